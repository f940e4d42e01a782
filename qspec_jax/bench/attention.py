"""Our decode attention over the quantized cache against other libraries' over a bfloat16 one, on named shapes in one run.

Rows are independent: what cannot run, or fails, is a row that says why.
"""

import dataclasses
import functools
import importlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attention import GPU_IMPLEMENTATIONS, decode_attention
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.views import DenseView
from qspec_jax.bench import rows
from qspec_jax.bench.attention_shapes import LARGE, TINY, Shape, bytes_read, random_problem
from qspec_jax.bench.peers import PEERS, Unavailable
from qspec_jax.bench.rows import Report, Row, one_line
from qspec_jax.bench.timing import input_count, time_jax

# Errors are measured on a shape shortened to this: the float32 reference is slow.
ERROR_TOKENS = 4096


def select_shapes(names: Sequence[str]) -> list[Shape]:
    """See `rows.select_shapes`."""
    return rows.select_shapes(names, LARGE, TINY)


def select_implementations(names: Sequence[str]) -> list[str]:
    """See `rows.select_implementations`."""
    return rows.select_implementations(names, GPU_IMPLEMENTATIONS)


def run(
    shapes: Sequence[Shape], implementations: Sequence[str], *, peers: bool = True, repeats: int = 20, progress: bool | None = None
) -> Report:
    """Measures every implementation and peer on every shape. progress: see `rows.run`.

    Shapes that differ in the cache's format alone share their peers' figures.
    """
    peer = functools.cache(functools.partial(measure_peer, repeats=repeats))

    def row(shape: Shape, name: str) -> Row:
        if name in PEERS:
            return dataclasses.replace(peer(_bf16(shape), name), shape=shape.name)
        return measure(shape, name, repeats=repeats)

    return rows.run(shapes, [*(PEERS if peers else ()), *implementations], row, repeats=repeats, progress=progress)


def measure(shape: Shape, implementation: str, *, config=None, repeats: int = 20, error_tokens: int = ERROR_TOKENS) -> Row:
    """One of our implementations on one shape. config: the kernel's own, in place of what it would choose.

    error_tokens: the most in a row for the relative error, which is against the reference.
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
    """One peer on a shape of a bfloat16 cache. Its error is None where it is run without a mask that it would need."""
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
    return rows.relative_error(out, expected)


def _bf16(shape: Shape) -> Shape:
    return dataclasses.replace(_unnamed(shape), planes=None)


def _unnamed(shape: Shape) -> Shape:
    # So that equal shapes compile once.
    return dataclasses.replace(shape, name="")
