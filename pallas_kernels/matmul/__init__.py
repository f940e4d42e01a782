"""Linear layers: activations times weights in full precision, in INT4 by groups, or in INT8."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.weights import Int4Weight, Int8Weight, Weight
from pallas_kernels.matmul.mosaic_skinny_plan import MAX_ROWS

GPU_IMPLEMENTATIONS = ("mosaic_gpu", "triton")
SKINNY_IMPLEMENTATIONS = ("mosaic_skinny",)  # few rows times weights that are not INT4


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
    at all. dtype: the result's where weights are not INT4; x's by default. summed_over: the axis of a mesh over whose devices the inputs
    are divided, within `jax.shard_map`: what each device makes of its own is added up before the biases. None: they are not divided.
    Raises ValueError where there are biases for some of the weights only.
    """
    if biases and len(biases) != len(weights):
        raise ValueError(f"linear: {len(biases)} biases for {len(weights)} weights, should be as many or none")
    y = _multiply(x, weights, x.dtype if dtype is None else dtype)
    if summed_over is not None:
        y = lax.psum(y, summed_over)
    return y + jnp.concatenate(biases) if biases else y


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
    if every(Int8Weight) or not any(isinstance(weight, Int4Weight | Int8Weight) for weight in weights):
        rows = math.prod(x.shape[:-1])
        candidates = SKINNY_IMPLEMENTATIONS if _faster_than_xla(rows, len(weights), int8=every(Int8Weight)) else ()
        module = choose("matmul", candidates, "auto", x, weights, dtype=dtype, slow_reference=False)  # XLA is not slow
        return module.skinny_matmul(x, weights, dtype=dtype)
    return jnp.concatenate([_multiply(x, [weight], dtype) for weight in weights], axis=-1)


def _faster_than_xla(rows: int, weights: int, *, int8: bool) -> bool:
    """Whether `SKINNY_IMPLEMENTATIONS` are taken for so many rows and weights that share them, as an H200 has it (docs/kernels.md, "Skinny
    matmul")."""
    if int8:
        return rows == 1 or 8 < rows <= MAX_ROWS
    return weights > 1 and 1 < rows <= MAX_ROWS
