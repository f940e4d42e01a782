"""The report of `qspec bench decode`: its fields, its tables and its plots."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from qspec_jax import plots
from qspec_jax.bench.decode_rows import METHODS, DecodeRow
from qspec_jax.decoding.config import AUTOREGRESSIVE, BITS, TOKENS
from qspec_jax.errors import InputError
from qspec_jax.reports import Run, formatted, grid, page


@dataclasses.dataclass(frozen=True)
class DecodeReport(Run):
    """Whole decodes.

    Attributes:
        read_bandwidth_gb_per_s: at which the device reads its memory, measured in the same run.
        model: its name.
        max_new_tokens: tokens that each decode adds.
        rows: of every method, gamma, context and batch size, and of other programs.
        devices: that the model is divided over.
        copy_bandwidth_gb_per_s: from host memory to the device; None if no cache is in host memory.
        allocated_bytes: the most that JAX had given out of a device's memory at a time; None if it does not say.
    """

    read_bandwidth_gb_per_s: float
    model: str
    max_new_tokens: int
    rows: list[DecodeRow]
    devices: int = 1
    copy_bandwidth_gb_per_s: float | None = None
    allocated_bytes: int | None = None

    def table(self) -> RenderableType:
        """Two tables: whole decodes, and their steps. Where the batch size is not always 1, they say what it is."""
        batches = any(row.batch_size > 1 for row in self.rows)
        of_host = [] if self.copy_bandwidth_gb_per_s is None else ["MB copied", "GB/s"]
        columns = _columns(batches, with_exact=self._compares_exact)
        wraps = ("method", "prefill s", "compile s", "cache GB", "peak GB", "copies")
        whole = grid(*columns, left=("method",), wraps=wraps)
        names = [label for label in ("context", "rows", "method", "gamma", "exact") if label in columns]
        steps = grid(*names, "step", "us", "quartiles", "MB", *of_host, "of its floor", left=("method", "step"), wraps=("method",))
        missing = ""
        for row in self.rows:
            whole.add_row(*(cell(row) for cell in columns.values()))
            if row.status != "measured":
                size = f", batch size {row.batch_size}" if batches else ""
                exact = f", exact {row.exact}" if row.exact else ""
                missing += f"\n{row.context:,} tokens{size}, {row.method}, gamma {row.gamma}{exact}: {row.status}: {row.note}"
            for step, found in row.steps.items():
                t = found.timing
                floor = [f"{found.bytes / 1e6:,.1f}", f"{1 / found.share:.2f}x"] if found.bytes else ["-", "-"]
                if self.copy_bandwidth_gb_per_s is not None:
                    rate = found.host_bytes / t.median_us / 1e3
                    floor[1:1] = [f"{found.host_bytes / 1e6:,.1f}", f"{rate:.1f}"] if found.host_bytes else ["-", "-"]
                name = [columns[label](row) for label in names]
                steps.add_row(*name, step, f"{t.median_us:,.1f}", f"{t.lower_us:,.1f} - {t.upper_us:,.1f}", *floor)
        of_several = f"{self.devices} x " if self.devices > 1 else ""
        beside = f", {self.date}: reads {self.read_bandwidth_gb_per_s:,.0f} GB/s"
        if of_host:
            beside += f", copies {self.copy_bandwidth_gb_per_s:.1f} GB/s of host memory"
        beside += "".join(f"\nAcceptance is SIMULATED{of}" for of in self._simulated())
        title = f"Decode of {self.model} on {of_several}{self.device}"
        return page(title, beside, whole, Text(missing and missing + "\n"), steps, notes=[" ".join(self._notes(batches))])

    def figure(self):
        """Each method with its best gamma. Of several batch sizes: tokens/s against rows, a panel for each context. Of one: speed-up, the
        time of a quantspec round by its steps, and memory, against context.

        Raises InputError if nothing was measured.
        """
        rows = [row for row in self.rows if row.status == "measured"]
        if not rows:
            raise InputError("--plot: nothing was measured")
        best = {}
        for row in sorted(rows, key=lambda row: row.tokens_per_second):
            best[self._line(row), row.context, row.batch_size] = row
        lines = defaultdict(list)
        for row in sorted(best.values(), key=lambda row: (row.context, row.batch_size)):
            lines[self._line(row)].append(row)
        # METHODS have the same colors in every plot.
        names = [*METHODS, *sorted(lines.keys() - METHODS.keys())]
        lines = {name: (f"C{number}", lines[name]) for number, name in enumerate(names) if name in lines}
        batch_sizes = sorted({row.batch_size for row in rows})
        figure = (_plot_batches if len(batch_sizes) > 1 else _plot_contexts)(lines)
        for axes in figure.axes:
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)
        simulated = "; acceptance SIMULATED" if self._simulated() else ""
        alike = f", {batch_sizes[0]} rows" if len(batch_sizes) == 1 and batch_sizes[0] > 1 else ""
        figure.suptitle(f"Decoding {self.model} on {self.device}{alike}, {self.date}{simulated}", fontsize=11)
        return figure

    def _notes(self, batches: bool) -> list[str]:
        """What the columns of the tables say. batches: whether they say how many rows there are."""
        copied = self.copy_bandwidth_gb_per_s is not None
        baseline = next((row.cache for row in self.rows if row.method == AUTOREGRESSIVE and row.cache), "full")
        of_batches = [
            "Greedy, random prompts. rows: decoded together after the same prompt, with random draws of their own, until the first one "
            "ends.",
            "tokens/s: of all rows. by bytes: these, if every step took as long as reading its weights and every row's cache.",
            f"ms/token: of each row. speed-up: over autoregressive decoding with a {baseline} cache at the same context and as many rows.",
            "peak: weights, cache and what prefill, repeating its row or decode need besides.",
        ]
        of_one_row = [
            f"Batch 1, greedy, random prompts. speed-up: over autoregressive decoding with a {baseline} cache at the same context.",
            "byte limit: the speed-up if every step took as long as reading its weights and cache.",
            "peak: weights, cache and what prefill or decode need besides.",
        ]
        notes = [
            *(of_batches if batches else of_one_row),
            "copies: operations of the size of a cache or more in the loop. of its floor: time over that of reading the bytes"
            + (", or of copying those of the cache that are in host memory where that takes longer." if copied else "."),
            *sorted({f"{row.method}: {row.note}." for row in self.rows if row.status == "measured" and row.note}),
        ]
        bits, tokens = self._methods_with(BITS), self._methods_with(TOKENS)
        if bits and not self._compares_exact:
            listed = ", ".join(f"{method}{f', {size} rows' if batches else ''}" for method, size in sorted(bits))
            notes.append("All with exact bits." if not tokens else f"With exact bits: {listed}; the others with exact tokens.")
        if self.allocated_bytes:
            notes.append(f"JAX had given out at most {self.allocated_bytes / 1e9:.1f} GB of a device's memory at a time.")
        return notes

    def _methods_with(self, exact: str) -> set[tuple[str, int]]:
        """Methods that were measured with bits, or tokens, and with how many rows."""
        return {(row.method, row.batch_size) for row in self.rows if row.exact == exact}

    @property
    def _compares_exact(self) -> bool:
        """Whether a method was measured with exact bits and with exact tokens."""
        return bool(self._methods_with(BITS) & self._methods_with(TOKENS))

    def _line(self, row: DecodeRow) -> str:
        """The name of the line of a plot that a row belongs to."""
        return f"{row.method}, exact {row.exact}" if self._compares_exact and row.exact else row.method

    def _simulated(self) -> list[str]:
        """How acceptance was simulated: a phrase for each rate."""
        contexts, ratios = defaultdict(set), defaultdict(set)
        for row in self.rows:
            if row.simulated_rate is not None:
                contexts[row.simulated_rate].add(row.context)
                ratios[row.simulated_rate].add(row.simulated_ratio)

        def where(rate):
            return "" if len(contexts) == 1 else f" at {', '.join(f'{context:,}' for context in sorted(contexts[rate]))} tokens"

        def mean(rate):
            return f", on average {min(ratios[rate]):.3f} of those drafted" if len(ratios[rate]) == 1 else ""

        inner = [f", at {rate:.3f} of an inner draft" for rate in {row.simulated_inner_rate for row in self.rows} - {None}]
        return [f"{where(rate)}: {rate:.3f} of each draft, given those before it{mean(rate)}{''.join(inner)}" for rate in contexts]


def _columns(batches: bool, *, with_exact: bool) -> dict[str, Callable[[DecodeRow], str]]:
    """The columns of whole decodes; of batches those that depend on how many rows there are. with_exact: with one of `exact`."""

    def figure(name: str, form: str, unit: str = "") -> Callable[[DecodeRow], str]:
        return lambda row: formatted(getattr(row, name), form, unit)

    def gigabytes(name: str) -> Callable[[DecodeRow], str]:
        return lambda row: "-" if getattr(row, name) is None else _gigabytes(getattr(row, name))

    def ratio(row: DecodeRow) -> str:
        return formatted(row.acceptance_ratio, ".3f") + ("" if row.simulated_rate is None else " (sim.)")

    def share(row: DecodeRow) -> str:
        limit = row.tokens_per_second_limit
        return formatted(limit and row.tokens_per_second / limit, ".0%")

    rows = {"rows": figure("batch_size", "d")}
    by_bytes = {"by bytes": figure("tokens_per_second_limit", ",.1f"), "of it": share}
    limit = {"byte limit": figure("byte_limit", ".2f"), "of it": figure("share_of_limit", ".0%")}
    once = {"prefill s": figure("prefill_s", ".2f"), "compile s": figure("compile_s", ".1f")}
    return {
        "context": figure("context", ",d"),
        **(rows if batches else {}),
        "method": lambda row: row.method,
        "gamma": figure("gamma", "d"),
        **({"exact": lambda row: row.exact or "-"} if with_exact else {}),
        "accepted": ratio,
        "tokens/s": figure("tokens_per_second", ",.1f"),
        **(by_bytes if batches else {}),
        "ms/token": figure("ms_per_token", ",.2f"),
        "speed-up": figure("speedup", ".2f", "x"),
        **({} if batches else limit | once),
        "cache GB": gigabytes("cache_bytes"),
        "peak GB": gigabytes("peak_memory_bytes"),
        "copies": lambda row: "-" if row.cache_bytes is None or row.large_operations is None else str(len(row.large_operations)),
        "": lambda row: "" if row.status == "measured" else row.status,
    }


def _gigabytes(size: int) -> str:
    """In GB, with two digits after the point, or with enough of them to show two that are not 0."""
    return f"{size / 1e9:.{max(2, 11 - len(str(size))) if size else 2}f}"


def _plot_contexts(lines: Mapping[str, tuple[str, list[DecodeRow]]]) -> Any:
    """Three panels against context. lines: each method's color and its rows, by context."""
    contexts = sorted({row.context for _, rows in lines.values() for row in rows})
    figure, (speed, time, memory) = plots.panels((15, 4.5), 3)
    for axes in (speed, memory):
        plots.context_axis(axes, contexts)
    for name, (color, found) in lines.items():
        style = dict(color=color, marker="o", label=name)
        if speedups := [(row.context, row.speedup) for row in found if row.speedup and row.method != AUTOREGRESSIVE]:
            speed.plot(*zip(*speedups), **style)
            if limits := [(row.context, row.byte_limit) for row in found if row.byte_limit]:
                speed.plot(*zip(*limits), color=color, linestyle=":")
        if peaks := [(row.context, row.peak_memory_bytes / 1e9) for row in found if row.peak_memory_bytes]:
            memory.plot(*zip(*peaks), **style)
    speed.set(ylabel="speed-up over autoregressive", title="Speed-up (dotted: by the bytes alone)")
    memory.set(ylabel="GB", title="Peak memory", ylim=(0, None))
    _, rounds = lines.get("quantspec", ("", []))
    bottom = [0.0] * len(rounds)
    for step, times in (("draft", lambda row: row.gamma), ("target", lambda row: 1), ("sampling", lambda row: 1)):
        heights = [times(row) * row.steps[step].timing.median_us / 1e3 for row in rounds]
        time.bar([f"{row.context:,}\n{row.gamma} drafts" for row in rounds], heights, bottom=bottom, label=step)
        bottom = [a + b for a, b in zip(bottom, heights)]
    time.set(xlabel="context (tokens)", ylabel="ms", title="A round of quantspec")
    return figure


def _plot_batches(lines: Mapping[str, tuple[str, list[DecodeRow]]]) -> Any:
    """A panel for each context, against the rows of a batch. lines: each method's color and its rows, by batch size within a context."""
    contexts = sorted({row.context for _, rows in lines.values() for row in rows})
    figure, of_contexts = plots.panels((5 * len(contexts) + 1, 4.5), len(contexts))
    for axes, context in zip(of_contexts, contexts):
        for name, (color, rows) in lines.items():
            found = [row for row in rows if row.context == context]
            if not found:
                continue
            axes.plot([row.batch_size for row in found], [row.tokens_per_second for row in found], color=color, marker="o", label=name)
            if limits := [(row.batch_size, row.tokens_per_second_limit) for row in found if row.tokens_per_second_limit]:
                axes.plot(*zip(*limits), color=color, linestyle=":")
        batch_sizes = sorted({row.batch_size for _, rows in lines.values() for row in rows if row.context == context})
        axes.set_xscale("log", base=2)
        axes.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
        axes.minorticks_off()
        axes.set(xlabel="rows", ylabel="tokens/s of all rows", ylim=(0, None), title=f"{context:,} tokens (dotted: by the bytes alone)")
        axes.grid(alpha=0.3)
    return figure
