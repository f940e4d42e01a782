"""How the benches of kernels show their rows: a table, and what their plots share."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qspec_jax.bench.rows import Report, Row
from qspec_jax.errors import InputError

PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def table(report: Report, title: str, describe: Callable[[Any], str], notes: Sequence[str]) -> Group:
    """Device and versions, a table with the rows of each shape, and below it what was not measured, how the rest was, and `notes`."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    head = Text.assemble(
        (f"{title} on {report.device}", "bold"),
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
        grid.add_row(Text(name, "bold"), Text(describe(shape), "dim"))
        for row in rows:
            grid.add_row(*_cells(row), style="" if row.peer else "green")
        grid.add_section()
    return Group(head, Text(), grid, Text(), *(Text(line, "dim") for line in [*_remarks(report), *notes]))


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


def _remarks(report: Report) -> list[str]:
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
    return lines


def check_plot(path: Path, output: Path | None) -> None:
    """Raises InputError where `save_plot` could not write this file, or what goes to `output` would be overwritten."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'qspec-jax[plot]'") from None
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(f"--plot {path}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"--plot {path}: cannot be written ({'it is a folder' if path.is_dir() else 'no such folder'})")
    if output and output.resolve() == path.resolve():
        raise InputError(f"--output and --plot are the same file, {path}")


def context_axis(axes, contexts: Sequence[int]) -> None:
    """Makes the horizontal axis of a matplotlib plot one of these contexts, on a logarithmic scale."""
    axes.set_xscale("log")
    # Shapes of attention have a few tokens more, which are buffered.
    axes.set_xticks(contexts, [f"{n // 1024}k" if n % 1024 <= n // 100 else f"{n:,}" for n in contexts])
    axes.minorticks_off()
    axes.set_xlabel("context (tokens)")
    axes.grid(alpha=0.3)


def save_plot(figure, path: Path) -> None:
    """Writes a matplotlib figure. Raises InputError if the file cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"--plot {path}: cannot be written ({error.strerror})") from None
