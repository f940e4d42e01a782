"""What `qspec plan` counts: FLOPs and bytes by hand, by XLA and by the real arrays; rounds against the schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
from silent_draft import Silent
from tiers import in_system

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.bench.architectures import architecture, random_int4, random_model
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.caches.schedule import Schedule, eligible_drafts
from qspec_jax.drafts.combine import CombinedSettings
from qspec_jax.drafts.registry import parse_draft
from qspec_jax.drafts.step_bytes import weight_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.planning import timing
from qspec_jax.planning.devices import DEVICES
from qspec_jax.planning.memory import memory_of
from qspec_jax.planning.operations import (
    model_bytes,
    pass_work,
    step_weight_bytes,
)
from qspec_jax.planning.plan import intensity, plan
from qspec_jax.planning.rounds import Asked, expected_rounds
from qspec_jax.planning.steps import LayerReads, StepReads, outlined, own_step
from qspec_jax.quantization.outline import outline
from qspec_jax.quantization.weights import quantize_head

LLAMA_7B, LLAMA_8B, TINY = map(architecture, ("llama-2-7b", "llama-3.1-8b", "tiny"))
FULL, INT8 = CacheConfig("full"), CacheConfig("int8")
H100 = DEVICES["h100"]

# Table 1 of the paper, and its figures


def test_work_of_a_step_by_hand():
    """The tiny shape: 2 layers of 256, 4 query and 2 KV heads of 64, MLP 512, 256 tokens in the vocabulary; 3 rows of 2 new tokens, 100
    tokens cached with them."""
    work = pass_work(planned.own_reads(TINY, 100, FULL), batch=3, tokens=2)
    matrices = 2 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512)
    assert work.linear.flops == 2 * 6 * (matrices + 256 * 256)
    assert work.linear.stored_bytes == 2 * (matrices + 256 * 256 + 5 * 256)
    inputs_and_outputs = 2 * ((256 + 512) + (256 + 256) + (256 + 1024) + (512 + 256)) + 256 + 256
    assert work.linear.activation_bytes == 2 * 6 * inputs_and_outputs
    assert work.attention.flops == 2 * 3 * 4 * (99 + 100) * 4 * 64  # the first of two new tokens does not see the second
    assert work.attention.stored_bytes == 2 * 3 * 100 * 2 * 2 * 64 * 2
    assert work.attention.activation_bytes == 2 * 3 * 2 * 2 * 4 * 64 * 2
    assert work.total.flops == work.linear.flops + work.attention.flops


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_intensity_of_decoding(batch):
    """Linear: as the batch. Attention: about 1 with a KV head for each query head, 4 with one for four; whatever batch and context."""
    for config, each in (LLAMA_7B, 1), (LLAMA_8B, 4):
        short, long = (intensity(config, H100, context, batch) for context in (128, 1 << 20))
        for found in short, long:
            assert found.decode_linear == pytest.approx(batch, rel=0.02)
            assert found.decode_attention == pytest.approx(each, rel=0.05)
        # The aggregate is the linear layers' at a short context, and attention's at a long one.
        assert short.decode_aggregate == pytest.approx(batch, rel=0.2) and short.attention_share < 0.1 * batch
        assert long.decode_aggregate == pytest.approx(each, rel=0.2) and long.attention_share > 0.8
        assert long.decode_aggregate < H100.ridge


def test_intensity_of_prefill():
    """Linear: as batch times tokens while they are few, bounded by the width. Attention: as the tokens, whatever the batch."""
    found = {(n, b): intensity(LLAMA_7B, H100, n, b) for n in (16, 32, 4096, 8192, 1 << 20) for b in (1, 2)}
    assert found[32, 1].prefill_linear / found[16, 1].prefill_linear == pytest.approx(2, rel=0.05)
    assert found[16, 2].prefill_linear / found[16, 1].prefill_linear == pytest.approx(2, rel=0.05)
    assert found[1 << 20, 2].prefill_linear == pytest.approx(found[1 << 20, 1].prefill_linear, rel=0.01)
    assert found[1 << 20, 2].prefill_linear < 4096
    assert found[8192, 1].prefill_attention / found[4096, 1].prefill_attention == pytest.approx(2, rel=0.01)
    assert found[8192, 2].prefill_attention == found[8192, 1].prefill_attention
    # Figure 5: prefill of any of these contexts is above the ridge of the paper's GPU.
    assert all(f.prefill_aggregate > DEVICES["a6000"].ridge for (n, _), f in found.items() if n >= 4096)


def test_the_cache_outgrows_the_weights():
    """Figure 6: with 16 rows of 262,144 tokens, 160 times the weights of Llama-2-7B."""
    found = 16 * FULL.outline(LLAMA_7B, 262144).num_bytes
    assert found / model_bytes(LLAMA_7B) == pytest.approx(160, rel=0.05)


# Against XLA and the real arrays


def test_flops_are_those_that_xla_counts():
    """XLA counts those of the real model's step: the reference attends to all that the cache has room for."""
    drawn, tokens = random_model(TINY).weights(), 4
    model = Llama(TINY, lambda path, shape: drawn[path].astype(jnp.float32))  # in bfloat16 a CPU converts the weights, which XLA counts
    cache = FULL.empty(TINY, batch=2, capacity=28, num_speculative_tokens=3, dtype=jnp.float32)

    def step(model, cache, fed):
        return model(fed, jnp.arange(tokens)[None] + jnp.zeros((2, 1), jnp.int32), cache)[0]

    compiled = jax.jit(step).lower(model, cache, jnp.zeros((2, tokens), jnp.int32)).compile()
    counted = compiled.cost_analysis()["flops"]
    work = pass_work(planned.own_reads(TINY, 32 + tokens // 2, FULL), batch=2, tokens=tokens)
    assert counted == pytest.approx(work.total.flops, rel=0.02)


@pytest.mark.parametrize(
    "draft", [None, "quantspec", *in_system("quantspec:head_bits=16", "quantspec:weight_bits=16", "quantspec:sensitive_layers=1")]
)
def test_weights_are_those_of_the_real_model(draft):
    config = dataclasses.replace(TINY, num_layers=3)
    model = random_model(config)
    reads = planned.own_reads(config, 1) if draft is None else planned.draft_reads(config, draft, 1)
    real = model if draft is None else parse_draft(draft).make(model, lambda: random_int4(model)).step.model
    if reads.head_bits == 8:
        real = quantize_head(real)
    assert step_weight_bytes(reads) == weight_bytes(real)


def test_weights_with_biases_and_norms_of_heads():
    config = dataclasses.replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm="head", tie_word_embeddings=True)
    weights = jax.eval_shape(lambda: random_model(config).weights())
    assert model_bytes(config) == sum(2 * x.size for x in jax.tree.leaves(weights))
    assert step_weight_bytes(planned.own_reads(config, 1)) == model_bytes(config)


@pytest.mark.parametrize(("config", "group_size"), [(LLAMA_8B, None), (LLAMA_7B, 64), (TINY, None)], ids=["8b", "7b", "tiny"])
@pytest.mark.parametrize("capacity", [1, 200, 4736])
@pytest.mark.parametrize("kind", CACHES)
def test_an_outline_of_a_cache_has_the_bytes_of_the_real_cache(kind, config, group_size, capacity):
    cache, sizes = CacheConfig(kind, group_size if kind == "int8" else None), dict(batch=3, capacity=capacity)
    real = jax.eval_shape(lambda: cache.empty(config, **sizes, num_speculative_tokens=5, dtype=jnp.bfloat16))
    assert 3 * cache.outline(config, capacity, 5).num_bytes == real.num_bytes
    heads, H = config.num_layers * config.num_kv_heads, config.head_dim
    per_token = 2 * 2 * heads * H  # keys and values in bfloat16
    by_hand = per_token * (capacity + 6)
    if kind == "int8":  # both planes take a byte a number; a scale and a zero in bfloat16 for each channel of keys and token of values
        G = cache.group_size_for(H)
        groups = max(0, capacity // G - 1)
        by_hand = per_token * (2 * G + 6) + groups * heads * (2 * G * H + 2 * (H + G) * 2)
    assert kind not in ("full", "int8") or cache.outline(config, capacity, 5).num_bytes == by_hand


@pytest.mark.parametrize("tokens", [1, 63, 255, 256, 4096, 4223, 4224])
def test_what_is_read_follows_the_schedule(tokens):
    quantized = int(Schedule(128).quantized_length(jnp.asarray(tokens)))  # as a device computes it
    assert set(planned.own_reads(LLAMA_8B, tokens).layers) == {LayerReads(2, quantized, tokens - quantized)}
    assert set(planned.own_reads(LLAMA_8B, tokens, FULL).layers) == {LayerReads(0, 0, tokens)}


# Of a plan of the tiny shape in bfloat16: bytes that a pass reads of a row of 200 tokens on the device, and bytes that it copies from host
# memory, for each of 2 layers with 2 KV heads of 64. A token takes 256 bytes in full precision; in groups of 64, 128 tokens are quantized,
# with 128 bytes of codes in both planes each, 8 of scales and zeros. In host memory are 1,000 tokens, 936 of them in 14 groups and one more
# group that a flush may write.
TOKENS, ROOM = 200, 1000
INT8_BYTES = 128 * (128 + 8) + 72 * 256
KIVI_BYTES = 128 * (32 + 8 + 8) + 72 * 256  # 2-bit codes, and as many scales and zeros of keys as of values
PASSES = {
    "full": (200 * 256, 0),
    "full:host=all": (200 * 256, (1000 + 1) * 256),
    "int8": (INT8_BYTES, 0),
    "int8:host=lower": (INT8_BYTES, 15 * 64 * 64),
    "int8:host=all": (INT8_BYTES, 15 * 64 * 128),
    "kivi:residual=64": (KIVI_BYTES, 0),
    "h2o:heavy=32,recent=64": ((32 + 72) * 256, 0),
    "streaming-llm:sinks=4,window=60": ((4 + 60 + 1) * 256, 0),
    "specache:residual=64,k=16": (KIVI_BYTES + 2 * 16 * 256, 0),
    "specache:residual=64,k=16,host=store": (KIVI_BYTES + 16 * 256, 16 * 256),
}


@pytest.mark.parametrize("text", PASSES)
def test_bytes_of_a_pass_over_every_cache(text):
    found = own_step(TINY, CacheConfig.parse(text).outline(TINY, ROOM), TOKENS)
    assert (found.cache_bytes, found.host_bytes) == tuple(2 * 2 * each for each in PASSES[text])
    cost = timing.pass_cost(H100, found, 64, batch=3)
    assert cost.copying == 3 * found.host_bytes / 54e9
    assert pass_work(found, batch=3, tokens=1).attention.stored_bytes == 3 * found.cache_bytes


def test_a_plan_covers_every_cache():
    """Each with the drafts that it takes, and memory of its own; and what is in host memory takes none on the device."""
    assert {CacheConfig.parse(text).kind for text in PASSES} == set(CACHES)
    report = plan("8b", LLAMA_8B, H100, [32768], [1], caches=list(PASSES), drafts=["quantspec", "sparse", "prompt-lookup"], gammas=[4])
    rows = {(row.draft, row.cache): row for row in report.rows}
    assert len(rows) == len(report.rows) == 4 * len(PASSES)
    for text in PASSES:
        cache = CacheConfig.parse(text)
        assert rows["none", text].ms_per_token and rows["none", text].kernels_measured == (cache.kind in ("full", "int8"))
        assert bool(rows["prompt-lookup", text].ms_per_token) == bool(rows["quantspec", text].ms_per_token) == cache.takes_drafts
        assert bool(rows["sparse", text].ms_per_token) == (cache.kind == "int8")
        memory, real = rows["none", text].memory, cache.outline(LLAMA_8B, 32768 + 640)
        assert memory.cache + memory.host == real.num_bytes and bool(memory.host) == ("host" in text)
        assert rows["none", text].copying_ms == pytest.approx(real.bytes_of_pass(BOTH_PLANES, 32769)[1] / 54e6, rel=0.01)
    assert "which cache h2o does not give" in rows["sparse", "h2o:heavy=32,recent=64"].note
    # The bus limits a pass that copies; a draft that reads the upper plane alone copies nothing where that is on the device.
    copied = rows["quantspec", "int8:host=lower"]
    assert copied.target_ms == copied.copying_ms > 3 * rows["none", "int8"].target_ms
    assert copied.step_ms == rows["quantspec", "int8"].step_ms < rows["quantspec", "int8:host=all"].step_ms
    assert {row.baseline for row in report.rows} == {"int8"}
    small = dataclasses.replace(H100, memory_gb=19)  # only what has its cache in host memory fits
    over_host = plan("8b", LLAMA_8B, small, [16384], [1], caches=["int8:host=all", "kivi"], drafts=["quantspec"], gammas=[4])
    assert {row.cache for row in over_host.rows if row.status == "planned"} >= {"int8:host=all"}
    with pytest.raises(InputError, match="cache 'int3' should be one of"):
        plan("8b", LLAMA_8B, H100, [32768], [1], caches=["int3"])


def test_copies_from_host_memory_take_what_was_measured():
    """Passes of the target of Llama-2-7B over 130,048 tokens on an H200, gamma 12 (docs/measurements/2026-11.md)."""
    for text, tokens, measured in (("full:host=all,resident=0.0625", 1, 1254), ("full:host=all", 13, 1291), ("int8:host=all", 13, 635)):
        sizes = dict(context=130048, batch=1, tokens=tokens, capacity=130112)
        found = timing.target_cost(DEVICES["h200"], LLAMA_7B, CacheConfig.parse(text), **sizes).seconds(DEVICES["h200"])
        assert 1e3 * found == pytest.approx(measured, rel=0.06)


# What drafts say of their steps

TOKENS_OF_ROW = 101 * 128 + 72  # 100 groups, and 200 buffered tokens


def test_what_quantspec_reads():
    drafted, own = LayerReads(1, 12800, 200, 4), LayerReads(2, 12800, 200, 16)
    of = lambda text: planned.draft_reads(LLAMA_8B, text, TOKENS_OF_ROW)
    assert of("quantspec") == StepReads(LLAMA_8B, (drafted,) * 32, 8, cache_bytes=32 * 8 * (12800 * (128 + 8) + 200 * 512))
    assert of("quantspec:sensitive_layers=2").layers == (own, own, *(drafted,) * 28, own, own)
    assert of("quantspec:weight_bits=16,cache=int8") == planned.own_reads(LLAMA_8B, TOKENS_OF_ROW)


def test_what_sparse_reads():
    """6 % of the groups, but at least 4, and all of them in dense layers."""
    of = lambda text, tokens: [layer.quantized // 128 for layer in planned.draft_reads(LLAMA_8B, text, tokens).layers]
    assert of("sparse", TOKENS_OF_ROW) == [6] * 32
    assert of("sparse:budget=0.25,dense_layers=2", TOKENS_OF_ROW) == [100] * 2 + [25] * 30
    assert of("sparse", 3 * 128 + 130) == [3] * 32
    assert of("sparse:budget=0.01", TOKENS_OF_ROW) == [4] * 32


def test_a_cache_of_its_own_takes_memory():
    """streaming-llm reads a quarter of the prompt in full precision, with the token that it appends, and keeps it; and the keys of its
    16 sinks once more."""
    reads = planned.draft_reads(LLAMA_8B, "streaming-llm", 4097)
    assert set(reads.layers) == {LayerReads(0, 0, 1025)} and reads.kernels_measured
    memory = memory_of(LLAMA_8B, INT8, planned.drafts_of(LLAMA_8B, "streaming-llm"), batch=2, context=4096, new_tokens=64, gamma=4)
    assert memory.draft == 2 * 32 * (1025 * 2 + 16) * 8 * 128 * 2
    # snapkv keeps what is generated besides: the rows of its real cache.
    drafts = planned.drafts_of(LLAMA_8B, "snapkv:budget=512,generated=256")
    memory = memory_of(LLAMA_8B, INT8, drafts, batch=2, context=4096, new_tokens=256, gamma=4)
    assert memory.draft == 2 * 32 * (512 + 256 + 1) * 2 * 8 * 128 * 2
    measured = {
        text: planned.draft_reads(LLAMA_8B, text, TOKENS_OF_ROW).kernels_measured for text in ("quantspec", "sparse", "chunk-means")
    }
    assert measured == {"quantspec": True, "sparse": True, "chunk-means": False}


def test_an_outline_is_made_as_the_draft_is():
    """With the same shapes and dtypes as a draft with weights."""
    model = random_model(TINY)
    shapes = lambda draft: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(draft)]
    for text in ("quantspec", "quantspec:sensitive_layers=1", "sparse", "streaming-llm", "snapkv:weight_bits=4", "chunk-means"):
        settings = parse_draft(text)
        (found,) = outlined(settings, outline(TINY), lambda: outline(TINY, int4=True))
        assert shapes(found.draft) == shapes(settings.make(model, lambda: random_int4(model)))
    assert jax.tree.structure(outline(TINY)) == jax.tree.structure(model)


def test_drafts_that_cannot_be_made_of_an_outline():
    """They do not say how much they propose. A setting that does not fit is an error, and so is a typo in its code."""

    class Mistaken:
        def make(self, model, int4):
            return model.embeding

    models = outline(TINY), lambda: outline(TINY, int4=True)
    combined = CombinedSettings(parse_draft("prompt-lookup"), Silent())
    assert [outlined(settings, *models) for settings in (Silent(), combined)] == [None] * 2
    with pytest.raises(InputError, match="sensitive_layers 9"):
        outlined(parse_draft("quantspec:sensitive_layers=9"), *models)
    with pytest.raises(AttributeError, match="embeding"):
        outlined(Mistaken(), *models)


# Rounds


@pytest.mark.parametrize(
    ("group_size", "gamma", "rate"), [(16, 1, 0.5), (128, 4, 0.9), *in_system((16, 6, 1.0), (16, 15, 0.97), (16, 20, 0.9))]
)
def test_rounds_are_those_of_the_schedule(group_size, gamma, rate):
    """Rounds that are drawn one by one, by the schedule's own functions."""
    schedule, random = Schedule(group_size), np.random.default_rng(0)
    n, tokens, drafted, flushes, count = group_size * 9, 0, 0, 0, 1500
    for _ in range(count):
        lengths = schedule.lengths(np.array([n]))
        eligible = int(eligible_drafts(np.array([gamma]), schedule.draft_room(lengths), np.array([1 << 30]))[0])
        accepted = int(np.argmin(np.append(random.random(eligible) < rate, False)))
        flushes += int(schedule.quantized_length(n + accepted + 1) > schedule.quantized_length(n))
        n, tokens, drafted = n + accepted + 1, tokens + accepted + 1, drafted + eligible
    found = expected_rounds(schedule, gamma, Asked(rate))
    assert found.tokens == pytest.approx(tokens / count, rel=0.04)
    assert found.drafted == pytest.approx(drafted / count, rel=0.04) and found.steps == pytest.approx(found.drafted)
    assert found.flushes == pytest.approx(flushes / count, abs=0.03)
    assert found.flushes == pytest.approx(found.tokens / group_size)


def test_rounds_without_a_schedule_and_in_a_batch():
    free = expected_rounds(Schedule(None), 3, Asked(0.5))
    assert free.tokens == 1 + 0.5 + 0.25 + 0.125 and free.accepted_of_drafted == pytest.approx(0.875 / 3) and free.flushes == 0
    one, eight = (expected_rounds(Schedule(128), 6, Asked(0.9), batch=batch) for batch in (1, 8))
    # A batch drafts as far as its row with the most room does, and flushes when any row does.
    assert one.drafted == eight.drafted == one.steps < eight.steps < 6
    assert eight.flushes == pytest.approx(1 - (1 - one.flushes) ** 8)
