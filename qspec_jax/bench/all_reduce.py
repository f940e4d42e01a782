"""`qspec bench all-reduce`: how long the devices that a model is divided over take to add up hidden states, as they do twice in a layer."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import RenderableType

from qspec_jax.bench.timing import Timing, loop, loop_trips, time_loop
from qspec_jax.errors import named
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.sharding import MODEL
from qspec_jax.progress import progress_bar
from qspec_jax.reports import Run, grid, page, this_run

# What adds up, and the options of XLA that choose it; on a CPU there is one alone.
# Without options XLA takes its own kernel for small arrays (jax 0.11).
WAYS: Mapping[str, dict[str, str]] = {
    "NCCL": {"xla_gpu_experimental_use_collective_kernels": ""},
    "XLA's own kernel": {"xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE"},
}
CPU_WAYS: Mapping[str, dict[str, str]] = {"XLA": {}}


@dataclasses.dataclass(frozen=True)
class AllReduceRow:
    """Time of adding up arrays over all devices, one after the other in a compiled loop.

    Attributes:
        way: what adds up, a key of `WAYS` or `CPU_WAYS`.
        rows, width: the shape of an array, in bfloat16.
        timing: of one array.
        gb_per_s: the bytes that each device must send, 2 (N - 1) / N of the array's, over the time.
        error: why there are no figures; empty if there are.
    """

    way: str
    rows: int
    width: int
    timing: Timing | None = None
    gb_per_s: float | None = None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class AllReduceReport(Run):
    """How long devices take: a row for each shape and way."""

    devices: int
    rows: list[AllReduceRow]

    def table(self) -> RenderableType:
        """A line for each shape and way."""
        found = grid("rows", "width", "by", "us", "quartiles", "GB/s", "", left=("by", ""), wraps=("",))
        for row in self.rows:
            t = row.timing
            figures = [f"{t.median_us:,.1f}", f"{t.lower_us:,.1f} - {t.upper_us:,.1f}", f"{row.gb_per_s:,.1f}"] if t else ["-"] * 3
            found.add_row(str(row.rows), f"{row.width:,}", row.way, *figures, row.error)
        note = "One after the other in a compiled loop, bfloat16. GB/s: what each device must send, over the time."
        return page(f"All-reduce over {self.devices} x {self.device}", f", {self.date}", found, notes=[note])


def run(
    mesh: Mesh, rows: Sequence[int], width: int, *, repeats: int = 20, kept: KeptRows = NOT_KEPT, progress: bool | None = None
) -> AllReduceReport:
    """Measures arrays of each of these numbers of rows over the devices of a mesh.

    Args:
        mesh: the devices.
        rows: numbers of rows, one for each array.
        width: columns of the arrays.
        repeats: the number of timed batches.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.
    """
    ways = CPU_WAYS if mesh.devices.flat[0].platform == "cpu" else WAYS
    cases = [(count, way) for count in rows for way in ways]
    found = []

    def row(count: int, way: str) -> AllReduceRow:
        try:
            return _measured(mesh, AllReduceRow(way, count, width), ways[way], repeats)
        except Exception as error:  # one row of many
            return AllReduceRow(way, count, width, error=named(error))

    for count, way in progress_bar(cases, progress=progress):
        found.append(
            kept.measured(f"{count} rows, {way}", AllReduceRow, functools.partial(row, count, way), _described, lambda row: not row.error)
        )
    return AllReduceReport(**this_run(), devices=mesh.size, rows=found)


def _described(row: AllReduceRow) -> str:
    return f"{row.timing.median_us:,.1f} us" if row.timing else row.error


def _measured(mesh: Mesh, row: AllReduceRow, options: dict[str, str], repeats: int) -> AllReduceRow:
    x = jax.device_put(jnp.ones((row.rows, row.width), jnp.bfloat16), NamedSharding(mesh, PartitionSpec()))

    def trip(x):
        return (lax.psum(x, MODEL) * (1 / mesh.size),)

    trips = loop_trips(1e-5)
    program, _ = loop(trip, trips, options=options).compile((x,), ())
    timing, _ = time_loop(program, trips, (x,), (), repeats=repeats)
    sent = 2 * (mesh.size - 1) / mesh.size * x.size * x.dtype.itemsize
    return dataclasses.replace(row, timing=timing, gb_per_s=sent / timing.median_us / 1e3)
