"""Matmul with INT8 weights on NVIDIA Hopper in Pallas Mosaic GPU, for few rows: the weights are read once.

A block owns tiles of 8 outputs and keeps the activations in shared memory. Where they have no room there, the blocks of a cluster divide
the inputs among them and add their sums at the end. Which block adds what in which order is the same in every launch.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import in_fixed_order, multiprocessors, no_mosaic_gpu
from pallas_kernels.formats.weights import Int8Weight
from pallas_kernels.gpu.launch import launch, lowered_once
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.mosaic_int8_plan import MAX_ROWS, TILE, UNIT, WARPS, Plan
from pallas_kernels.matmul.support import unsupported_skinny
from pallas_kernels.matmul.transforms import transformable


def unsupported(x: Array, weights: Sequence[Int8Weight], *, dtype) -> str | None:
    if reason := no_mosaic_gpu():
        return reason
    if x.dtype != jnp.bfloat16:
        return f"needs activations in bfloat16, not {x.dtype}"
    if reason := unsupported_skinny(x, weights, dtype, max_rows=MAX_ROWS, inputs=UNIT, outputs=TILE):
        return reason
    rows = MAX_ROWS if in_fixed_order() else math.prod(x.shape[:-1])  # that there has to be room for
    return None if plan_for(x, weights, dtype) else f"has no room in shared memory for {rows} rows of {x.shape[-1]} inputs and their sums"


def skinny_matmul(x: Float[Array, "*rows in"], weights: Sequence[Int8Weight], *, dtype) -> Float[Array, "*rows out"]:
    """x @ weight.T for each weight, one after the other in the last axis, accumulated in float32, in `dtype`."""
    xla = functools.partial(reference.skinny_matmul, dtype=dtype)
    product = transformable(functools.partial(run, plan_for(x, weights, dtype)), xla)
    return product(x.reshape(-1, x.shape[-1]), tuple(weights)).reshape(*x.shape[:-1], -1)


def plan_for(x: Array, weights: Sequence[Int8Weight], dtype) -> Plan | None:
    outputs, float32_out = tuple(weight.shape[0] for weight in weights), jnp.dtype(dtype) == jnp.float32
    alike = MAX_ROWS if in_fixed_order() else 0
    return Plan.fitting(math.prod(x.shape[:-1]), x.shape[-1], outputs, multiprocessors(), float32_out, alike)


@lowered_once
def run(plan: Plan, x: Float[Array, "M in"], weights: Sequence[Int8Weight]) -> Float[Array, "M out"]:
    """The weights' outputs one after the other."""
    from pallas_kernels.matmul import mosaic_int8_block

    emit = functools.partial(mosaic_int8_block.emit_block, plan)
    inputs = {"x": x} | {f"codes{i}": weight.codes for i, weight in enumerate(weights)}
    inputs |= {f"scale{i}": weight.scale.astype(jnp.float32) for i, weight in enumerate(weights)}
    outputs = {"y": jax.ShapeDtypeStruct((plan.rows, plan.width), plan.dtype)}
    return launch("int8_matmul", emit, inputs, outputs, plan.blocks, WARPS // 4, plan.layout.total, cluster=plan.cluster)["y"]
