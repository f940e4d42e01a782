"""Attention with replaced tokens on NVIDIA Hopper in Pallas Mosaic GPU."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import mosaic_low_bits
from pallas_kernels.attention.partials import merged
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import FullTokens, TokenCodesLayer
from pallas_kernels.gather import mosaic_gpu as gather
from pallas_kernels.replaced_attention import choice, mosaic_choice

MAX_REPLACED = 128  # tokens of a KV head: each of a warp's 32 lanes holds the positions of up to 4 of them


def unsupported(q: Array, layer: TokenCodesLayer, lengths: Lengths, replaced: FullTokens, k: int) -> str | None:
    if reason := mosaic_low_bits.unsupported(q, layer, lengths):
        return reason
    if (dtype := replaced.keys_values.dtype) != jnp.bfloat16:
        return f"needs replaced keys and values in bfloat16, not {dtype.name}"
    if replaced.positions.dtype != jnp.int32 or not replaced.positions.shape[2]:
        return "needs room for replaced tokens, and their positions in int32"
    if (count := replaced.positions.shape[2]) > MAX_REPLACED:
        return f"supports up to {MAX_REPLACED} replaced tokens of a KV head, not {count}"
    return None if layer.keys.tokens else "needs room for tokens in codes"


def attend_and_choose(
    q: Float[Array, "B T N H"], layer: TokenCodesLayer, lengths: Lengths, replaced: FullTokens, k: int
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K k"]]:
    # The tokens that the layer before chose are being fetched, if the store is in host memory. Otherwise these multiprocessors are idle.
    plan = mosaic_low_bits.Plan.of(q, layer, replaced.positions.shape[2], occupied=gather.occupied())
    found = mosaic_low_bits.run(plan, q, lengths, layer, replaced)
    chosen_from = found, replaced.positions, lengths.quantized
    # Where the kernel that chooses does not support the shapes, XLA chooses. The attention still runs here: it takes most of the time.
    by_kernel = mosaic_choice.unsupported(plan.size, plan.heads, plan.replaced, k) is None
    positions = mosaic_choice.choose_tokens(*chosen_from, k) if by_kernel else choice.choose_tokens(mosaic_low_bits.shares(*chosen_from), k)
    return merged(found["out"], found["top"], found["total"], q), positions
