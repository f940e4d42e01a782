"""`qspec bench attention`: our decode attention over the quantized cache against other libraries' over a bfloat16 one.

All are measured on named shapes in one run. Rows are independent: what cannot run, or fails, gets a row that says why.
"""

import dataclasses
import functools
import importlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import Group

from pallas_kernels.attention import GPU_IMPLEMENTATIONS, decode_attention
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.views import DenseView
from qspec_jax import plots
from qspec_jax.bench import kernels
from qspec_jax.bench.attention_shapes import LARGE, TINY, Shape, bytes_read, random_problem
from qspec_jax.bench.kernels import KernelReport, KernelRow
from qspec_jax.bench.peers import PEERS, Unavailable
from qspec_jax.bench.timing import input_count, time_jax
from qspec_jax.errors import InputError, named

# Tokens in a row of the shortened shape that errors are measured on: the float32 reference is slow.
ERROR_TOKENS = 4096


def select_shapes(names: Sequence[str]) -> list[Shape]:
    """The shapes of these names; see `kernels.select_shapes`."""
    return kernels.select_shapes(names, LARGE, TINY)


def select_implementations(names: Sequence[str]) -> list[str]:
    """The implementations of these names; see `kernels.select_implementations`."""
    return kernels.select_implementations(names, GPU_IMPLEMENTATIONS)


def run(
    shapes: Sequence[Shape], implementations: Sequence[str], *, peers: bool = True, repeats: int = 20, progress: bool | None = None
) -> KernelReport:
    """Measures every implementation and peer on every shape. progress: see `kernels.run`.

    Shapes that differ in the cache's format alone share their peers' figures.
    """
    peer = functools.cache(functools.partial(measure_peer, repeats=repeats))

    def row(shape: Shape, name: str) -> KernelRow:
        if name in PEERS:
            return dataclasses.replace(peer(_bf16(shape), name), shape=shape.name)
        return measure(shape, name, repeats=repeats)

    return kernels.run(shapes, [*(PEERS if peers else ()), *implementations], row, repeats=repeats, progress=progress)


def measure(shape: Shape, implementation: str, *, config=None, repeats: int = 20, error_tokens: int = ERROR_TOKENS) -> KernelRow:
    """Measures one of our implementations on one shape. config: the kernel's own, in place of what it would choose.

    error_tokens: at most so many tokens in a row for the relative error, which is against the reference.
    """
    row = functools.partial(KernelRow, shape.name, implementation, False, bytes=bytes_read(shape))
    try:
        if reason := unsupported(shape, implementation):
            return row("unavailable", reason)
        attend = _attend(implementation, shape.planes, config)
        error = _error(implementation, _unnamed(shape.shortened(error_tokens)), config)
        problems = [random_problem(_unnamed(shape), seed) for seed in range(input_count(bytes_read(shape)))]
        timing = time_jax(attend, problems[0][0], [problem[1:] for problem in problems], repeats=repeats)
    except Exception as error:  # one row of many
        return row("failed", named(error))
    return row("measured", "", timing=timing, relative_error=error)


def measure_peer(shape: Shape, name: str, *, repeats: int = 20) -> KernelRow:
    """Measures one peer on a shape with a bfloat16 cache. Its error is None where it is run without a mask that it would need."""
    row = functools.partial(KernelRow, shape.name, name, True, bytes=bytes_read(shape))
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
        return row("failed", named(error))
    return row("measured", peer.note, timing=timing, relative_error=error)


def unsupported(shape: Shape, implementation: str) -> str | None:
    """Why that implementation cannot run on a shape here, or None."""
    if implementation == "reference":
        return None
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    q, layer, lengths = jax.eval_shape(lambda: random_problem(shape, 0))
    return module.unsupported(q, layer, lengths, view=DenseView(shape.planes))


def _attend(implementation: str, planes: int | None, config=None):
    if config is None:
        return functools.partial(decode_attention, view=DenseView(planes), implementation=implementation)
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    return functools.partial(module.decode_attention, view=DenseView(planes), config=config)


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
    attend = jax.jit(functools.partial(decode_attention, view=DenseView(planes), implementation="reference"))
    expected = attend(wide(q), jax.tree.map(wide, layer), lengths)
    return kernels.relative_error(out, expected)


def _bf16(shape: Shape) -> Shape:
    return dataclasses.replace(_unnamed(shape), planes=None)


def _unnamed(shape: Shape) -> Shape:
    # So that equal shapes compile once.
    return dataclasses.replace(shape, name="")


def table(found: KernelReport) -> Group:
    """The rows of every shape; see `kernels.table`."""
    return kernels.table(
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


def plot(found: KernelReport, path: Path) -> None:
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
