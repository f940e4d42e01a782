"""Text as it comes: whole characters, no part of a stop string, and together what comes at once; and ending it early."""

import dataclasses
import gc
import json
import shutil
from typing import Any

import jax
import made_tokenizers as made
import pytest
from checkpoints import hf_config, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import with_draft

from qspec_jax import GenerationConfig, demo, stream
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.text import RowText, encoded, first_stop
from qspec_jax.drafts import quantspec
from qspec_jax.errors import InputError, warn_once

TOKENIZER = load_tokenizer(demo.MODEL)


class Words:
    """A tokenizer that, as SentencePiece's, takes the blank from the beginning of a text; token 0 is a special one."""

    pieces = ("", " a", " be", "c", " ", "\n", "é")
    all_special_tokens = ("<s>",)

    def convert_tokens_to_ids(self, token):
        return 0

    def encode(self, text, *, add_special_tokens):
        return [1]

    def decode(self, ids, *, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join(self.pieces[i] for i in ids).removeprefix(" ")


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **settings):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **settings)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Tokenizers of several kinds, loaded."""
    folder = tmp_path_factory.mktemp("kinds")
    kinds = {
        "bytes": made.byte_level(made.QWEN),
        "prepend": made.sentencepiece_like("normalizer"),
        "metaspace": made.sentencepiece_like("metaspace"),
        "unigram": made.unigram(),
        "wordpiece": made.word_piece(),
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {name: load_tokenizer(made.write(folder / name, tokenizer, **config)) for name, tokenizer in kinds.items()}


def whole_text(tokenizer, tokens, sizes, *, prompt=(), stop=()):
    row = RowText(tokenizer, stop, prompt)
    text = "".join([row.add(part) for part in parts_of(tokens, sizes)]) + row.end()
    assert text == row.text
    return text


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
    text = "".join(Words.pieces[token] for token in tokens)
    assert whole_text(Words(), tokens, sizes) == whole_text(Words(), tokens, sizes, prompt=[0, 3, 0]) == text
    assert whole_text(Words(), tokens, sizes, prompt=[0, 0]) == text.removeprefix(" ")  # the beginning of a text


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("cats mew\n 1é🙂€"), min_size=1, max_size=24), st.integers(0, 60), SIZES)
def test_prompt_and_text_are_the_whole(kinds, text, cut, sizes):
    """Wherever the prompt ends; a character that it begins is whole in the text after it."""
    for name, tokenizer in kinds.items():
        ids = tokenizer(text)["input_ids"]
        prompt, new = ids[:cut], ids[cut:]
        before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, ids))
        if not prompt or before.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        assert before + whole_text(tokenizer, new, sizes, prompt=prompt) == whole, name


@pytest.mark.parametrize("kind", ["bytes", "prepend", "metaspace"])
def test_a_character_that_the_prompt_begins(kinds, kind):
    tokenizer = kinds[kind]
    smile, mew = tokenizer("🙂")["input_ids"][-4:], [tokenizer.convert_tokens_to_ids("Ġmew" if kind == "bytes" else "▁mew")]
    for at in range(1, 4):
        prompt = [*tokenizer("cats🙂")["input_ids"][:-4], *smile[:at]]
        for sizes in ([1], [9]):
            assert whole_text(tokenizer, [*smile[at:], *smile, *mew], sizes, prompt=prompt) == "🙂🙂 mew"
            # What stays unfinished is the prompt's.
            assert whole_text(tokenizer, mew, sizes, prompt=prompt) == " mew"
            assert whole_text(tokenizer, [*smile, *mew], sizes, prompt=prompt) == "🙂 mew"


def test_special_tokens_in_a_prompt(kinds):
    """Text goes on after them as after what comes before them; after them alone it begins."""
    tokenizer = kinds["prepend"]
    mew, ends = tokenizer.convert_tokens_to_ids("▁mew"), [tokenizer.eos_token_id]
    assert whole_text(tokenizer, [mew], [1], prompt=[*tokenizer("cats")["input_ids"], *ends * 20]) == " mew"
    assert whole_text(tokenizer, [*ends, mew], [1], prompt=[tokenizer.bos_token_id, *ends * 20]) == "mew"
    assert whole_text(tokenizer, [mew, *ends, mew], [2]) == " mew mew"


# The bytes F0 9F 99 82 of a character, the first of another, and letters.
BYTE_LEVEL = ("ð", "Ł", "Ļ", "Ĥ", "â", "a", "mew")
BYTE_FALLBACK = ("<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "<0xE2>", "<0x61>", "▁mew")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_bytes_are_the_same_text_in_any_parts(kinds, data):
    for kind in ("bytes", "prepend", "metaspace"):
        tokenizer = kinds[kind]
        some = [tokenizer.convert_tokens_to_ids(token) for token in (BYTE_LEVEL if kind == "bytes" else BYTE_FALLBACK)]
        ids = st.lists(st.sampled_from([*some, tokenizer.eos_token_id]), max_size=25)
        tokens, prompt = data.draw(ids), data.draw(ids)
        text = whole_text(tokenizer, tokens, [1], prompt=prompt)
        assert text == whole_text(tokenizer, tokens, data.draw(SIZES), prompt=prompt) == whole_text(tokenizer, tokens, [30], prompt=prompt)
        before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *tokens]))
        if kind == "bytes" and whole.startswith(before):
            assert before + text == whole


@pytest.mark.parametrize(
    "tokens", [["<0x80>"], ["<0xE2>", "<0x82>"], ["<0xF0>", "<0x9F>", "<0x99>"], ["</s>"], ["<0xE2>", "<0x82>", "<0xAC>"]]
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_no_token_is_decoded_often(kinds, tokens, size):
    """However long no character comes."""
    counting = Counting(kinds["prepend"])
    ids = (counting.convert_tokens_to_ids(tokens) * 1000)[:1000]
    text = whole_text(counting, ids, [size])
    assert counting.decoded < 50 * len(ids)
    assert text in ("", "€" * 333 + "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}" * 1000)


def test_characters_that_each_token_ends_within(tmp_path):
    """No token ends where a character does, for a long time."""
    tokenizer = made.byte_level(None)
    halves = tokenizer.encode("€").ids
    rest_and_first = "".join(map(tokenizer.id_to_token, [*halves[1:], halves[0]]))
    stored = json.loads(tokenizer.to_str())
    stored["model"]["vocab"][rest_and_first] = 9999
    (made.write(tmp_path, tokenizer, tokenizer_class="PreTrainedTokenizerFast") / "tokenizer.json").write_text(json.dumps(stored))
    counting = Counting(load_tokenizer(tmp_path))
    ids = [halves[0], *[9999] * 300]
    row, came = RowText(counting), []
    for token in ids:
        came.append(row.add([token]))
    assert "".join(came) == "€" * 300 and came[:3] == ["", "€", "€"] and counting.decoded < 50 * len(ids)
    assert row.end() == "\N{REPLACEMENT CHARACTER}"


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
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory)


@pytest.fixture(scope="module")
def draft(model):
    return quantspec(model)


def test_pieces_are_what_comes_at_once(model, draft):
    whole = generate(model, [PROMPT], config=with_draft(CONFIG, draft), key=KEY, tokenizer=TOKENIZER)
    counts = lambda pieces: [sum(getattr(piece, name) for piece in pieces) for name in ("drafted", "accepted", "flushes")]
    for rounds in (1, 3):
        run = stream(model, PROMPT, config=with_draft(CONFIG, draft), key=KEY, tokenizer=TOKENIZER, rounds_per_update=rounds)
        assert run.generation is None
        pieces = list(run)
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids[0]
        assert "".join(piece.text for piece in pieces) == whole.text[0]
        stats = whole.stats
        assert counts(pieces) == [stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.flushes]
        assert len(pieces) == 1 + -(-stats.num_spec_steps // rounds) and len(pieces[0].token_ids) == 1
        assert dataclasses.replace(run.generation, stats=None) == dataclasses.replace(whole, stats=None)
    silent = list(stream(model, TOKENIZER(PROMPT)["input_ids"], config=with_draft(CONFIG, draft), key=KEY))
    assert [token for piece in silent for token in piece.token_ids] == whole.token_ids[0] and not any(piece.text for piece in silent)


def test_stop_strings_in_generate_and_stream(model, draft):
    whole = generate(model, [PROMPT, "import"], config=with_draft(CONFIG, draft), key=KEY, tokenizer=TOKENIZER)
    stop = whole.text[0][20:22]
    config = dataclasses.replace(CONFIG, stop=(stop, "never said"))
    out = generate(model, [PROMPT, "import"], config=with_draft(config, draft), key=KEY, tokenizer=TOKENIZER)
    for text, before, ids, all_ids, reason in zip(out.text, whole.text, out.token_ids, whole.token_ids, out.finish_reason):
        cut = first_stop(before, (stop,))
        assert text == before[:cut] and ids == all_ids[: len(ids)] and reason == ("length" if cut is None else "stop")
        assert cut is None or (stop in TOKENIZER.decode(ids) and stop not in TOKENIZER.decode(ids[:-1]))
    assert out.finish_reason[0] == "stop" and out.stats.rows[0].num_spec_steps < whole.stats.rows[0].num_spec_steps
    pieces = list(stream(model, PROMPT, config=with_draft(config, draft), key=KEY, tokenizer=TOKENIZER))
    assert "".join(piece.text for piece in pieces) == out.text[0]
    assert [token for piece in pieces for token in piece.token_ids] == out.token_ids[0]


def test_a_stop_string_before_an_unfinished_character():
    half = next(i for i in range(4096) if TOKENIZER.decode([i]) == " \N{REPLACEMENT CHARACTER}")
    row = RowText(TOKENIZER, [" "])
    assert row.add(TOKENIZER("a")["input_ids"]) + row.add([half]) + row.add(TOKENIZER("b")["input_ids"]) == "a"
    assert row.stopped and row.token_ids == [*TOKENIZER("a")["input_ids"], half]


@pytest.mark.parametrize("rounds", [0, -1])
def test_rounds_that_are_none(rounds, model, draft):
    with pytest.raises(InputError, match=f"rounds_per_update {rounds} should be at least 1"):
        stream(model, PROMPT, config=with_draft(CONFIG, draft), key=KEY, tokenizer=TOKENIZER, rounds_per_update=rounds)


@pytest.fixture(scope="module")
def with_call(tmp_path_factory) -> tuple[Any, int]:
    """A tokenizer with a special token, "def", that no file has a name for, and its id."""
    directory = tmp_path_factory.mktemp("special")
    shutil.copy(demo.MODEL / "tokenizer_config.json", directory)
    stored = json.loads((demo.MODEL / "tokenizer.json").read_text())
    token = stored["added_tokens"][0] | {"content": "def", "id": stored["model"]["vocab"]["def"]}
    (directory / "tokenizer.json").write_text(json.dumps(stored | {"added_tokens": [*stored["added_tokens"], token]}))
    return load_tokenizer(directory), token["id"]


@pytest.mark.system
def test_a_special_token_as_a_stop_string(model, draft, with_call):
    """It is in no text, and ends a row all the same; beside other text it cannot."""
    tokenizer, id = with_call
    config = dataclasses.replace(CONFIG, stop=("never said", "def"), logit_bias={id: 1000.0}, min_new_tokens=0)
    out = generate(model, [PROMPT, "import"], config=with_draft(config, draft), key=KEY, tokenizer=tokenizer)
    assert (out.token_ids, out.text, out.finish_reason) == ([[id]] * 2, ["", ""], ["stop"] * 2)
    request = Request(tokenizer(PROMPT)["input_ids"], config, jax.random.key(0))
    (result,) = run_batch(model, with_draft([request], draft), tokenizer=tokenizer)
    assert (result.token_ids, result.text, result.finish_reason) == ([id], "", "stop")
    for stop in ("def ", "\ndef", "<|endoftext|>."):
        with pytest.raises(InputError, match=r"has the special token '.*' in it, so it is in no text; stop \(--stop\) should"):
            generate(model, [PROMPT], config=with_draft(dataclasses.replace(config, stop=(stop,)), draft), key=KEY, tokenizer=tokenizer)


def test_the_eos_of_a_tokenizer(model, draft, with_call, caplog):
    """Rows end at it and at the checkpoint's, with one warning; unless the config says which ids end them."""
    tokenizer, id = with_call
    tokenizer.eos_token = "def"
    warn_once.cache_clear()
    config = dataclasses.replace(CONFIG, ignore_eos=False, max_new_tokens=3, logit_bias={id: 1000.0})
    for _ in range(2):
        out = generate(model, [PROMPT], config=with_draft(config, draft), key=KEY, tokenizer=tokenizer)
        assert (out.token_ids, out.text, out.finish_reason) == ([[id]], [""], ["eos"])
    (result,) = run_batch(
        model, with_draft([Request(tokenizer(PROMPT)["input_ids"], config, jax.random.key(0))], draft), tokenizer=tokenizer
    )
    assert (result.token_ids, result.finish_reason) == ([id], "eos")
    ends = ", ".join(map(str, model.config.eos_token_ids))
    (record,) = caplog.records
    assert f"tokenizer's EOS 'def', {id}, is not among those of config.json and generation_config.json ({ends})" in record.getMessage()
    own = dataclasses.replace(config, logit_bias={model.config.eos_token_ids[0]: 1000.0})
    assert generate(model, [PROMPT], config=with_draft(own, draft), key=KEY, tokenizer=tokenizer).finish_reason == ["eos"]
    for other in ({"ignore_eos": True}, {"eos_token_ids": (7,)}):
        out = generate(model, [PROMPT], config=with_draft(dataclasses.replace(config, **other), draft), key=KEY, tokenizer=tokenizer)
        assert (out.token_ids, out.finish_reason) == ([[id] * 3], ["length"])
    assert len(caplog.records) == 1


