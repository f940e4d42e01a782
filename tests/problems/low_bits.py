"""Queries and layers of a cache in KIVI's format, and what attention to them has to be."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.attention import decode_attention, mosaic_low_bits, reference
from pallas_kernels.attention.partials import merged
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import FullTokens, TokenCodesLayer
from pallas_kernels.formats.views import BOTH_PLANES, FULL_PRECISION
from pallas_kernels.gather import mosaic_gpu as gather
from pallas_kernels.replaced_attention import attend_and_choose

# Compiled, for JAX would compile each operation by itself, which takes longer.
WIDE = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize == 2 else leaf, tree))


class Sizes(NamedTuple):
    """Tokens that a cache has room for in codes and in its buffer, and those in the codes and in the buffer of each row."""

    codes: int
    buffer: int
    quantized: list[int]
    buffered: list[int]


LARGE = Sizes(2048, 160, [0, 64, 1056, 2048], [160, 17, 100, 64])  # nothing in codes, one step of a program, an odd number of tiles, all
SMALL = Sizes(640, 80, [0, 64, 416, 640], [80, 17, 50, 64])  # nothing in codes, a tile for some warps, for all warps, all


def random_codes(
    bits: int, T: int, heads: int, kv_heads: int, head_dim: int, group: int, *, outliers: bool = False, sizes: Sizes = LARGE
) -> tuple[Float[Array, "B T N H"], TokenCodesLayer, Lengths]:
    """Queries, a layer of a cache, and the lengths of its rows. One query is all zeros, and so attends to all tokens alike.

    Args:
        outliers: Whether a few channels and tokens are a hundred times as loud as the others.
    """
    r = np.random.default_rng(bits + T)
    draw = lambda *shape: r.standard_normal((len(sizes.quantized), *shape)).astype(np.float32)
    keys, values = draw(kv_heads, sizes.codes, head_dim), draw(kv_heads, sizes.codes, head_dim)
    if outliers:
        keys[..., ::17] *= 100
        values[:, :, ::101] *= 100
    coded = [
        jax.jit(functools.partial(LowBits.of, bits=bits, tokens=t, channels=c, rule="centred", dtype=dtype))(x.astype(jnp.bfloat16))
        for x, t, c, dtype in ((keys, group, 1, jnp.float16), (values, 1, group, jnp.bfloat16))
    ]
    buffer = FullLayer(*(jnp.asarray(draw(kv_heads, sizes.buffer, head_dim), jnp.bfloat16) for _ in range(2)))
    lengths = Lengths(jnp.array(sizes.quantized, jnp.int32), jnp.array(sizes.buffered, jnp.int32))
    q = draw(T, heads, head_dim)
    q[2, -1, 0] = 0
    return jnp.asarray(q, jnp.bfloat16), TokenCodesLayer(*coded, buffer), lengths


@jax.jit
def exactly(q: Array, layer: TokenCodesLayer, lengths: Lengths) -> Array:
    """What the reference reads, in float32."""
    return reference.decode_attention(WIDE(q), WIDE(layer), lengths, BOTH_PLANES)[0]


@jax.jit
def _in_bfloat16(layer: TokenCodesLayer) -> list[Array]:
    """The codes' keys and values. A program of its own: XLA leaves out rounding after which it goes on in float32."""
    return [x.dequantized(jnp.bfloat16) for x in (layer.keys, layer.values)]


@jax.jit
def _attended(q: Array, held: list[Array], layer: TokenCodesLayer, lengths: Lengths, replaced: FullTokens | None = None) -> Array:
    """What the reference reads, in float32, where keys and values have passed through bfloat16, as they would in a cache of that dtype.
    held: those of the codes."""
    size, rows = layer.keys.tokens, layer.buffer.keys.shape[2]
    if replaced is not None:
        put = jax.vmap(jax.vmap(lambda held, at, new: held.at[at].set(new, mode="drop")))
        at = jnp.where(replaced.positions < 0, size, replaced.positions)
        held = [put(x, at, new) for x, new in zip(held, (replaced.keys, replaced.values))]
    joined = WIDE([jnp.concatenate(both, 2) for both in zip(held, (layer.buffer.keys, layer.buffer.values))])
    # Each row's tokens of codes and of the buffer, one after the other.
    token, quantized = jnp.arange(size + rows), lengths.quantized[:, None]
    at = jnp.where(token < quantized, token, token - quantized + size)
    layer = FullLayer(*(jnp.take_along_axis(x, at[:, None, :, None], 2, mode="clip") for x in joined))
    lengths = Lengths(jnp.zeros_like(lengths.quantized), lengths.total)
    return reference.decode_attention(WIDE(q), layer, lengths, FULL_PRECISION)[0]


