"""Models in which some layers have a sliding window: drafts that choose what they read of the other layers, and caches of those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from runs import random_model, random_prompts

from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.cache_views import CacheView
from qspec_jax.evaluate.emulated import EmulatedConfig, Quantizer
from qspec_jax.evaluate.scoring import score

pytestmark = pytest.mark.usefixtures("float64")
G, WINDOW, CAPACITY = 8, 12, 128
EVERYTHING = 100  # tokens, more than any row here has
PROMPTS = random_prompts([5, 30, 61])
SHAPE = dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=WINDOW,
    sliding_window_pattern=2,  # the second of two layers has none
    rope_local_base_freq=100.0,
    query_pre_attn_scalar=16,
    tie_word_embeddings=False,  # or it repeats the last token, whatever it reads
)


@pytest.fixture(scope="module")
def model(float64):
    return random_model("float64", spread=0.3, **SHAPE)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    shape = dict(num_hidden_layers=1, hidden_size=32, max_position_embeddings=512)
    return write_checkpoint(tmp_path_factory.mktemp("small") / "hf", hf_config(**shape))


@pytest.fixture(scope="module")
def expected(model):
    """The target's own tokens over a cache."""
    return functools.cache(lambda cache: generate(model, PROMPTS, config=config(model, "none", cache)).token_ids)


def config(model, draft, cache="int8", **changes) -> GenerationConfig:
    made = draft if draft == "none" else make_draft(draft, model)
    size = G if cache.startswith("int8") else None
    return GenerationConfig(**dict(draft=made, cache=cache, group_size=size, num_speculative_tokens=3, max_new_tokens=30) | changes)


def few(*cases):
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.system) for case in cases]


STREAMING = "streaming-llm:budget={},sinks=3"
TRIFORCE = "triforce:model={small},gamma1=4,middle=(retrieval:budget={},chunk=2,rebuild=8)"
MORE = ("snapkv:budget={}", "retrieval:budget={},chunk=2,rebuild=8")


@pytest.mark.system
@pytest.mark.parametrize("draft", [STREAMING, *few(TRIFORCE, *MORE)])
def test_a_draft_that_reads_every_token_is_the_target(model, small, expected, draft):
    """Over a cache in full precision all of its tokens are accepted, in rows that are longer than the window or not; a state that was read
    in pieces goes on as the straight way does."""
    settings = config(model, draft.format(EVERYTHING, small=small), "full", num_speculative_tokens=5)
    found = generate(model, PROMPTS, config=settings)
    assert found.token_ids == expected("full")
    assert found.stats.num_accepted_draft_tokens == found.stats.num_draft_tokens > 0
    state = extend(extend(prefill(model, PROMPTS[1][:9], config=settings, room=CAPACITY), PROMPTS[1][9:11]), PROMPTS[1][11:])
    warm = generate(model, state, config=settings)
    assert warm.token_ids[0] == found.token_ids[1] and warm.stats.rows[0] == found.stats.rows[1]


@pytest.mark.system
@pytest.mark.parametrize("draft", [STREAMING, *few(TRIFORCE, *MORE)])
def test_with_less_of_the_text_not_all_is_accepted(model, small, expected, draft):
    found = generate(model, PROMPTS, config=config(model, draft.format(40, small=small), "full", num_speculative_tokens=5))
    assert found.token_ids == expected("full")
    assert 0 < found.stats.num_accepted_draft_tokens < found.stats.num_draft_tokens


@pytest.mark.system
@pytest.mark.parametrize(
    "draft",
    [
        "snapkv:budget=40",
        *few(
            "chunk-means:budget=8,chunk=4,rebuild=8,dense_layers=0",
            "h2o:budget=0.3,min_groups=1",
            "retrieval:budget=44,chunk=2,rebuild=8",
            "streaming-llm:budget=20,cache=int8",
            "combine:prompt-lookup+(snapkv:budget=40)",
        ),
    ],
)
def test_a_batch_whose_slots_are_refilled(model, paged, expected, draft):
    """Over codes, in slots that other rows had before, with pages in common."""
    settings = config(model, draft)
    found = {each.index: each for each in run_batch(model, [Request(row, settings, jax.random.key(0)) for row in PROMPTS], batch_size=2)}
    assert [found[i].token_ids for i in range(len(PROMPTS))] == expected("int8")


@pytest.mark.system
@pytest.mark.parametrize(
    ("cache", "draft"),
    [("int8:host=lower", "quantspec"), ("full:host=all", "snapkv:budget=40"), *few(("int8:host=all,resident=0.5", "snapkv:budget=40"))],
)
def test_host_memory(model, expected, cache, draft):
    found = generate(model, PROMPTS, config=config(model, draft, cache))
    assert found.token_ids == expected(cache.partition(":")[0])
    assert found.stats.num_accepted_draft_tokens


