"""Matmul with plain bfloat16 weights on NVIDIA Hopper in Pallas Mosaic GPU.

Sums are of all inputs in their order, so a row's outputs depend neither on other rows nor on how many there are. With up to 128 rows a
block has all of them, and weights are read once (mosaic_plain_block.py); more rows are divided into tiles (mosaic_tiled_block.py).
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import ANY, multiprocessors, no_mosaic_gpu
from pallas_kernels.gpu.launch import lowered_once, varying_as
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.mosaic_plain_plan import INPUT_MULTIPLE, MAX_EXACT_INPUTS, MAX_OUTPUTS, MAX_ROWS, TILE, Plan
from pallas_kernels.matmul.mosaic_tiled_plan import TiledPlan, tiled_plan
from pallas_kernels.matmul.support import unsupported_skinny
from pallas_kernels.matmul.transforms import transformable


def unsupported(x: Array, weights: Sequence[Array], *, dtype: DTypeLike) -> str | None:
    if reason := no_mosaic_gpu():
        return reason
    if others := {jnp.dtype(a.dtype).name for a in (x, *weights)} - {"bfloat16"}:
        return f"needs activations and weights in bfloat16, not {', '.join(sorted(others))}"
    if reason := unsupported_skinny(x, weights, dtype, max_rows=ANY, inputs=INPUT_MULTIPLE, outputs=TILE):
        return reason
    if jnp.dtype(dtype) == jnp.float32 and x.shape[-1] > MAX_EXACT_INPUTS:
        return f"gives float32 of up to {MAX_EXACT_INPUTS} inputs, not {x.shape[-1]}"
    if TILE * len(weights) > MAX_OUTPUTS:
        return f"supports up to {MAX_OUTPUTS // TILE} weights, not {len(weights)}"
    return None


def skinny_matmul(x: Float[Array, "*rows in"], weights: Sequence[Array], *, dtype) -> Float[Array, "*rows out"]:
    """x @ weight.T for each weight, one after the other in the last axis, accumulated in float32, in `dtype`."""
    return _computed(x, weights, functools.partial(reference.skinny_matmul, dtype=dtype), jnp.dtype(dtype) == jnp.float32, gated=False)


def gated_matmul(x: Float[Array, "*rows in"], gate: Float[Array, "out in"], up: Float[Array, "out in"]) -> Float[Array, "*rows out"]:
    return _computed(x, (gate, up), lambda x, weights: reference.gated_matmul(x, *weights), float32_out=False, gated=True)


def _computed(x: Array, weights: Sequence[Array], xla, float32_out: bool, gated: bool) -> Array:
    rows, outputs = x.reshape(-1, x.shape[-1]), tuple(weight.shape[0] for weight in weights)
    shape = rows.shape[1], outputs, multiprocessors(), float32_out, gated

    def kernel(x, weights) -> Array:
        if len(x) <= MAX_ROWS:
            return run(Plan(len(x), *shape), x, weights)
        if plan := tiled_plan(len(x), *shape):
            return run_tiled(plan, x, weights)
        # Where no tile fits, as with fewer than 64 outputs.
        return jnp.concatenate([kernel(x[first : first + MAX_ROWS], weights) for first in range(0, len(x), MAX_ROWS)])

    return transformable(kernel, xla)(rows, tuple(weights)).reshape(*x.shape[:-1], -1)


@lowered_once
def run(plan: Plan, x: Float[Array, "M in"], weights: Sequence[Array]) -> Float[Array, "M out"]:
    """The weights' outputs one after the other, or those of a gated pair."""
    from pallas_kernels.matmul.mosaic_plain_block import body

    return _launch(plan, body, x, weights, grid=(plan.blocks,), grid_names=("block",))[: plan.rows]


@lowered_once
def run_tiled(plan: TiledPlan, x: Float[Array, "M in"], weights: Sequence[Array]) -> Float[Array, "M out"]:
    """What `run` gives, for more rows."""
    from pallas_kernels.matmul.mosaic_tiled_block import BLOCK, CLUSTER, ROWS, body

    grid = dict(grid=plan.grid, grid_names=(BLOCK, ROWS), cluster=(plan.config.cluster,), cluster_names=(CLUSTER,))
    y = _launch(plan, body, x, weights, **grid)
    return (y.T if plan.float32_out else y)[: plan.rows]


def _launch(plan: Plan | TiledPlan, body: Callable, x: Array, weights: Sequence[Array], **grid) -> Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.matmul.mosaic_plain_block import WARPGROUP

    kernel = plgpu.kernel(
        functools.partial(body, plan),
        out_type=jax.ShapeDtypeStruct(plan.shape, plan.dtype),
        num_threads=plan.warpgroups,
        thread_name=WARPGROUP,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="gated_matmul" if plan.gated else "plain_matmul",
        **grid,
    )
    # The copies of activations are of whole tiles of rows.
    return varying_as([x, *weights], kernel(jnp.pad(x, ((0, plan.tiled_rows - plan.rows), (0, 0))), *weights))
