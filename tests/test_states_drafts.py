"""A state holds all that a draft remembers: acceptance is that of the straight way, through extending, forks and files."""

import dataclasses

import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from runs import random_model, random_prompts
from tiers import in_system

from qspec_jax import demo
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding import resolve
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.saving import load_state, save_state
from qspec_jax.errors import InputError
from qspec_jax.models.skipping import Skipped

TEXT = random_prompts([40])[0] * 4  # so that lookups find something

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def model():
    """One layer compiles in half the time."""
    return random_model("float64", num_hidden_layers=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    shape = dict(num_hidden_layers=1, hidden_size=32, max_position_embeddings=512)
    return write_checkpoint(tmp_path_factory.mktemp("small") / "hf", hf_config(**shape))


@pytest.mark.parametrize(
    "draft",
    [
        "combine:prompt-lookup+quantspec:weight_bits=16,skip=(0m)",
        *in_system(
            "triforce:model={small},middle=(retrieval:budget=44,chunk=2,rebuild=16)",
            "small-model:model={small}",
            "prompt-lookup",
            "retrieval:budget=44,chunk=2,rebuild=8",
            "snapkv:budget=40",
            "streaming-llm:budget=40",
            "eagle3:model=random,window=20",
            "cascade:first=(eagle3:model=random,window=90),middle=(quantspec:weight_bits=16)",
        ),
    ],
)
@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.system)])
def test_acceptance_is_that_of_the_straight_way(model, small, draft, adaptive, tmp_path):
    """With a cache in full precision, where a text read in pieces has the keys and values of one that was read at once."""
    changes = dict(adaptive=True) if adaptive else {}
    settings = GenerationConfig(draft=draft.format(small=small), cache="full", num_speculative_tokens=4, max_new_tokens=24, **changes)
    straight = generate(model, prefill(model, TEXT[:110], config=settings, room=60), config=settings)
    cold = generate(model, [TEXT[:110]], config=settings)
    assert straight.token_ids == cold.token_ids and straight.stats.rows == cold.stats.rows
    assert cold.stats.num_draft_tokens, "nothing was drafted"
    state = extend(extend(prefill(model, TEXT[:60], config=settings, room=20), TEXT[60:71]), TEXT[71:110])
    save_state(state.fork(2)[1], tmp_path / "state")
    for each in (state, load_state(tmp_path / "state", model)):
        found = generate(model, each, config=settings)
        assert found.token_ids == cold.token_ids and found.stats.rows == cold.stats.rows
    # And after generating, where arrays that grow hold what larger ones did: what is in memory is what comes back from a file.
    save_state(found.states[0], tmp_path / "state")
    after = [generate(model, each, config=settings) for each in (straight.states[0], load_state(tmp_path / "state", model))]
    assert after[0].token_ids == after[1].token_ids and after[0].stats.rows == after[1].stats.rows
    assert found.states[0].room != straight.states[0].room == after[1].states[0].room


@pytest.mark.system
@pytest.mark.parametrize("draft, cache", [("quantspec", "int8"), ("retrieval:budget=44,chunk=2,rebuild=8", "int8"), ("none", "specache")])
def test_stop_strings_that_cut_a_round(draft, cache):
    """The state holds the tokens up to the one that completes the stop string, and no accepted draft after it."""
    model, tokenizer = random_model("float64", vocab_size=4096, num_hidden_layers=1), load_tokenizer(demo.MODEL)
    gamma = 0 if draft == "none" else 5
    settings = GenerationConfig(draft=draft, cache=cache, group_size=8, num_speculative_tokens=gamma, max_new_tokens=40, ignore_eos=True)
    state = prefill(model, TEXT[:60], config=settings, room=120)
    plain = generate(model, state, config=settings, tokenizer=tokenizer)
    tokens, text, cut = plain.token_ids[0], plain.text[0], 0
    r = np.random.default_rng(0)
    for begin in r.integers(1, len(text) // 2, 6):
        stop = text[begin : begin + int(r.integers(1, 6))]
        found = generate(model, state, config=dataclasses.replace(settings, stop=(stop,)), tokenizer=tokenizer)
        new, after = found.token_ids[0], found.states[0]
        assert found.finish_reason == ["stop"] and found.text[0] == text[: text.index(stop)] and new == tokens[: len(new)]
        assert after.tokens.tolist() == TEXT[:60] + new and after.cached == len(after) - 1 and after.pending
        np.testing.assert_allclose(extend(after, [5, 7]).logits, extend(state, [*new, 5, 7]).logits, atol=1e-12)
        again = generate(model, after, config=dataclasses.replace(settings, max_new_tokens=40 - len(new)))
        assert again.token_ids[0] == tokens[len(new) :]
        cut += found.stats.rows[0].num_accepted_draft_tokens > 0
    assert cut or draft == "none", "no draft was accepted before a stop string"


@pytest.mark.system
def test_layers_that_were_chosen_for_the_prompt_are_in_the_file(tmp_path, monkeypatch):
    model, chosen, other = random_model("float64"), Skipped.parse("(1a,0m)"), "(0a,1m)"
    monkeypatch.setattr(resolve, "layers_to_skip", lambda *args: chosen)
    settings = GenerationConfig(draft="quantspec:weight_bits=16,skip=auto", group_size=8, num_speculative_tokens=3, max_new_tokens=24)
    state = prefill(model, TEXT[:110], config=settings, room=40)
    save_state(state, tmp_path / "state")
    monkeypatch.setattr(resolve, "layers_to_skip", lambda *args: pytest.fail("they are chosen by another text"))
    loaded = load_state(tmp_path / "state", model)
    assert loaded.reader.draft.skipped == chosen and loaded.reader.settings == state.reader.settings
    found, expected = (generate(model, each, config=settings) for each in (loaded, state))
    assert found.token_ids == expected.token_ids and found.stats.rows == expected.stats.rows
    with pytest.raises(InputError, match=r"another draft \(.*skipped="):
        load_state(tmp_path / "state", model, config=dataclasses.replace(settings, draft=f"quantspec:weight_bits=16,skip={other}"))
