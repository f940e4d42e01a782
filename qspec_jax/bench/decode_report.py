"""What `qspec bench decode` shows: tables, and plots of speed-up, a round's time and memory."""

from collections import defaultdict
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qspec_jax import plots
from qspec_jax.bench.decode_rows import AUTOREGRESSIVE, METHODS, Report
from qspec_jax.errors import InputError


def table(report: Report) -> Group:
    """Two tables: whole decodes, and their steps."""
    simulated = "".join(f"Acceptance is SIMULATED{of}\n" for of in _simulated(report))
    head = Text.assemble(
        (f"Decode of {report.model} on {report.device}", "bold"),
        f", {report.date}: reads {report.read_bandwidth_gb_per_s:,.0f} GB/s\n",
        simulated,
    )
    whole = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in ("context", "method", "gamma", "accepted", "tokens/s", "ms/token", "speed-up", "byte limit", "of it"):
        whole.add_column(label, justify="left" if label == "method" else "right", no_wrap=True)
    for label in ("prefill s", "compile s", "cache GB", "peak GB", "copies"):
        whole.add_column(label, justify="right")
    whole.add_column("")
    steps = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in ("context", "method", "step", "us", "quartiles", "MB", "of its floor"):
        steps.add_column(label, justify="left" if label in ("method", "step") else "right", no_wrap=True)
    for row in report.rows:
        name = f"{row.context:,}", row.method
        if row.status != "measured":
            whole.add_row(*name, str(row.gamma), *["-"] * 11, f"{row.status}: {row.note}")
            continue
        number = lambda x, form: "-" if x is None else format(x, form)
        accepted = number(row.acceptance_ratio, ".3f") + ("" if row.simulated_rate is None else " (sim.)")
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        figures = [number(row.tokens_per_second, ",.1f"), number(row.ms_per_token, ",.2f"), speedup]
        figures += [number(row.byte_limit, ".2f"), number(row.share_of_limit, ".0%"), f"{row.prefill_s:.2f}", f"{row.compile_s:.1f}"]
        gigabytes = lambda size: "-" if size is None else f"{size / 1e9:.2f}"
        figures += [gigabytes(row.cache_bytes), gigabytes(row.peak_memory_bytes)]
        copies = "-" if row.cache_bytes is None else str(len(row.large_operations))
        whole.add_row(*name, str(row.gamma), accepted, *figures, copies)
        for step, found in row.steps.items():
            t = found.timing
            floor = [f"{found.bytes / 1e6:,.1f}", f"{1 / found.share:.2f}x"] if found.bytes else ["-", "-"]
            steps.add_row(*name, step, f"{t.median_us:,.1f}", f"{t.lower_us:,.1f} - {t.upper_us:,.1f}", *floor)
    others = {f"{row.method}: {row.note}." for row in report.rows if row.status == "measured" and row.note}
    notes = [
        "Batch 1, greedy, random prompts. speed-up: over autoregressive decoding with a bfloat16 cache at the same context.",
        "byte limit: the speed-up if every step took as long as reading its weights and cache.",
        "peak: weights, cache and what prefill or decode need besides. copies: operations of the size of a cache or more in the loop.",
        "of its floor: time over that of reading the bytes.",
        *sorted(others),
    ]
    return Group(head, whole, Text(), steps, Text("\n" + " ".join(notes), "dim"))


def plot(report: Report, path: Path) -> None:
    """Three panels against context, of each method's best gamma: speed-up, the time of a quantspec round by its steps, and memory.

    Raises InputError if nothing was measured, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.status == "measured"]
    if not rows:
        raise InputError(f"--plot {path}: nothing was measured")
    best = {}
    for row in sorted(rows, key=lambda row: row.tokens_per_second):
        best[row.method, row.context] = row
    lines = defaultdict(list)
    for row in best.values():
        lines[row.method].append(row)
    contexts = sorted({row.context for row in rows})
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    speed, time, memory = figure.subplots(1, 3)
    for axes in (speed, memory):
        plots.context_axis(axes, contexts)
    for number, name in enumerate([*METHODS, *sorted(lines.keys() - METHODS.keys())]):
        found = sorted(lines.get(name, []), key=lambda row: row.context)
        style = dict(color=f"C{number}", marker="o", label=name)
        if speedups := [(row.context, row.speedup) for row in found if row.speedup and name != AUTOREGRESSIVE]:
            speed.plot(*zip(*speedups), **style)
            if limits := [(row.context, row.byte_limit) for row in found if row.byte_limit]:
                speed.plot(*zip(*limits), color=f"C{number}", linestyle=":")
        if peaks := [(row.context, row.peak_memory_bytes / 1e9) for row in found if row.peak_memory_bytes]:
            memory.plot(*zip(*peaks), **style)
    speed.set(ylabel="speed-up over autoregressive, bf16 cache", title="Speed-up (dotted: by the bytes alone)")
    memory.set(ylabel="GB", title="Peak memory", ylim=(0, None))
    rounds = sorted(lines.get("quantspec", []), key=lambda row: row.context)
    bottom = [0.0] * len(rounds)
    for step, times in (("draft", lambda row: row.gamma), ("target", lambda row: 1), ("sampling", lambda row: 1)):
        heights = [times(row) * row.steps[step].timing.median_us / 1e3 for row in rounds]
        time.bar([f"{row.context:,}\n{row.gamma} drafts" for row in rounds], heights, bottom=bottom, label=step)
        bottom = [a + b for a, b in zip(bottom, heights)]
    time.set(xlabel="context (tokens)", ylabel="ms", title="A round of quantspec")
    for axes in (speed, time, memory):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    simulated = "; acceptance SIMULATED" if _simulated(report) else ""
    figure.suptitle(f"Decoding {report.model} on {report.device}, {report.date}{simulated}", fontsize=11)
    plots.save(figure, path)


def _simulated(report: Report) -> list[str]:
    """Of every rate, how it was simulated."""
    contexts, ratios = defaultdict(set), defaultdict(set)
    for row in report.rows:
        if row.simulated_rate is not None:
            contexts[row.simulated_rate].add(row.context)
            ratios[row.simulated_rate].add(row.simulated_ratio)
    where = lambda rate: "" if len(contexts) == 1 else f" at {', '.join(f'{context:,}' for context in sorted(contexts[rate]))} tokens"
    mean = lambda rate: f", in the mean {min(ratios[rate]):.3f} of those drafted" if len(ratios[rate]) == 1 else ""
    return [f"{where(rate)}: {rate:.3f} of each draft, given those before it{mean(rate)}" for rate in contexts]
