"""Matmuls in plain JAX. INT4 and nested weights are dequantized first; XLA converts INT8 codes as it multiplies."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.formats.weights import CodedWeight, Int8Weight, dequantize_weight
from pallas_kernels.matmul.support import INT4_ROWS


def coded_matmul(x: Float[Array, "*rows in"], weights: Sequence[CodedWeight]) -> Float[Array, "*rows out"]:
    wide = accumulation_dtype(x.dtype)
    # Or XLA dequantizes once, before the decode loop, and keeps every weight in full precision through it.
    x, weights = lax.optimization_barrier((x, tuple(weights)))

    def product(weight):
        if math.prod(x.shape[:-1]) > INT4_ROWS and x.dtype != wide:
            # Weights are rounded to x's dtype, in which tensor cores are many times as fast.
            return jnp.matmul(x, dequantize_weight(weight, wide).astype(x.dtype).T, preferred_element_type=wide)
        return jnp.matmul(x.astype(wide), dequantize_weight(weight, wide).T, precision=lax.Precision.HIGHEST)

    return jnp.concatenate([product(weight).astype(x.dtype) for weight in weights], axis=-1)


def skinny_matmul(x: Float[Array, "*rows in"], weights: Sequence[Array | Int8Weight], *, dtype) -> Float[Array, "*rows out"]:
    """x @ weight.T for each weight, plain or INT8, one after the other in the last axis, in `dtype`."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))

    # HIGHEST: a GPU would otherwise round float32 operands to tf32.
    def product(weight):
        return lax.dot_general(x, weight, contract, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)

    def coded(weight):
        return product(weight.codes.astype(x.dtype)) * weight.scale.astype(dtype)

    return jnp.concatenate([(coded if isinstance(weight, Int8Weight) else product)(weight) for weight in weights], axis=-1)


def gated_matmul(x: Float[Array, "*rows in"], gate: Array, up: Array) -> Float[Array, "*rows out"]:
    """See `pallas_kernels.matmul.gated_linear`, of plain weights."""
    gate, up = jnp.split(skinny_matmul(x, [gate, up], dtype=x.dtype), 2, axis=-1)
    return jax.nn.silu(gate) * up
