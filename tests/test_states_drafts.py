"""A state holds all that a draft remembers: acceptance is that of the straight way, through extending, forks and files."""

import jax
import pytest
from checkpoints import hf_config, write_checkpoint
from runs import random_model, random_prompts

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.saving import load_state, save_state

TEXT = random_prompts([40])[0] * 4  # so that lookups find something


@pytest.fixture(scope="module", autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    return random_model("float64")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    shape = dict(num_hidden_layers=1, hidden_size=32, max_position_embeddings=512)
    return write_checkpoint(tmp_path_factory.mktemp("small") / "hf", hf_config(**shape))


def few(*drafts: str):
    return [pytest.param(draft, marks=pytest.mark.system) for draft in drafts]


@pytest.mark.parametrize(
    "draft",
    [
        "triforce:model={small},middle=(retrieval:budget=44,chunk=2,rebuild=16)",
        "combine:prompt-lookup+quantspec:weight_bits=16,skip=(1a)",
        *few(
            "small-model:model={small}",
            "prompt-lookup",
            "retrieval:budget=44,chunk=2,rebuild=8",
            "snapkv:budget=40",
            "streaming-llm:budget=40",
        ),
    ],
)
@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.system)])
def test_acceptance_is_that_of_the_straight_way(model, small, draft, adaptive, tmp_path):
    """With a cache in full precision, where a text read in pieces has the keys and values of one that was read at once."""
    changes = dict(adaptive=True) if adaptive else {}
    settings = GenerationConfig(draft=draft.format(small=small), cache="full", num_speculative_tokens=4, max_new_tokens=24, **changes)
    straight = generate(model, prefill(model, TEXT[:110], config=settings), config=settings)
    cold = generate(model, [TEXT[:110]], config=settings)
    assert straight.token_ids == cold.token_ids and straight.stats.rows == cold.stats.rows
    assert cold.stats.num_draft_tokens, "nothing was drafted"
    state = extend(extend(prefill(model, TEXT[:60], config=settings, room=20), TEXT[60:71]), TEXT[71:110])
    save_state(state.fork(2)[1], tmp_path / "state")
    for each in (state, load_state(tmp_path / "state", model)):
        found = generate(model, each, config=settings)
        assert found.token_ids == cold.token_ids and found.stats.rows == cold.stats.rows
    # And after generating: what is in memory is what comes back from a file.
    save_state(found.states[0], tmp_path / "state")
    after = [generate(model, each, config=settings) for each in (straight.states[0], load_state(tmp_path / "state", model))]
    assert after[0].token_ids == after[1].token_ids and after[0].stats.rows == after[1].stats.rows
