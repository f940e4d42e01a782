"""How the benches of kernels show their rows."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qspec_jax.bench.rows import Report, Row


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
