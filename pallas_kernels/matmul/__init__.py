"""Linear layers: activations times weights in full precision, in INT4 by groups, or in INT8."""

import math
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.weights import Int4Weight, Int8Weight, Weight
from pallas_kernels.matmul import mosaic_int8_plan, mosaic_plain

GPU_IMPLEMENTATIONS = ("mosaic_gpu", "triton")
# Few rows times weights that are not INT4.
PLAIN_IMPLEMENTATIONS, INT8_IMPLEMENTATIONS = ("mosaic_plain",), ("mosaic_int8",)


def linear(
    x: Float[Array, "*rows in"],
    weights: Sequence[Weight],
    biases: Sequence[Float[Array, "out"]] = (),
    *,
    dtype=None,
    summed_over: str | None = None,
) -> Float[Array, "*rows out"]:
    """The outputs x @ weight.T + bias of linear layers with the same input, one after the other in the last axis.

    weights: [out, in] in any format; where all are INT4, or the rows few, they may share a launch. biases: one for each weight, or none
    at all. dtype: of the result, x's by default; outputs of INT4 weights are rounded to x's dtype before. summed_over: the axis of a mesh
    over whose devices the inputs are divided, within `jax.shard_map`: what each device makes of its own is added up before the biases.
    None: they are not divided.
    Raises ValueError where there are biases for some of the weights only.
    """
    if biases and len(biases) != len(weights):
        raise ValueError(f"linear: {len(biases)} biases for {len(weights)} weights, should be as many or none")
    y = _multiply(x, weights, x.dtype if dtype is None else dtype)
    if summed_over is not None:
        y = lax.psum(y, summed_over)
    return y + jnp.concatenate(biases) if biases else y


def gated_linear(
    x: Float[Array, "*rows in"], gate: Weight, up: Weight, biases: Sequence[Float[Array, "out"]] = ()
) -> Float[Array, "*rows out"]:
    """silu(x @ gate.T) * (x @ up.T), in x's dtype: the first half of an MLP. Both products are rounded to that dtype before.

    gate, up: [out, in] in any format. biases: of both, added to the products, or none at all.
    Raises ValueError where the weights have not as many outputs, or where there is only one bias.
    """
    if gate.shape[0] != up.shape[0]:
        raise ValueError(f"gated_linear: {gate.shape[0]} outputs of gate and {up.shape[0]} of up, should be as many")
    if not biases and _plain(gate, up):
        return _skinny(x, [gate, up], x.dtype, int8=False).gated_matmul(x, gate, up)
    gate, up = jnp.split(linear(x, [gate, up], biases), 2, axis=-1)
    return jax.nn.silu(gate) * up


def int4_matmul(
    x: Float[Array, "*rows in"], weights: Sequence[Int4Weight], *, implementation: Implementation = "auto"
) -> Float[Array, "*rows out"]:
    """x @ weight.T for each weight, one after the other in the last axis, accumulated in at least float32, in x's dtype.

    One launch computes all of them, where a kernel runs.
    Raises ValueError where the implementation asked for does not support the device or the shapes.
    """
    return choose("matmul", GPU_IMPLEMENTATIONS, implementation, x, weights).int4_matmul(x, weights)


def _multiply(x: Array, weights: Sequence[Weight], dtype) -> Array:
    """The outputs without biases."""
    every = lambda kind: all(isinstance(weight, kind) for weight in weights)
    if every(Int4Weight):
        return int4_matmul(x, weights).astype(dtype)
    if every(Int8Weight) or _plain(*weights):
        return _skinny(x, weights, dtype, int8=every(Int8Weight)).skinny_matmul(x, weights, dtype=dtype)
    return jnp.concatenate([_multiply(x, [weight], dtype) for weight in weights], axis=-1)


def _plain(*weights: Weight) -> bool:
    return not any(isinstance(weight, Int4Weight | Int8Weight) for weight in weights)


def _skinny(x: Array, weights: Sequence[Weight], dtype, *, int8: bool) -> ModuleType:
    """The module that multiplies by these weights, none of which is INT4: XLA's where that is faster (docs/kernels/matmul.md)."""
    rows = math.prod(x.shape[:-1])
    if int8:
        candidates = INT8_IMPLEMENTATIONS if rows == 1 or 8 < rows <= mosaic_int8_plan.MAX_ROWS else ()
    else:
        candidates = PLAIN_IMPLEMENTATIONS if 1 < rows <= mosaic_plain.MAX_ROWS else ()
    return choose("matmul", candidates, "auto", x, weights, dtype=dtype, slow_reference=False)  # XLA is not slow
