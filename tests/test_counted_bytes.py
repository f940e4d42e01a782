"""Bytes of passes over every cache and of steps of drafts, as benchmarks count them, and random models with the shapes of real ones."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE
from pallas_kernels.formats.weights import Int4Weight, dequantize_weight
from qspec_jax.bench import decode_rows, decode_steps, timing
from qspec_jax.bench.architectures import ARCHITECTURES, architecture, random_int4, random_model
from qspec_jax.bench.hlo import large_operations
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.step_bytes import bytes_of, step_bytes, weight_bytes
from qspec_jax.quantization.weights import quantize_head, quantize_linears

pytestmark = pytest.mark.usefixtures("short_loops")


@pytest.fixture(scope="module")
def model():
    return random_model(architecture("tiny"))


def test_random_models_have_the_shapes_of_real_ones(model):
    drawn, quantized = random_int4(model).weights(), jax.eval_shape(quantize_linears, model).weights()
    assert drawn.keys() == quantized.keys()
    for name, weight in quantized.items():
        assert jax.tree.map(lambda x: (x.shape, x.dtype), drawn[name]) == jax.tree.map(lambda x: (x.shape, x.dtype), weight)
        if isinstance(weight, Int4Weight):
            wide = dequantize_weight(drawn[name], jnp.float32)
            assert abs(float(wide.mean())) < 2e-3 and 0.015 < float(wide.std()) < 0.025
        else:
            assert drawn[name] is model.weights()[name]


def test_parameters_of_known_architectures():
    count = {}
    for name in ("llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "llama-2-13b", "mistral-7b", "gemma-3-12b", "seed-oss-36b", "qwen3-30b-a3b"):
        weights = jax.eval_shape(lambda name=name: random_model(architecture(name)).weights())
        count[name] = sum(x.size for x in jax.tree.leaves(weights)) / 1e9
    expected = {"llama-2-7b": 6.738, "llama-3.1-8b": 8.030, "llama-3.2-1b": 1.236, "llama-2-13b": 13.016, "mistral-7b": 7.248}
    expected |= {"gemma-3-12b": 11.766, "seed-oss-36b": 36.151, "qwen3-30b-a3b": 30.532}  # of Gemma the text model alone
    assert count == pytest.approx(expected, abs=1e-3) and set(expected) < set(ARCHITECTURES)


def test_the_first_layers_of_an_architecture_have_their_windows():
    assert architecture("gemma-3-12b", layers=8).windowed_layers == (0, 1, 2, 3, 4, 6, 7)


def cache_shapes(model, cache: str):
    """The shapes of a cache of two rows, in bfloat16."""
    sizes = dict(batch=2, capacity=512, num_speculative_tokens=4, dtype=jnp.bfloat16)
    return jax.eval_shape(lambda: CacheConfig.parse(cache).empty(model.config, **sizes))


def pass_bytes(model, cache: str, view, tokens: int) -> int:
    """Bytes that a pass reads of a row on the device."""
    return cache_shapes(model, cache).bytes_of_pass(view, tokens)[0]


# Bytes of a pass over 200 tokens, in 2 layers with 2 KV heads of 64. A token of keys and values takes 256 bytes in bfloat16; in groups of
# 64, 128 tokens are quantized, each with 128 bytes in both planes and 8 of scales and zeros. What is in host memory is copied whole: all
# 512 + 5 tokens that a row has room for, or its 8 groups of 64, since of 512 + 64 tokens at least 64 are buffered.
INT8_PASS = 2 * 2 * (128 * (128 + 8) + 72 * 256)
# 32 bytes of 2-bit codes, and 8 each of scales and zeros: of keys for 32 tokens and each channel, of values for 32 channels of a token.
KIVI_PASS = 2 * 2 * (128 * (32 + 8 + 8) + 72 * 256)
PASSES = {
    "full": (2 * 2 * 200 * 256, 0),
    "full:host=all": (2 * 2 * 200 * 256, 2 * 2 * (512 + 5) * 256),
    "full:host=all,resident=0.5": (2 * 2 * 200 * 256, 2 * (512 + 5) * 256),
    "int8": (INT8_PASS, 0),
    "int8:host=lower": (INT8_PASS, 2 * 2 * 512 * 64),
    "int8:host=lower,resident=0.5": (INT8_PASS, 2 * 512 * 64),
    "int8:host=all": (INT8_PASS, 2 * 2 * 512 * 128),
    "streaming-llm:sinks=4,window=60": (2 * 2 * (4 + 60 + 5) * 256, 0),
    "h2o:heavy=32,recent=64": (2 * 2 * (32 + 72) * 256, 0),
    "kivi:residual=64": (KIVI_PASS, 0),
    "specache:residual=64,k=16": (KIVI_PASS + 2 * 2 * 2 * 16 * 256, 0),
    "specache:residual=64,k=16,host=store": (KIVI_PASS + 2 * 2 * 16 * 256, 2 * 2 * 16 * 256),
}


@pytest.mark.parametrize("cache", PASSES)
def test_every_cache_counts_the_bytes_of_a_pass(model, cache):
    """By its arrays or by shapes that say nothing of the memory that they are in."""
    sizes = dict(batch=2, capacity=512, num_speculative_tokens=4, dtype=jnp.bfloat16)
    made = CacheConfig.parse(cache).empty(model.config, **sizes)
    assert made.bytes_of_pass(BOTH_PLANES, 200) == cache_shapes(model, cache).bytes_of_pass(BOTH_PLANES, 200) == PASSES[cache]


def test_no_cache_is_left_out():
    assert {CacheConfig.parse(cache).kind for cache in PASSES} == set(CACHES)


@pytest.mark.parametrize(("host", "copied"), [("lower", 0), ("all", 2 * 2 * 512 * 64)])
def test_a_pass_over_the_upper_plane_copies_no_lower_one(model, host, copied):
    read = 2 * 2 * (128 * (64 + 8) + 72 * 256)
    assert cache_shapes(model, f"int8:host={host}").bytes_of_pass(UPPER_PLANE, 200) == (read, copied)


def test_bytes_of_a_step(model):
    c = model.config
    matrices = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512)
    others = 256 * 256 + 5 * 256  # the head, and the norms; the embedding gives a row
    assert weight_bytes(model) == 2 * (matrices + others)
    # 4 bits a weight, and a scale and a zero in bfloat16 for 128.
    draft = random_int4(model)
    assert weight_bytes(draft) == matrices * (4 + 2 * 16 / 128) / 8 + 2 * others
    # 8 bits of the head, and a scale in float32 for each of 256 outputs.
    assert weight_bytes(quantize_head(draft)) == matrices * (4 + 2 * 16 / 128) / 8 + 256 * (256 + 4) + 2 * 5 * 256
    # 2 layers, 2 KV heads of 64, groups of 64: 200 tokens are 128 and 72, or 200 of 256 bytes.
    assert pass_bytes(model, "full", BOTH_PLANES, 200) == 2 * 2 * 200 * 256
    assert pass_bytes(model, "int8", UPPER_PLANE, 200) == 2 * 2 * (128 * (64 + 8) + 72 * 256)
    both = pass_bytes(model, "int8", BOTH_PLANES, 200)
    assert both == 2 * 2 * (128 * (128 + 8) + 72 * 256)
    assert decode_steps.target_bytes(model, cache_shapes(model, "int8"), 200, 3) == (weight_bytes(model) + 3 * both, 0)
    assert c.head_dim == 64


def test_a_draft_that_says_nothing_of_its_steps_has_no_byte_limit():
    """Its speed is measured all the same."""
    step = decode_rows.StepTiming(timing.Timing(10.0, 9.0, 11.0, 1, 1, 1, ""), 100, 0.5)
    baseline = decode_rows.DecodeRow("autoregressive", 64, 0, "measured", ms_per_token=2.0, new_tokens=8, rounds=8, steps={"target": step})
    row = decode_rows.DecodeRow("bigram", 64, 3, "measured", ms_per_token=1.0, new_tokens=8, rounds=4, steps={"target": step})
    _, found = decode_rows.compared([baseline, row])
    assert (found.speedup, found.byte_limit) == (2.0, None)


def test_arrays_that_are_shared_count_once(model):
    assert bytes_of((model, model)) == bytes_of(model)
    draft = random_int4(model)
    matrices = sum(w.nbytes for w in draft.weights().values() if isinstance(w, Int4Weight))
    assert bytes_of((model, draft)) == bytes_of(model) + matrices


def test_what_fusions_make_is_seen():
    fusion = """
