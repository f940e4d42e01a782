"""`exact="bits"`: on a CPU, the bits of greedy decoding do not depend on drafts, gamma, the batch, or its other rows."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts

from pallas_kernels.attention.reference import decode_attention
from pallas_kernels.dispatch import fixed_order, in_fixed_order
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.views import BOTH_PLANES, FULL_PRECISION
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.reading import prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import Greedy, prompt_keys
from qspec_jax.errors import InputError
from qspec_jax.models.fixed_order import FixedOrderModel
from qspec_jax.models.viewed import ViewedModel

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for GPUs there is test_exact_bits_gpu.py")

PROMPTS = random_prompts([40, 100, 70])
ALIKE = random_prompts([100, 90, 70])  # of one padded length, so that decoding each alone takes one program
BITS = dict(exact="bits", cache="int8", group_size=16, ignore_eos=True, max_new_tokens=40)


@pytest.fixture(scope="module")
def model():
    """One layer whose logits are close to one another."""
    return random_model(jnp.bfloat16, num_hidden_layers=1, tie_word_embeddings=False)


def read(model, exact: str, *prompts):
    """What an engine reads of prompts."""
    config = GenerationConfig(draft="none", **BITS | {"exact": exact})
    engine = prepare(model, list(prompts), config=config).engine()
    return engine, engine.read(*prompts)


@pytest.fixture(scope="module")
def texts():
    return random_prompts([120] * 3, seed=7)


def passes(target: ViewedModel, cache, texts, tokens: int, count: int = 16) -> np.ndarray:
    """The logits of `count` tokens of each text after the first 96, by passes of some tokens."""
    found = []
    step = jax.jit(lambda target, *args: target(*args))
    for at in range(96, 96 + count, tokens):
        of_pass = jnp.asarray([text[at : at + tokens] for text in texts])
        logits, cache = step(target, of_pass, jnp.broadcast_to(jnp.arange(at, at + tokens), of_pass.shape), cache)
        found.append(np.asarray(logits))
    return np.concatenate(found, 1)[:, :count]


def test_a_token_has_the_same_logits_in_every_pass(model, texts):
    """Whatever the number of tokens, its place among them, and the rows beside it; the usual passes differ."""
    engine, alone = read(model, "bits", texts[0][:96])
    _, beside = read(model, "bits", *(text[:96] for text in texts))
    by_one = passes(engine.target, alone.cache, texts[:1], 1)[0]
    assert np.isfinite(by_one).all()
    for rows, cache, tokens in ((1, alone.cache, 8), (3, beside.cache, 16)):
        assert (passes(engine.target, cache, texts[:rows], tokens)[0] == by_one).all()
    usual = ViewedModel(model, BOTH_PLANES)
    assert (passes(usual, alone.cache, texts[:1], 8)[0] != passes(usual, alone.cache, texts[:1], 1)[0]).any()


def test_what_a_pass_is_filled_up_with_changes_nothing(model, texts):
    _, alone = read(model, "tokens", texts[0][:96])
    tokens, positions = jnp.asarray([texts[0][96:99]]), jnp.arange(96, 99)[None]
    plain, filled = (model.watched(tokens, positions, alone.cache, view=BOTH_PLANES, filled=filled) for filled in (0, 8))
    assert filled[0].shape == plain[0].shape
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.05), filled, plain)


@pytest.mark.system
def test_nothing_is_computed_before_a_part():
    """XLA would convert weights before the loop of a part, and in a batch otherwise than alone; seen with these sizes, in bfloat16."""
    sizes = dict(hidden_size=240, head_dim=40, intermediate_size=600, num_attention_heads=6, num_key_value_heads=3)
    model = random_model(jnp.bfloat16, num_hidden_layers=2, vocab_size=1000, spread=0.05, tie_word_embeddings=False, **sizes)
    text = random_prompts([120], vocab_size=1000, seed=5)[0]
    engine, alone = read(model, "bits", text[:96])
    beside = jax.tree.map(lambda x: jnp.repeat(x, 3, 0), alone.cache)
    by_one = passes(engine.target, alone.cache, [text], 1)[0]
    for tokens in (1, 4):
        assert (passes(engine.target, beside, [text] * 3, tokens) == by_one).all()


def test_a_prompt_is_read_alike_beside_longer_ones(model, texts):
    """And not so by the usual passes."""
    for exact, same in (("bits", True), ("tokens", False)):
        (_, alone), (_, beside) = read(model, exact, PROMPTS[0]), read(model, exact, PROMPTS[0], texts[0][:96], texts[1][:96])
        assert (np.asarray(alone.logits[0]) == np.asarray(beside.logits[0])).all() == same


def check_batch(model, prompts, draft: str, gamma: int, cache: str = "int8") -> None:
    """A batch with a draft has the tokens of each prompt alone without one, and its log-probabilities but for a rounding of float32."""
    settings = BITS | dict(cache=cache, output_logprobs=True)
    together = generate(model, prompts, config=GenerationConfig(draft=draft, num_speculative_tokens=gamma, **settings))
    for b, prompt in enumerate(prompts):
        alone = generate(model, [prompt], config=GenerationConfig(draft="none", **settings))
        assert together.token_ids[b] == alone.token_ids[0]
        np.testing.assert_allclose(together.logprobs[b], alone.logprobs[0], rtol=0, atol=1e-5)  # logits in bfloat16 would differ by more


def test_a_batch_with_a_draft_emits_what_one_by_one_decoding_does(model):
    check_batch(model, ALIKE, "prompt-lookup", 8)


@pytest.mark.system
@pytest.mark.parametrize(
    ("draft", "gamma", "cache"),
    [("quantspec", 1, "int8"), ("quantspec:weight_bits=16", 7, "int8"), ("sparse:weight_bits=16", 3, "int8"), ("prompt-lookup", 2, "full")],
)
def test_every_draft_in_a_batch_emits_what_one_by_one_decoding_does(model, draft, gamma, cache):
    """Beside prompts of other lengths, whose cache is larger."""
    check_batch(model, PROMPTS, draft, gamma, cache)


@pytest.mark.system
def test_refilled_slots_emit_what_one_by_one_decoding_does(model):
    config = GenerationConfig(draft="prompt-lookup", num_speculative_tokens=2, **BITS)
    requests = [Request(prompt, config, key) for prompt, key in zip(PROMPTS, prompt_keys(jax.random.key(0), 3), strict=True)]
    found = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2)}
    for b, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], config=GenerationConfig(draft="none", **BITS))
        assert found[b] == alone.token_ids[0]


def test_fixed_chunks_read_what_chunks_of_the_capacity_do():
    """Whatever the capacity, with the very same bits; and nothing after the end."""
    rng, found = np.random.default_rng(0), []
    q, keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 4, 16), (2, 2, 700, 16), (2, 2, 700, 16)))
    lengths = Lengths(jnp.zeros(2, jnp.int32), jnp.array([300, 517]))
    for capacity in (520, 700):
        layer = FullLayer(keys[:, :, :capacity], values[:, :, :capacity])
        with fixed_order():
            found.append(np.asarray(decode_attention(q, layer, lengths, FULL_PRECISION)[0]))
    assert (found[0] == found[1]).all()
    np.testing.assert_allclose(found[0], decode_attention(q, layer, lengths, FULL_PRECISION)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(cache="kivi"), "is for the caches full and int8, and cache is kivi"),
        (dict(cache="int8:host=lower"), "and cache is int8:host=lower"),
        (dict(num_speculative_tokens=16), "at most 15 drafts in a round, and num_speculative_tokens (gamma) is 16"),
        (dict(num_return_sequences=2), "is for one sample of each prompt, and num_return_sequences (samples) is 2"),
        (dict(exact="bit"), "exact 'bit' should be one of auto, tokens, bits"),
    ],
)
def test_what_does_not_hold_is_refused(model, changes, words):
    with pytest.raises(InputError) as error:
        prepare(model, PROMPTS, config=GenerationConfig(**dict(draft="prompt-lookup") | BITS | changes), key=jax.random.key(0))
    assert words in str(error.value)


def test_states_other_devices_and_windows_are_refused(model, monkeypatch):
    config = GenerationConfig(draft="none", **BITS)
    with pytest.raises(InputError, match="is for whole prompts, not for states"):
        prefill(model, PROMPTS[0], config=config)
    with pytest.raises(InputError, match="not for a sampler of your own"):
        generate(model, PROMPTS, config=config, sampler=Greedy(), key=jax.random.key(0))
    with pytest.raises(InputError, match="not for states and requests with a prefix"):
        prepare(model, [Request(PROMPTS[0], config, jax.random.key(0), prefix=8)])
    state = prefill(model, PROMPTS[0], config=dataclasses.replace(config, exact="tokens"))
    with pytest.raises(InputError, match="is for whole prompts, not for states"):
        generate(model, state, config=dataclasses.replace(config, cache=None, draft="auto", group_size=None))
    windowed = random_model(jnp.float32, num_hidden_layers=1, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8)
    with pytest.raises(InputError, match="without sliding windows"):
        prepare(windowed, PROMPTS, config=config)
    monkeypatch.setattr("qspec_jax.decoding.exact_bits.dispatch.platform", lambda: "gpu")
    with pytest.raises(InputError, match="on a GPU needs"):
        prepare(model, PROMPTS, config=config)
    monkeypatch.setattr("qspec_jax.decoding.exact_bits.dispatch.no_mosaic_gpu", lambda: None)
    assert prepare(model, PROMPTS, config=config).exact == "bits"
    offset = random_model(jnp.bfloat16, num_hidden_layers=1)
    monkeypatch.setattr(offset, "_config", dataclasses.replace(offset.config, norm_offset=1.0))
    with pytest.raises(InputError, match="models whose norms multiply by their weights; in this one it is by 1"):
        prepare(offset, PROMPTS, config=config)


@pytest.mark.parametrize("tokens", [8, 300])
def test_on_a_gpu_an_int8_cache_has_room_for_a_group(model, monkeypatch, tokens):
    """Without room for one, attention would add up a row's tokens in another order than with room for many."""
    monkeypatch.setattr("qspec_jax.decoding.engine.dispatch.platform", lambda: "gpu")
    sizes = dict(gamma=0, prompt_tokens=tokens, max_new_tokens=8)
    capacity = {}
    for same_bits, cache in [(False, "int8"), (True, "int8"), (True, "full")]:
        engine = Engine(model, None, cache=CacheConfig.parse(cache, 128), same_bits=same_bits, **sizes)
        capacity[same_bits, cache] = engine.sizes.capacity
    assert capacity[False, "int8"] == capacity[True, "full"]
    assert capacity[True, "int8"] == max(capacity[False, "int8"], 256)