def test_a_second_bos(tmp_path, caplog):
    warn_once.cache_clear()
    tokenizer = load_tokenizer(made.write(tmp_path, made.sentencepiece_like("normalizer")))
    for _ in range(2):
        assert encoded(tokenizer, "<s>cats")[:2] == [tokenizer.bos_token_id] * 2
        assert encoded(tokenizer, "cats<s><s>").count(tokenizer.bos_token_id) == 3
    (record,) = caplog.records
    assert "begins with '<s>', and the tokenizer puts another before it" in record.getMessage()
    without = load_tokenizer(made.write(tmp_path, made.sentencepiece_like("normalizer", bos=False)))
    warn_once.cache_clear()
    assert encoded(without, "<s><s>cats")[:2] == [tokenizer.bos_token_id] * 2 and len(caplog.records) == 1


@pytest.mark.system
def test_the_first_blank_in_generate_stream_and_batch(tmp_path):
    """And a stop string that begins with it."""
    directory = write_checkpoint(tmp_path, hf_config(vocab_size=512, num_hidden_layers=1))
    (directory / "config.json").rename(tmp_path / "model.json")
    tokenizer = load_tokenizer(made.write(directory, made.sentencepiece_like("normalizer"), tokenizer_class="LlamaTokenizer"))
    (tmp_path / "model.json").rename(directory / "config.json")
    model, mew = load_model(directory), tokenizer.convert_tokens_to_ids("▁mew")
    config = GenerationConfig(max_new_tokens=3, draft="none", logit_bias={mew: 1000.0})
    ids = tokenizer("cats")["input_ids"]
    texts = generate(model, ["cats", [tokenizer.bos_token_id]], config=config, tokenizer=tokenizer).text
    assert texts == [" mew mew mew", "mew mew mew"]
    assert [piece.text for piece in stream(model, "cats", config=config, tokenizer=tokenizer)] == [" mew"] * 3
    (result,) = run_batch(model, [Request(ids, config, jax.random.key(0))], tokenizer=tokenizer)
    assert result.text == " mew mew mew"
    out = generate(model, ["cats"], config=dataclasses.replace(config, stop=(" mew",)), tokenizer=tokenizer)
    assert (out.text, out.token_ids, out.finish_reason) == ([""], [[mew]], ["stop"])


def test_ended_early_nothing_is_left(model, draft):
    list(stream(model, PROMPT, config=with_draft(CONFIG, draft), key=KEY, tokenizer=TOKENIZER))  # compiles
    gc.collect()
    before = len(jax.live_arrays())
    run = stream(model, PROMPT, config=with_draft(CONFIG, draft), key=KEY, tokenizer=TOKENIZER)
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
    for piece in stream(model, PROMPT, config=with_draft(CONFIG, draft), key=KEY, tokenizer=TOKENIZER):
        assert piece.token_ids
        break
    gc.collect()
    assert len(jax.live_arrays()) <= before
