"""What `qspec bench attention` shows: a table, and a plot of latency against context."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group

from qspec_jax import plots
from qspec_jax.bench import report
from qspec_jax.bench.attention import ERROR_TOKENS
from qspec_jax.bench.attention_shapes import Shape
from qspec_jax.bench.rows import Report
from qspec_jax.errors import InputError


def table(found: Report) -> Group:
    """See `report.table`."""
    return report.table(
        found,
        "Decode attention",
        _describe,
        [
            "Peers read a bfloat16 cache of the same context. MB: what must be read of the cache.",
            f"error: norm, against the reference in float32, on at most {ERROR_TOKENS:,} tokens.",
        ],
    )


def _describe(shape: Shape) -> str:
    context = f"{min(shape.context):,} to {max(shape.context):,}" if shape.ragged else f"{shape.context[0]:,}"
    rows = f", {shape.batch} rows" if shape.batch > 1 else ""
    return f"{shape.format}, T={shape.tokens}, {shape.heads}/{shape.kv_heads} heads{rows} of {context} tokens"


def check_plot(path: Path, output: Path | None, shapes: Sequence[Shape]) -> None:
    """Raises InputError as `plots.check` does, and where `plot` would have nothing to show."""
    plots.check(path, output)
    if all(shape.batch > 1 for shape in shapes):
        raise InputError("--plot shows shapes of a single row, and none is chosen")


def plot(found: Report, path: Path) -> None:
    """Latency against context of single rows, one panel for each (T, heads): our fastest by format, and the fastest peer.

    Panels with a single context are left out where another has more. Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    panels = defaultdict(lambda: defaultdict(dict))
    for name, shape in found.shapes.items():
        if shape.batch > 1:
            continue
        lines = panels[shape.tokens, shape.heads, shape.kv_heads, shape.head_dim]
        for row in found.rows:
            if row.shape == name and row.timing:
                line = lines["fastest bf16 peer" if row.peer else shape.format]
                line[shape.context[0]] = min(row.timing.median_us, line.get(shape.context[0], float("inf")))
    several = {key: lines for key, lines in panels.items() if any(len(line) > 1 for line in lines.values())}
    panels = several or panels
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    styles = {"INT4": "o-", "INT8": "s-", "bf16": "^-", "fastest bf16 peer": "x--"}
    for axes, ((tokens, heads, kv_heads, head_dim), lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for label, style in styles.items():
            if line := sorted(lines.get(label, {}).items()):
                ours = label if "peer" in label else f"qspec-jax, {label}"
                axes.plot(*zip(*line), style, label=ours)
        ticks = sorted({context for line in lines.values() for context in line})
        axes.set_yscale("log")
        plots.context_axis(axes, ticks)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("latency (us)")
        axes.set_title(f"T={tokens}, {heads} query and {kv_heads} KV heads of {head_dim}", fontsize=10)
        if lines:
            axes.legend()
    figure.suptitle(f"Decode attention on {found.device}, {found.date}", fontsize=11)
    plots.save(figure, path)
