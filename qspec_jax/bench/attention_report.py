"""What `qspec bench attention` shows: a table, and a plot of latency against context."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pallas_kernels.attention.shapes import Shape
from qspec_jax.bench.attention import ERROR_TOKENS, Report, Row
from qspec_jax.errors import InputError

PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def table(report: Report) -> Group:
    """Device and versions, a table with the rows of each shape, and below it what was not measured and how the rest was."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    head = Text.assemble(
        (f"Decode attention on {report.device}", "bold"),
        f", {report.date}: reads {report.read_bandwidth_gb_per_s:,.0f} GB/s\n",
        (versions, "dim"),
    )
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column("shape")
    grid.add_column("implementation")
    for label in ("median us", "quartiles", "MB", "GB/s", "of read", "vs best peer", "error"):
        grid.add_column(label, justify="right", no_wrap=True)
    grid.add_column("note")
    for name, shape in report.shapes.items():
        rows = [row for row in report.rows if row.shape == name and row.status != "unavailable"]
        rows.sort(key=lambda row: (row.peer, row.timing.median_us if row.timing else float("inf")))
        grid.add_row(Text(name, "bold"), Text(_describe(shape), "dim"))
        for row in rows:
            grid.add_row(*_cells(row), style="" if row.peer else "green")
        grid.add_section()
    return Group(head, Text(), grid, *_remarks(report))


def _describe(shape: Shape) -> str:
    context = f"{min(shape.context):,} to {max(shape.context):,}" if shape.ragged else f"{shape.context[0]:,}"
    rows = f", {shape.batch} rows" if shape.batch > 1 else ""
    return f"{shape.format}, T={shape.tokens}, {shape.heads}/{shape.kv_heads} heads{rows} of {context} tokens"


def _cells(row: Row) -> list[str]:
    if row.timing is None:
        return ["", row.implementation, *["-"] * 7, f"{row.status}: {row.note}"]
    ratio, error = row.ratio_to_fastest_peer, row.relative_error
    return [
        "",
        row.implementation,
        f"{row.timing.median_us:,.1f}",
        f"{row.timing.lower_us:,.1f} - {row.timing.upper_us:,.1f}",
        f"{row.bytes / 1e6:,.1f}",
        f"{row.gb_per_s:,.0f}",
        f"{row.share_of_read_bandwidth:.0%}",
        "-" if ratio is None else f"{ratio:.2f}x",
        "-" if error is None else f"{error:.1e}",
        row.note,
    ]


def _remarks(report: Report) -> list[Text]:
    missing = defaultdict(list)
    for row in report.rows:
        if row.status == "unavailable":
            missing[row.implementation, row.note].append(row.shape)
    lines = []
    for (name, reason), shapes in missing.items():
        where = "" if len(shapes) == len(report.shapes) else f" (on {', '.join(shapes)})"
        lines.append(f"{name}: not measured, {reason}{where}")
    for method in dict.fromkeys(row.timing.method for row in report.rows if row.timing):
        names = dict.fromkeys(row.implementation for row in report.rows if row.timing and row.timing.method == method)
        lines.append(f"{', '.join(names)}: {method}")
    lines.append("Peers read a bfloat16 cache of the same context. MB: what must be read of the cache.")
    lines.append(f"error: norm, against the reference in float32, on at most {ERROR_TOKENS:,} tokens.")
    return [Text(), *(Text(line, "dim") for line in lines)]


def check_plot(path: Path, shapes: Sequence[Shape]) -> None:
    """Raises InputError where `plot` could not write this file, or would have nothing to show."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'qspec-jax[plot]'") from None
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(f"--plot {path}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"--plot {path}: cannot be written ({'it is a folder' if path.is_dir() else 'no such folder'})")
    if all(shape.batch > 1 for shape in shapes):
        raise InputError("--plot shows shapes of a single row, and none is chosen")


def plot(report: Report, path: Path) -> None:
    """Latency against context of single rows, one panel for each (T, heads): our fastest by format, and the fastest peer.

    Panels with a single context are left out where another has more. Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    panels = defaultdict(lambda: defaultdict(dict))
    for name, shape in report.shapes.items():
        if shape.batch > 1:
            continue
        lines = panels[shape.tokens, shape.heads, shape.kv_heads, shape.head_dim]
        for row in report.rows:
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
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{context // 1024}k" if context >= 1024 else str(context) for context in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="context (tokens)", ylabel="latency (us)")
        axes.set_title(f"T={tokens}, {heads} query and {kv_heads} KV heads of {head_dim}", fontsize=10)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend()
    figure.suptitle(f"Decode attention on {report.device}, {report.date}", fontsize=11)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"--plot {path}: cannot be written ({error.strerror})") from None
