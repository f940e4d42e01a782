"""One layer of KV cache and its quantizer: the pytrees, the two 4-bit planes, quantize and dequantize in plain JAX.

Codes are packed along the axis that a matrix product of attention contracts: channels for keys, tokens for values, which
are stored transposed (channels before tokens). A byte pairs entries half a row apart, so that a kernel unpacks two contiguous
runs and never shuffles.

Source: QuantSpec (arXiv 2502.10424), section 4.2 and appendix D, for the hierarchical format."""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt8

from pallas_kernels.formats.pytree import pytree
from pallas_kernels.formats.quantization import dequantize, pack, quantize, unpack
from pallas_kernels.formats.rounding import parameter_dtype


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
    """Keys (after RoPE) and values in full precision, [B, K, S, H] each: a plain cache, which is its own buffer, or the buffer of recent
    tokens."""

    groups: ClassVar[int] = 0

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]

    @classmethod
    def zeros(cls, batch: int, kv_heads: int, rows: int, head_dim: int, dtype) -> "FullLayer":
        # Two arrays, never one object twice: a donated buffer may be given away once only.
        shape = (batch, kv_heads, rows, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def buffer(self) -> "FullLayer":
        return self

    def with_buffer(self, buffer: "FullLayer") -> "FullLayer":
        return buffer

    def append(self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K H"], offset: Int[Array, "B"]) -> "FullLayer":
        """Writes T tokens at row `offset[b]` of each batch row; the caller sees to it that offset + T <= S."""
        return FullLayer(_write_rows(self.keys, keys, offset), _write_rows(self.values, values, offset))

    def read(
        self, rows: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None
    ) -> tuple[Float[Array, "R K T H"], Float[Array, "R K T H"]]:
        """Keys and values of these rows; a number beyond either end means the row at that end. batch_rows: of the batch; None: all."""
        rows = jnp.clip(rows, 0, self.keys.shape[2] - 1)
        return take(self.keys, rows, batch_rows), take(self.values, rows, batch_rows)


@pytree()
class Planes:
    """Upper and lower 4-bit codes with the scale and zero that both share.

    keys:   upper, lower [B, K, C, G, H/2];  scale, zero [B, K, C, H]   (a scale per channel and group of G tokens)
    values: upper, lower [B, K, C, H, G/2];  scale, zero [B, K, C, G]   (a scale per token)
    C is the capacity in groups. Where rows share a pool of P pages, the arrays begin with [P, K, 1] instead of [B, K, C]. The lower code,
    -8..7, is stored plus 8.
    """

    upper: UInt8[Array, "..."]
    lower: UInt8[Array, "..."]
    scale: Float[Array, "..."]
    zero: Float[Array, "..."]


@pytree()
class HierarchicalLayer:
    """One layer's cache: the quantized region and the full-precision buffer of recent tokens.

    Attributes:
        pages: None where each row has room of its own for C groups. Otherwise the rows share a pool of P pages, each of which has room for
            one group of every KV head, and pages[b, c] is the page that holds group c of row b (see `Planes`).
        shared_groups: how many of the first groups all rows have in the same pages, the same number for each row: they can be read once for
            all rows. None: each row is read for itself.
    """

    keys: Planes
    values: Planes
    buffer: FullLayer
    pages: Int[Array, "B C"] | None = None
    shared_groups: Int[Array, "B"] | None = None

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

    def with_buffer(self, buffer: FullLayer) -> Self:
        return dataclasses.replace(self, buffer=buffer)

    @property
    def group_size(self) -> int:
        return self.keys.upper.shape[-2]

    @property
    def groups(self) -> int:
        """Capacity of the quantized region of a row, in groups."""
        return self.keys.upper.shape[2] if self.pages is None else self.pages.shape[1]

    def places(self, groups: Int[Array, "#R #K n"], batch_rows: Int[Array, "R"] | None = None) -> tuple[Array, Array, Array]:
        """Where groups lie: the first three indices of each in the arrays of `Planes`.

        groups: their numbers in the row, 0 to C - 1, for each row and KV head. batch_rows: these rows of the batch; None: all.
        """
        B, K = self.buffer.keys.shape[:2]
        row, head = (jnp.arange(B) if batch_rows is None else batch_rows)[:, None, None], jnp.arange(K)[:, None]
        if self.pages is None:
            return row, head, groups
        return self.pages[row, groups], head, jnp.zeros_like(groups)

    def next_places(self, lengths: Lengths, due: Bool[Array, "B"]) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """Where each row's next quantized group goes: its first and its third index in the arrays of `Planes`.

        For a row that is not due, or has no room for another group, one of the two is beyond its axis, so that nothing is written.
        """
        group = lengths.quantized // self.group_size
        if self.pages is None:
            return jnp.arange(due.shape[0], dtype=group.dtype), jnp.where(due, group, self.groups)
        page = jnp.take_along_axis(self.pages, jnp.clip(group, 0, self.groups - 1)[:, None], 1)[:, 0]
        return jnp.where(due & (group < self.groups), page, self.keys.upper.shape[0]), jnp.zeros_like(group)


@pytree()
class HeldKeys:
    """The keys of those tokens that a draft holds in a cache of its own, as they were taken from the target's cache: for measurements of
    such a draft.

    Attributes:
        keys: the first count[b] rows are held, in any order, without those of the current round.
    """

    keys: Float[Array, "B K S H"]
    count: Int[Array, "B"]


def rows_from(x: Float[Array, "B K S H"], start: Int[Array, "B"], rows: int) -> Float[Array, "B K rows H"]:
    """`rows` rows of each batch row from start[b] on; zeros beyond the end."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, rows), (0, 0)))
    return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, rows, axis=1))(padded, start)


def moved_up(x: Float[Array, "B K S H"], rows: int, due: Bool[Array, "B"]) -> Float[Array, "B K S H"]:
    """x with its first `rows` rows moved to the end, in the batch rows that are due."""
    return jnp.where(due[:, None, None, None], jnp.roll(x, -rows, axis=2), x)


def take(x: Array, rows: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None) -> Array:
    """Rows of x [B, K, S, ...], T for each KV head and each of these rows of the batch; None: of all."""
    B, K = x.shape[:2]
    return x[(jnp.arange(B) if batch_rows is None else batch_rows)[:, None, None], jnp.arange(K)[:, None], rows]


def _write_rows(buffer: Array, rows: Float[Array, "B T K H"], offset: Int[Array, "B"]) -> Array:
    rows = jnp.swapaxes(rows, 1, 2).astype(buffer.dtype)
    return jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis=1))(buffer, rows, offset)


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


def dequantize_tokens(
    layer: HierarchicalLayer, tokens: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None, *, dtype
) -> tuple[Float[Array, "R K T H"], Float[Array, "R K T H"]]:
    """Keys and values of single quantized tokens, from both planes; a number beyond either end means the token at that end.

    batch_rows: in these rows of the batch; None: in all.
    """
    keys, values, G = layer.keys, layer.values, layer.group_size
    group, at = jnp.divmod(jnp.clip(tokens, 0, layer.groups * G - 1), G)
    place = layer.places(group, batch_rows)
    upper, lower = (unpack(plane[*place, at]) for plane in (keys.upper, keys.lower))
    k = dequantize(upper, lower, keys.scale[place], keys.zero[place], dtype)
    # A value's byte holds the codes of two tokens, half a group apart.
    byte, high = at % (G // 2), (at >= G // 2)[..., None]
    taken = (plane[*place, :, byte] for plane in (values.upper, values.lower))
    upper, lower = (jnp.where(high, codes >> 4, codes & 15) for codes in taken)
    v = dequantize(upper, lower, values.scale[*place, at][..., None], values.zero[*place, at][..., None], dtype)
    return k, v
