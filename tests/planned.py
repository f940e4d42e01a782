"""What the planner predicts for measured rows, and its coefficients fitted anew on those rows that are marked as used."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import measured_rows as rows
import numpy as np

from pallas_kernels.formats.views import DenseView
from qspec_jax.bench.architectures import architecture
from qspec_jax.caches.cache import Reads
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.drafts.registry import levels_in, parse_draft
from qspec_jax.drafts.registry import name_of as name_of_draft
from qspec_jax.models.config import LlamaConfig
from qspec_jax.planning import timing
from qspec_jax.planning.devices import DEVICES, Device
from qspec_jax.planning.operations import prefill_work
from qspec_jax.planning.plan import plan
from qspec_jax.planning.rounds import Asked, Rounds, expected_rounds
from qspec_jax.planning.steps import OutlinedDraft, StepReads, outlined, own_step
from qspec_jax.planning.timing import FITTED, Cost, Efficiencies
from qspec_jax.quantization.outline import outline

FULL, INT8, G = CacheConfig("full"), CacheConfig("int8"), 128
DOCS = Path(__file__).parent.parent / "docs" / "measurements" / "plan.md"
LLAMA_8B, H100 = architecture("llama-3.1-8b"), DEVICES["h100"]


def config_of(name: str) -> LlamaConfig:
    return LlamaConfig.from_hf(rows.LLAMA_419M) if name == "419m" else architecture(name)


def draft_reads(config: LlamaConfig, text: str, tokens: int, cache: CacheConfig = INT8) -> StepReads:
    """What a step of the draft of a text reads, which is not made of others, of a row with `tokens` tokens in the target's cache."""
    (draft,) = drafts_of(config, text)
    return draft.reads(cache.outline(config, tokens), tokens)


def own_reads(config: LlamaConfig, tokens: int, cache: CacheConfig = INT8) -> StepReads:
    """What a step of the model itself reads of a row with `tokens` tokens."""
    return own_step(config, cache.outline(config, tokens), tokens)


@functools.cache
def drafts_of(config: LlamaConfig, text: str) -> tuple[OutlinedDraft, ...]:
    """The drafts that rounds ask in turn, of an outline."""
    return outlined(parse_draft(text), outline(config), lambda: outline(config, int4=True))


def acceptance_of(schedule: Schedule, gamma: int, ratio: float) -> float:
    """The conditional acceptance at which this share of the drafts is accepted."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_rounds(schedule, gamma, Asked(middle)).accepted_of_drafted < ratio else (low, middle)
    return low


def step_costs(row: rows.Decode) -> tuple[Cost, Cost, Cost]:
    """A step of the baseline, of the draft, and a verification."""
    c, device, cache = config_of(row.arch), DEVICES[row.device], CacheConfig(row.cache)
    (draft,) = drafts_of(c, row.draft)
    target = lambda cache, tokens, observe: timing.target_cost(
        device, c, cache, context=row.context, batch=1, tokens=tokens, observe=observe
    )
    step = timing.draft_cost(device, draft, c, cache, context=row.context, batch=1)
    return target(FULL, 1, False), step, target(cache, row.gamma + 1, draft.observes)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Milliseconds of a row's steps and tokens. rest: what a round takes besides its steps and flushes."""

    baseline_ms: float
    step_ms: float
    verify_ms: float
    flush_ms: float
    rounds: Rounds
    rest_ms: float = 1e3 * FITTED.round

    @property
    def ms(self) -> float:
        return (self.rounds.steps * self.step_ms + self.verify_ms + self.flush_ms + self.rest_ms) / self.rounds.tokens

    @property
    def speedup(self) -> float:
        return self.baseline_ms / self.ms


def predicted(row: rows.Decode) -> Predicted:
    device, c = DEVICES[row.device], config_of(row.arch)
    schedule = CacheConfig(row.cache).schedule_for(c.head_dim)
    rounds = expected_rounds(schedule, row.gamma, Asked(acceptance_of(schedule, row.gamma, row.ratio)))
    flush = rounds.flushes * timing.flush_cost(c).seconds(device)
    return Predicted(*(1e3 * cost.seconds(device) for cost in step_costs(row)), 1e3 * flush, rounds)


def attention_cost(row: rows.Attention) -> tuple[Device, Cost]:
    device = dataclasses.replace(DEVICES[row.device], kernels="triton" if row.kernels == "triton" else "mosaic_gpu")
    c = dataclasses.replace(LLAMA_8B, num_kv_heads=row.kv_heads)
    # Blocks of Mosaic GPU are dealt to the rows by what there is to read. Triton's are as many for every row, so it waits for the longest.
    contexts = row.context if row.kernels != "triton" else (max(row.context),) * len(row.context)
    cache = (FULL if row.planes is None else INT8).outline(c, max(contexts))
    cached = [cache.reads(DenseView(row.planes), context) for context in contexts]
    quantized = sum(r.quantized for r in cached) if row.listed is None else row.listed * G
    layer = Reads(row.planes or 2, quantized, sum(r.full for r in cached), listed=row.listed is not None)
    of_bytes = Cost(cache.bytes_of_reads(0, layer)[0] / device.read_bytes_per_s)
    known = {} if row.kernels != "default" else {"return_value": []}
    with mock.patch.object(timing.tuning, "problems", **(known or {"side_effect": timing.tuning.problems})):
        return device, of_bytes + timing.attention_cost(device, c, layer, G, tokens=row.tokens, observe=row.observed)


