"""Decode attention over KIVI's format on NVIDIA Hopper: each warp by itself, with everything that it works on in registers.

A warp has a share of the tokens of one KV head, in tiles of 32: all of one group of the keys. It takes in a tile or two at a time. A code
that is masked out of a 16-bit word is, as a float, a subnormal number: the code times a known power of 2. So codes are only masked, not
converted. They are the first operand of the tensor cores (16 tokens, or 16 channels). The second has 8 columns, the query rows: queries
times the keys' scales in float16, or softmax weights times the values' scales in bfloat16. Zero points have products of their own.
docs/kernels/attention.md, "KIVI's format", says which lane holds what.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.mosaic_low_bits_plan import CHUNK, ROWS, TILE, Plan
from pallas_kernels.attention.partials import log_shares, log_total, merged
from pallas_kernels.attention.support import unsupported_queries
from pallas_kernels.dispatch import no_mosaic_gpu
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import FullTokens, TokenCodesLayer
from pallas_kernels.gpu.launch import launch, lowered_once


def unsupported(q: Array, layer: TokenCodesLayer, lengths: Lengths) -> str | None:
    if reason := no_mosaic_gpu():
        return reason
    keys, values, (H,) = layer.keys, layer.values, q.shape[3:]
    if not isinstance(keys, LowBits) or not isinstance(values, LowBits):
        return "reads tokens in 1 or 2 bits, and not yet those in 8 with a scale each"
    if reason := unsupported_queries([q, layer.buffer.keys, layer.buffer.values, values.scale, values.zero], lengths):
        return reason
    if others := {x.dtype.name for x in (keys.scale, keys.zero)} - {"float16"}:
        return f"needs keys' scales and zeros in float16, not {', '.join(sorted(others))}"
    if (rows := q.shape[1] * (q.shape[2] // layer.buffer.keys.shape[1])) > ROWS:
        return f"supports up to {ROWS} query rows of a KV head, not {rows}"
    if keys.bits != values.bits:
        return f"supports as many bits for values as for keys, not {values.bits} and {keys.bits}"
    if H * keys.bits % (8 * CHUNK):
        return f"supports tokens of a multiple of {CHUNK} bytes, not {keys.codes.shape[3]}"
    if not keys.tokens:
        return None
    if keys.group_tokens % TILE or keys.tokens % keys.group_tokens:
        return f"supports groups of a multiple of {TILE} tokens, not {keys.group_tokens} of {keys.tokens}"
    if keys.scale.shape[3] != H or values.scale.shape[2] != keys.tokens:
        return "supports keys with a scale for each channel, and values with scales for each token"
    if (groups := values.scale.shape[3]) > ROWS or H // groups % CHUNK:
        return f"supports groups of a multiple of {CHUNK} of a value's channels, {ROWS} at most, not {groups} of {H // groups}"
    return None


def decode_attention(q: Float[Array, "B T N H"], layer: TokenCodesLayer, lengths: Lengths) -> Float[Array, "B T N H"]:
    found = run(Plan.of(q, layer), q, lengths, layer)
    return merged(found["out"], found["top"], found["total"], q)


def shares(found: dict[str, Array], positions: Int[Array, "B K n"], quantized: Int[Array, "B"]) -> Float[Array, "B K S"]:
    """The logarithms of shares, see `reference.attend_replaced`. found: the result of `run`."""
    # A weight of 0 gives minus infinity, which counts as MIN_LOG_SHARE; entries after the last token are ignored.
    coded = jnp.log2(found["weights"].astype(jnp.float32)) + jnp.repeat(found["relative_to"], TILE, axis=2)
    return log_shares(coded, found["replaced_logits"], log_total(found["top"], found["total"]), quantized, positions)


@lowered_once
def run(
    plan: Plan, q: Float[Array, "B T N H"], lengths: Lengths, layer: TokenCodesLayer, replaced: FullTokens | None = None
) -> dict[str, Array]:
    """One launch.

    Returns:
        Arrays by their names, in float32 but for the weights; logarithms are to base 2.
        out [B K, splits, rows, H], total [B K, splits, rows]: the weighted values and the sum of the weights, over each warp's share of a
            KV head's tokens. A weight is 2^(logit - top).
        top [B K, splits, rows]: see `total`.
        With replaced tokens, also for the last token's queries (entries after a row's quantized tokens are undefined):
        weights [B, K, S, heads]: in bfloat16, of the tokens in codes; 0 for those that are replaced.
        relative_to [B, K, tiles, heads]: a stored weight is 2^(logit - relative_to) of its tile of 32 tokens.
        replaced_logits [B, K, n, heads].
    """
    from pallas_kernels.attention.mosaic_low_bits_warp import emit_block

    B, K = plan.batch, plan.kv_heads
    inputs = {"q": q, "quantized": lengths.quantized, "buffered": lengths.buffered}
    if plan.size:
        for name, codes in ("key", layer.keys), ("value", layer.values):
            inputs |= {f"{name}_codes": codes.codes, f"{name}_scale": codes.scale, f"{name}_zero": codes.zero}
    inputs |= {"keys": layer.buffer.keys, "values": layer.buffer.values}

    def numbers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    partial = B * K, plan.splits, plan.rows
    outputs = {"out": numbers(*partial, plan.head_dim), "top": numbers(*partial), "total": numbers(*partial)}
    name = f"attend_{plan.bits}_bits"
    if replaced is not None:
        inputs |= {"positions": replaced.positions, "replacing": replaced.keys_values}
        outputs["weights"] = jax.ShapeDtypeStruct((B, K, plan.size, plan.heads), jnp.bfloat16)
        outputs["relative_to"] = numbers(B, K, plan.size // TILE, plan.heads)
        outputs["replaced_logits"] = numbers(B, K, plan.replaced, plan.heads)
        name += "_replaced"
    emit, blocks = functools.partial(emit_block, plan), B * K * plan.splits // plan.warps
    return launch(name, emit, inputs, outputs, blocks, plan.warps // 4, plan.warps * plan.warp.total)
