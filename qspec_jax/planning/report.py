"""A plan as people read it: tables, and plots of speed-up, sizes and intensity against context."""

import dataclasses
from collections import defaultdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from qspec_jax import plots
from qspec_jax.drafts.registry import NONE
from qspec_jax.planning.devices import Device
from qspec_jax.planning.plan_report import Best, Intensity, PlannedRow, Sizes, Status
from qspec_jax.reports import grid, page


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A plan.

    Attributes:
        model: its name.
        device: that is planned for.
        estimated: whether the device's times rest on its datasheet alone, and on efficiencies that were measured on others.
        ridge: see `Device.ridge`.
        weight_bytes: of the model.
        max_new_tokens: tokens that are decoded after each prompt.
        intensity, sizes, rows, best: the findings, by context and batch.
        notes: sentences for people on what the figures rest on.
    """

    model: str
    device: Device
    estimated: bool
    ridge: float
    weight_bytes: float
    max_new_tokens: int
    intensity: list[Intensity]
    sizes: list[Sizes]
    rows: list[PlannedRow]
    best: list[Best]
    notes: list[str]

    def table(self) -> RenderableType:
        """Tables of arithmetic intensity, of sizes, and of every draft with the best of its gammas; then what the figures rest on."""
        d = self.device
        estimate = " (ESTIMATE)" if self.estimated else ""
        shared = ", shared with the processor" if d.shared_memory else ""
        title = f"Plan of {self.model} on {d.name}{estimate}"
        beside = (
            f": {d.bandwidth_gb_per_s:,.0f} GB/s, {d.memory_gb:,.0f} GB{shared}, {d.bf16_tflops:,.0f} TFLOP/s in bf16, "
            f"weights {self.weight_bytes / 1e9:.2f} GB"
        )
        notes = [
            "intensity: FLOPs per byte, with a bfloat16 cache; below the ridge memory binds. attention's share is of the time by bytes and",
            "FLOPs, in decoding. gamma: drafts of a round, and of a cascade those of its first draft at a time. times: a draft's step (of",
            "a cascade a pass of its middle), a verification (or a step without a draft), a token of each row. accepted: the chance that a",
            "draft is, given those before it, and the share of all that are drafted; inner: the same chance of a cascade's first draft by",
            "its middle. speed-up: over the faster of decoding",
            "without a draft over a full or an int8 cache, as named, if it fits. rows: the most of this context that fit; longest: the",
            f"longest context of this batch that does, with {self.max_new_tokens:,} new tokens and all prompts prefilled at once.",
        ]
        parts = [_intensities(self), Text(), _sizes(self), Text(), _rows(self), Text(), _best(self)]
        return page(title, beside, *parts, notes=[" ".join(notes), *(f"* {note}." for note in self.notes)])

    def figure(self):
        """Three panels against context: the speed-up of each draft, the caches against the weights, and intensity against the ridge."""
        contexts = sorted({sizes.context for sizes in self.sizes})
        batches = sorted({sizes.batch for sizes in self.sizes})

        def several(batch):
            return f", batch {batch}" if len(batches) > 1 else ""

        figure, (speed, memory, intensity) = plots.panels((15, 4.5), 3)
        lines = defaultdict(list)
        for row in best_gammas(self):
            if row.compared and row.draft != NONE:
                lines[_name(row) + several(row.batch)].append((row.context, row.speedup))
        for label, points in lines.items():
            speed.plot(*zip(*sorted(points)), marker="o", label=label)
        speed.axhline(1, color="gray", linewidth=0.8)
        speed.set(ylabel="speed-up over the best without a draft", title="Speed-up, where it fits", ylim=(0, None))
        for number, batch in enumerate(batches):
            found = [sizes for sizes in self.sizes if sizes.batch == batch]
            for kind, style in ("full", "-"), ("int8", "--"):
                ratios = [getattr(sizes, f"{kind}_cache_bytes") / self.weight_bytes for sizes in found]
                memory.plot([sizes.context for sizes in found], ratios, style, marker="o", color=f"C{number}", label=kind + several(batch))
            steps = [step for step in self.intensity if step.batch == batch]
            for part, style in ("linear", "--"), ("attention", ":"), ("aggregate", "-"):
                values = [getattr(step, f"decode_{part}") for step in steps]
                intensity.plot([step.context for step in steps], values, style, marker="o", color=f"C{number}", label=part + several(batch))
        memory.axhline(1, color="gray", linewidth=0.8)
        memory.set(ylabel="cache / weights", title="KV cache against weights", yscale="log")
        intensity.axhline(self.ridge, color="gray", linewidth=0.8, label="ridge")
        intensity.set(ylabel="FLOPs per byte", title="Intensity of decoding", yscale="log")
        for axes, place in (speed, "lower left"), (memory, "upper left"), (intensity, "best"):
            plots.context_axis(axes, contexts)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8, loc=place)
        kind = "ESTIMATE" if self.estimated else "planned"
        figure.suptitle(f"{self.model} on {self.device.name}, {kind}; acceptance assumed or given", fontsize=11)
        return figure


def _intensities(report: PlanReport) -> Table:
    labels = [f"{phase} {part}" for phase in ("prefill", "decode") for part in ("linear", "attention", "both")]
    found = grid("context", "batch", *labels, "ridge", "attention's\nshare of time")
    for i in report.intensity:
        prefill = i.prefill_linear, i.prefill_attention, i.prefill_aggregate
        decode = i.decode_linear, i.decode_attention, i.decode_aggregate
        figures = [f"{x:,.0f}" for x in prefill] + [f"{x:,.2f}" for x in decode]
        found.add_row(f"{i.context:,}", str(i.batch), *figures, f"{report.ridge:,.0f}", f"{i.attention_share:.0%}")
    return found


def _sizes(report: PlanReport) -> Table:
    found = grid("context", "batch", "full cache GB", "of the weights", "int8 cache GB", "of the full one")
    for s in report.sizes:
        full, int8 = s.full_cache_bytes / 1e9, s.int8_cache_bytes / 1e9
        shares = f"{s.full_cache_to_weights:.2f}x", f"{int8 / full:.0%}"
        found.add_row(f"{s.context:,}", str(s.batch), f"{full:,.2f}", shares[0], f"{int8:,.2f}", shares[1])
    return found


def _rows(report: PlanReport) -> Table:
    labels = ["context", "batch", "draft", "gamma", "accepted\n(of drafted)", "step ms", "target ms", "ms/token", "tokens/s", "speed-up"]
    found = grid(*labels, "prefill s", "GB", "rows", "longest", "", left=("draft", ""), wraps=("draft", ""))
    for row in best_gammas(report):
        name = f"{row.context:,}", str(row.batch), _name(row)
        if row.ms_per_token is None:  # which the notes say
            continue
        accepted = "-" if row.acceptance is None else f"{row.acceptance:.2f} ({row.accepted_of_drafted or 0:.2f})"
        step = "-" if row.step_ms is None else f"{row.step_ms:,.2f}"
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x {row.baseline}"
        if row.inner_acceptance is not None:
            accepted += f"\ninner {row.inner_acceptance:.2f}"
        gamma = str(row.gamma or "-") if row.first_gamma is None else f"{row.gamma}, {row.first_gamma}"
        figures = [gamma, accepted, step, f"{row.target_ms:,.2f}"]
        figures += [f"{row.ms_per_token:,.2f}", f"{row.tokens_per_second:,.0f}"]
        room = [f"{row.prefill_s:,.2f}", f"{row.memory.total / 1e9:,.1f}", f"{row.max_rows:,}", f"{row.longest_context:,}"]
        found.add_row(*name, *figures, speedup, *room, "" if row.status == Status.PLANNED else row.status)
    return found


def _name(row: PlannedRow) -> str:
    """The draft, with the cache unless it is that of drafts over which none is said."""
    return row.draft if row.draft != NONE and row.cache == "int8" else f"{row.draft} ({row.cache})"


def _best(report: PlanReport) -> Text:
    lines = []
    for best in report.best:
        where = f"{best.context:,} tokens, batch {best.batch}: "
        if best.draft is None:
            lines.append(where + "nothing fits")
        elif best.draft == NONE:
            here = (row for row in report.rows if (row.context, row.batch) == (best.context, best.batch) and row.draft != NONE)
            none = "no draft fits" if any(row.status == Status.DOES_NOT_FIT for row in here) else "no draft was compared"
            said = "no draft pays" if best.drafts_compared else none
            lines.append(where + f"{said}; without one over the {best.cache} cache{_assumed(best)}")
        else:
            gain = "" if best.speedup is None else f", {best.speedup:.2f} times as fast"
            over = "" if best.cache == "int8" else f", over the {best.cache} cache"
            at_once = "" if best.first_gamma is None else f", {best.first_gamma} of its first draft at a time"
            lines.append(where + f"{best.draft} with {best.gamma} drafts a round{at_once}{over}{gain}{_assumed(best)}")
            if (other := best.with_measured_kernels) and other.draft is not None:
                way = f"no draft, over the {other.cache} cache" if other.draft == NONE else f"{other.draft} with {other.gamma}"
                lines.append(f"    by kernels that were not measured; of the others, {way}, {other.speedup:.2f} times{_assumed(other)}")
    return Text("\n".join(["Best:", *lines]), "bold")


def _assumed(best: Best) -> str:
    return f" ({' and '.join(best.assumed)} ASSUMED)" if best.assumed else ""


def best_gammas(report: PlanReport) -> list[PlannedRow]:
    """The rows with the gamma that is fastest of those that fit, or of all where none does: one for each way of decoding at each context
    and batch."""
    found: dict[tuple, PlannedRow] = {}

    def rank(row):
        return (row.status != Status.PLANNED, row.ms_per_token or 0)

    for row in report.rows:
        key = row.context, row.batch, row.draft, row.cache
        if key not in found or rank(row) < rank(found[key]):
            found[key] = row
    return list(found.values())