@pytest.mark.system
@pytest.mark.parametrize("fetch", ["ahead", *few("checked")])
def test_specache_that_fetches_every_token_is_a_full_cache(model, fetch):
    """As long as nothing is flushed, of which the pass before could not fetch anything."""
    prompts, new = random_prompts([34, 66]), dict(max_new_tokens=12)
    settings = config(model, "none", f"specache:bits=1,k=128,fetch={fetch},group=4,residual=16", **new)
    found, full = (generate(model, prompts, config=each).token_ids for each in (settings, config(model, "none", "full", **new)))
    assert found == full
    state = extend(prefill(model, prompts[1][:9], config=settings, room=CAPACITY), prompts[1][9:])
    assert generate(model, state, config=settings).token_ids[0] == found[1]


@pytest.mark.system
def test_an_emulated_quantizer_is_the_stored_format(model):
    """As a draft reads them, and as the target does."""
    caches = CacheConfig(group_size=G), EmulatedConfig(Quantizer(), G)
    views = [CacheView(cache, view) for view in (UPPER_PLANE, BOTH_PLANES) for cache in caches]
    draft, emulated_draft, target, emulated_target = score(model, PROMPTS, random_prompts([30, 30, 30], seed=4), views, width=4).logprobs
    np.testing.assert_allclose(emulated_draft, draft, atol=1e-11)
    np.testing.assert_allclose(emulated_target, target, atol=1e-11)
    assert np.abs(draft - target).max() > 1e-4


def test_how_far_a_state_can_be_trimmed(model):
    """To one token less, since its rings have the window before that; a row within the window to any length."""
    settings = config(model, "none", "full")
    state = prefill(model, PROMPTS[1], config=settings, room=CAPACITY)
    again = extend(state.trim(29), PROMPTS[1][29:])
    np.testing.assert_allclose(again.logits, state.logits, atol=1e-12)
    with pytest.raises(
        InputError, match="a state of 30 tokens can be trimmed to 29 or more, not to 28, since layers with a sliding window"
    ):
        state.trim(28)
    short = prefill(model, PROMPTS[1][:WINDOW], config=settings, room=CAPACITY)
    again = extend(short.trim(4), PROMPTS[1][4:WINDOW])
    np.testing.assert_allclose(again.logits, short.logits, atol=1e-12)


@pytest.mark.system
def test_a_small_model_whose_window_was_trimmed_away_reads_again(tmp_path):
    """The state of a target without windows can be trimmed to fewer tokens than the small model's rings still hold."""
    shape = hf_config("MistralForCausalLM", max_position_embeddings=512, num_hidden_layers=1)
    small = write_checkpoint(tmp_path / "small", shape | {"sliding_window": WINDOW})
    target = load_model(write_checkpoint(tmp_path / "target", shape), dtype="float64")
    settings = config(target, f"small-model:model={small}", "full")
    start = prefill(target, PROMPTS[2][:50], config=settings, room=CAPACITY)
    other = generate(target, extend(start, PROMPTS[1]), config=settings).states[0]
    again = extend(other.trim(50), PROMPTS[2][50:])
    read = int(again.draft.own.read_so_far[0])
    fresh = prefill(target, PROMPTS[2][:read], config=settings, room=CAPACITY)
    window = jnp.arange(read - WINDOW + 1, read)[None, None]
    held, expected = (state.draft.own.cache.tokens(0, window) for state in (again, fresh))
    np.testing.assert_allclose(held, expected, atol=1e-5)


@pytest.mark.parametrize("draft", ["snapkv", "streaming-llm", "retrieval", "chunk-means", "exact-topk", "triforce:model={small}"])
def test_what_chooses_needs_a_layer_without_a_window(small, draft):
    model = random_model("float64", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=WINDOW)
    with pytest.raises(
        InputError, match=f"{draft.partition(':')[0]} chooses what it reads in layers without a sliding window, and the model"
    ):
        make_draft(draft.format(small=small), model)


@pytest.mark.parametrize("cache", ["specache", "int8:host=lower"])
def test_a_cache_needs_a_layer_without_a_window(cache):
    model = random_model("float64", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=WINDOW)
    with pytest.raises(InputError, match=f"cache {cache} .* of layers without a sliding window, and the model has no such layer"):
        generate(model, [[1, 2, 3]], config=config(model, "none", cache))