def test_a_pass_without_a_kernel_of_fixed_order_is_refused(model, monkeypatch):
    """In whatever thread it is traced."""
    monkeypatch.setattr("pallas_kernels.dispatch.platform", lambda: "gpu")
    target = FixedOrderModel(model, FULL_PRECISION)
    cache = CacheConfig.parse("full").empty(model.config, batch=1, capacity=64, num_speculative_tokens=1, dtype=model.dtype)
    one = jnp.zeros((1, 1), jnp.int32)
    with (
        ThreadPoolExecutor() as pool,
        pytest.raises(InputError, match=r"^exact bits needs kernels .*; norm in a fixed order: mosaic_gpu needs "),
    ):
        pool.submit(jax.jit(lambda *args: target(*args)).trace, one, one, cache).result()
    assert not in_fixed_order()


def test_a_pass_has_no_more_tokens_than_it_is_computed_in(model):
    engine, reading = read(model, "bits", PROMPTS[0])
    with pytest.raises(ValueError, match="a pass of 17 tokens"):
        engine.target(jnp.zeros((1, 17), jnp.int32), jnp.arange(17)[None], reading.cache)
    paged = dataclasses.replace(reading.cache.layers[0], pages=jnp.zeros((1, 4), jnp.int32))
    with pytest.raises(ValueError, match="whose rows share no pages"):
        engine.target(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), reading.cache.with_layers((paged,)))
    assert type(read(model, "tokens", PROMPTS[0])[0].target) is ViewedModel and engine.target.view == BOTH_PLANES
