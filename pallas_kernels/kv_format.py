"""One layer of KV cache: its pytrees, the two 4-bit planes, quantize and dequantize in plain JAX.

Codes are packed along the axis that a matrix product of attention contracts: channels for keys, tokens for values, which
are stored transposed (channels before tokens). A byte pairs entries half a row apart, so that a kernel unpacks two contiguous
runs and never shuffles.

Source: QuantSpec (arXiv 2502.10424), section 4.2 and appendix, for the hierarchical format.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8


def pytree(*static: str):
    """A frozen dataclass registered with JAX; the fields named are static."""

    def register(cls):
        cls = dataclasses.dataclass(frozen=True)(cls)
        data = [f.name for f in dataclasses.fields(cls) if f.name not in static]
        return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(static))

    return register


@pytree()
class Lengths:
    """How much of each row is cached: tokens in the quantized region and in the full-precision buffer, [B] each."""

    quantized: Int[Array, "B"]
    buffered: Int[Array, "B"]

    @property
    def total(self) -> Int[Array, "B"]:
        return self.quantized + self.buffered


@pytree()
class FullLayer:
    """Keys (after RoPE) and values in full precision, [B, K, S, H] each: a plain cache, or the buffer of recent tokens."""

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]

    @classmethod
    def zeros(cls, batch: int, kv_heads: int, rows: int, head_dim: int, dtype) -> "FullLayer":
        # Two arrays, never one object twice: a donated buffer may be given away once only.
        shape = (batch, kv_heads, rows, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def append(self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K H"], offset: Int[Array, "B"]) -> "FullLayer":
        """Writes T tokens at row `offset[b]` of each batch row; the caller sees to it that offset + T <= S."""
        return FullLayer(_write_rows(self.keys, keys, offset), _write_rows(self.values, values, offset))


@pytree()
class Planes:
    """Upper and lower 4-bit codes with the scale and zero that both share.

    keys:   upper, lower [B, K, C, G, H/2];  scale, zero [B, K, C, H]   (a scale per channel and group of G tokens)
    values: upper, lower [B, K, C, H, G/2];  scale, zero [B, K, C, G]   (a scale per token)
    C is the capacity in groups. The lower code, -8..7, is stored plus 8.
    """

    upper: UInt8[Array, "..."]
    lower: UInt8[Array, "..."]
    scale: Float[Array, "..."]
    zero: Float[Array, "..."]


@pytree()
class HierarchicalLayer:
    """One layer's cache: the quantized region and the full-precision buffer of recent tokens."""

    keys: Planes
    values: Planes
    buffer: FullLayer

    @classmethod
    def zeros(cls, batch: int, kv_heads: int, groups: int, group_size: int, buffer_rows: int, head_dim: int, dtype) -> "HierarchicalLayer":
        def planes(codes: tuple[int, ...], parameters: tuple[int, ...]) -> Planes:
            lead = (batch, kv_heads, groups)
            return Planes(
                jnp.zeros(lead + codes, jnp.uint8),
                jnp.zeros(lead + codes, jnp.uint8),
                jnp.zeros(lead + parameters, parameter_dtype(dtype)),
                jnp.zeros(lead + parameters, parameter_dtype(dtype)),
            )

        return cls(
            planes((group_size, head_dim // 2), (head_dim,)),
            planes((head_dim, group_size // 2), (group_size,)),
            FullLayer.zeros(batch, kv_heads, buffer_rows, head_dim, dtype),
        )

    @property
    def group_size(self) -> int:
        return self.keys.upper.shape[-2]

    @property
    def groups(self) -> int:
        """Capacity of the quantized region, in groups."""
        return self.keys.upper.shape[2]


def parameter_dtype(dtype) -> jnp.dtype:
    """Dtype of scales and zeros: bfloat16 for 16-bit models (float16 overflows), else the model's own."""
    return jnp.dtype(jnp.bfloat16) if jnp.dtype(dtype).itemsize == 2 else jnp.dtype(dtype)


def accumulation_dtype(dtype) -> jnp.dtype:
    """Dtype of softmax, norms and quantization: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _write_rows(buffer: Array, rows: Float[Array, "B T K H"], offset: Int[Array, "B"]) -> Array:
    rows = jnp.swapaxes(rows, 1, 2).astype(buffer.dtype)
    return jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis=1))(buffer, rows, offset)


# Rounding ------------------------------------------------------------------------------------------------------------


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
    return jnp.where(_finite(x), rounded, x)


def round_down(x: Array, dtype) -> Array:
    """The largest value of `dtype` that is <= x, still in x's dtype."""
    return -round_up(-x, dtype)


def _finite(x: Array) -> Array:
    return jnp.abs(x) < jnp.inf


# Schemes: x, lowest and highest of its group, parameter dtype -> upper 0..15, lower -8..7, scale, zero ---------------
#
# Kernels call them too and shall give the same bits. So they are elementwise, without what Pallas lacks (floor, isfinite), and
# multiply by the reciprocal of a constant: XLA makes that of a division, other compilers do not.


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
    """What `quantize` stores, still in x's dtype. low, high: extremes of each value's group, NaN if it has one."""
    upper, lower, scale, zero = SCHEMES[scheme](x, low, high, dtype)
    finite = _finite(scale) & _finite(zero)
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


def quantize_groups(keys: Float[Array, "B K C G H"], values: Float[Array, "B K C G H"], *, scheme: str, dtype) -> tuple[Planes, Planes]:
    """Whole groups as the cache stores them: keys per channel over G tokens, values per token over the channels."""
    upper, lower, scale, zero = quantize(keys, -2, scheme=scheme, dtype=dtype)
    key_planes = Planes(pack(upper), pack(lower), scale.squeeze(-2), zero.squeeze(-2))
    upper, lower, scale, zero = quantize(jnp.swapaxes(values, -1, -2), -2, scheme=scheme, dtype=dtype)
    return key_planes, Planes(pack(upper), pack(lower), scale.squeeze(-2), zero.squeeze(-2))


def dequantize_groups(keys: Planes, values: Planes, *, planes: int, dtype) -> tuple[Array, Array]:
    """Keys and values [B, K, C, G, H] of packed groups, from the upper plane (planes=1) or both (planes=2)."""
    lower = unpack(keys.lower) if planes == 2 else None
    k = dequantize(unpack(keys.upper), lower, keys.scale[..., None, :], keys.zero[..., None, :], dtype)
    lower = unpack(values.lower) if planes == 2 else None
    v = dequantize(unpack(values.upper), lower, values.scale[..., None, :], values.zero[..., None, :], dtype)
    return k, jnp.swapaxes(v, -1, -2)
