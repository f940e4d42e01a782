"""Matmul with INT4 or nested weights on NVIDIA Hopper in Pallas Mosaic GPU, for few rows, at the speed of the memory.

A block keeps the activations in shared memory and owns tiles of 16 outputs. Its producer warps copy codes, scales and zeros to a
ring in shared memory, a thousand bytes of a row at a time. Its math warps divide the groups of inputs among them:
codes become the first operand of the tensor cores, where activations, 4 rows a tile, are the second. Their sums meet in shared memory,
once a tile, where epilogue warps add them. Where there are more activations than a block can keep, it takes several tiles together,
over some of the inputs, then over the next.
"""

import functools
import math
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import multiprocessors, no_mosaic_gpu
from pallas_kernels.formats.weights import CodedWeight
from pallas_kernels.gpu.launch import launch, lowered_once
from pallas_kernels.matmul import support
from pallas_kernels.matmul.mosaic_plan import EPILOGUE_WARPS, MATH_WARPS, MIN_SLOTS, PRODUCER_WARPS, Plan, Stage
from pallas_kernels.matmul.support import GROUP_SIZE

WARPGROUPS = (MATH_WARPS + PRODUCER_WARPS + EPILOGUE_WARPS) // 4


def unsupported(x: Array, weights: Sequence[CodedWeight]) -> str | None:
    if reason := no_mosaic_gpu() or support.unsupported_by_mosaic(x, weights):
        return reason
    rows, parameters = math.prod(x.shape[:-1]), support.parameters_of(weights[0])
    if plan_for(rows, x.shape[-1] // GROUP_SIZE, tuple(weight.shape[0] for weight in weights), parameters).slots < MIN_SLOTS:
        return f"has no room for {rows} rows beside weights in groups of {parameters.group_size}"
    return None


def coded_matmul(x: Float[Array, "*rows in"], weights: Sequence[CodedWeight]) -> Float[Array, "*rows out"]:
    rows = x.reshape(-1, x.shape[-1])
    outputs = tuple(weight.shape[0] for weight in weights)
    y = run(plan_for(rows.shape[0], x.shape[-1] // GROUP_SIZE, outputs, support.parameters_of(weights[0])), rows, weights)
    return y.reshape(*x.shape[:-1], -1)


def plan_for(rows: int, groups: int, outputs: tuple[int, ...], parameters: support.Parameters = support.DEFAULT_PARAMETERS) -> Plan:
    return Plan.fitting(rows, (Stage(groups, outputs),), multiprocessors(), parameters=parameters)


@lowered_once
def run(plan: Plan, x: Float[Array, "M in"], weights: Sequence[CodedWeight]) -> Float[Array, "M out"]:
    """The weights' outputs one after the other."""
    from pallas_kernels.matmul import mosaic_block

    emit = functools.partial(mosaic_block.emit_block, plan)
    inputs = {"x": x} | support.weight_inputs(weights)
    outputs = {"y": jax.ShapeDtypeStruct((plan.rows, plan.stages[0].width), x.dtype)}
    name = ("int4_matmul", "nested_matmul")[plan.parameters.planes - 1]
    return launch(name, emit, inputs, outputs, plan.blocks, WARPGROUPS, plan.layout.total)["y"]
