"""The arguments that the GPU kernels of matmul take: those with INT4 weights, and those of few rows with others."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.formats.weights import CodedWeight, Int8Weight, NestedWeight, upper_plane

GROUP_SIZE = 128
GROUP_SIZES = (128, 64, 32)  # of weights that some kernel multiplies
MAX_ROWS = 16  # of the kernels that have no limit of their own: mosaic_gpu and triton
INT4_ROWS = 64  # up to which some kernel multiplies by INT4 weights; more rows are left to XLA
OUTPUTS = 16  # a weight has a multiple of these
PLANES = "codes", "lower"  # a launch's inputs of codes (`weight_inputs`), the upper plane's or those of INT4 first
DTYPES = (("bfloat16", "bfloat16"), ("bfloat16", "int16"), ("float16", "int16"))  # of scales and zeros; in int16 they are zero points


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What scales and zeros a weight has, and which planes.

    Attributes:
        scale, zero: the dtypes of scales and zeros.
        group_size: inputs that share them.
        lower_steps: `NestedWeight.steps`; None: there is no lower plane.
    """

    scale: str = "bfloat16"
    zero: str = "bfloat16"
    group_size: int = GROUP_SIZE
    lower_steps: int | None = None

    @property
    def subgroups(self) -> int:
        """Scales of GROUP_SIZE inputs, which kernels take at once."""
        return GROUP_SIZE // self.group_size

    @property
    def planes(self) -> int:
        """Planes of codes: two of a nested weight."""
        return 1 if self.lower_steps is None else 2


DEFAULT_PARAMETERS = Parameters()


def unsupported(
    x: Array, weights: Sequence[CodedWeight], max_rows: int = MAX_ROWS, group_sizes: tuple[int, ...] = (GROUP_SIZE,)
) -> str | None:
    """Why no kernel for up to `max_rows` rows and groups of these sizes runs on these arguments, or None."""
    if x.dtype != jnp.bfloat16:
        return f"needs activations in bfloat16, not {x.dtype.name}"
    kind = parameters_of(weights[0])
    if (kind.scale, kind.zero) not in DTYPES:
        return f"needs scales in bfloat16, or in bfloat16 or float16 with zero points in int16, not {kind.scale} with zeros in {kind.zero}"
    if not alike(weights):
        return "needs weights whose groups have one size, whose scales and zeros have the same dtypes, and whose planes are alike"
    rows = math.prod(x.shape[:-1])
    if not 1 <= rows <= max_rows:
        return f"supports up to {max_rows} rows, not {rows}"
    if others := {weight.in_features for weight in weights} - {x.shape[-1]}:
        return f"needs weights of {x.shape[-1]} inputs, the number of activations, not {', '.join(map(str, sorted(others)))}"
    for weight in weights:
        out, groups, half = upper_plane(weight).codes.shape
        if 2 * half not in group_sizes or 2 * half * groups != weight.in_features:
            sizes = " or ".join(map(str, group_sizes))
            return f"supports inputs in whole groups of {sizes}, not {weight.in_features} in groups of {2 * half}"
        if out % OUTPUTS:
            return f"supports outputs in multiples of {OUTPUTS}, not {out}"
    return None


def parameters_of(weight: CodedWeight) -> Parameters:
    """The parameters of a weight."""
    upper, lower_steps = upper_plane(weight), weight.steps if isinstance(weight, NestedWeight) else None
    return Parameters(upper.scale.dtype.name, upper.zero.dtype.name, 2 * upper.codes.shape[2], lower_steps)


def alike(weights: Sequence[CodedWeight]) -> bool:
    """Whether one launch can have these weights: their parameters are the same."""
    return len({parameters_of(weight) for weight in weights}) <= 1


def unsupported_by_mosaic(x: Array, weights: Sequence[CodedWeight], max_rows: int = MAX_ROWS) -> str | None:
    """Why no kernel in Pallas Mosaic GPU for up to `max_rows` rows runs on these arguments, or None."""
    if reason := unsupported(x, weights, max_rows, GROUP_SIZES):
        return reason
    if (inputs := x.shape[-1]) % GROUP_SIZE:
        return f"supports inputs in multiples of {GROUP_SIZE}, not {inputs}"
    kind = parameters_of(weights[0])
    if kind.planes == 2 and (kind.scale, kind.zero) != ("bfloat16", "bfloat16"):
        return f"needs scales and zeros of nested weights in bfloat16, not {kind.scale} and {kind.zero}"
    return None


def weight_inputs(weights: Sequence[CodedWeight], stage: int = 0) -> dict[str, Array]:
    """The arrays of weights as a launch's inputs: "codes0_1" are the codes of weight 1 of stage 0, "lower0_1" those of its lower plane."""
    found = {}
    for i, weight in enumerate(weights):
        found |= {f"{name}{stage}_{i}": getattr(upper_plane(weight), name) for name in ("codes", "scale", "zero")}
        if isinstance(weight, NestedWeight):
            found[f"lower{stage}_{i}"] = weight.lower
    return found


def unsupported_skinny(
    x: Array, weights: Sequence[Array | Int8Weight], dtype: DTypeLike, *, max_rows: int, inputs: int, outputs: int
) -> str | None:
    """Why no kernel for up to `max_rows` rows and weights that are not INT4 runs on these arguments, or None. inputs, outputs: what there
    must be multiples of."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"gives bfloat16 or float32, not {jnp.dtype(dtype).name}"
    if not (rows := math.prod(x.shape[:-1])):
        return "needs a row"
    if rows > max_rows:
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
