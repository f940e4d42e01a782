"""The forward pass, through the real loader, against transformers' logits (tests/make_goldens.py)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import (
    CASES,
    CONTINUED,
    GOLDENS,
    HEAD_DIMS,
    MODEL_TYPES,
    ROPE_TYPES,
    case_lengths,
    case_tokens,
    old_spelling,
    write_checkpoint,
)
from runs import random_model
from tiers import in_system

from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.views import DenseView
from pallas_kernels.fused_layer import between_attentions
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.errors import InputError
from qspec_jax.models import prompts
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import AttendingCache, Llama
from qspec_jax.models.prompts import attend_prompt
from qspec_jax.quantization import calibration
from qspec_jax.quantization.weights import quantize_linears


@dataclasses.dataclass(frozen=True)
class OnePass(AttendingCache):
    """The least that the model takes for a cache: one call holds the whole sequence, and nothing is kept."""

    kv_heads: int

    def attend(self, layer: int, qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, view) -> tuple[jax.Array, None, None]:
        q, k, v = split_and_rotate(qkv, cos, sin, kv_heads=self.kv_heads)
        B, T, K, H = k.shape
        empty = jnp.zeros(B, jnp.int32)
        whole = FullLayer.zeros(B, K, T, H, k.dtype).append(k, v, empty)
        return decode_attention(q, whole, Lengths(empty, empty + T), view=DenseView(None))[0], None, None

    def advance(self, layers: tuple[None, ...], tokens: int) -> "OnePass":
        return self


def one_pass(model: Llama, tokens: np.ndarray, length: int) -> jax.Array:
    """Logits of the first `length` tokens; the rope of each knows that length, as in one pass of transformers."""
    # All 48 tokens are computed, so that JAX compiles one shape: attention is causal, the first see nothing of the rest.
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = OnePass(model.config.num_kv_heads)
    if model.config.windowed_layers:
        sizes = dict(batch=tokens.shape[0], capacity=tokens.shape[1], num_speculative_tokens=tokens.shape[1] - 1, dtype=model.dtype)
        cache = CacheConfig("full").empty(model.config, **sizes)
    logits, _ = model(jnp.asarray(tokens), positions, cache, lengths=jnp.full_like(positions, length))
    return logits[:, :length]


# Which kind of RoPE there is does not depend on the architecture; and edges of one kind.
AGAIN = [
    *(f"{architecture}-{kind}" for architecture in ("mistral", "qwen2", "qwen3") for kind in ROPE_TYPES if kind != "default"),
    *(name for name in CASES if name.startswith("yarn-") and name != "yarn-mscale"),
]


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in AGAIN), *in_system(*AGAIN)])
def test_logits_equal_transformers(name, tmp_path):
    # The goldens were made from the other spelling; three shards for every second case.
    config, shards = old_spelling(CASES[name]), 1 + 2 * (list(CASES).index(name) % 2)
    model = load_model(write_checkpoint(tmp_path, config, shards=shards), progress=False)
    with np.load(GOLDENS) as goldens:
        for length in case_lengths(name):
            logits = one_pass(model, case_tokens(name), length)
            assert logits.dtype == jnp.float32
            np.testing.assert_allclose(logits, goldens[f"{name}-{length}"], rtol=0, atol=1e-4, err_msg=f"{name}, {length} tokens")


def test_continuations_on_one_side_of_the_short_length_equal_transformers(tmp_path):
    model = load_model(write_checkpoint(tmp_path, CASES["phi3-longrope"]), progress=False)
    settings = dict(draft="none", ignore_eos=True)
    with np.load(GOLDENS) as goldens:
        for length, new in CONTINUED:
            config = GenerationConfig(max_new_tokens=new, **settings)
            tokens = generate(model, case_tokens("phi3-longrope")[:, :length].tolist(), config=config).token_ids
            assert tokens == goldens[f"phi3-longrope-{length}+{new}"].tolist()
    for length, new, most in ((25, 9, 8), (32, 2, 1), (1, 96, 32)):
        with pytest.raises(InputError, match=f"cross the 32 tokens .* at most {most} new tokens, or give a prompt of more than 32"):
            generate(model, [[1] * length], config=GenerationConfig(max_new_tokens=new, **settings))


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_of_a_config_are_one(name):
    assert LlamaConfig.from_hf(CASES[name]) == LlamaConfig.from_hf(old_spelling(CASES[name]))


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_cases_cover(architecture):
    """Every rope type, head_dim, tied and untied, GQA and MHA, with this architecture."""
    configs = [c for c in map(LlamaConfig.from_hf, CASES.values()) if c.architecture == architecture]
    assert {c.rope.rope_type for c in configs} == set(ROPE_TYPES)
    assert {c.head_dim for c in configs} >= set(HEAD_DIMS)
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert {c.num_heads == c.num_kv_heads for c in configs} == {True, False}


@pytest.mark.parametrize("weights", ["full", "int4", "mixed"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"architecture": "Qwen2ForCausalLM"},
        {"architecture": "Qwen3ForCausalLM"},
        {"architecture": "Qwen3ForCausalLM", "attention_bias": True},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "llama",
)
def test_from_one_attention_to_the_next(settings, weights):
    """In one step or by the parts that prefill uses, which transformers' logits are the measure of."""
    model = random_model(jnp.float32, **settings)
    if weights != "full":
        quantized, full = quantize_linears(model).weights(), model.weights()
        mixed = lambda path: weights == "mixed" and path.endswith(("k_proj.weight", "up_proj.weight", "o_proj.weight"))
        model = Llama(model.config, lambda path, shape: full[path] if mixed(path) else quantized[path])
    block, following = model.layers
    assert (following.q_norm is not None) == ("Qwen3" in settings.get("architecture", ""))
    assert (following.q_proj.bias is not None) == ("Qwen2" in settings.get("architecture", "") or "attention_bias" in settings)
    r = np.random.default_rng(0)
    x = jnp.asarray(r.standard_normal((2, 3, model.config.hidden_size)), jnp.float32)
    attended = jnp.asarray(r.standard_normal((2, 3, block.num_heads, block.head_dim)), jnp.float32)
    expected = block.after_attention(x, attended)
    after, y, _ = block.until(following, x, attended)
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, following.qkv(following.input_norm(expected)), rtol=1e-4, atol=1e-4)
    before, added, _ = block.until(None, x, attended)
    np.testing.assert_allclose(before + added, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_gets_the_carry_of_the_layer_before(monkeypatch):
    given = []

    def fake(x, attended, *weights, **settings):
        given.append(weights[-1])
        return *between_attentions(x, attended, *weights, **settings, implementation="reference")[:2], jnp.full(1, len(given))

    monkeypatch.setattr("qspec_jax.models.block.between_attentions", fake)
    model = random_model(jnp.float32, num_hidden_layers=3)
    for any_weights in (model, quantize_linears(model)):
        given.clear()
        one_pass(any_weights, np.zeros((1, 2), np.int32), 2)
        assert given[0] is None and given[1:] == [1, 2]


@pytest.mark.system
def test_layers_without_rope_in_prefill_and_calibration(monkeypatch):
    model = random_model(jnp.float32, architecture="SmolLM3ForCausalLM", num_hidden_layers=2, no_rope_layers=[1, 0])
    tokens = np.random.default_rng(0).integers(0, 64, (1, 64))
    cache = CacheConfig("full").empty(model.config, batch=1, capacity=64, num_speculative_tokens=0, dtype=jnp.float32)
    logits, _ = jax.jit(prefill)(model, jnp.asarray(tokens), jnp.array([50]), cache)
    np.testing.assert_allclose(logits, one_pass(model, tokens, 64)[:, 49], rtol=0, atol=1e-4)
    without, block = [], calibration._block

    def watched(layer, x, angles, valid):
        cos, sin = layer.angles_of(angles)
        without.append(bool((cos == 1).all() and (sin == 0).all()))
        return block(layer, x, angles, valid)

    monkeypatch.setattr(calibration, "_block", watched)
    calibration.quantize_linears_for(model, [[1, 2, 3]], progress=False)
    assert without == [False, True]


@pytest.mark.parametrize(("heads", "at_once", "parts"), [(6, 2, 3), (6, 4, 2), (5, 2, 5), (4, 4, 1)])
def test_keys_are_quantized_some_heads_at_a_time(heads, at_once, parts, monkeypatch):
    """To the same as all of them at once. Parts are cut out as prefill lays prompts out: else XLA turns all of them round first, and holds
    both."""
    r = np.random.default_rng(0)
    keys, values = (jnp.asarray(r.standard_normal((2, heads, 12, 4)), jnp.float32) for _ in range(2))
    monkeypatch.setattr(prompts, "QUANTIZED_BYTES", at_once * keys.nbytes // heads)
    function = lambda keys, values: (keys.cumsum(2), {"both": jnp.einsum("bksh,bksh->bks", keys, values), "values": values[:, :, 3:8]})
    by_heads = lambda *args: prompts.by_heads(function, *args)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(by_heads)(keys, values), function(keys, values))
    jaxpr = jax.make_jaxpr(by_heads)(keys, values)
    loops = [e.params.get("body_jaxpr", e.params.get("jaxpr")) for e in jaxpr.eqns if e.primitive.name in ("while", "scan")]
    assert len(loops) == (parts > 1)
    constrained = [e for e in (loops or [jaxpr])[0].eqns if e.primitive.name == "layout_constraint"]
    as_it_is = (2, 12, heads // parts, 4), (0, 1, 2, 3)
    assert [(e.invars[0].aval.shape, e.params["layout"].major_to_minor) for e in constrained] == [as_it_is] * 2


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 1), *in_system((8, 8), (12, 4), (6, 3))])
def test_prompts_are_attended_some_heads_at_a_time(heads, kv_heads, monkeypatch):
    """What a GPU does with cuDNN, by way of XLA."""
    r = np.random.default_rng(0)
    q, k, v = (jnp.asarray(r.standard_normal((2, 64, n, 64)), jnp.bfloat16) for n in (heads, kv_heads, kv_heads))
    expected, seen, attend = jax.nn.dot_product_attention(q, k, v, is_causal=True), [], jax.nn.dot_product_attention

    def flash(q, k, v, *, is_causal, implementation):
        seen.append((implementation, q.shape[2], k.shape[2]))
        return attend(q, k, v, is_causal=is_causal)

    monkeypatch.setattr(jax.nn, "dot_product_attention", flash)
    monkeypatch.setattr(prompts, "compute_capability", lambda: 9.0)
    for flash_bytes, parts in (q.nbytes + 1, 1), (q.nbytes, 2), (q.nbytes // 4, 8):
        monkeypatch.setattr(prompts, "FLASH_BYTES", flash_bytes)
        np.testing.assert_array_equal(attend_prompt(q, k, v), expected)
        parts = math.gcd(parts, kv_heads)
        assert seen.pop() == ("cudnn", heads // parts, kv_heads // parts)