%fused (a: f32[1024]) -> (f32[1024], f32[4]) {
  %a = f32[1024]{0} parameter(0)
  %copied = f32[1024]{0} copy(%a)
  %cut = f32[4]{0} slice(%a), slice={[0:4]}
  ROOT %both = (f32[1024]{0}, f32[4]{0}) tuple(%copied, %cut)
}
%pass (b: f32[1024]) -> f32[1024] {
  ROOT %b = f32[1024]{0} parameter(0)
}
%turned (c: f32[1024]) -> f32[1024] {
  %c = f32[1024]{0} parameter(0)
  ROOT %t = f32[1024]{0} transpose(%c), dimensions={0}
}
%put (d: f32[1024], e: f32[4], at: s32[]) -> f32[1024] {
  %d = f32[1024]{0} parameter(0)
  %e = f32[4]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %written = f32[1024]{0} dynamic-update-slice(%d, %e, %at)
}
%body (carry: (f32[1024])) -> (f32[1024]) {
  %carry = (f32[1024]{0}) parameter(0)
  %x = f32[1024]{0} get-tuple-element(%carry), index=0
  %made = (f32[1024]{0}, f32[4]{0}) fusion(%x), kind=kLoop, calls=%fused
  %z = f32[1024]{0} get-tuple-element(%made), index=0
  %few = f32[4]{0} get-tuple-element(%made), index=1
  %zero = s32[] constant(0)
  %in_place = ((f32[1024]{0}, f32[4]{0}, s32[]), f32[1024]{0}, u32[]) fusion-start(%z, %few, %zero), kind=kLoop, calls=%put
  %put_there = f32[1024]{0} fusion-done(%in_place)
  %begun = ((f32[1024]{0}), (f32[1024]{0}, f32[4]{0}), u32[]) fusion-start(%put_there), kind=kLoop, calls=%fused
  %again = (f32[1024]{0}, f32[4]{0}) fusion-done(%begun)
  %w = f32[1024]{0} get-tuple-element(%again), index=0
  %fetching = (f32[1024]{0}, f32[1024]{0:S(5)}, u32[]) copy-start(%w)
  %fetched = f32[1024]{0} copy-done(%fetching)
  %copying = (f32[1024]{0}, f32[1024]{0}, u32[]) copy-start(%fetched)
  %copy = f32[1024]{0} copy-done(%copying)
  %which = pred[] constant(true)
  %y = f32[1024]{0} conditional(%which, %copy, %copy), branch_computations={%pass, %turned}
  ROOT %out = (f32[1024]{0}) tuple(%y)
}
%condition (carry: (f32[1024])) -> pred[] {
  %carry = (f32[1024]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
ENTRY %main (x: f32[1024]) -> (f32[1024]) {
  %x = f32[1024]{0} parameter(0)
  %outside = f32[1024]{0} copy(%x)
  %start = (f32[1024]{0}) tuple(%outside)
  ROOT %loop = (f32[1024]{0}) while(%start), condition=%condition, body=%body
}
"""
    fetching, copying = (f"copy-start (f32[1024]{{0}}, f32[1024]{{0{place}}}, u32[])" for place in (":S(5)", ""))
    found = ["copy f32[1024]{0}", "copy f32[1024]{0}", fetching, copying, "transpose f32[1024]{0}"]
    assert large_operations(fusion, 4096) == found
    found.remove(fetching)
    assert large_operations(fusion, 4096, streamed=True) == found
    assert large_operations(fusion, 4097) == []


def test_what_a_draft_reads_is_counted_in_its_own_cache(model):
    """Bytes of a step at 400 tokens, the 401st appended: its budget of them, one more token, and its weights."""
    weights, group, heads, layers = weight_bytes(model), 64, 2, 2
    token = {"full": 2 * 64 * 2, "int8": 2 * 64 + 4 * 2}  # bytes of keys and values; with two scales and two zeros
    for text, held, kind in (
        ("streaming-llm:budget=0.5", 200, "full"),
        ("streaming-llm:budget=0.1", 64, "full"),  # the least of a share
        ("streaming-llm:budget=4096", 400, "full"),
        ("snapkv:budget=100,generated=30,cache=int8", 130, "int8"),  # what was generated is read as well
        ("snapkv:budget=100,generated=30", 130, "full"),
        ("snapkv:budget=380", 400, "full"),
    ):
        for size in (64, 16):  # tokens of the target's groups, which the draft's own cache does not have
            found = step_bytes(make_draft(text, model), CacheConfig(group_size=size), 401)
            assert found == weights + layers * heads * (held * token[kind] + token["full"])
            rows = step_bytes(make_draft(text, model), CacheConfig(group_size=size), 401, batch=3)
            assert rows == weights + 3 * (found - weights)
    dense = step_bytes(make_draft("quantspec:weight_bits=16", model), CacheConfig(group_size=group), 401)
    assert dense == weights + pass_bytes(model, "int8", UPPER_PLANE, 401)
    full = step_bytes(make_draft("quantspec:weight_bits=16", model), CacheConfig("full"), 401)
    assert full == weights + pass_bytes(model, "full", BOTH_PLANES, 401)
