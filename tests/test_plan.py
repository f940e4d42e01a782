"""`qspec plan`: FLOPs and bytes against what is counted by hand, by XLA and by the real arrays; times against measured rows; bad input."""

import dataclasses
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import measured_rows as rows
import numpy as np
import planned
import pytest
from checkpoints import hf_config

from pallas_kernels.attention.mosaic_plan import Plan
from qspec_jax.bench.architectures import ARCHITECTURES, architecture, random_int4, random_model
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule, eligible_drafts
from qspec_jax.checkpoints.converted import is_converted
from qspec_jax.drafts import registry
from qspec_jax.drafts.combine import CombinedSettings
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.quantspec import QuantSpecSettings
from qspec_jax.drafts.registry import parse_draft
from qspec_jax.drafts.step_bytes import weight_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.planning import timing
from qspec_jax.planning.devices import DEVICES, find_device
from qspec_jax.planning.memory import memory_of
from qspec_jax.planning.operations import (
    cache_bytes,
    model_bytes,
    pass_work,
    row_of,
    step_weight_bytes,
)
from qspec_jax.planning.plan import intensity, plan
from qspec_jax.planning.report import best_gammas
from qspec_jax.planning.rounds import Asked, expected_rounds
from qspec_jax.planning.steps import LayerReads, Row, StepReads, outlined, own_step
from qspec_jax.quantization.outline import outline
from qspec_jax.quantization.weights import quantize_head

ROOT = Path(__file__).parent.parent
LLAMA_7B, LLAMA_8B, TINY = map(architecture, ("llama-2-7b", "llama-3.1-8b", "tiny"))
FULL, INT8 = CacheConfig("full"), CacheConfig("int8")
H100 = DEVICES["h100"]

# Table 1 of the paper, and its figures


