"""The two 4-bit planes: quantize, dequantize and pack in plain JAX.

Source: QuantSpec (arXiv 2502.10424), section 4.2 and appendix D, for the hierarchical format.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.formats.rounding import accumulation_dtype, is_finite, round_down, round_up


def _smallest_scale(dtype) -> float:
    # A constant group has range 0; and what XLA on a CPU flushes to zero must be next to nothing of scale / 16.
    return 2**20 * float(jnp.finfo(dtype).tiny)


def _paper(x: Array, low: Array, high: Array, dtype) -> tuple[Array, Array, Array, Array]:
    """Equations of the paper: asymmetric 4-bit rounding, then the rounding error to 4 bits at scale / 16."""
    # The residual must absorb the rounding of the parameters, so quantize against the stored ones: they must enclose x.
    zero = round_down(low, dtype)
    scale = round_up(jnp.maximum((high - zero) * (1 / 15), _smallest_scale(dtype)), dtype)
    upper = jnp.rint(jnp.clip((x - zero) / scale, 0, 15))
    lower = jnp.rint(jnp.clip((x - zero - upper * scale) / (scale / 16), -8, 7))
    return upper, lower, scale, zero


def _int8_first(x: Array, low: Array, high: Array, dtype) -> tuple[Array, Array, Array, Array]:
    """Rounds to 8 bits once and splits the code: the same format, 255 steps instead of 240, error at most half a step."""
    # The 8 steps rounded too: compilers that fuse multiplication and addition then agree with those that do not.
    zero = round_down(low + round_down((high - low) * (8 / 255), dtype), dtype)
    step = jnp.maximum((high - zero) * (1 / 247), (zero - low) / 8)
    scale = round_up(jnp.maximum(16 * step, _smallest_scale(dtype)), dtype)
    code = jnp.clip(jnp.rint((x - zero) / (scale / 16)), -8, 247)
    upper = jnp.rint((code + 0.5) / 16)
    return upper, code - 16 * upper, scale, zero


Scheme = Callable[[Array, Array, Array, jnp.dtype], tuple[Array, Array, Array, Array]]
SCHEMES: dict[str, Scheme] = {"paper": _paper, "int8_first": _int8_first}


def quantize(x: Float[Array, "..."], axis: int, *, scheme: str, dtype) -> tuple[Array, Array, Array, Array]:
    """Quantizes groups that span `axis` into two 4-bit planes.

    Returns upper (uint8, 0..15), lower (uint8, the code plus 8), scale and zero (`dtype`, `axis` of size 1). The error
    of both planes is at most one step of the stored scale / 16. A group with a non-finite value, or whose range is no
    finite number, gets a NaN scale: it reads as NaN, and no other group changes.
    """
    wide = x.astype(accumulation_dtype(x.dtype))
    # Whether a minimum hands on a NaN depends on the device.
    low = jnp.where(jnp.isfinite(wide).all(axis, keepdims=True), wide.min(axis, keepdims=True), jnp.nan)
    upper, lower, scale, zero = encode(wide, low, wide.max(axis, keepdims=True), scheme=scheme, dtype=jnp.dtype(dtype))
    return upper.astype(jnp.uint8), lower.astype(jnp.uint8), scale.astype(dtype), zero.astype(dtype)


def encode(x: Array, low: Array, high: Array, *, scheme: str, dtype) -> tuple[Array, Array, Array, Array]:
    """The upper and lower codes, scale and zero that `quantize` stores, still in x's dtype.

    low, high: extremes of each value's group, NaN if it has one.
    """
    upper, lower, scale, zero = SCHEMES[scheme](x, low, high, dtype)
    finite = is_finite(scale) & is_finite(zero)
    return jnp.where(finite, upper, 0), jnp.where(finite, lower + 8, 8), jnp.where(finite, scale, jnp.nan), jnp.where(finite, zero, 0)


def dequantize(upper: Array, lower: Array | None, scale: Array, zero: Array, dtype) -> Array:
    """upper * scale + zero, or with the lower plane (16 upper + lower) * scale / 16 + zero; computed in `dtype`."""
    scale, zero = scale.astype(dtype), zero.astype(dtype)
    if lower is None:
        return upper.astype(dtype) * scale + zero
    return (16 * upper.astype(jnp.int16) + lower.astype(jnp.int16) - 8).astype(dtype) * (scale / 16) + zero


def pack(codes: UInt8[Array, "..."]) -> UInt8[Array, "..."]:
    """Packs 4-bit codes two to a byte along the last axis (even): entry i in the low, entry i + half in the high nibble."""
    low, high = jnp.split(codes, 2, -1)
    return low | (high << 4)


def unpack(packed: UInt8[Array, "..."]) -> UInt8[Array, "..."]:
    """The inverse of `pack`."""
    return jnp.concatenate([packed & 15, packed >> 4], -1)
