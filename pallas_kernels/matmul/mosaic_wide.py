"""Matmul with INT4 or nested weights on NVIDIA Hopper in Pallas Mosaic GPU, for up to 64 rows, as of a batch.

Codes become weights in bfloat16 on their way to the tensor cores.
A block owns tiles of up to 64 outputs a warpgroup, which multiplies them by all rows at once. Weights are read once. Activations have no
room in a block and stream through it with the codes. Where tiles are few, the blocks of a cluster divide the inputs and add their sums.
"""

import functools
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import multiprocessors, no_mosaic_gpu
from pallas_kernels.formats.weights import CodedWeight
from pallas_kernels.gpu.launch import launch, lowered_once
from pallas_kernels.matmul import support
from pallas_kernels.matmul.mosaic_wide_plan import MAX_ROWS, STEP_GROUPS, Config, Plan
from pallas_kernels.matmul.support import GROUP_SIZE


def unsupported(x: Array, weights: Sequence[CodedWeight]) -> str | None:
    if reason := no_mosaic_gpu() or support.unsupported_by_mosaic(x, weights, MAX_ROWS):
        return reason
    if (groups := x.shape[-1] // GROUP_SIZE) % STEP_GROUPS:
        return f"supports inputs in an even number of groups of {GROUP_SIZE}, not {groups}"
    return None


def coded_matmul(x: Float[Array, "*rows in"], weights: Sequence[CodedWeight], *, config: Config | None = None) -> Float[Array, "*rows out"]:
    """See `pallas_kernels.matmul.coded_matmul`.

    config: how the work is divided, by default as `Plan.fitting` has it. Raises ValueError for one that does not fit the shapes.
    """
    rows = x.reshape(-1, x.shape[-1])
    shape = rows.shape[0], x.shape[-1] // GROUP_SIZE, tuple(weight.shape[0] for weight in weights), multiprocessors()
    kind = support.parameters_of(weights[0])
    plan = Plan.fitting(*shape, kind) if config is None else Plan(*shape, config, kind)
    if not plan.fits:
        raise ValueError(f"{config} does not fit {shape[0]} rows and weights {[weight.shape for weight in weights]}")
    return run(plan, rows, tuple(weights)).reshape(*x.shape[:-1], -1)


@lowered_once
def run(plan: Plan, x: Float[Array, "M in"], weights: Sequence[CodedWeight]) -> Float[Array, "M out"]:
    """The weights' outputs one after the other."""
    from pallas_kernels.matmul import mosaic_wide_block

    emit = functools.partial(mosaic_wide_block.emit_block, plan)
    inputs = {"x": x} | support.weight_inputs(weights)
    outputs = {"y": jax.ShapeDtypeStruct((plan.rows, plan.width), x.dtype)}
    cluster = plan.config.cluster
    return launch(
        ("int4_matmul_wide", "nested_matmul_wide")[plan.parameters.planes - 1],
        emit,
        inputs,
        outputs,
        plan.blocks,
        plan.warps // 4,
        plan.layout.total,
        cluster=cluster,
    )["y"]