def matmul_cost(row: rows.Matmul) -> Cost:
    return timing.int4_matmul_cost(DEVICES[row.device], row.out, row.inputs, row.rows)


def prefill_seconds(row: rows.Prefill) -> float:
    return timing.prefill_cost(H100, LLAMA_8B, batch=1, tokens=row.context).seconds(H100)


def batch_costs(rounds: Rounds) -> tuple[Cost, float]:
    """A round of 8 rows in the middle of their texts, and the seconds of it that are no pass of the model."""
    context, gamma = rows.BATCH_CONTEXT + rows.BATCH_TOKENS // rows.BATCH_PROMPTS // 2, 4
    step = timing.pass_cost(H100, draft_reads(LLAMA_8B, "quantspec", context + 1), G, batch=8)
    verify = timing.pass_cost(H100, own_reads(LLAMA_8B, context + gamma + 1), G, batch=8, tokens=gamma + 1)
    flush = rounds.flushes * timing.flush_cost(LLAMA_8B)
    return rounds.steps * step + verify + flush, FITTED.round


def batch_rounds() -> Rounds:
    return expected_rounds(Schedule(G), 4, Asked(acceptance_of(Schedule(None), 4, 0.92)), batch=8)


def batch_round_count(row: rows.Batch) -> float:
    """Rounds of the run: the first token of each prompt is prefill's, and slots are busy for a share of the rounds."""
    return (rows.BATCH_TOKENS - rows.BATCH_PROMPTS) / (8 * row.busy * batch_rounds().tokens)


def batch_tokens_per_second(row: rows.Batch) -> float:
    cost, rest = batch_costs(batch_rounds())
    prefill = prefill_seconds(next(found for found in rows.PREFILLS if found.place.startswith("batches.md")))
    return rows.BATCH_TOKENS / (batch_round_count(row) * (cost.seconds(H100) + rest) + rows.BATCH_PROMPTS * prefill)


def fitted() -> Efficiencies:
    """The coefficients, by least squares of relative errors over the rows that are marked as used."""
    known: list[tuple[Cost, float]] = []
    for row in (row for row in rows.DECODES if row.used):
        known += zip(step_costs(row), (row.baseline_ms / 1e3, row.step_ms / 1e3, row.verify_ms / 1e3))
    known += [(attention_cost(row)[1], row.us / 1e6) for row in rows.ATTENTION if row.used]
    known += [(matmul_cost(row), row.us / 1e6) for row in rows.MATMULS if row.used]
    names = sorted({name for cost, _ in known for name, count in cost.counts.items() if count})
    matrix = np.array([[cost.counts[name] / seconds for name in names] for cost, seconds in known])
    size = np.abs(matrix).max(0)
    found, *_ = np.linalg.lstsq(matrix / size, np.array([1 - cost.floor / seconds for cost, seconds in known]), rcond=None)
    # Prefill: seconds = FLOPs / (share of the peak) + call, of two rows.
    (long, short) = sorted((row for row in rows.PREFILLS if row.used), key=lambda row: -row.context)
    flops = [prefill_work(LLAMA_8B, batch=1, tokens=row.context).total.flops for row in (long, short)]
    per_flop = (long.seconds - short.seconds) / (flops[0] - flops[1])
    made = Efficiencies(
        **dict(zip(names, (found / size).tolist())),
        flush_layer=rows.FLUSH_MS / 1e3 / LLAMA_8B.num_layers,
        prefill_share=1 / per_flop / H100.flops_per_s,
        prefill_call=short.seconds - flops[1] * per_flop,
    )
    used = [(row, predicted(row)) for row in rows.DECODES if row.used]
    rest = [row.ms * p.rounds.tokens - p.rounds.steps * row.step_ms - row.verify_ms - p.flush_ms for row, p in used]
    made = dataclasses.replace(made, round=float(np.mean(rest)) / 1e3)
    (row,) = (row for row in rows.BATCHES if row.used)
    cost, rest = batch_costs(batch_rounds())
    seconds = (rows.BATCH_TOKENS / row.tokens_per_second - rows.BATCH_PROMPTS * short.seconds) / batch_round_count(row) - rest
    without = dataclasses.replace(made, layer_batch=0.0)
    return dataclasses.replace(made, layer_batch=(seconds - cost.seconds(H100, without)) / cost.counts["layer_batch"])


class Compared(NamedTuple):
    """A figure: what it is of, in what unit, what is predicted and was measured, and whether the coefficients were fitted on it."""

    what: str
    unit: str
    predicted: float
    measured: float
    used: bool

    def __str__(self) -> str:
        return f"{self.predicted:.3g} / {self.measured:.3g} ({100 * (self.predicted / self.measured - 1):+.0f} %)"


