"""What the benchmarks of kernels share: which shapes and implementations are measured, the run over them, its rows, and their table."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import RenderableType
from rich.text import Text

from qspec_jax.bench.peers import Unavailable
from qspec_jax.bench.timing import Timing, read_bandwidth
from qspec_jax.errors import InputError, named
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.progress import progress_bar
from qspec_jax.reports import Run, formatted, grid, page, this_run


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One implementation on one shape; figures are None unless its status is "measured".

    Attributes:
        shape, implementation: their names.
        peer: whether it is another library's.
        status: whether there are figures.
        note: why there are none, or how it was measured.
        bytes: that it must move once.
        timing: of a call.
        gb_per_s: bytes over the median time.
        share_of_read_bandwidth: gb_per_s over the bandwidth that was measured in the same run.
        ratio_to_fastest_peer: the fastest peer's median time over this one's.
        relative_error: norm of the difference from the result in float32, over the norm of that result, where it was measured.
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
    """A row for every shape and implementation; each kernel's benchmark has a class of its own.

    Attributes:
        read_bandwidth_gb_per_s: at which the device reads its memory, measured in the same run.
        repeats: timed batches of each row.
        shapes: by name; each has a `description`.
        rows: of each shape, in the order that they were measured in.
        TITLE: what the table says was measured.
        NOTES: what the table says of its columns.
    """

    read_bandwidth_gb_per_s: float
    repeats: int
    shapes: dict[str, Any]
    rows: list[KernelRow]
    TITLE: ClassVar[str] = ""
    NOTES: ClassVar[Sequence[str]] = ()

    def table(self) -> RenderableType:
        """Device and versions, the rows of each shape, and below them what was not measured and how the rest was."""
        figures, texts = ("median us", "quartiles", "MB", "GB/s", "of read", "vs best peer", "error"), ("shape", "implementation", "note")
        found = grid("shape", "implementation", *figures, "note", left=texts, wraps=texts)
        for name, shape in self.shapes.items():
            rows = [row for row in self.rows if row.shape == name and row.status != "unavailable"]
            rows.sort(key=lambda row: (row.peer, row.timing.median_us if row.timing else float("inf")))
            found.add_row(Text(name, "bold"), Text(shape.description, "dim"))
            for row in rows:
                found.add_row("", row.implementation, *_cells(row), style="" if row.peer else "green")
            found.add_section()
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        beside = f", {self.date}: reads {self.read_bandwidth_gb_per_s:,.0f} GB/s\n{versions}"
        return page(f"{self.TITLE} on {self.device}", beside, found, notes=[*self._remarks(), *self.NOTES])

    def _remarks(self) -> list[str]:
        missing = defaultdict(list)
        for row in self.rows:
            if row.status == "unavailable":
                missing[row.implementation, row.note].append(row.shape)
        lines = []
        for (name, reason), shapes in missing.items():
            where = "" if len(shapes) == len(self.shapes) else f" (on {', '.join(shapes)})"
            lines.append(f"{name}: not measured, {reason}{where}")
        for method in dict.fromkeys(row.timing.method for row in self.rows if row.timing):
            names = dict.fromkeys(row.implementation for row in self.rows if row.timing and row.timing.method == method)
            lines.append(f"{', '.join(names)}: {method}")
        return lines


Kind = TypeVar("Kind", bound=KernelReport)


def select_shapes(names: Sequence[str], large: Sequence, tiny: Sequence, *, more: Sequence = (), listing: str | None = None) -> list:
    """The shapes that were asked for, in their order; without names the large ones.

    Args:
        names: of shapes, or the beginnings of the names of several.
        large: shapes that need a GPU.
        tiny: shapes for any machine.
        more: shapes that need a GPU, and are measured by name alone.
        listing: how an error lists the names that there are; None: all of them.

    Raises:
        InputError: for a name that begins no shape's name, and for large shapes without a GPU.
    """
    known = {shape.name: shape for shape in (*large, *more, *tiny)}
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
    report: type[Kind],
    shapes: Sequence,
    names: Sequence[str],
    measure: Callable[[Any, str], KernelRow],
    *,
    repeats: int,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> Kind:
    """Measures each shape with each implementation and peer.

    Args:
        report: the class of the kernel's report.
        shapes: of that kernel.
        names: of implementations and peers.
        measure: makes the row of a shape and a name.
        repeats: timed batches, which `measure` makes too.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.
    """
    rows: list[KernelRow] = []
    with progress_bar(total=1 + len(shapes) * len(names), progress=progress) as bar:
        bandwidth = kept.measured("read bandwidth", float, lambda: read_bandwidth(repeats=repeats))
        bar.update()
        for shape in shapes:
            found = []
            for name in names:
                row = functools.partial(measure, shape, name)
                found.append(kept.measured(f"{shape.name}, {name}", KernelRow, row, described, is_measured))
                bar.update()
            rows += _compared(found, bandwidth)
    return report(
        **this_run(),
        read_bandwidth_gb_per_s=bandwidth,
        repeats=repeats,
        shapes={shape.name: shape for shape in shapes},
        rows=rows,
    )


def is_measured(row: KernelRow) -> bool:
    """Whether a row has figures, and is kept."""
    return row.status == "measured"


def described(row: KernelRow) -> str:
    """What is said of a row once it is measured."""
    return f"{row.timing.median_us:,.1f} us" if row.timing else f"{row.status}: {row.note}"


class Figures(NamedTuple):
    """What is measured of one implementation: the time of a call, its relative error, and a note on how."""

    timing: Timing
    relative_error: float | None
    note: str = ""


def measured(shape: str, name: str, size: int, figures: Callable[[], Figures], *, peer: bool = False) -> KernelRow:
    """The row of an implementation or a peer on a shape, one of many: where its figures cannot be had, it says why.

    Args:
        shape: its name.
        name: of the implementation or the peer.
        size: bytes that it must move once.
        figures: measures; `Unavailable` where it cannot run here.
        peer: whether it is another library's.
    """
    row = functools.partial(KernelRow, shape, name, peer, bytes=size)
    try:
        timing, error, note = figures()
    except Unavailable as reason:
        return row("unavailable", str(reason))
    except Exception as error:
        return row("failed", named(error))
    return row("measured", note, timing=timing, relative_error=error)


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


def _cells(row: KernelRow) -> list[str]:
    if row.timing is None:
        return [*["-"] * 7, f"{row.status}: {row.note}"]
    return [
        f"{row.timing.median_us:,.1f}",
        f"{row.timing.lower_us:,.1f} - {row.timing.upper_us:,.1f}",
        f"{row.bytes / 1e6:,.1f}",
        f"{row.gb_per_s:,.0f}",
        f"{row.share_of_read_bandwidth:.0%}",
        formatted(row.ratio_to_fastest_peer, ".2f", "x"),
        formatted(row.relative_error, ".1e"),
        row.note,
    ]
