"""Plain JAX: dequantize, then multiply."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.kv_format import accumulation_dtype
from pallas_kernels.weight_format import Int4Weight, dequantize_weight


def int4_matmul(x: Float[Array, "*rows in"], weight: Int4Weight) -> Float[Array, "*rows out"]:
    """See `pallas_kernels.matmul.int4_matmul`."""
    wide = accumulation_dtype(x.dtype)
    # Or XLA dequantizes once, before the decode loop, and keeps every weight in full precision through it.
    x, weight = lax.optimization_barrier((x, weight))
    return jnp.matmul(x.astype(wide), dequantize_weight(weight, wide).T, precision=lax.Precision.HIGHEST).astype(x.dtype)
