"""`qspec bench decode` on a model that a CPU decodes at once: what it simulates, counts and reports. No figure of speed is tested."""

import functools
import gc
import importlib.util
import json
import subprocess
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE
from pallas_kernels.formats.weights import Int4Weight, dequantize_weight
from qspec_jax import host, plots
from qspec_jax.bench import decode, decode_report, decode_rows, decode_steps, timing, transformers_decode
from qspec_jax.bench.architectures import ARCHITECTURES, architecture, random_int4, random_model
from qspec_jax.bench.hlo import large_operations
from qspec_jax.bench.simulated import SimulatedGreedy, rate_of_ratio, ratio_of_rate
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.decoding.sampling import Greedy, prompt_keys
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.step_bytes import bytes_of, step_bytes, weight_bytes
from qspec_jax.quantization.weights import quantize_head, quantize_linears

FAST = ["bench", "decode", "--arch", "tiny", "--context", 200, "--max-new-tokens", 150, "--gamma", 3, "--repeats", 1]


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    """The read bandwidth is measured elsewhere, and short loops will do."""
    monkeypatch.setattr(decode, "read_bandwidth", lambda *, repeats: 20.0)
    monkeypatch.setattr(timing, "LOOP_TRIPS", (2, 2))
    monkeypatch.setattr(timing, "BATCH_SECONDS", 1e-3)


@pytest.fixture(scope="module")
def model():
    return random_model(architecture("tiny"))


@pytest.fixture(scope="module")
def small_model():
    """A model of one layer."""
    return random_model(architecture("tiny", layers=1))


@pytest.mark.parametrize("gamma", [1, 4, 7])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.912, 1.0])
def test_the_rate_gives_the_ratio(ratio, gamma):
    assert ratio_of_rate(rate_of_ratio(ratio, gamma), gamma) == pytest.approx(ratio, abs=1e-9)


def test_a_rate_of_one_half():
    # One in two is accepted, then one in four, one in eight.
    assert ratio_of_rate(0.5, 3) == pytest.approx((1 / 2 + 1 / 4 + 1 / 8) / 3)


verify = jax.jit(lambda sampler, *args: sampler.verify(*args))


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_simulated_acceptance(rate):
    B, gamma, V = 2000, 3, 11
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((B, gamma + 1, V)), jnp.float32)
    drafts = jnp.zeros((B, gamma), jnp.int32)
    eligible = jnp.where(jnp.arange(B) % 2, gamma, 1)
    positions = jnp.broadcast_to(jnp.arange(gamma + 1), (B, gamma + 1))
    rest = (jnp.zeros((B, gamma, 0)), eligible, prompt_keys(jax.random.key(1), B), positions)
    accepted, after = verify(SimulatedGreedy(jnp.float32(rate)), logits, drafts, *rest)
    best = jnp.argmax(logits, -1)
    np.testing.assert_array_equal(after, jnp.take_along_axis(best, accepted[:, None], 1)[:, 0])
    odd, even = (np.asarray(accepted)[1::2], np.asarray(accepted)[::2])
    assert even.max(initial=0) <= 1
    assert abs(even.mean() - rate) < 0.06
    assert abs(odd.mean() - gamma * ratio_of_rate(rate, gamma)) < 0.12
    # Without drafts it is greedy decoding.
    nothing = (drafts[:, :0], rest[0][:, :0], eligible, rest[2], positions[:, :1])
    for simulated, greedy in zip(*(verify(s, logits[:, :1], *nothing) for s in (SimulatedGreedy(jnp.float32(rate)), Greedy()))):
        np.testing.assert_array_equal(simulated, greedy)


