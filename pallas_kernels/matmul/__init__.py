"""Activations times group-quantized INT4 weights."""

from jaxtyping import Array, Float

from pallas_kernels.matmul import reference
from pallas_kernels.weight_format import Int4Weight


def int4_matmul(x: Float[Array, "*rows in"], weight: Int4Weight) -> Float[Array, "*rows out"]:
    """x @ weight.T, accumulated in at least float32, in x's dtype."""
    return reference.int4_matmul(x, weight)
