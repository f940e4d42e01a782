"""Activations times group-quantized INT4 weights."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.weights import Int4Weight

GPU_IMPLEMENTATIONS = ("mosaic_gpu", "triton")


def int4_matmul(
    x: Float[Array, "*rows in"], weights: Sequence[Int4Weight], *, implementation: Implementation = "auto"
) -> Float[Array, "*rows out"]:
    """x @ weight.T for each weight, one after the other in the last axis, accumulated in at least float32, in x's dtype.

    One launch for all, where a kernel runs.

    Raises ValueError where the implementation asked for does not support the device or the shapes.
    """
    return choose("matmul", GPU_IMPLEMENTATIONS, implementation, x, weights).int4_matmul(x, weights)
