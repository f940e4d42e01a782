"""Decode attention over quantized tokens, some of which are read in full precision instead."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer

GPU_IMPLEMENTATIONS = ("mosaic_gpu", "triton")


def attend_replaced(
    q: Float[Array, "B T N H"],
    layer: TokenCodesLayer,
    lengths: Lengths,
    replaced: Replaced,
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S"]]:
    """What the queries read, and the share of each quantized token in the last of the T tokens' attention, summed over the query heads of
    a KV head: its logarithm, which is minus infinity where there is no token.

    q, lengths: as in `pallas_kernels.attention.decode_attention`. Source: SpeCache (arXiv 2503.16163), equation 1. Raises ValueError where
    the implementation asked for does not support the device or the shapes.
    """
    args = q, layer, lengths, replaced
    return choose("replaced_attention", GPU_IMPLEMENTATIONS, implementation, *args).attend_replaced(*args)
