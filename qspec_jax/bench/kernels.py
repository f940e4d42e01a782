"""What the benchmarks of kernels share: which shapes and implementations are measured, the run over them, its rows, and their table."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from qspec_jax.bench.timing import Timing, read_bandwidth
from qspec_jax.errors import InputError
from qspec_jax.reports import Run, this_run


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One implementation on one shape; figures are None unless its status is "measured".

    bytes: what it must move, once; gb_per_s: those bytes over the median time. ratio_to_fastest_peer: the fastest peer's median over this
    one's. relative_error: norm of the difference from the result in float32, over the norm of that result, where it was measured.
    """

    shape: str
    implementation: str
    peer: bool
    status: Literal["measured", "unavailable", "failed"]
    note: str
    bytes: int
    timing: Timing | None = None
    gb_per_s: float | None = None
    share_of_read_bandwidth: float | None = None
    ratio_to_fastest_peer: float | None = None
    relative_error: float | None = None


@dataclasses.dataclass(frozen=True)
class KernelReport(Run):
    """A row for every shape and implementation. shapes: by name, in the class of the kernel that was measured."""

    read_bandwidth_gb_per_s: float
    repeats: int
    shapes: dict[str, Any]
    rows: list[KernelRow]


def select_shapes(names: Sequence[str], large: Sequence, tiny: Sequence, *, listing: str | None = None) -> list:
    """The shapes of these names; a name that no shape has stands for all whose names begin with it; without names the large ones.

    Raises InputError for a name that begins no shape's name, and for large shapes without a GPU. listing: what that error lists in place
    of all names.
    """
    known = {shape.name: shape for shape in (*large, *tiny)}
    chosen = set()
    for name in names:
        found = [name] if name in known else [other for other in known if other.startswith(name)]
        if not found:
            raise InputError(f"no shape {name!r}; there are {listing or ', '.join(known)}, and any beginning of these names")
        chosen.update(found)
    shapes = [shape for shape in known.values() if shape.name in chosen] if names else list(large)
    if jax.default_backend() != "gpu" and (needs := [shape.name for shape in shapes if shape not in tiny]):
        raise InputError(f"shape {needs[0]} needs a GPU, and JAX finds none; --shape tiny runs anywhere")
    return shapes


def select_implementations(names: Sequence[str], kernels: Sequence[str]) -> list[str]:
    """The implementations of these names; without any, the kernels on a GPU and the reference elsewhere.

    Raises InputError for an unknown one.
    """
    for name in names:
        if name not in (*kernels, "reference"):
            raise InputError(f"no implementation {name!r}; there are {', '.join([*kernels, 'reference'])}")
    default = kernels if jax.default_backend() == "gpu" else ("reference",)
    return list(dict.fromkeys(names or default))


def run(
    shapes: Sequence, names: Sequence[str], measure: Callable[[Any, str], KernelRow], *, repeats: int, progress: bool | None = None
) -> KernelReport:
    """Calls measure(shape, name) for every shape and name; peers are among the names.

    progress: a bar on standard error; None where that is a terminal.
    """
    rows: list[KernelRow] = []
    with tqdm(total=1 + len(shapes) * len(names), leave=False, disable=None if progress is None else not progress) as bar:
        bar.set_description("read bandwidth")
        bandwidth = read_bandwidth(repeats=repeats)
        bar.update()
        for shape in shapes:
            found = []
            for name in names:
                bar.set_description(f"{shape.name}: {name}")
                found.append(measure(shape, name))
                bar.update()
            rows += _compared(found, bandwidth)
    return KernelReport(
        **this_run(),
        read_bandwidth_gb_per_s=bandwidth,
        repeats=repeats,
        shapes={shape.name: shape for shape in shapes},
        rows=rows,
    )


def relative_error(out: Array, expected: Array) -> float:
    """Norm of the difference over the norm of what is expected. Raises ValueError where it is not finite."""
    error = float(jnp.linalg.norm(out.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    if not error < float("inf"):
        raise ValueError("its output has values that are no finite numbers")
    return error


def _compared(rows: list[KernelRow], bandwidth: float) -> list[KernelRow]:
    """The rows of one shape with the figures that need the device's bandwidth and the other rows."""
    fastest = min((row.timing.median_us for row in rows if row.peer and row.timing), default=None)

    def figures(row: KernelRow) -> KernelRow:
        if row.timing is None:
            return row
        rate = row.bytes / row.timing.median_us / 1e3
        ratio = fastest and fastest / row.timing.median_us
        return dataclasses.replace(row, gb_per_s=rate, share_of_read_bandwidth=rate / bandwidth, ratio_to_fastest_peer=ratio)

    return [figures(row) for row in rows]


def table(report: KernelReport, title: str, describe: Callable[[Any], str], notes: Sequence[str]) -> Group:
    """Device and versions, a table with the rows of each shape, and below it what was not measured, how the rest was, and `notes`.

    describe: what stands beside the name of a shape.
    """
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


def _cells(row: KernelRow) -> list[str]:
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


def _remarks(report: KernelReport) -> list[str]:
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
