"""Decode attention over KIVI's format through jax-triton: split over the tokens, partial results merged at the end."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.partials import block_rows, log_shares, log_total, merged
from pallas_kernels.attention.support import unsupported_queries
from pallas_kernels.dispatch import multiprocessors
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer

LEAST_TILE, TILE = 16, 32  # tokens that are read at a time
WARPS, STAGES = 4, 2
PROGRAMS = 2  # for each multiprocessor


def unsupported(q: Array, layer: TokenCodesLayer, lengths: Lengths) -> str | None:
    """Why the kernel cannot run on these arguments, or None."""
    if not isinstance(layer.keys, LowBits):
        return "reads tokens in 1 or 2 bits, and not yet those in 8 with a scale each"
    if reason := unsupported_queries([q, layer.buffer.keys, layer.buffer.values], lengths):
        return reason
    if layer.keys.tokens and _tile(layer) < LEAST_TILE:
        return f"supports groups of a multiple of {LEAST_TILE} tokens, not {layer.keys.group_tokens}"
    return None


def decode_attention(q: Float[Array, "B T N H"], layer: TokenCodesLayer, lengths: Lengths) -> Float[Array, "B T N H"]:
    """See `pallas_kernels.attention.decode_attention`."""
    from pallas_kernels.attention import low_bits_kernel

    out, top, total = _launched(low_bits_kernel.attend, "decode_attention", q, layer, lengths)
    return merged(out, top, total, q)


def attend_replaced(
    q: Float[Array, "B T N H"], layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S"]]:
    """See `reference.attend_replaced`."""
    from pallas_kernels.attention import low_bits_kernel

    (B, K, size, _), count = layer.keys.codes.shape, replaced.positions.shape[2]
    group = q.shape[2] // K
    at = jnp.where(replaced.positions < 0, size, replaced.positions)
    left_out = jax.vmap(jax.vmap(lambda at: jnp.zeros(size, jnp.int8).at[at].set(1, mode="drop")))(at)
    logits = [jax.ShapeDtypeStruct((B, K, group, tokens), jnp.float32) for tokens in (size, count)]
    more = left_out, replaced.positions, replaced.keys, replaced.values
    out, top, total, of_codes, of_replaced = _launched(
        low_bits_kernel.attend_replaced, "attend_replaced", q, layer, lengths, more, logits, COUNT=count
    )
    of_tokens = (jnp.swapaxes(logits, 2, 3) for logits in (of_codes, of_replaced))
    return merged(out, top, total, q), log_shares(*of_tokens, log_total(top, total), lengths.quantized, replaced.positions)


def _launched(
    kernel,
    name: str,
    q: Float[Array, "B T N H"],
    layer: TokenCodesLayer,
    lengths: Lengths,
    more: Sequence[Array] = (),
    more_out: Sequence[jax.ShapeDtypeStruct] = (),
    **settings: int,
) -> tuple[Array, ...]:
    """What a program comes to over all tokens: of each KV head, share of its tokens and query row the weighted values, maximum and sum of
    exponentials; and more_out. more: its arguments between the codes and the buffer."""
    import jax_triton

    B, T, N, H = q.shape
    K, capacity = layer.buffer.keys.shape[1:3]
    keys, values, rows = layer.keys, layer.values, T * (N // K)
    M, size, tile = block_rows(rows, H), keys.tokens, _tile(layer)
    blocks = math.ceil(rows / M)
    splits = max(1, min(PROGRAMS * multiprocessors() // (B * K * blocks), size // tile + math.ceil(capacity / TILE)))
    # Where there is no room for codes, none are read; q stands for them.
    coded = [x for p in (keys, values) for x in (p.codes, p.scale, p.zero)] if size else [q] * 6
    partial = jax.ShapeDtypeStruct((B * K, splits, rows), jnp.float32)
    return jax_triton.triton_call(
        q,
        lengths.quantized,
        lengths.buffered,
        *coded,
        *more,
        layer.buffer.keys,
        layer.buffer.values,
        kernel=kernel,
        name=f"{name}_{keys.bits}_bits",
        out_shape=(jax.ShapeDtypeStruct((*partial.shape, H), jnp.float32), partial, partial, *more_out),
        grid=(B * K, splits, blocks),
        num_warps=WARPS,
        num_stages=STAGES,
        TO_BASE_2=math.log2(math.e) / math.sqrt(H),
        T=T,
        K=K,
        PER_HEAD=N // K,
        H=H,
        M=M,
        BITS=keys.bits,
        SIZE=size,
        KEY_GROUP=keys.group_tokens if size else tile,
        VALUE_GROUP=H // values.scale.shape[3],
        CODED_TILE=tile,
        CAPACITY=capacity,
        TILE=TILE,
        SPLITS=splits,
        **settings,
    )


def _tile(layer: TokenCodesLayer) -> int:
    """Tokens in codes that are read at a time: all of one group."""
    return math.gcd(layer.keys.group_tokens, TILE) if layer.keys.tokens else TILE
