"""What the benches of kernels share: which shapes and implementations to measure, one run over them, and its rows of figures."""

import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array
from tqdm import tqdm

from qspec_jax.bench.timing import Timing, read_bandwidth
from qspec_jax.errors import InputError

PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "transformers", "flashinfer-python", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation on one shape; figures are None unless its status is "measured".

    bytes: that it must read, once; gb_per_s: those over the median time. ratio_to_fastest_peer: that peer's median over this one's.
    relative_error: the norm of the difference from the result in float32, over the norm of that, where it was measured.
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
class Run:
    """On which device something was measured, when, and with which packages."""

    device: str
    date: str
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Report(Run):
    """A row for every shape and implementation. shapes: of the kernel's own class."""

    read_bandwidth_gb_per_s: float
    repeats: int
    shapes: dict[str, Any]
    rows: list[Row]


def select_shapes(names: Sequence[str], large: Sequence, tiny: Sequence, *, listing: str | None = None) -> list:
    """The shapes of these names, or whose names begin with one that is no shape's; without names the large ones.

    Raises InputError for a name that begins no shape's, with `listing` in place of all names, and for large shapes without a GPU.
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
    """These names; without any, the kernels on a GPU and the reference elsewhere. Raises InputError for an unknown one."""
    for name in names:
        if name not in (*kernels, "reference"):
            raise InputError(f"no implementation {name!r}; there are {', '.join([*kernels, 'reference'])}")
    default = kernels if jax.default_backend() == "gpu" else ("reference",)
    return list(dict.fromkeys(names or default))


def run(
    shapes: Sequence, names: Sequence[str], measure: Callable[[Any, str], Row], *, repeats: int, progress: bool | None = None
) -> Report:
    """measure(shape, name) for all, peers among the names. progress: a bar on standard error; None where that is a terminal."""
    rows: list[Row] = []
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
    return Report(
        **this_run(),
        read_bandwidth_gb_per_s=bandwidth,
        repeats=repeats,
        shapes={shape.name: shape for shape in shapes},
        rows=rows,
    )


def relative_error(out: Array, expected: Array) -> float:
    """See Row. Raises ValueError where it is not finite."""
    error = float(jnp.linalg.norm(out.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
    if not error < float("inf"):
        raise ValueError("its output has values that are no finite numbers")
    return error


def _compared(rows: list[Row], bandwidth: float) -> list[Row]:
    """The rows of one shape with the figures that need the device's bandwidth and the other rows."""
    fastest = min((row.timing.median_us for row in rows if row.peer and row.timing), default=None)

    def figures(row: Row) -> Row:
        if row.timing is None:
            return row
        rate = row.bytes / row.timing.median_us / 1e3
        ratio = fastest and fastest / row.timing.median_us
        return dataclasses.replace(row, gb_per_s=rate, share_of_read_bandwidth=rate / bandwidth, ratio_to_fastest_peer=ratio)

    return [figures(row) for row in rows]


def one_line(error: Exception) -> str:
    """What to show of it in a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines[0].split())}"[:200]


def this_run() -> dict[str, Any]:
    """The fields of `Run`, here and now."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version(), "platform": " ".join(device.client.platform_version.split())}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": device.device_kind, "date": datetime.date.today().isoformat(), "versions": versions}