def test_a_level_below_has_a_rate_of_its_own():
    one, other = SimulatedGreedy(jnp.float32(0.9)), SimulatedGreedy(jnp.float32(0.9), jnp.float32(0.5))
    assert one.below().rate == one.rate and other.below().rate == 0.5 == other.below().below().rate


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
    for name in ("llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "llama-2-13b", "mistral-7b"):
        weights = jax.eval_shape(lambda name=name: random_model(architecture(name)).weights())
        count[name] = sum(x.size for x in jax.tree.leaves(weights)) / 1e9
    expected = {"llama-2-7b": 6.738, "llama-3.1-8b": 8.030, "llama-3.2-1b": 1.236, "llama-2-13b": 13.016, "mistral-7b": 7.248}
    assert count == pytest.approx(expected, abs=1e-3) and set(expected) < set(ARCHITECTURES)


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


def test_json(run):
    names = ["autoregressive", "quantspec", "quantspec-weights-only"]
    flags = ["--layers", 1, "--simulate-ratio", 0.8, "--methods", ",".join(names)]
    code, out, err = run(*FAST, *flags, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["model"] == "tiny, 1 of 2 layers"
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == names
    for name, row in rows.items():
        method = decode_rows.METHODS[name]
        assert (row["status"], row["note"]) == ("measured", "")
        assert row["gamma"] == (3 if method.speculative else 0)
        assert row["simulated_ratio"] == (pytest.approx(0.8) if method.speculative else None)
        assert row["simulated_rate"] == (pytest.approx(rate_of_ratio(0.8, 3)) if method.speculative else None)
        assert row["decode_s"] > 0 and row["prefill_s"] > 0 and row["compile_s"] > 0
        assert row["ms_per_token"] == pytest.approx(1e3 * row["decode_s"] / row["new_tokens"])
        assert row["speedup"] == pytest.approx(rows["autoregressive"]["ms_per_token"] / row["ms_per_token"])
        assert set(row["steps"]) == {"target", "sampling"} | ({"draft"} if method.speculative else set()) | (
            {"flush due", "flush not due"} if method.cache == "int8" else set()
        )
        assert row["peak_memory_bytes"] > row["cache_bytes"] > 0
        if method.speculative:
            assert 0.6 < row["acceptance_ratio"] < 0.95
            assert row["rounds"] < row["new_tokens"]
        # 200 tokens of the prompt and 150 new ones: the group's boundaries at 256 and 320.
        assert row["flushes"] == (2 if method.cache == "int8" else 0)
    baseline, both = rows["autoregressive"], rows["quantspec"]
    tokens = both["new_tokens"] / both["rounds"]
    limit = baseline["steps"]["target"]["bytes"] * tokens / (both["steps"]["target"]["bytes"] + 3 * both["steps"]["draft"]["bytes"])
    assert both["byte_limit"] == pytest.approx(limit)
    assert both["cache_bytes"] < baseline["cache_bytes"]


@pytest.fixture(scope="module")
def decoded_batches(small_model):
    """Rows of batches of 1 and 4, each with the state behind its decode. Half of the drafts are accepted."""
    cases = [decode_rows.Case(decode_rows.METHODS["autoregressive"], 0), decode_rows.Case(decode_rows.METHODS["quantspec-kv-only"], 3)]
    states, whole = [], decode._Measured._decoded

    def recorded(self, *args):
        run, state = whole(self, *args)
        states.append(jax.device_get((state.emitted, state.counts, state.cache.lengths.total)))
        return run, state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode._Measured, "_decoded", recorded)
        patch.setattr(timing, "LOOP_TRIPS", (2, 2))
        patch.setattr(timing, "BATCH_SECONDS", 1e-3)
        settings = decode.Settings(100, rate=0.5, bandwidth=decode.Bandwidth(20.0), repeats=1)
        rows = decode.measure(small_model, lambda: small_model, cases, [list(range(100))], settings, batch_sizes=(1, 4))
        return list(zip(decode_rows.compared(list(rows)), states, strict=True))


def test_batches_are_measured_at_each_size(decoded_batches):
    rows = [row for row, _ in decoded_batches]
    assert [(row.batch_size, row.method, row.status, row.note) for row in rows] == [
        (size, method, "measured", "") for size in (1, 4) for method in ("autoregressive", "quantspec-kv-only")
    ]
    for row, (emitted, counts, _) in decoded_batches:
        assert emitted.shape == (row.batch_size,)
        # Without the first token, which prefill chooses, and the two rounds of the warm-up.
        assert row.batch_size * 2 == counts.rounds.sum() - row.rounds
        assert row.new_tokens < (emitted - 1).sum() == (counts.accepted + counts.rounds).sum()
        assert row.tokens_per_second == pytest.approx(row.new_tokens / row.decode_s)
        assert row.ms_per_token == pytest.approx(1e3 * row.batch_size / row.tokens_per_second)
    for baseline, row in (rows[:2], rows[2:]):  # at the same batch size
        assert baseline.speedup == 1
        assert row.speedup == pytest.approx(row.tokens_per_second / baseline.tokens_per_second)


def test_rows_of_a_batch_accept_independently_and_all_run(decoded_batches):
    (_, _), (_, _), (_, (emitted, one_by_one, _)), (_, (ended, counts, lengths)) = decoded_batches
    assert len(set(counts.accepted.tolist())) > 1 and len(set(lengths.tolist())) > 1
    assert emitted.tolist() == [100] * 4 and one_by_one.rounds.tolist() == [99] * 4
    # Until the first row has all of its tokens.
    assert len(set(counts.rounds.tolist())) == 1 and ended.max() == 100 > ended.min()


def test_floors_of_batches_count_weights_once_and_every_rows_cache(decoded_batches, small_model):
    weights, layers = weight_bytes(small_model), small_model.config.num_layers
    one, four = ({row.method: row for row, _ in decoded_batches if row.batch_size == size} for size in (1, 4))
    assert one.keys() == four.keys() == {"autoregressive", "quantspec-kv-only"}
    for method, row in four.items():
        for step in ("target", *["draft"] * bool(row.gamma)):
            of_cache = one[method].steps[step].bytes - weights
            assert of_cache > 0 and row.steps[step].bytes == weights + 4 * of_cache
        assert row.cache_bytes == 4 * one[method].cache_bytes
        tokens = row.new_tokens / row.rounds
        seconds = (row.steps["target"].bytes + (3 * row.steps["draft"].bytes if row.gamma else 0)) / 20e9
        assert row.tokens_per_second_limit == pytest.approx(4 * tokens / seconds)
        assert row.byte_limit == pytest.approx(row.tokens_per_second_limit / four["autoregressive"].tokens_per_second_limit)
    # 100 tokens and the one that is appended, in 2 heads of 64 values of 2 bytes for keys, and as much for values.
    assert one["autoregressive"].steps["target"].bytes == weights + layers * 101 * 2 * 2 * 64 * 2


def test_peak_memory_counts_the_making_of_a_batch(monkeypatch, model):
    """The program that repeats a row is given no weights, which stay where they are; prefill and decode are given them."""
    monkeypatch.setattr(decode, "_working_bytes", lambda size: size)
    measured = types.SimpleNamespace(engine=types.SimpleNamespace(target=model, draft=None))
    weights = bytes_of(model)
    assert decode._Measured._peak_bytes(measured, {"prefill": weights + 10}, 30, weights + 20, None) == weights + 30
    assert decode._Measured._peak_bytes(measured, {"prefill": weights + 10}, None, weights + 20, None) == weights + 20


def test_more_rows_than_did_not_fit_are_skipped_and_not_compiled(monkeypatch, model):
    tried = []

    class Fails:
        """Autoregressive decoding has room for 1 row, which it finds out when it runs; with an int8 cache for 4, found out before."""

        def __init__(self, model, draft, case, prompts, settings, pool, batch_size, began):
            tried.append((case.method.name, batch_size))
            self.name, self.batch_size = case.method.name, batch_size
            if (self.name, batch_size) == ("autoregressive-int8", 16):
                raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory")

        def row(self, bandwidth, repeats):
            if (self.name, self.batch_size) == ("autoregressive", 4):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.\nstack")
            if self.name == "quantspec-kv-only":
                raise ValueError("no kernel")
            return decode_rows.DecodeRow(self.name, 3, 0, "measured", batch_size=self.batch_size)

    monkeypatch.setattr(decode, "_Measured", Fails)
    names = ["autoregressive", "autoregressive-int8", "quantspec-kv-only"]
    cases = [decode_rows.Case(decode_rows.METHODS[name], 0) for name in names]
    found = list(decode.measure(model, lambda: model, cases, [[1, 2, 3]], decode.Settings(32), batch_sizes=(1, 4, 16, 64)))
    assert [(row.method, row.batch_size) for row in found] == [(name, size) for size in (1, 4, 16, 64) for name in names]
    outcome = {(row.method, row.batch_size): (row.status, row.note) for row in found}
    assert [outcome[names[0], size] for size in (1, 4, 16, 64)] == [
        ("measured", ""),
        ("failed", "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."),
        ("skipped", "batch size 4 did not fit"),
        ("skipped", "batch size 4 did not fit"),
    ]
    assert [outcome[names[1], size][0] for size in (1, 4, 16, 64)] == ["measured", "measured", "failed", "skipped"]
    # What fails for another reason may not fail with more rows.
    assert [outcome[names[2], size] for size in (1, 4, 16, 64)] == [("failed", "ValueError: no kernel")] * 4
    assert tried == [(name, size) for size in (1, 4, 16, 64) for name in names if outcome[name, size][0] != "skipped"]


def test_batches_in_table_plot_and_json(run, monkeypatch, tmp_path):
    """They are asked for in any order, with repetitions."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")

    def measured(model, drafts, cases, prompts, *args, batch_sizes, **settings):
        for size in batch_sizes:
            for case in cases:
                row_of = functools.partial(decode_rows.DecodeRow, case.method.name, len(prompts[0]), case.gamma, batch_size=size)
                if size == 8 and case.method.name == "autoregressive":
                    yield row_of("skipped", "batch size 2 did not fit")
                    continue
                figures = dict(prefill_s=0.1, compile_s=2.0, decode_s=0.5, new_tokens=100, rounds=40, tokens_per_second=200.0 * size)
                figures |= dict(ms_per_token=5.0 / (1 + case.gamma), cache_bytes=1000, peak_memory_bytes=2000)
                yield row_of("measured", tokens_per_second_limit=300.0 * size, **figures)

    figures, save = [], plots.save
    monkeypatch.setattr(decode, "measure", measured)
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    path, sizes = tmp_path / "batches.png", ["--batch-size", 8, "--batch-size", 1, "--batch-size", 2, "--batch-size", 8]
    code, out, _ = run(*FAST, "--context", 64, *sizes, "--plot", path)
    words = " ".join(out.split())
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and "Batch 1" not in words and "at the same context and as many rows" in words
    assert next(line for line in lines if line[:1] == ["context"])[:3] == ["context", "rows", "method"]
    assert [line[:2] for line in lines if "quantspec" in line] == [[n, size] for n in ("200", "64") for size in ("1", "2", "8")]
    quantspec = next(line for line in lines if line[:3] == ["64", "8", "quantspec"])
    assert quantspec[5:10] == ["1,600.0", "2,400.0", "67%", "1.25", "-"]
    skipped = [line for line in lines if line[:3] == ["64", "8", "autoregressive"]]
    assert len(skipped) == 1 and skipped[0][-1] == "skipped"
    assert "64 tokens, batch size 8, autoregressive, gamma 0: skipped: batch size 2 did not fit" in words
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert [axes.get_title().split()[0] for axes in figure.axes] == ["64", "200"]
    for axes in figure.axes:
        drawn = {(line.get_label(), line.get_linestyle()): line.get_xydata().tolist() for line in axes.lines}
        assert drawn["autoregressive", "-"] == [[1, 200], [2, 400]]
        assert drawn["quantspec", "-"] == [[1, 200], [2, 400], [8, 1600]]
        dotted = [points for (_, style), points in drawn.items() if style == ":"]
        assert dotted == [[[1, 300], [2, 600]], [[1, 300], [2, 600], [8, 2400]]]
    code, out, _ = run(*FAST, "--batch-size", 2, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and [(row["method"], row["batch_size"], row["speedup"]) for row in rows] == [
        ("autoregressive", 2, 1.0),
        ("quantspec", 2, 4.0),
    ]


def test_a_row_for_every_method_context_and_gamma(run, monkeypatch):
    def measured(model, drafts, cases, prompts, *args, **settings):
        return [decode_rows.DecodeRow(case.method.name, len(prompts[0]), case.gamma, "failed", "no room", 0.0) for case in cases]

    monkeypatch.setattr(decode, "measure", measured)
    flags = ["--gamma", 1, "--context", 64, "--methods", "autoregressive,quantspec", "--simulate-acceptance", 0.9, "--json"]
    code, out, _ = run(*FAST, *flags)
    report = json.loads(out)
    methods = [("autoregressive", 0), ("quantspec", 3), ("quantspec", 1)]
    assert code == 0
    assert [(row["context"], row["method"], row["gamma"]) for row in report["rows"]] == [(n, *rest) for n in (200, 64) for rest in methods]


def test_what_was_given_out_of_a_devices_memory(run, monkeypatch):
    """The most of any device, where JAX says so, as it does not of a CPU."""
    monkeypatch.setattr(decode, "measure", lambda *args, **settings: [decode_rows.DecodeRow("autoregressive", 200, 0, "failed", "no room")])
    for stats, found in (([None], None), ([{}, {"peak_bytes_in_use": 12_340_000_000}, {"peak_bytes_in_use": 5}], 12_340_000_000)):
        devices = [types.SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]
        monkeypatch.setattr(jax, "local_devices", lambda devices=devices: devices)
        assert json.loads(run(*FAST, "--json")[1])["allocated_bytes"] == found
        shown = "JAX had given out at most 12.3 GB of a device's memory at a time." in " ".join(run(*FAST)[1].split())
        assert shown == (found is not None)


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


@pytest.mark.parametrize("draft", ["streaming-llm", "snapkv:cache=int8,generated=1"])
def test_a_draft_with_a_cache_of_its_own_is_timed(run, one_layer, draft):
    code, out, _ = run(*FAST, "--draft", draft, "--simulate-ratio", 0.8, "--json")
    baseline, row = json.loads(out)["rows"]
    assert code == 0 and (row["status"], row["note"]) == ("measured", "")
    step = row["steps"]["draft"]
    # The same weights as the baseline's; of 200 tokens 64 or 65, in 2 heads of 256 bytes or less.
    assert step["timing"]["median_us"] > 0 and baseline["steps"]["target"]["bytes"] - step["bytes"] >= 135 * 2 * 256
    assert row["byte_limit"] > 0


def test_a_step_that_cannot_be_compiled_is_one_row_and_keeps_nothing(one_layer, monkeypatch):
    model = random_model(architecture("tiny"))

    class Broken:
        def compile(self, *args):
            raise MemoryError("no room")

    monkeypatch.setattr(
        decode, "loop", lambda function, trips: Broken() if function is decode_steps._flushed else timing.loop(function, trips)
    )
    monkeypatch.setattr(decode_steps, "loop_trips", lambda seconds: 2)
    cases = [decode_rows.Case(decode_rows.METHODS[name], gamma) for name, gamma in (("quantspec-kv-only", 3), ("autoregressive", 0))]
    held = lambda: sum(array.nbytes for array in jax.live_arrays())
    settings = decode.Settings(32, bandwidth=decode.Bandwidth(20.0), repeats=1)
    rows = decode.measure(model, lambda int4: model, cases, [[1] * 500], settings)
    gc.disable()
    try:
        before = held()
        first = next(rows)
        kept = held() - before
    finally:
        gc.enable()
    assert (first.status, first.note) == ("failed", "MemoryError: no room")
    assert kept < 100_000  # of a cache of 400 kB, which is not made
    (second,) = rows
    assert (second.method, second.status) == ("autoregressive", "measured")


def test_transformers_beside(run, monkeypatch):
    """Rows of a process that is not started here; those of a failed one say why."""
    asked = []

    def start(command, *, input, **_):
        asked.append(json.loads(input))
        found = {"status": "measured", "prefill_s": 0.5, "compile_s": 1.0, "decode_s": 2.0, "ms_per_token": 1e3, "new_tokens": 2}
        return subprocess.CompletedProcess(command, code, json.dumps(found), "Traceback\nRuntimeError: no room\n")

    monkeypatch.setattr(transformers_decode, "check", lambda: None)
    monkeypatch.setattr(transformers_decode.subprocess, "run", start)
    baseline = decode_rows.DecodeRow("autoregressive", 200, 0, "measured", ms_per_token=2.0)
    monkeypatch.setattr(decode, "measure", lambda *args, **settings: [baseline])
    flags = ["--context", 200, "--methods", "autoregressive", "--transformers", "--json"]  # twice the same context
    for code, status, note in (0, "measured", ""), (1, "failed", "RuntimeError: no room"), (-9, "failed", "killed by signal 9"):
        exit_code, out, _ = run(*FAST, *flags)
        ours, theirs = json.loads(out)["rows"]
        assert exit_code == 0 and (ours["method"], theirs["method"], theirs["context"]) == ("autoregressive", "transformers", 200)
        assert (theirs["status"], theirs["note"]) == (status, note)
        assert theirs["speedup"] == (pytest.approx(2e-3) if code == 0 else None)
    assert asked == [{"config": ARCHITECTURES["tiny"], "context": 200, "dtype": "bfloat16", "seed": 0}] * 3


def test_a_checkpoint_for_transformers_is_never_a_shape_of_ours(monkeypatch, tmp_path):
    asked = []

    def start(command, *, input, **_):
        asked.append(json.loads(input))
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers_decode.subprocess, "run", start)
    row = transformers_decode.measure(Path("tiny"), 64, dtype="float32")
    assert (row.status, row.note) == ("failed", "exit code 1")
    assert asked == [{"directory": str(tmp_path / "tiny"), "context": 64, "dtype": "float32", "seed": 0}]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_transformers_tokens_are_timed():
    model = transformers_decode.load(ARCHITECTURES["tiny"], "float32")
    prefill_s, intervals, tokens = transformers_decode.decode_times(model, [1, 2, 3], 5, static=True)
    assert prefill_s > 0 and len(intervals) == 4 and min(intervals) > 0 and len(tokens) == 5


def test_what_is_in_host_memory_is_copied(run, one_layer, monkeypatch):
    flags = ["--method", "autoregressive", "--baseline-cache", "full:host=all"]
    reports, table = [], decode_report.DecodeReport.table
    monkeypatch.setattr(decode_report.DecodeReport, "table", lambda report: reports.append(report) or table(report))
    code, out, err = run(*FAST, *flags)
    (report,) = reports
    (row,) = report.rows
    assert (code, row.status, row.speedup) == (0, "measured", 1.0), err
    held, step = (200 + 150 + 1) * 2 * 2 * 64 * 2, row.steps["target"]
    assert step.host_bytes == row.cache_bytes >= held
    floor_us = max(step.bytes / report.read_bandwidth_gb_per_s, step.host_bytes / report.copy_bandwidth_gb_per_s) / 1e3
    assert step.floor_us == pytest.approx(floor_us)
    assert "GB/s of host memory" in " ".join(out.split()) and "MB copied" in out


def test_a_baseline_that_host_memory_cannot_hold(run, one_layer, monkeypatch):
    """Its step copies as many bytes as that of one that is there; another method over such a cache has a row that says so."""
    flags = [*FAST, "--draft", "none", "--cache", "full:host=all", "--baseline-cache", "full:host=all,resident=0", "--json"]
    found = {}
    for free in (1 << 40, 1000):
        monkeypatch.setattr(host, "free_bytes", lambda free=free: free)
        code, out, err = run(*flags)
        found[free] = json.loads(out)["rows"]
        assert code == 0, err
    (_, there), (step, without) = found.values()
    assert (there["status"], step["status"], without["status"]) == ("measured", "measured", "failed")
    assert "GB of host memory for these prompts" in without["note"] and without["speedup"] is None
    assert "host memory cannot hold its cache" in step["note"] and "of 1 layers, from the arrays of 1, again" in step["note"]
    assert step["large_operations"] is None and there["large_operations"] is not None and there["cache"] == "full:host=all,resident=0"
    for name in ("bytes", "host_bytes"):
        assert step["steps"]["target"][name] == there["steps"]["target"][name] > 0
    assert step["cache_bytes"] == there["cache_bytes"] and step["ms_per_token"] == step["steps"]["target"]["timing"]["median_us"] / 1e3


def test_lossy_caches(run, one_layer, caplog):
    """What a pass over them reads is counted, and what it fetches from host memory, the guess included."""
    caches = ("kivi:bits=1,residual=64", "specache:bits=1,residual=64,k=8,host=store", "specache:bits=1,residual=64,k=8,fetch=now")
    flags = [flag for cache in caches for flag in ("--cache", cache)]
    code, out, err = run(*FAST, "--draft", "none", *flags, "--json")
    code_of_drafts, drafts_out, _ = run(*FAST, "--draft", "quantspec:weight_bits=16", "--cache", caches[0], "--json")
    rows = {(row["method"], row["gamma"]): row for row in json.loads(out)["rows"]}
    assert (code, {row["status"] for row in rows.values()}) == (0, {"measured"}), err
    assert list(rows) == [("autoregressive", 0), *((f"none, {cache}", 0) for cache in caches)]
    for row in rows.values():
        assert row["byte_limit"] > 0 and row["tokens_per_second"] < row["tokens_per_second_limit"]
    kivi, host, now = list(rows.values())[1:]
    due, other = (kivi["steps"][name]["timing"]["median_us"] for name in ("flush due", "flush not due"))
    assert due > 2 * other
    shape = architecture("tiny")
    read = lambda row: (row["steps"]["target"]["bytes"], row["steps"]["target"]["host_bytes"])
    fetched = shape.num_layers * 8 * shape.num_kv_heads * 2 * shape.head_dim * 2
    assert read(kivi)[1] == read(now)[1] == 0
    assert read(now)[0] == read(kivi)[0] + 2 * fetched
    assert 0 < read(host)[0] - read(kivi)[0] - fetched < 5000 and read(host)[1] == fetched  # besides, the guess's own key and value
    drafting = json.loads(drafts_out)["rows"][1]["steps"]  # by the same weights, over the same cache
    assert code_of_drafts == 0 and drafting["draft"]["bytes"] == read(kivi)[0] < drafting["target"]["bytes"]


@pytest.mark.parametrize(
    "asked", [["--methods", "autoregressive"], ["--draft", "none", "--cache", "kivi"], ["--draft", "none", "--cache", "specache"]]
)
def test_few_new_tokens_are_enough_where_nothing_is_drafted(run, one_layer, monkeypatch, caplog, asked):
    """Nor is there anything to accept, of which the report could warn."""
    measured = lambda model, int4, cases, *_, **__: [decode_rows.DecodeRow("", 4096, case.gamma, "failed") for case in cases]
    monkeypatch.setattr(decode, "measure", measured)
    command = ["bench", "decode", "--arch", "tiny", *asked, "--max-new-tokens", 16, "--json"]
    code, out, err = run(*command)
    assert code == 0 and {row["gamma"] for row in json.loads(out)["rows"]} == {0}, err
    assert "acceptance" not in caplog.text and "--gamma" not in caplog.text
    assert run(*command, "--gamma", 4)[0] == 0 and "--gamma makes no difference" in caplog.text


def test_methods_over_other_caches(fails):
    found = decode_rows.select_methods([], ["quantspec", "none"], ["int8:host=lower", "int8"], baseline_cache="full:host=all")
    assert [(method.name, method.cache, method.draft) for method in found] == [
        ("autoregressive", "full:host=all", "none"),
        ("quantspec, int8:host=lower", "int8:host=lower", "quantspec"),
        ("quantspec, int8", "int8", "quantspec"),
        ("none, int8:host=lower", "int8:host=lower", "none"),
        ("none, int8", "int8", "none"),
    ]
    over_kivi = decode_rows.select_methods([], ["sparse", "snapkv"], ["kivi", "int8"])[1:]
    assert [method.name for method in over_kivi] == ["sparse, int8", "snapkv, kivi", "snapkv, int8"]
    without = decode_rows.select_methods([], ["quantspec"], ["full", "kivi", "specache"])[1:]
    assert [method.name for method in without] == ["quantspec, full", "quantspec, kivi"]
    fails([*FAST, "--draft", "sparse", "--cache", "kivi"], "draft sparse reads groups")
    fails([*FAST, "--draft", "quantspec", "--draft", "magic"], "draft 'magic' should be one of")
    fails([*FAST, "--cache", "int8"], "--cache is the cache of drafts; give one with --draft")
    fails([*FAST, "--draft", "quantspec", "--cache", "int9"], "cache 'int9' should be one of full, ")
    fails([*FAST, "--baseline-cache", "full:guest"], "'guest' should be one of host=none|all, resident=...")
    fails([*FAST, "--method", "quantspec", "--baseline-cache", "full:host=all"], "--baseline-cache is of the method autoregressive")


def test_random_weights_need_no_more_than_a_config(run, one_layer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURES["tiny"]), encoding="utf-8")
    flags = ["--random-weights", "--method", "autoregressive", "--context", 64, "--max-new-tokens", 32, "--repeats", 1, "--json"]
    code, out, err = run("bench", "decode", "--model", tmp_path, *flags)
    (row,) = json.loads(out)["rows"]
    assert (code, err, row["status"]) == (0, "", "measured")


def test_table_of_real_acceptance(run, one_layer, tmp_path, caplog):
    path = tmp_path / "decode.png"
    plot = ["--plot", path] if importlib.util.find_spec("matplotlib") else []
    code, out, _ = run(*FAST, "--method", "autoregressive", "--method", "quantspec-kv-only", *plot)
    assert code == 0 and path.exists() == bool(plot) and "Batch 1, greedy" in out
    assert "--simulate-ratio" in caplog.text
    assert "SIMULATED" not in out and "(sim.)" not in out
    assert "quantspec-kv-only" in out and "flush not due" in out and "1.00x" in out


def test_a_simulation_says_so(run, monkeypatch, tmp_path, caplog):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    timed = timing.Timing(10.0, 9.0, 11.0, 1, 1, 1, "")
    steps = {name: decode_rows.StepTiming(timed, 1000, 0.5) for name in ("target", "draft")} | {
        "sampling": decode_rows.StepTiming(timed, 0, 0.0)
    }

    def measured(model, drafts, cases, prompts, settings, **others):
        figures = dict(prefill_s=0.1, compile_s=2.0, decode_s=0.5, new_tokens=100, rounds=40, flushes=2, acceptance_ratio=0.8)
        figures |= dict(tokens_per_second=200.0, ms_per_token=5.0, cache_bytes=1000, peak_memory_bytes=2000, steps=steps)
        simulated = dict(simulated_rate=settings.rate, simulated_ratio=ratio_of_rate(settings.rate, 3))
        return [decode_rows.DecodeRow(case.method.name, len(prompts[0]), case.gamma, "measured", **simulated, **figures) for case in cases]

    monkeypatch.setattr(decode, "measure", measured)
    path = tmp_path / "decode.png"
    code, out, _ = run(*FAST, "--method", "quantspec", "--simulate-ratio", 0.8, "--plot", path)
    assert code == 0 and "on average 0.800 of those drafted" in " ".join(out.split())
    assert " 0.0000010 " in out and " 0.0000020 " in out  # GB
    assert decode_report._gigabytes(0) == "0.00" and decode_report._gigabytes(70_900_000_000) == "70.90"
    assert "SIMULATED" in out and out.count("0.800 (sim.)") == 1 and "--simulate-ratio" not in caplog.text
    assert path.read_bytes().startswith(b"\x89PNG")
    each = ["--context", 64, "--simulate-ratio", 0.8, "--simulate-ratio", 0.9]  # beside the first context's 200
    code, out, _ = run(*FAST, *each, "--method", "quantspec")
    lines = [" ".join(line.split()) for line in out.splitlines() if "SIMULATED" in line]
    assert [(line.split(":")[0], line.split("average ")[1][:5]) for line in lines] == [
        ("Acceptance is SIMULATED at 200 tokens", "0.800"),
        ("Acceptance is SIMULATED at 64 tokens", "0.900"),
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--arch", "gpt"], ["gpt", "llama-3.1-8b"]),
        (["--arch", "tiny", "--model", "x"], ["--arch", "--model"]),
        ([], ["--arch", "--model"]),
        (["--arch", "tiny", "--method", "medusa"], ["medusa", "quantspec-kv-only"]),
        (["--arch", "tiny", "--gamma", 16], ["--gamma 16"]),
        (["--arch", "tiny", "--gamma", 7, "--max-new-tokens", 31], ["--max-new-tokens 31", "32, four rounds of --gamma 7"]),
        (["--arch", "tiny", "--simulate-ratio", 0.5, "--simulate-acceptance", 0.5], ["--simulate-ratio"]),
        (["--arch", "tiny", "--simulate-ratio", 1.5], ["--simulate-ratio"]),
        (["--arch", "tiny", "--simulate-inner-acceptance", 0.5], ["--simulate-inner-acceptance needs"]),
        (
            ["--arch", "tiny", "--context", 64, "--simulate-acceptance", 0.9, "--simulate-inner-acceptance", 0.5],
            ["themselves verify, such as triforce"],
        ),
        (["--arch", "tiny", "--simulate-ratio", 0.5, "--simulate-ratio", 0.6], ["--simulate-ratio", "2 times for 1 contexts"]),
        (["--arch", "tiny", "--context", 0], ["--context"]),
        (
            ["--arch", "tiny", "--context", 64, "--context", 1 << 20],
            ["--context of 1048576 tokens and 640 new ones", "model's 1048576 positions"],
        ),
        (["--arch", "tiny", "--layers", 3], ["3 layers of tiny should be from 1 to 2"]),
        (["--arch", "tiny", "--layers", 1, "--transformers"], ["--layers needs --arch"]),
        (["--model", "x", "--layers", 1], ["--layers needs --arch"]),
        (["--arch", "tiny", "--batch-size", 0], ["--batch-size"]),
        (["--arch", "tiny", "--batch-size", 1, "--batch-size", 4, "--transformers"], ["--transformers", "one row", "--batch-size"]),
        (["--arch", "tiny", "--simulate-ratio", 0.5, "--gamma", 2, "--gamma", 3], ["--simulate-ratio", "--gamma"]),
        (["--arch", "tiny", "--methods", "autoregressive,medusa"], ["medusa"]),
        (["--model", "no/such/folder"], ["no/such/folder"]),
        (["--model", "no/such/folder", "--random-weights"], ["no/such/folder"]),
        (["--model", "no/such/folder", "--random-weights", "--transformers"], ["--transformers", "--random-weights"]),
    ],
)
def test_bad_flags(fails, flags, words):
    fails(["bench", "decode", *flags], *words)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize("command", ["decode", "batch"])
def test_large_shapes_need_a_gpu(fails, command):
    said = "--arch llama-3.1-8b needs a GPU, and JAX finds none; --arch tiny runs anywhere"
    fails(["bench", command, "--arch", "llama-3.1-8b"], said)


def test_transformers_needs_torch(fails, monkeypatch):
    monkeypatch.setattr(transformers_decode.importlib.util, "find_spec", lambda name: None)
    fails(["bench", "decode", "--arch", "tiny", "--transformers"], "pip install torch")
