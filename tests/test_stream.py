"""Text as it comes: whole characters, no part of a stop string, and together what comes at once; and ending it early."""

import dataclasses
import gc

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qspec_jax import GenerationConfig, demo, stream
from qspec_jax.checkpoints.loading import load_model, load_tokenizer
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.text import RowText, first_stop
from qspec_jax.drafts import quantspec
from qspec_jax.errors import InputError

TOKENIZER = load_tokenizer(demo.MODEL)


class Words:
    """A tokenizer that, as SentencePiece's, takes the blank from the beginning of a text; token 0 is a special one."""

    pieces = ("", " a", " be", "c", " ", "\n", "é")

    def decode(self, ids, *, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join(self.pieces[i] for i in ids).removeprefix(" ")


def parts_of(tokens, sizes):
    at = 0
    while at < len(tokens):
        size = sizes[at % len(sizes)]
        yield tokens[at : at + size]
        at += size


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("ab \n€🙂ñ𝔸"), max_size=30), SIZES)
def test_pieces_are_whole_characters_and_the_text(text, sizes):
    row = RowText(TOKENIZER)
    pieces = [row.add(part) for part in parts_of(TOKENIZER(text)["input_ids"], sizes)]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + row.end() == row.text == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=40), SIZES)
def test_any_tokens(tokens, sizes):
    """Also those that are no text: bytes that never become a character come at the end at the latest."""
    row = RowText(TOKENIZER)
    pieces = [row.add(part) for part in parts_of(tokens, sizes)]
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) + row.end() == whole and row.token_ids == tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=30), SIZES)
def test_a_tokenizer_that_takes_away_the_first_blank(tokens, sizes):
    row = RowText(Words())
    whole = "".join(row.add(part) for part in parts_of(tokens, sizes)) + row.end()
    # Where special tokens alone stand before it, the first blank may have come with a later part.
    assert whole == Words().decode(tokens, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("ab €"), max_size=30),
    SIZES,
    st.lists(st.text(st.sampled_from("ab €"), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings(text, sizes, stop):
    tokens = TOKENIZER(text)["input_ids"]
    row = RowText(TOKENIZER, stop)
    shown = ""
    for part in parts_of(tokens, sizes):
        shown += row.add(part)
    shown += row.end()
    cut = first_stop(text, stop)
    if cut is None:
        assert (shown, row.stopped, row.token_ids) == (text, False, tokens)
        return
    # The first to be complete decides; one that begins earlier may need longer.
    ends = lambda n: first_stop(TOKENIZER.decode(tokens[:n]), stop)
    n = next(n for n in range(1, len(tokens) + 1) if ends(n) is not None)
    assert (shown, row.stopped, row.token_ids) == (text[: ends(n)], True, tokens[:n])


# With a model ---------------------------------------------------------------------------------------------------------

CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=40, group_size=8, ignore_eos=True, num_speculative_tokens=3, temperature=0.7)
PROMPT = "def main():"


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory)


@pytest.fixture(scope="module")
def draft(model):
    return quantspec(model)


@pytest.mark.slow
def test_pieces_are_what_comes_at_once(model, draft):
    whole = generate(model, [PROMPT], config=CONFIG, tokenizer=TOKENIZER, draft=draft)
    counts = lambda pieces: [sum(getattr(piece, name) for piece in pieces) for name in ("drafted", "accepted", "flushes")]
    for rounds in (1, 3):
        run = stream(model, PROMPT, config=CONFIG, tokenizer=TOKENIZER, draft=draft, rounds_per_piece=rounds)
        assert run.generation is None
        pieces = list(run)
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids[0]
        assert "".join(piece.text for piece in pieces) == whole.text[0]
        stats = whole.stats
        assert counts(pieces) == [stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.flushes]
        assert len(pieces) == 1 + -(-stats.num_spec_steps // rounds) and len(pieces[0].token_ids) == 1
        assert dataclasses.replace(run.generation, stats=None) == dataclasses.replace(whole, stats=None)
    silent = list(stream(model, TOKENIZER(PROMPT)["input_ids"], config=CONFIG, draft=draft))
    assert [token for piece in silent for token in piece.token_ids] == whole.token_ids[0] and not any(piece.text for piece in silent)


@pytest.mark.slow
def test_stop_strings_in_generate_and_stream(model, draft):
    whole = generate(model, [PROMPT, "import"], config=CONFIG, tokenizer=TOKENIZER, draft=draft)
    stop = whole.text[0][20:22]
    config = dataclasses.replace(CONFIG, stop=(stop, "never said"))
    out = generate(model, [PROMPT, "import"], config=config, tokenizer=TOKENIZER, draft=draft)
    for text, before, ids, all_ids, reason in zip(out.text, whole.text, out.token_ids, whole.token_ids, out.finish_reason):
        cut = first_stop(before, (stop,))
        assert text == before[:cut] and ids == all_ids[: len(ids)] and reason == ("length" if cut is None else "stop")
        assert cut is None or (stop in TOKENIZER.decode(ids) and stop not in TOKENIZER.decode(ids[:-1]))
    assert out.finish_reason[0] == "stop" and out.stats.rows[0]["num_spec_steps"] < whole.stats.rows[0]["num_spec_steps"]
    pieces = list(stream(model, PROMPT, config=config, tokenizer=TOKENIZER, draft=draft))
    assert "".join(piece.text for piece in pieces) == out.text[0]
    assert [token for piece in pieces for token in piece.token_ids] == out.token_ids[0]


def test_a_stop_string_before_an_unfinished_character():
    half = next(i for i in range(4096) if TOKENIZER.decode([i]) == " \N{REPLACEMENT CHARACTER}")
    row = RowText(TOKENIZER, [" "])
    assert row.add(TOKENIZER("a")["input_ids"]) + row.add([half]) + row.add(TOKENIZER("b")["input_ids"]) == "a"
    assert row.stopped and row.token_ids == [*TOKENIZER("a")["input_ids"], half]


@pytest.mark.parametrize("rounds", [0, -1])
def test_rounds_that_are_none(rounds, model, draft):
    with pytest.raises(InputError, match=f"rounds {rounds}"):
        stream(model, PROMPT, config=CONFIG, tokenizer=TOKENIZER, draft=draft, rounds_per_piece=rounds)


def test_a_special_token_is_no_stop_string(model, draft):
    special = TOKENIZER.all_special_tokens[0]
    with pytest.raises(InputError, match="stop at its id"):
        generate(model, [PROMPT], config=dataclasses.replace(CONFIG, stop=(special,)), tokenizer=TOKENIZER, draft=draft)


def test_ended_early_nothing_is_left(model, draft):
    list(stream(model, PROMPT, config=CONFIG, tokenizer=TOKENIZER, draft=draft))  # compiles
    gc.collect()
    before = len(jax.live_arrays())
    run = stream(model, PROMPT, config=CONFIG, tokenizer=TOKENIZER, draft=draft)
    next(run)
    next(run)
    assert len(jax.live_arrays()) > before
    run.close()
    gc.collect()
    assert list(run) == [] and run.generation is None
    assert len(jax.live_arrays()) <= before + 4  # the run's keys and the like, none of the cache


def test_left_by_break(model, draft):
    gc.collect()
    before = len(jax.live_arrays())
    for piece in stream(model, PROMPT, config=CONFIG, tokenizer=TOKENIZER, draft=draft):
        assert piece.token_ids
        break
    gc.collect()
    assert len(jax.live_arrays()) <= before
