"""Decode attention over quantized tokens, some of which are read in full precision instead, and the choice of the tokens that the next
pass reads so."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import FullTokens, TokenCodesLayer


def attend_and_choose(
    q: Float[Array, "B T N H"],
    layer: TokenCodesLayer,
    lengths: Lengths,
    replaced: FullTokens,
    k: int,
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K k"]]:
    """Attention, and of each KV head the positions of the k quantized tokens with the largest shares in the attention of the last of the T
    tokens, summed over the query heads of the KV head.

    Source: SpeCache (arXiv 2503.16163), equation 1. With room for more than 128 replaced tokens of a KV head the kernel for Hopper cannot
    run, and "auto" takes the reference, which is slower.

    Args:
        q, lengths: see `pallas_kernels.attention.decode_attention`.
        layer: the cache, whose `keys` have room for S tokens.
        replaced: tokens that are read in full precision instead of their codes.
        k: at most S.

    Returns:
        The values read, and the positions in any order, followed by -1 where there are fewer than k tokens.

    Raises:
        NotImplementedError: the implementation asked for does not support the device or the shapes.
    """
    args = q, layer, lengths, replaced, k
    return choose("replaced_attention", implementation, *args).attend_and_choose(*args)
