"""Our decode attention over the quantized cache against other libraries' over a bfloat16 one, on named shapes in one run.

Rows are independent: what cannot run, or fails, is a row that says why.
"""

import dataclasses
import datetime
import functools
import importlib
import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array
from tqdm import tqdm

from pallas_kernels.attention import GPU_IMPLEMENTATIONS, decode_attention
from pallas_kernels.attention.shapes import LARGE, SHAPES, TINY, Shape, bytes_read, random_problem
from pallas_kernels.kv_format import FullLayer, HierarchicalLayer, Lengths
from qspec_jax.bench.peers import PEERS, Unavailable
from qspec_jax.bench.timing import Timing, input_count, read_bandwidth, time_jax
from qspec_jax.errors import InputError

IMPLEMENTATIONS = (*GPU_IMPLEMENTATIONS, "reference")
# Errors are measured on a shape shortened to this: the float32 reference is slow.
ERROR_TOKENS = 4096
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "flashinfer-python", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation on one shape; figures are None unless its status is "measured".

    bytes: of cache that it must read, once (`shapes.bytes_read`); gb_per_s: those over the median time. ratio_to_fastest_peer: that peer's
    median over this one's. relative_error: the norm of the difference from the reference in float32, over the norm of that, with at most
    4,096 tokens in a row; None too for a peer run without a mask that it would need.
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
class Report:
    """One run: the device, what was installed, and a row for every shape and implementation."""

    device: str
    date: str
    versions: dict[str, str]
    read_bandwidth_gb_per_s: float
    repeats: int
    shapes: dict[str, Shape]
    rows: list[Row]


def select_shapes(names: Sequence[str]) -> list[Shape]:
    """The shapes of these names or whose names begin with one; without names all but the tiny ones.

    Raises InputError for a name that begins no shape's, and for large shapes without a GPU.
    """
    for name in names:
        if not any(known.startswith(name) for known in SHAPES):
            raise InputError(f"no shape {name!r}; there are {', '.join(SHAPES)}, and any beginning of these names")
    chosen = [s for s in SHAPES.values() if any(s.name.startswith(name) for name in names)] if names else list(LARGE)
    if jax.default_backend() != "gpu" and (large := [s.name for s in chosen if s not in TINY]):
        raise InputError(f"shape {large[0]} needs a GPU, and JAX finds none; --shape tiny runs anywhere")
    return chosen