def attend_replaced(
    q: Float[Array, "B T N H"], layer: TokenCodesLayer, lengths: Lengths, replaced: FullTokens
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S"]]:
    """`reference.attend_replaced` by the Mosaic kernel. Only tests want all shares: `attend_and_choose` chooses from what `run` returns."""
    plan = mosaic_low_bits.Plan.of(q, layer, replaced.positions.shape[2], occupied=gather.occupied())
    found = mosaic_low_bits.run(plan, q, lengths, layer, replaced)
    shares = mosaic_low_bits.shares(found, replaced.positions, lengths.quantized)
    return merged(found["out"], found["top"], found["total"], q), shares


def assert_attention_is_exact(q: Array, layer: TokenCodesLayer, lengths: Lengths) -> None:
    """The kernel's attention is the reference's in float32, up to rounding, and the same bits twice."""
    found = decode_attention(q, layer, lengths, BOTH_PLANES, implementation="mosaic_gpu")[0].astype(jnp.float32)
    expected = exactly(q, layer, lengths)
    scale = float(jnp.abs(expected).max())
    rounded = float(jnp.abs(_attended(q, _in_bfloat16(layer), layer, lengths) - expected).max())  # what that rounding alone makes
    assert float(jnp.abs(found - expected).max()) <= 2 * rounded + 0.01 * scale, (rounded, scale)
    again = decode_attention(q, layer, lengths, BOTH_PLANES, implementation="mosaic_gpu")[0].astype(jnp.float32)
    np.testing.assert_array_equal(found, again)


def assert_attention_with_replaced_tokens_is_exact(q: Array, layer: TokenCodesLayer, lengths: Lengths, count: int, outliers: bool) -> None:
    """Up to `count` tokens of each KV head are replaced: other tokens for each head, and fewer in rows that have fewer tokens."""
    size, quantized, kv_heads, head_dim = layer.keys.tokens, np.asarray(lengths.quantized).tolist(), layer.buffer.keys.shape[1], q.shape[-1]
    r = np.random.default_rng(count)
    positions = np.full((len(quantized), kv_heads, count), -1, np.int32)
    for b, k in np.ndindex(len(quantized), kv_heads):
        some = min(count - k, quantized[b])
        positions[b, k, :some] = r.choice(quantized[b], some, replace=False) if some else []
    draw = lambda: jnp.asarray(r.standard_normal((len(quantized), kv_heads, count, head_dim)), jnp.bfloat16)
    replaced = FullTokens(jnp.asarray(positions), jnp.stack([draw(), draw()], 3))
    found, share = attend_replaced(q, layer, lengths, replaced)
    expected, expected_share = jax.jit(reference.attend_replaced)(WIDE(q), WIDE(layer), lengths, WIDE(replaced))
    error = float(jnp.abs(_attended(q, _in_bfloat16(layer), layer, lengths, replaced) - expected).max())
    scale = float(jnp.abs(expected).max())
    assert float(jnp.abs(found.astype(jnp.float32) - expected).max()) <= 2 * error + 0.01 * scale, (error, scale)
    there = np.arange(size) < np.array(quantized)[:, None, None]
    np.testing.assert_array_equal(np.isneginf(share), np.broadcast_to(~there, share.shape))
    # As shares of attention: logarithms of almost nothing may differ more. Loud channels make logits of hundreds.
    np.testing.assert_allclose(np.exp(share), np.exp(expected_share), atol=0.2 if outliers else 0.01)
    for one, other in zip(attend_replaced(q, layer, lengths, replaced), (found, share), strict=True):
        np.testing.assert_array_equal(one, other)
    again, chosen = attend_and_choose(q, layer, lengths, replaced, count, implementation="mosaic_gpu")
    np.testing.assert_array_equal(again, found)
    # Those with the largest shares, up to the order in which shares are added up.
    for b, k in np.ndindex(chosen.shape[:2]):
        some = min(count, quantized[b])
        (mine,) = np.nonzero(chosen[b, k] >= 0)
        at = np.asarray(chosen[b, k, mine])
        assert len(set(at.tolist())) == len(mine) == some and (at < quantized[b]).all()
        np.testing.assert_allclose(np.sort(share[b, k, at]), np.sort(share[b, k])[size - some :], atol=1e-4)
