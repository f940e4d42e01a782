"""The INT4 matmul in plain JAX: dequantize, then multiply."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.formats.weights import Int4Weight, dequantize_weight


def int4_matmul(x: Float[Array, "*rows in"], weights: Sequence[Int4Weight]) -> Float[Array, "*rows out"]:
    """See `pallas_kernels.matmul.int4_matmul`."""
    wide = accumulation_dtype(x.dtype)
    # Or XLA dequantizes once, before the decode loop, and keeps every weight in full precision through it.
    x, weights = lax.optimization_barrier((x, tuple(weights)))
    product = lambda weight: jnp.matmul(x.astype(wide), dequantize_weight(weight, wide).T, precision=lax.Precision.HIGHEST)
    return jnp.concatenate([product(weight).astype(x.dtype) for weight in weights], axis=-1)
