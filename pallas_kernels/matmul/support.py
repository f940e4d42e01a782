"""The arguments that the GPU kernels of matmul take: those with INT4 weights, and those of few rows with others."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.formats.weights import Int4Weight, Int8Weight

GROUP_SIZE = 128
MAX_ROWS = 16  # of the kernels for few rows
FEW_ROWS = 64  # up to which there are kernels for INT4 weights
OUTPUTS = 16  # a weight has a multiple of these


def unsupported(x: Array, weights: Sequence[Int4Weight], max_rows: int = MAX_ROWS) -> str | None:
    """Why no kernel for up to `max_rows` rows runs on these arguments, or None."""
    if others := {a.dtype.name for a in (x, *(p for w in weights for p in (w.scale, w.zero)))} - {"bfloat16"}:
        return f"needs activations, scales and zeros in bfloat16, not {', '.join(sorted(others))}"
    rows = math.prod(x.shape[:-1])
    if not 1 <= rows <= max_rows:
        return f"supports up to {max_rows} rows, not {rows}"
    if others := {weight.in_features for weight in weights} - {x.shape[-1]}:
        return f"needs weights of as many inputs as there are activations, {x.shape[-1]}, not {', '.join(map(str, sorted(others)))}"
    for weight in weights:
        out, groups, half = weight.codes.shape
        if 2 * half != GROUP_SIZE or groups * GROUP_SIZE != weight.in_features:
            return f"supports inputs in whole groups of {GROUP_SIZE}, not {weight.in_features} in groups of {2 * half}"
        if out % OUTPUTS:
            return f"supports outputs in multiples of {OUTPUTS}, not {out}"
    return None


def weight_inputs(weights: Sequence[Int4Weight], stage: int = 0) -> dict[str, Array]:
    """The arrays of weights as a launch's inputs: "codes0_1" are the codes of weight 1 of stage 0."""
    return {f"{name}{stage}_{i}": getattr(weight, name) for i, weight in enumerate(weights) for name in ("codes", "scale", "zero")}


def unsupported_skinny(
    x: Array, weights: Sequence[Array | Int8Weight], dtype: DTypeLike, *, max_rows: int, inputs: int, outputs: int
) -> str | None:
    """Why no kernel for up to `max_rows` rows and weights that are not INT4 runs on these arguments, or None. inputs, outputs: what there
    must be multiples of."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"gives bfloat16 or float32, not {jnp.dtype(dtype).name}"
    if not 1 <= (rows := math.prod(x.shape[:-1])) <= max_rows:
        return f"supports up to {max_rows} rows, not {rows}"
    if x.shape[-1] % inputs or x.shape[-1] == 0:
        return f"supports inputs in multiples of {inputs}, not {x.shape[-1]}"
    if others := [weight.shape for weight in weights if weight.shape[1:] != x.shape[-1:]]:
        return f"needs weights [outputs, {x.shape[-1]}], not {list(others[0])}"
    if others := [weight.shape[0] for weight in weights if weight.shape[0] % outputs or weight.shape[0] == 0]:
        return f"supports outputs in multiples of {outputs}, not {others[0]}"
    if any(_divided(jax.typeof(array).sharding.mesh) for array in jax.tree.leaves((x, weights))):
        return "needs all arrays on one device"
    return None


def _divided(mesh: AbstractMesh) -> bool:
    """Whether arrays of a mesh may be sharded: within jax.shard_map each device has its own."""
    return any(size > 1 and kind != AxisType.Manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types))