def test_work_of_a_step_by_hand():
    """The tiny shape: 2 layers of 256, 4 query and 2 KV heads of 64, MLP 512, 256 tokens in the vocabulary; 3 rows of 2 new tokens, 100
    tokens cached with them."""
    work = pass_work(own_step(TINY, Row(0, 100, 64)), 64, batch=3, tokens=2)
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
    found = cache_bytes(LLAMA_7B, FULL, batch=16, capacity=262144, gamma=0)
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
    work = pass_work(own_step(TINY, Row(0, 32 + tokens // 2, 64)), 64, batch=2, tokens=tokens)
    assert counted == pytest.approx(work.total.flops, rel=0.02)


@pytest.mark.parametrize("draft", [None, "quantspec", "quantspec:head_bits=16", "quantspec:weight_bits=16", "quantspec:sensitive_layers=1"])
def test_weights_are_those_of_the_real_model(draft):
    config = dataclasses.replace(TINY, num_layers=3)
    model = random_model(config)
    reads = own_step(config, Row(0, 0, 64)) if draft is None else planned.draft_reads(config, draft, Row(0, 0, 64))
    real = model if draft is None else parse_draft(draft).make(model, lambda: random_int4(model)).step.model
    if reads.head_bits == 8:
        real = quantize_head(real)
    assert step_weight_bytes(reads) == weight_bytes(real)


def test_weights_with_biases_and_norms_of_heads():
    config = dataclasses.replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, tie_word_embeddings=True)
    weights = jax.eval_shape(lambda: random_model(config).weights())
    assert model_bytes(config) == sum(2 * x.size for x in jax.tree.leaves(weights))
    assert step_weight_bytes(own_step(config, Row(0, 0, 64))) == model_bytes(config)


@pytest.mark.parametrize("kind", ["full", "int8"])
@pytest.mark.parametrize(("config", "group_size"), [(LLAMA_8B, None), (LLAMA_7B, 64), (TINY, None)], ids=["8b", "7b", "tiny"])
@pytest.mark.parametrize("capacity", [1, 200, 4736])
def test_cache_bytes_are_those_of_the_real_cache(kind, config, group_size, capacity):
    cache, sizes = CacheConfig(kind, group_size), dict(batch=3, capacity=capacity)
    real = jax.eval_shape(lambda: cache.empty(config, **sizes, num_speculative_tokens=5, dtype=jnp.bfloat16))
    assert cache_bytes(config, cache, **sizes, gamma=5) == real.num_bytes


@pytest.mark.parametrize("tokens", [1, 63, 255, 256, 4096, 4223, 4224])
def test_rows_follow_the_schedule(tokens):
    quantized = int(Schedule(128).quantized_length(jnp.asarray(tokens)))  # as a device computes it
    assert row_of(LLAMA_8B, INT8, tokens) == Row(quantized, tokens - quantized, 128)
    assert row_of(LLAMA_8B, FULL, tokens) == Row(0, tokens, 128)


# What drafts say of their steps

ROW = Row(100 * 128, 200, 128)


def test_what_quantspec_reads():
    drafted, own = LayerReads(1, 12800, 200, 4), LayerReads(2, 12800, 200, 16)
    of = lambda text: planned.draft_reads(LLAMA_8B, text, ROW)
    assert of("quantspec") == StepReads(LLAMA_8B, (drafted,) * 32, 8)
    assert of("quantspec:sensitive_layers=2").layers == (own, own, *(drafted,) * 28, own, own)
    assert of("quantspec:weight_bits=16,cache=int8") == own_step(LLAMA_8B, ROW)


def test_what_sparse_reads():
    """6 % of the groups, but at least 4, and all of them in dense layers."""
    of = lambda text, row: [layer.quantized // 128 for layer in planned.draft_reads(LLAMA_8B, text, row).layers]
    assert of("sparse", ROW) == [6] * 32
    assert of("sparse:budget=0.25,dense_layers=2", ROW) == [100] * 2 + [25] * 30
    assert of("sparse", Row(3 * 128, 130, 128)) == [3] * 32
    assert of("sparse:budget=0.01", ROW) == [4] * 32


def test_a_cache_of_its_own_takes_memory():
    """streaming-llm reads a quarter of the prompt in full precision, with the token that it appends, and keeps it; and the keys of its
    16 sinks once more."""
    reads = planned.draft_reads(LLAMA_8B, "streaming-llm", Row(0, 4097, 128))
    assert set(reads.layers) == {LayerReads(0, 0, 1025)} and reads.kernels_measured
    memory = memory_of(LLAMA_8B, INT8, planned.drafts_of(LLAMA_8B, "streaming-llm"), batch=2, context=4096, new_tokens=64, gamma=4)
    assert memory.draft == 2 * 32 * (1025 * 2 + 16) * 8 * 128 * 2
    # snapkv keeps what is generated besides: the rows of its real cache.
    drafts = planned.drafts_of(LLAMA_8B, "snapkv:budget=512,generated=256")
    memory = memory_of(LLAMA_8B, INT8, drafts, batch=2, context=4096, new_tokens=256, gamma=4)
    assert memory.draft == 2 * 32 * (512 + 256 + 1) * 2 * 8 * 128 * 2
    measured = {text: planned.draft_reads(LLAMA_8B, text, ROW).kernels_measured for text in ("quantspec", "sparse", "chunk-means")}
    assert measured == {"quantspec": True, "sparse": True, "chunk-means": False}


@dataclasses.dataclass(frozen=True)
class SilentDraft(Draft):
    """Says nothing of what it costs."""

    def propose(self, state, cache, current):
        raise AssertionError("not run")


@dataclasses.dataclass(frozen=True)
class Silent:
    def make(self, model, int4):
        return SilentDraft()


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


@pytest.mark.parametrize(("group_size", "gamma", "rate"), [(16, 1, 0.5), (128, 4, 0.9), (16, 6, 1.0), (16, 15, 0.97), (16, 20, 0.9)])
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


# Times against what was measured

COMPARED = planned.compared()


def test_efficiencies_are_fitted_on_the_rows_that_say_so():
    """And on no others: the coefficients follow from those rows. One is assumed."""
    found = planned.fitted()
    for name, value in dataclasses.asdict(timing.FITTED).items():
        if name != "launch_small":
            assert value == pytest.approx(getattr(found, name), rel=0.01), name


@pytest.mark.parametrize("figure", [figure for figure in COMPARED if not figure.used], ids=lambda figure: f"{figure.what}: {figure.unit}")
def test_predictions_stand_within_15_percent(figure):
    """Every measured figure that nothing was fitted on is predicted."""
    assert figure.predicted == pytest.approx(figure.measured, rel=0.15)


@pytest.mark.parametrize("row", [row for row in rows.DECODES if row.arch != "419m" and row.cache == "int8"], ids=planned.name_of)
def test_the_plan_says_what_was_compared(row):
    """With the acceptance that came out, `plan` gives the very figures that stand against the measured ones."""
    rate = planned.acceptance_of(Schedule(128), row.gamma, row.ratio)
    settings = dict(drafts=[row.draft], gammas=[row.gamma], acceptances={"": rate})
    found = plan(row.arch, architecture(row.arch), DEVICES[row.device], [row.context], [1], **settings)
    full, _, drafted = found.rows
    p = planned.predicted(row)
    assert full.ms_per_token == pytest.approx(p.baseline_ms)
    assert (drafted.step_ms, drafted.target_ms, drafted.ms_per_token) == pytest.approx((p.step_ms, p.verify_ms, p.ms))
    assert drafted.accepted_of_drafted == pytest.approx(row.ratio)


@pytest.mark.parametrize("arch", ["llama-3.2-1b", "llama-2-13b", "llama-3.1-70b", "tiny"])
def test_the_smallest_and_the_largest(arch):
    for name in ("h200", "orin"):
        found = plan(arch, architecture(arch), DEVICES[name], [1, (1 << 20) - 640], [1, 1 << 16], gammas=[1, 15])
        planned_rows = [row for row in found.rows if row.ms_per_token is not None]
        assert all(math.isfinite(row.ms_per_token) and row.ms_per_token > 0 and row.memory.total > 0 for row in planned_rows)
        assert {row.draft for row in planned_rows} >= {"none", "quantspec", "sparse"}


def test_most_rows_are_held_out():
    used = [row for row in rows.DECODES if row.used]
    assert len(used) == 3 and len(rows.DECODES) >= 28 and not any(row.arch == "419m" for row in used)
    assert sum(figure.used for figure in COMPARED) < len(COMPARED) / 4


def test_ranges_of_the_trained_model():
    """docs/measurements/2026-11.md: a round at 8k takes 2.2 to 2.3 ms, and with 4 drafts a round decoding is 1.40 to 1.80 times as fast."""
    trained = [row for row in rows.DECODES if row.arch == "419m" and row.device == "h200"]
    for row in trained[:2]:
        p = planned.predicted(row)
        assert p.ms * p.rounds.tokens == pytest.approx(2.25, rel=0.15)
    four = []
    for row in trained:
        rate = planned.acceptance_of(Schedule(128), 6, row.ratio)
        ratio = expected_rounds(Schedule(128), 4, Asked(rate)).accepted_of_drafted
        four.append(planned.predicted(row._replace(gamma=4, ratio=ratio)).speedup)
    assert (min(four), max(four)) == pytest.approx((1.40, 1.80), rel=0.15)


def test_costs_of_a_draft():
    """docs/measurements/2026-11.md, "Adaptive drafting": of verifying 0.311 for Llama-2-7B at 4k, 0.387 for Llama-3.1-8B at 128k."""
    for arch, context, cost in ("llama-2-7b", 4096, 0.311), ("llama-3.1-8b", 131072, 0.387):
        row = next(row for row in rows.DECODES if (row.arch, row.context) == (arch, context))
        found = planned.predicted(row)
        assert found.step_ms / found.verify_ms == pytest.approx(cost, rel=0.15)


@pytest.mark.parametrize("row", rows.MEMORY, ids=lambda row: f"{row.arch}-{row.context}")
def test_memory_is_what_was_measured(row):
    c = architecture(row.arch)
    sizes = dict(batch=1, context=row.context, new_tokens=row.new_tokens)
    draft = memory_of(c, INT8, planned.drafts_of(c, "quantspec"), **sizes, gamma=6)
    baseline = memory_of(c, FULL, (), **sizes, gamma=0)
    assert draft.cache / 1e9 == pytest.approx(row.cache_gb, rel=0.005, abs=0.005)
    assert draft.cache / baseline.cache == pytest.approx(row.share_of_full, abs=0.006)
    assert draft.total / 1e9 == pytest.approx(row.peak_gb, rel=0.05) and baseline.total / 1e9 == pytest.approx(row.baseline_gb, rel=0.05)


def test_docs_have_what_is_predicted():
    """The tables of docs/measurements/plan.md, which `python tests/planned.py` writes."""
    text = planned.DOCS.read_text()
    for table in planned.tables():
        assert table in text
    assert planned.with_tables(text) == text and planned.with_tables(text.replace("| fitted |", "| |")) == text


# Plans


def test_a_tuned_configuration_is_found_by_the_kernels_own_problem(monkeypatch):
    shapes = dict(batch=2, kv_heads=8, tokens=5, heads_per_kv_head=4, head_dim=128, group_size=128, groups=9, buffer_rows=264)
    kernel = Plan(**shapes, planes=2, block_tiles=3, blocks_of_rows=1)
    monkeypatch.setattr(timing.tuning, "problems", lambda *_: [kernel.problem])
    count = lambda **sizes: timing.attention_cost(DEVICES["h200"], LLAMA_8B, LayerReads(2, 1024, 200), 128, **sizes).counts["int8"]
    assert count(batch=2, tokens=5) and not count(batch=2, tokens=7) and not count(batch=1, tokens=5)


def test_a_tuned_configuration_counts_for_its_own_problem():
    """On an H200 INT8 attention of 7 tokens with 8 KV heads was tuned for one row in groups of 128. Other batches and group sizes get the
    default's figure, so that verifying more tokens never takes less time; and one row is told which passes were tuned."""
    h200, layer = DEVICES["h200"], LayerReads(2, 1 << 17, 200)
    counts = lambda group_size, **sizes: timing.attention_cost(h200, LLAMA_8B, layer, group_size, **sizes).counts
    found = [counts(128, tokens=7), counts(64, tokens=7), counts(128, tokens=7, batch=8), counts(128, tokens=1)]
    assert [bool(each["int8"]) for each in found] == [True, False, False, False]
    assert [bool(each["int8_default"]) for each in found] == [False, True, True, True]
    planned_for = lambda device, *batches: plan("8b", LLAMA_8B, device, [131072], batches, drafts=["quantspec", "streaming-llm"])
    eight = planned_for(h200, 8)
    times = [row.target_ms for row in eight.rows if row.draft == "quantspec"]
    assert times == sorted(times) and not any("tuned" in note for note in eight.notes)
    (note,) = (note for note in planned_for(h200, 1, 8).notes if "tuned" in note)
    assert note.startswith("batch 1: ") and "was tuned on this device for a step of quantspec; verifying 7 tokens; " in note
    assert "; not for a token without a draft; verifying 2, 3, 4, 5, 9, 11, 13 tokens. " in note
    assert not any("tuned" in note for note in planned_for(H100, 1).notes + planned_for(DEVICES["l40s"], 1).notes)


def test_int4_weights_without_a_kernel_do_not_pay():
    """Beyond a device's maximum of rows they are dequantized in every step, which is slower than the target's own; above 8 rows another
    kernel multiplies them."""
    for name, most in (("h200", 64), ("l40s", 16)):
        found = plan("8b", LLAMA_8B, DEVICES[name], [1024], [1, 2 * most], drafts=["quantspec"], gammas=[2, 4])
        assert [best.draft for best in found.best] == ["quantspec", "none"]
        assert any(f"no kernel there for more than {most} rows" in note for note in found.notes)
    costs = [timing.int4_matmul_cost(DEVICES["h200"], 28672, 4096, rows).seconds(DEVICES["h200"]) for rows in (1, 8, 9, 64)]
    assert costs == sorted(costs) and costs[3] < 3 * costs[0]


@pytest.mark.parametrize("inputs", [128, 896, 4864])
def test_inputs_in_an_odd_number_of_groups_have_a_cost_at_any_rows(inputs):
    costs = [timing.int4_matmul_cost(DEVICES["h200"], 896, inputs, rows).seconds(DEVICES["h200"]) for rows in (1, 8, 9, 64)]
    assert costs == sorted(costs) and costs[0] > 0


def test_devices_that_were_never_measured_are_estimates():
    for name, device in DEVICES.items():
        found = plan("8b", LLAMA_8B, device, [4096], [1], drafts=["quantspec"], gammas=[4])
        assert found.estimated == (name not in ("h100", "h200"))
        assert found.estimated == any("ESTIMATE" in note for note in found.notes)
        assert all(math.isfinite(row.ms_per_token) and row.ms_per_token > 0 for row in found.rows)


def test_what_fits():
    found = plan("7b", LLAMA_7B, DEVICES["h100"], [65536, 131072], [1, 4], drafts=["quantspec"], gammas=[6])
    by = {(row.context, row.batch, row.draft, row.cache): row for row in found.rows}
    # At 128k a full cache of Llama-2-7B does not fit into 80 GB, and an int8 one does: that is the baseline then.
    assert by[131072, 1, "none", "full"].status == "does not fit" and by[131072, 1, "quantspec", "int8"].status == "planned"
    assert {row.baseline for row in found.rows if (row.context, row.batch) == (131072, 1)} == {"int8"}
    assert by[131072, 4, "quantspec", "int8"].speedup is None and found.best[3].draft is None
    row = by[65536, 1, "quantspec", "int8"]
    room = 79e9

    def total(batch: int, context: int) -> float:
        drafts = planned.drafts_of(LLAMA_7B, "quantspec")
        return memory_of(LLAMA_7B, INT8, drafts, batch=batch, context=bucket(context), new_tokens=640, gamma=6).total

    assert total(row.max_rows, 65536) <= room < total(row.max_rows + 1, 65536)
    assert total(1, row.longest_context) <= room < total(1, row.longest_context + 1)


def test_the_best_gamma_is_one_that_fits(run, tmp_path):
    """The table shows what "Best" names, where a larger gamma would be faster and takes more memory than there is."""
    device = dataclasses.replace(H100, memory_gb=80)
    memory = {row.gamma: row.memory.total for row in plan("8b", LLAMA_8B, device, [8192], [1], drafts=["quantspec"]).rows}
    device = dataclasses.replace(device, memory_gb=(memory[6] + memory[8]) / 2e9 + 1)
    found = plan("8b", LLAMA_8B, device, [8192], [1], drafts=["quantspec"], acceptances={"": 1.0})
    eight, six = (next(row for row in found.rows if row.gamma == gamma) for gamma in (8, 6))
    assert eight.status == "does not fit" and six.status == "planned" and eight.ms_per_token < six.ms_per_token
    shown = next(row for row in best_gammas(found) if row.draft == "quantspec")
    assert (shown.gamma, found.best[0].gamma) == (6, 6)
    file = tmp_path / "device.json"
    file.write_text(json.dumps(dataclasses.asdict(device)))
    code, out, _ = run("plan", "--arch", "llama-3.1-8b", "--device", file, "--context", 8192, "--draft", "quantspec", "--acceptance", 1)
    assert code == 0 and "does not fit" not in out and "quantspec with 6" in out
    # Where none fits the table says so.
    small = plan("8b", LLAMA_8B, dataclasses.replace(H100, memory_gb=12), [8192], [1], drafts=["quantspec"])
    assert {row.status for row in best_gammas(small)} == {"does not fit"}
    baseline = plan("8b", LLAMA_8B, H100, [8192], [1], drafts=["none"]).rows[-1].memory.total
    file.write_text(json.dumps(dataclasses.asdict(H100) | {"memory_gb": baseline / 1e9 + 1.1}))
    code, out, _ = run("plan", "--arch", "llama-3.1-8b", "--device", file, "--context", 8192, "--draft", "quantspec")
    assert code == 0 and "8,192 tokens, batch 1: no draft fits; without one over the int8 cache" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft", "none"], "no draft was compared; without one over the"),
        (["--draft", "h2o"], "no draft was compared; without one over the"),
        (["--draft", "quantspec", "--acceptance", 0.1], "no draft pays; without one over the"),
        (["--draft", "h2o", "--draft", "quantspec", "--acceptance", "quantspec=0.1"], "no draft pays; without one over the"),
    ],
)
def test_no_draft_pays_where_one_was_compared(run, arguments, said):
    code, out, _ = run("plan", "--arch", "llama-3.1-8b", "--context", 4096, *arguments)
    assert code == 0 and f"4,096 tokens, batch 1: {said}" in out


def test_memory_is_what_the_engine_allocates():
    # Prompts and caches are padded: no context between two buckets fits that the larger bucket does not.
    found = {row.cache: row for row in plan("7b", LLAMA_7B, H100, [9000], [1], drafts=["none"]).rows}
    assert all(row.longest_context == bucket(row.longest_context) for row in found.values())
    padded = plan("7b", LLAMA_7B, H100, [bucket(9000)], [1], drafts=["none"]).rows
    assert [row.memory for row in padded] == [row.memory for row in found.values()]


def test_contexts_end_with_the_models_positions():
    config = dataclasses.replace(TINY, max_position_embeddings=8192)
    assert {row.longest_context for row in plan("tiny", config, H100, [1024], [1], drafts=["quantspec"]).rows} == {8192 - 640}
    with pytest.raises(InputError, match="7,553 tokens and 640 new ones are more than the 8,192 positions"):
        plan("tiny", config, H100, [7553], [1])


def test_a_budget_beyond_the_context_is_refused():
    with pytest.raises(InputError, match="draft streaming-llm:budget=200000: draft budget 200000 should be at most 4736"):
        plan("8b", LLAMA_8B, H100, [4096], [1], drafts=["streaming-llm:budget=200000"])
    assert plan("8b", LLAMA_8B, H100, [4096], [1], drafts=["streaming-llm:budget=4736"]).rows[-1].speedup


def test_an_oracle_is_not_planned_and_the_best_with_measured_kernels_is_named():
    found = plan("8b", LLAMA_8B, H100, [131072], [1], acceptances={"": 0.93, "prompt-lookup": 0.4})
    (oracle,) = (row for row in found.rows if row.draft == "exact-topk")
    assert (oracle.status, oracle.speedup) == ("not planned", None)
    with pytest.raises(InputError, match="exact-topk: an oracle"):
        plan("8b", LLAMA_8B, H100, [4096], [1], drafts=["exact-topk"])
    # Kernels for listed groups were timed on Hopper alone, and only there does one observe.
    assert found.best[0].draft == "sparse" and found.best[0].with_measured_kernels is None
    found = plan("8b", LLAMA_8B, DEVICES["a100"], [131072], [1], acceptances={"": 0.93, "prompt-lookup": 0.4})
    (best,) = found.best
    assert best.draft == "sparse" and best.with_measured_kernels.draft == "quantspec" and best.with_measured_kernels.speedup < best.speedup
    (said,) = (note for note in found.notes if note.startswith("sparse: "))
    assert said.endswith("on A100 there is none that observes; " + said.split("; ")[-1])


def test_speedups_are_over_the_better_baseline():
    found = plan("8b", LLAMA_8B, H100, [131072], [1], gammas=[1, 4])
    full, int8, *drafts = (row for row in found.rows if row.ms_per_token)
    better = min(full, int8, key=lambda row: row.ms_per_token)
    assert better.speedup == 1 and {row.baseline for row in drafts} == {better.cache}
    assert all(row.speedup == pytest.approx(better.ms_per_token / row.ms_per_token) for row in drafts)
    fastest = min([full, int8, *drafts], key=lambda row: row.ms_per_token)
    assert (found.best[0].draft, found.best[0].gamma) == (fastest.draft, fastest.gamma)


# The command

PLAN = ["plan", "--arch", "llama-2-7b", "--device", "h100", "--context", 4096]


def test_the_command_prints_tables_and_json(run):
    code, out, _ = run(*PLAN, "--context", 65536, "--batch", 1, "--batch", 8, "--draft", "quantspec", "--gamma", 2, "--gamma", 6)
    assert (
        code == 0
        and "decode attention" in out
        and "share of time" in out
        and "(of drafted)" in out
        and "quantspec with 6 drafts a round" in out
    )
    code, out, _ = run(
        *PLAN, "--draft", "quantspec", "--draft", "sparse:budget=0.1", "--acceptance", 0.9, "--acceptance", "sparse=0.8", "--json"
    )
    found = json.loads(out)
    assert code == 0 and found["device"]["name"] == "H100" and not found["estimated"]
    given = {row["draft"]: (row["acceptance"], row["acceptance_source"]) for row in found["rows"] if row["gamma"] == 6}
    assert given == {"quantspec": (0.9, "given"), "sparse:budget=0.1": (0.8, "given")}
    assert all(row["memory"]["weights"] == model_bytes(LLAMA_7B) for row in found["rows"])


def test_contexts_that_are_not_given_are_those_that_the_model_has_positions_for(run, tmp_path):
    """As --help and docs/plan.md say; a known shape has positions for more."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(num_hidden_layers=1, max_position_embeddings=40000)))
    contexts = {}
    for which in ("--model", tmp_path), ("--arch", "llama-3.1-8b"):
        code, out, _ = run("plan", *which, "--draft", "none", "--max-new-tokens", 100, "--json")
        assert code == 0
        contexts[which[0]] = [row["context"] for row in json.loads(out)["sizes"]]
    assert contexts == {"--model": [4096, 32768, 39900], "--arch": [4096, 32768, 131072]}
    assert {architecture(name).max_length for name in ARCHITECTURES} == {1 << 20}
    said = " ".join(run("plan", "--help")[1].replace("│", " ").split())
    assert "each cut to what the model's positions have room for" in said and "A known shape, with 2^20 positions" in said


def test_a_checkpoint_is_planned_by_its_config_alone(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(num_hidden_layers=3)))
    code, out, _ = run("plan", "--model", tmp_path, "--context", 64, "--max-new-tokens", 8, "--json")
    config = LlamaConfig.from_hf(tmp_path / "config.json")
    assert code == 0 and not is_converted(tmp_path) and json.loads(out)["weight_bytes"] == model_bytes(config)


def test_a_device_of_ones_own(run, tmp_path):
    file = tmp_path / "device.json"
    fields = {"name": "Mine", "bandwidth_gb_per_s": 500, "memory_gb": 24, "bf16_tflops": 80.5}
    file.write_text(json.dumps(fields | {"multiprocessors": 40, "clock_ghz": 1.5, "kernels": "triton"}))
    code, out, _ = run("plan", "--arch", "tiny", "--device", file, "--json")
    found = json.loads(out)
    assert code == 0 and found["estimated"] and found["device"]["multiprocessors"] == 40 and found["ridge"] == 80.5e12 / 500e9


def test_a_device_as_it_is_printed():
    assert find_device("H200") is find_device("h200") is DEVICES["h200"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_gb": None}, "memory_gb is missing"),
        ({"memory_gb": -1}, "memory_gb is -1, should be a number of more than 0"),
        ({"bf16_tflops": "fast"}, "bf16_tflops is 'fast', should be a number"),
        ({"multiprocessors": 1.5}, "multiprocessors is 1.5, should be a whole number"),
        ({"clock_ghz": float("inf")}, "clock_ghz is inf, should be a number"),
        ({"kernels": "cuda"}, "kernels is 'cuda', should be mosaic_gpu or triton"),
        ({"shared_memory": 1}, "shared_memory is 1, not true or false"),
        ({"color": "red"}, "color is no field of a device"),
    ],
)
def test_devices_that_are_refused(run, tmp_path, changes, said):
    file = tmp_path / "device.json"
    fields = dataclasses.asdict(DEVICES["orin"]) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    code, out, err = run("plan", "--arch", "tiny", "--device", file)
    assert code == 2 and not out and err.count("\n") == 1 and f"{file}: {said}" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "llama-9"], "no architecture 'llama-9'; there are llama-2-7b"),
        ([], "give one of --arch and --model"),
        (["--arch", "tiny", "--model", "x"], "give one of --arch and --model"),
        (["--arch", "tiny", "--device", "h900"], "no device 'h900'; there are h200, h100"),
        (["--arch", "tiny", "--context", 0], "--context 0 should be from 1 to 1,047,936"),
        (["--arch", "tiny", "--context", 10**9], "--context 1,000,000,000 should be from 1 to 1,047,936, the model's 1,048,576 positions"),
        (["--arch", "tiny", "--batch", 0], "--batch 0 should be from 1 to"),
        (["--arch", "tiny", "--gamma", 16], "--gamma 16 should be from 1 to 15"),
        (["--arch", "tiny", "--max-new-tokens", 0], "--max-new-tokens 0 should be from 1 to"),
        (["--arch", "tiny", "--max-new-tokens", 1 << 20], "--max-new-tokens 1,048,576 should be less than the model's 1,048,576 positions"),
        (["--arch", "tiny", "--acceptance", "1.1"], "--acceptance 1.1: '1.1' should be a number from 0 to 1"),
        (["--arch", "tiny", "--acceptance", "nan"], "'nan' should be a number from 0 to 1"),
        (["--arch", "tiny", "--acceptance", "sparse=x"], "'x' should be a number from 0 to 1"),
        (["--arch", "tiny", "--acceptance", "medusa=0.5"], "no draft 'medusa' is planned"),
        (["--arch", "tiny", "--acceptance", 0.5, "--acceptance", 0.6], "given twice for all drafts"),
        (["--arch", "tiny", "--draft", "medusa"], "draft 'medusa' should be one of quantspec"),
        (["--arch", "tiny", "--draft", "quantspec:sensitive_layers=9"], "sensitive_layers 9 should be from 0 to the model's 2 layers"),
        (["--arch", "tiny", "--draft", "sparse:dense_layers=9"], "dense_layers 9 should be from 0 to the model's 2 layers"),
        (["--arch", "tiny", "--plot", "x.txt"], "--plot x.txt: the name must end in"),
        (["--model", "no/such"], "no/such"),
    ],
)
def test_bad_input(run, arguments, said):
    code, out, err = run("plan", *arguments)
    assert code == 2 and not out and err.startswith("qspec: error: ") and err.count("\n") == 1 and said in err


def test_a_draft_without_a_cost_is_listed(run, monkeypatch):
    """Drafts of the registry that do not say how much they propose, or of which no acceptance is known."""

    @dataclasses.dataclass(frozen=True)
    class Wanting:
        def __post_init__(self):
            raise InputError("it wants a checkpoint")

    for name, settings in {"silent": Silent, "other": QuantSpecSettings, "wanting": Wanting}.items():
        monkeypatch.setitem(registry.DRAFTS, name, settings)
    code, out, _ = run(*PLAN)
    assert code == 0 and "* silent: no model of its cost.\n" in out
    assert "* other: no acceptance known; give --acceptance other=R.\n" in out
    assert "* wanting: not planned; it wants a checkpoint.\n" in out
    assert run(*PLAN, "--draft", "wanting")[::2] == (2, "qspec: error: draft wanting: it wants a checkpoint\n")
    code, out, _ = run(*PLAN, "--acceptance", "other=0.9", "--json")
    rows = json.loads(out)["rows"]
    assert all((row["kernels_measured"] is None) == (row["ms_per_token"] is None) for row in rows)
    status = {row["draft"]: row["status"] for row in rows}
    assert code == 0 and (status["silent"], status["other"], status["quantspec"]) == ("no model of its cost", "planned", "planned")


def test_plots(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, _ = run(*PLAN, "--context", 16384, "--batch", 1, "--batch", 4, "--plot", tmp_path / "plan.png")
    assert code == 0 and (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("own", [False, True])
def test_it_answers_at_once_and_asks_no_device(tmp_path, own):
    """In about 1.6 seconds on an idle machine, nearly all of it to import. What counts here is the processor's time, since others may be at
    work, in times of what importing JAX takes just then, for machines differ: 2.1 to 2.6. No backend of JAX is initialised."""
    check = "import sys; from qspec_jax.cli.app import app; app(sys.argv[1:], standalone_mode=False); "
    check += "from jax._src import xla_bridge; assert not xla_bridge._backends"
    arguments = [*map(str, PLAN)]
    if own:
        (tmp_path / "config.json").write_text(json.dumps(hf_config(vocab_size=LLAMA_7B.vocab_size, max_position_embeddings=8192)))
        draft = f"combine:prompt-lookup+small-model:model={tmp_path},weight_bits=4"
        arguments += ["--draft", draft, "--acceptance", "0.8", "--json"]

    def spent(code: str, *arguments: str) -> tuple[float, str]:
        used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        before = used()
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return used() - before, done.stdout

    (one, _), (plan, out) = spent("import jax"), spent(check, *arguments)
    assert not own or json.loads(out)["rows"][-1]["speedup"] > 0
    assert plan < 4 * one