def name_of(row: rows.Decode) -> str:
    how = row.draft.removeprefix("quantspec").removeprefix(":") if row.cache == "int8" else "full cache"
    found = [row.arch, row.device.upper(), f"{row.context // 1024}k", f"{row.gamma} drafts", f"{row.ratio} accepted", how]
    return ", ".join(filter(None, found))


def compared_decode(row: rows.Decode) -> list[Compared]:
    p = predicted(row)
    steps = [("a draft, ms", p.step_ms, row.step_ms), ("verifying, ms", p.verify_ms, row.verify_ms)]
    figures = [("baseline, ms a token", p.baseline_ms, row.baseline_ms), *(step for step in steps if step[2] is not None)]
    figures += [("ms a token", p.ms, row.ms), ("speed-up", p.speedup, row.speedup)]
    return [Compared(name_of(row), *figure, row.used) for figure in figures]


def compared_cascade(row: rows.Cascade) -> Compared:
    rate = acceptance_of(Schedule(G), row.gamma, row.ratio)
    given = dict(acceptances={"": rate}, inner_acceptances={"": row.inner}, proposing={} if "eagle3" in row.draft else {"": 1.0})
    found = plan(row.arch, config_of(row.arch), DEVICES["h200"], [row.context], [1], drafts=[row.draft], gammas=[row.gamma], **given)
    first, _ = levels_in(row.draft)
    what = f"{row.arch}, {row.context // 1024}k, {row.ratio} accepted, of {name_of_draft(first)}'s by the middle {row.inner}"
    return Compared(what, "ms a token", found.rows[-1].ms_per_token, row.ms, False)


def compared_others() -> list[Compared]:
    found = [compared_cascade(row) for row in rows.CASCADES]
    for row in rows.ATTENTION:
        device, cost = attention_cost(row)
        kind = {None: "bfloat16", 1: "INT4", 2: "INT8"}[row.planes]
        context = f"{row.context[0] // 1024}k" if len(row.context) == 1 else f"{len(row.context)} rows of 4k to 16k"
        how = ", observed" * row.observed + (f", {row.listed} groups of it" if row.listed else "")
        what = f"attention, {row.device.upper()} ({row.kernels}), {kind}, T = {row.tokens}, {row.kv_heads} KV heads, {context}{how}"
        if any(one.what == what for one in found):
            what += ", again"
        found.append(Compared(what, "us", 1e6 * cost.seconds(device), row.us, row.used))
    for row in rows.MATMULS:
        seconds = matmul_cost(row).seconds(DEVICES[row.device])
        what = f"INT4 matmul, {row.device.upper()}, {row.out} x {row.inputs}, {row.rows} rows"
        found.append(Compared(what, "us", 1e6 * seconds, row.us, row.used))
    for row in rows.PREFILLS:
        found.append(Compared(f"prefill, {row.context:,} tokens ({row.place})", "s", prefill_seconds(row), row.seconds, row.used))
    for row in rows.BATCHES:
        found.append(Compared(f"a batch of 8, {row.way}", "tokens/s", batch_tokens_per_second(row), row.tokens_per_second, row.used))
    flush = 1e3 * timing.flush_cost(LLAMA_8B).seconds(H100)
    found.append(Compared("a flush of 32 layers, in bench decode", "ms", flush, rows.FLUSH_MS, True))
    return [*found, Compared("a flush of 32 layers, in bench flush", "ms", flush, 0.8, False)]


def tables() -> list[str]:
    """What docs/measurements/plan.md shows of them, and which were fitted on."""
    mark = lambda used: "fitted" if used else ""
    decodes = ["| decode | baseline, ms | a draft, ms | verifying, ms | a token, ms | speed-up | |", "|---|---|---|---|---|---|---|"]
    for row in rows.DECODES:
        found = list(map(str, compared_decode(row)))
        cells = [found[0], *(found[1:3] if row.step_ms is not None else ["", ""]), *found[-2:]]
        decodes.append(f"| {name_of(row)} | {' | '.join(cells)} | {mark(row.used)} |")
    others = ["| | | predicted / measured | |", "|---|---|---|---|"]
    others += [f"| {one.what} | {one.unit} | {one} | {mark(one.used)} |" for one in compared_others()]
    return ["\n".join(lines) + "\n" for lines in (decodes, others)]


def with_tables(text: str) -> str:
    """The text of docs/measurements/plan.md with these tables instead of its own, known by their first two lines."""
    for table in tables():
        head = table[: table.index("\n", table.index("\n") + 1) + 1]
        before, _, behind = text.partition(head)
        text = before + table + behind[re.match(r"(\|.*\n)*", behind).end() :]
    return text


if __name__ == "__main__":
    # After rows have changed: the coefficients as they are fitted now, for `qspec_jax.planning.timing`, and with them the tables.
    found = fitted()
    for name, value in dataclasses.asdict(FITTED).items():
        if name != "launch_small" and abs(getattr(found, name) / value - 1) > 0.01:
            print(f"{name}: {value} should be {getattr(found, name):.3g}")
    DOCS.write_text(with_tables(DOCS.read_text()))
