"""Residual connection and RMSNorm in plain JAX, with the roundings of Hugging Face's models."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats.rounding import accumulation_dtype


def add_rms_norm(
    x: Float[Array, "*rows D"], added: Float[Array, "*rows D"] | None, weight: Float[Array, "*n D"], *, eps: float
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    x = x if added is None else x + added
    wide = x.astype(accumulation_dtype(x.dtype))
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return x, weight * wide.astype(x.dtype)
