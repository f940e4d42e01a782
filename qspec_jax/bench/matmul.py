"""`qspec bench matmul`: our INT4 matmuls against other libraries' of the same weights in bfloat16, on named shapes in one run.

Rows are independent: what cannot run, or fails, is a row that says why.
"""

import functools
import importlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import GPU_IMPLEMENTATIONS, int4_matmul
from qspec_jax.bench import rows
from qspec_jax.bench.matmul_shapes import LARGE, LAYERS, ROWS, TINY, Shape, bf16_problem, random_problem
from qspec_jax.bench.peers import Peer, Unavailable, to_jax, to_torch, torch_with_cuda
from qspec_jax.bench.rows import Report, Row, one_line
from qspec_jax.bench.timing import Timing, input_count, time_calls, time_torch


def select_shapes(names: Sequence[str]) -> list[Shape]:
    """See `rows.select_shapes`."""
    layers = ", ".join(f"{model}-{layer}" for model, layer, *_ in LAYERS)
    several = ", ".join(f"-M{m}" for m in ROWS)
    listing = f"{layers} (each with {several}), {', '.join(shape.name for shape in TINY)}"
    return rows.select_shapes(names, LARGE, TINY, listing=listing)


def select_implementations(names: Sequence[str]) -> list[str]:
    """See `rows.select_implementations`."""
    return rows.select_implementations(names, GPU_IMPLEMENTATIONS)


def run(
    shapes: Sequence[Shape], implementations: Sequence[str], *, peers: bool = True, repeats: int = 20, progress: bool | None = None
) -> Report:
    """Measures every implementation and peer on every shape. progress: see `rows.run`."""
    row = functools.partial(measure, repeats=repeats)
    return rows.run(shapes, [*(PEERS if peers else ()), *implementations], row, repeats=repeats, progress=progress)


def measure(shape: Shape, name: str, *, repeats: int = 20) -> Row:
    """One of our implementations or one peer on one shape. Errors are against the product in float32 with the weights that it reads."""
    peer = name in PEERS
    row = functools.partial(Row, shape.name, name, peer, bytes=shape.bf16_bytes if peer else shape.int4_bytes)
    try:
        timing, error = (_peer if peer else _ours)(shape, name, repeats)
    except Unavailable as reason:
        return row("unavailable", str(reason))
    except Exception as error:  # one row of many
        return row("failed", one_line(error))
    return row("measured", "", timing=timing, relative_error=error)


def unsupported(shape: Shape, implementation: str) -> str | None:
    """Why that implementation cannot run on a shape here, or None."""
    if implementation == "reference":
        return None
    module = importlib.import_module(f"pallas_kernels.matmul.{implementation}")
    return module.unsupported(*jax.eval_shape(lambda: random_problem(shape, 0)))


def _ours(shape: Shape, implementation: str, repeats: int) -> tuple[Timing, float]:
    if reason := unsupported(shape, implementation):
        raise Unavailable(reason)
    multiply = functools.partial(int4_matmul, implementation=implementation)
    x, weights = random_problem(shape, 0)
    error = rows.relative_error(jax.jit(multiply)(x, weights), _reference(x.astype(jnp.float32), weights))
    inputs = [random_problem(shape, seed)[1:] for seed in range(input_count(shape.int4_bytes))]
    return time_calls(multiply, x, inputs, repeats=repeats), error


def _peer(shape: Shape, name: str, repeats: int) -> tuple[Timing, float]:
    peer = PEERS[name]()
    x, weight = bf16_problem(shape, 0)
    error = rows.relative_error(peer(x, weight), _wide_product(x, weight))
    inputs = []
    for seed in range(input_count(shape.bf16_bytes)):
        activations, *values = peer.convert(*bf16_problem(shape, seed))
        inputs.append(tuple(values))
    return peer.time(activations, inputs, repeats=repeats), error


_reference = jax.jit(functools.partial(int4_matmul, implementation="reference"))
_wide_product = jax.jit(lambda x, w: jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32).T, precision=lax.Precision.HIGHEST))


def xla() -> Peer:
    """XLA, which calls cuBLAS where it has no kernel of its own that is faster."""
    multiply = lambda x, weight: lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    return Peer(jax.jit(multiply), lambda x, weight: (x, weight), lambda out: out, time_calls)


def torch_matmul() -> Peer:
    """torch, which calls cuBLAS."""
    torch = torch_with_cuda()

    def convert(x, weight):
        x, weight = to_torch(x, weight)
        return x, weight.T

    return Peer(torch.matmul, convert, to_jax, functools.partial(time_torch, chained=False))


PEERS: dict[str, Callable[[], Peer]] = {"xla": xla, "torch": torch_matmul}
