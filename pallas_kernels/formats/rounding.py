"""Dtypes of what is stored and of what is computed, and rounding in one direction."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def parameter_dtype(dtype) -> jnp.dtype:
    """Dtype of scales and zeros: bfloat16 for 16-bit models (float16 overflows), else the model's own. Keys in 1 or 2 bits have another
    (`low_bits.key_parameter_dtype`)."""
    return jnp.dtype(jnp.bfloat16) if jnp.dtype(dtype).itemsize == 2 else jnp.dtype(dtype)


def accumulation_dtype(dtype) -> jnp.dtype:
    """Dtype of softmax, norms and quantization: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def round_up(x: Array, dtype) -> Array:
    """The smallest value of `dtype` that is >= x, still in x's dtype (float32 to bfloat16; other pairs are exact)."""
    if dtype == x.dtype:
        return x
    # On the bits, not by a cast and back: XLA may drop such a pair of casts.
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    truncated = bits & jnp.uint32(0xFFFF0000)
    # The sign too: XLA on a CPU takes a subnormal for zero in comparisons.
    away = (truncated != bits) & (bits < jnp.uint32(0x80000000))
    rounded = lax.bitcast_convert_type(jnp.where(away, truncated + jnp.uint32(0x10000), truncated), jnp.float32)
    return jnp.where(is_finite(x), rounded, x)


def round_down(x: Array, dtype) -> Array:
    """The largest value of `dtype` that is <= x, still in x's dtype."""
    return -round_up(-x, dtype)


def is_finite(x: Array) -> Array:
    return jnp.abs(x) < jnp.inf
