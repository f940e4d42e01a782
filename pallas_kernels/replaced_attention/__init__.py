"""Decode attention over quantized tokens, some of which are read in full precision instead, and the choice of those that the next pass
reads so."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer
from pallas_kernels.replaced_attention.arguments import ReplacedArguments


def attend_and_choose(
    q: Float[Array, "B T N H"],
    layer: TokenCodesLayer,
    lengths: Lengths,
    replaced: Replaced,
    k: int,
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K k"]]:
    """What the queries read, and for each KV head the positions of the k quantized tokens with the largest shares in the last of the T
    tokens' attention, summed over the query heads of the KV head: in any order, with -1 behind them where there are fewer tokens.

    q, lengths: as in `pallas_kernels.attention.decode_attention`. k: at most S, the tokens that `layer.keys` has room for. Source: SpeCache
    (arXiv 2503.16163), equation 1.

    With room for more than 128 replaced tokens of a KV head the kernel for Hopper cannot run, and "auto" takes the reference, which is
    slower. Raises NotImplementedError where the implementation asked for does not support the device or the shapes.
    """
    args = ReplacedArguments(q, layer, lengths, replaced, k)
    return choose("replaced_attention", implementation, args).attend_and_choose(args)
