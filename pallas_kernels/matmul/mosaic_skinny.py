"""Matmul with plain bfloat16 or with INT8 weights on NVIDIA Hopper in Pallas Mosaic GPU, for few rows: the weights are read once.

A block owns tiles of 8 outputs and keeps the activations in shared memory. Where they have no room there, the blocks of a cluster divide
the inputs among them and add their sums at the end. Which block adds what in which order is the same in every launch.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array, Float

from pallas_kernels.dispatch import multiprocessors, no_mosaic_gpu
from pallas_kernels.formats.weights import Int8Weight
from pallas_kernels.gpu.launch import launch
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.mosaic_skinny_plan import MAX_ROWS, TILE, UNIT_BYTES, WARPS, Plan


def unsupported(x: Array, weights: Sequence[Array | Int8Weight], *, dtype) -> str | None:
    """Why this kernel cannot run on these arguments here, or None. weights: all plain, or all INT8."""
    if reason := no_mosaic_gpu():
        return reason
    if others := {jnp.dtype(a.dtype).name for a in (x, *([] if int8(weights) else weights))} - {"bfloat16"}:
        return f"needs activations and plain weights in bfloat16, not {', '.join(sorted(others))}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"gives bfloat16 or float32, not {jnp.dtype(dtype).name}"
    if not 1 <= (rows := math.prod(x.shape[:-1])) <= MAX_ROWS:
        return f"supports up to {MAX_ROWS} rows, not {rows}"
    if x.shape[-1] % (unit := UNIT_BYTES // (1 if int8(weights) else 2)) or x.shape[-1] == 0:
        return f"supports inputs in multiples of {unit}, not {x.shape[-1]}"
    if others := [weight.shape for weight in weights if weight.shape[1:] != x.shape[-1:]]:
        return f"needs weights [outputs, {x.shape[-1]}], not {list(others[0])}"
    if others := [weight.shape[0] for weight in weights if weight.shape[0] % TILE or weight.shape[0] == 0]:
        return f"supports outputs in multiples of {TILE}, not {others[0]}"
    if any(_divided(jax.typeof(a).sharding.mesh) for a in jax.tree.leaves((x, weights))):
        return "needs all weights on one device"
    return None if plan_for(x, weights, dtype) else f"has no room in shared memory for {rows} rows of {x.shape[-1]} inputs and their sums"


def skinny_matmul(x: Float[Array, "*rows in"], weights: Sequence[Array | Int8Weight], *, dtype) -> Float[Array, "*rows out"]:
    """x @ weight.T for each weight, one after the other in the last axis, accumulated in float32, in `dtype`."""
    y = _transformable(plan_for(x, weights, dtype))(x.reshape(-1, x.shape[-1]), tuple(weights))
    return y.reshape(*x.shape[:-1], -1)


def _transformable(plan: Plan) -> Callable[[Array, Sequence[Array | Int8Weight]], Array]:
    """`run` with this plan. Under jax.vmap XLA multiplies instead, for all rows at once; derivatives are XLA's, values this kernel's."""
    xla = functools.partial(reference.skinny_matmul, dtype=plan.dtype)
    kernel = custom_vmap(functools.partial(run, plan))

    @kernel.def_vmap
    def multiply_by_xla(size, in_batched, *arguments):
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        return jax.vmap(xla, in_axes=axes, axis_size=size)(*arguments), True

    product = jax.custom_jvp(kernel)
    product.defjvp(lambda values, tangents: (product(*values), jax.jvp(xla, values, tangents)[1]))
    return product


def plan_for(x: Array, weights: Sequence[Array | Int8Weight], dtype) -> Plan | None:
    outputs, float32_out = tuple(weight.shape[0] for weight in weights), jnp.dtype(dtype) == jnp.float32
    return Plan.fitting(math.prod(x.shape[:-1]), x.shape[-1], outputs, multiprocessors(), float32_out, int8(weights))


def int8(weights: Sequence[Array | Int8Weight]) -> bool:
    return isinstance(weights[0], Int8Weight)


def _divided(mesh: AbstractMesh) -> bool:
    """Whether arrays of a mesh may be sharded: within jax.shard_map each device has its own."""
    return any(size > 1 and kind != AxisType.Manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types))


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnums=0)
def run(plan: Plan, x: Float[Array, "M in"], weights: Sequence[Array | Int8Weight]) -> Float[Array, "M out"]:
    """The weights' outputs one after the other."""
    from pallas_kernels.matmul import mosaic_skinny_block

    emit = functools.partial(mosaic_skinny_block.emit_block, plan)
    inputs = {"x": x} | {f"weight{i}": weight.codes if plan.int8 else weight for i, weight in enumerate(weights)}
    if plan.int8:
        inputs |= {f"scale{i}": weight.scale.astype(jnp.float32) for i, weight in enumerate(weights)}
    outputs = {"y": jax.ShapeDtypeStruct((plan.rows, plan.width), plan.dtype)}
    return launch("skinny_matmul", emit, inputs, outputs, plan.blocks, WARPS // 4, plan.shared_bytes, cluster=plan.cluster)["y"]