def select_implementations(names: Sequence[str]) -> list[str]:
    """These names; without any, the kernels on a GPU and the reference elsewhere. Raises InputError for an unknown one."""
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise InputError(f"no implementation {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
    default = GPU_IMPLEMENTATIONS if jax.default_backend() == "gpu" else ("reference",)
    return list(dict.fromkeys(names)) or list(default)


def run(
    shapes: Sequence[Shape], implementations: Sequence[str], *, peers: bool = True, repeats: int = 20, progress: bool | None = None
) -> Report:
    """Measures every implementation and peer on every shape. progress: a bar on standard error; None where that is a terminal.

    Shapes that differ in the cache's format alone share their peers' figures.
    """
    problems = {_bf16(shape) for shape in shapes}
    total = 1 + len(shapes) * len(implementations) + len(problems) * len(PEERS) * peers
    measured: dict[tuple[str, Shape], Row] = {}
    rows: list[Row] = []
    with tqdm(total=total, leave=False, disable=None if progress is None else not progress) as bar:

        def begin(label: str) -> None:
            bar.set_description(label)

        begin("read bandwidth")
        bandwidth = read_bandwidth(repeats=repeats)
        bar.update()
        for shape in shapes:
            found = []
            for name in PEERS if peers else ():
                problem = _bf16(shape)
                if (name, problem) not in measured:
                    begin(f"{shape.name}: {name}")
                    measured[name, problem] = measure_peer(problem, name, repeats=repeats)
                    bar.update()
                found.append(dataclasses.replace(measured[name, problem], shape=shape.name))
            for name in implementations:
                begin(f"{shape.name}: {name}")
                found.append(measure(shape, name, repeats=repeats))
                bar.update()
            rows += _compared(found, bandwidth)
    return Report(
        device=jax.devices()[0].device_kind,
        date=datetime.date.today().isoformat(),
        versions=versions(),
        read_bandwidth_gb_per_s=bandwidth,
        repeats=repeats,
        shapes={shape.name: shape for shape in shapes},
        rows=rows,
    )


def measure(shape: Shape, implementation: str, *, config=None, repeats: int = 20, error_tokens: int = ERROR_TOKENS) -> Row:
    """One of our implementations on one shape. config: the kernel's own, in place of what it would choose.

    error_tokens: the most in a row for the relative error.
    """
    row = functools.partial(Row, shape.name, implementation, False, bytes=bytes_read(shape))
    try:
        if reason := unsupported(shape, implementation):
            return row("unavailable", reason)
        attend = _attend(implementation, shape.planes, config)
        error = _error(implementation, _unnamed(shape.shortened(error_tokens)), config)
        problems = [random_problem(_unnamed(shape), seed) for seed in range(input_count(bytes_read(shape)))]
        timing = time_jax(attend, problems[0][0], [problem[1:] for problem in problems], repeats=repeats)
    except Exception as error:  # one row of many
        return row("failed", one_line(error))
    return row("measured", "", timing=timing, relative_error=error)


def measure_peer(shape: Shape, name: str, *, repeats: int = 20) -> Row:
    """One peer on a shape of a bfloat16 cache."""
    row = functools.partial(Row, shape.name, name, True, bytes=bytes_read(shape))
    try:
        peer = PEERS[name](shape)
        error = _peer_error(name, _unnamed(shape.shortened(ERROR_TOKENS))) if peer.exact else None
        query, inputs = None, []
        for seed in range(input_count(bytes_read(shape))):
            q, layer, _ = random_problem(shape, seed)
            query, *cache = peer.convert(q, layer.keys, layer.values)
            inputs.append(tuple(cache))
            del q, layer, cache
        timing = peer.time(query, inputs, repeats=repeats)
    except Unavailable as reason:
        return row("unavailable", str(reason))
    except Exception as error:  # one row of many
        return row("failed", one_line(error))
    return row("measured", peer.note, timing=timing, relative_error=error)


def unsupported(shape: Shape, implementation: str) -> str | None:
    """Why that implementation cannot run on a shape here, or None."""
    if implementation == "reference":
        return None
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    q, layer, lengths = jax.eval_shape(lambda: random_problem(shape, 0))
    return module.unsupported(q, layer, lengths, planes=shape.planes)


def _attend(implementation: str, planes: int | None, config=None):
    if config is None:
        return functools.partial(decode_attention, planes=planes, implementation=implementation)
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    return functools.partial(module.decode_attention, planes=planes, config=config)


@functools.cache
def _error(implementation: str, shape: Shape, config=None) -> float:
    problem = random_problem(shape, 0)
    return _relative_error(jax.jit(_attend(implementation, shape.planes, config))(*problem), *problem, planes=shape.planes)


@functools.cache
def _peer_error(name: str, shape: Shape) -> float:
    q, layer, lengths = random_problem(shape, 0)
    return _relative_error(PEERS[name](shape)(q, layer.keys, layer.values), q, layer, lengths, planes=None)


def _relative_error(out: Array, q: Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, *, planes: int | None) -> float:
    wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    attend = jax.jit(functools.partial(decode_attention, planes=planes, implementation="reference"))
    expected = attend(wide(q), jax.tree.map(wide, layer), lengths)
    error = float(jnp.linalg.norm(wide(out) - expected) / jnp.linalg.norm(expected))
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


def _bf16(shape: Shape) -> Shape:
    return dataclasses.replace(_unnamed(shape), planes=None)


def _unnamed(shape: Shape) -> Shape:
    # So that equal shapes compile once.
    return dataclasses.replace(shape, name="")


def one_line(error: Exception) -> str:
    """What to show of it in a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines[0].split())}"[:200]


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version(), "platform": " ".join(jax.devices()[0].client.platform_version.split())}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
