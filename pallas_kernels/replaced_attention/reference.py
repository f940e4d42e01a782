"""Attention with replaced tokens in plain JAX, see `pallas_kernels.attention.reference`."""

from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import attend_replaced
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import FullTokens, TokenCodesLayer
from pallas_kernels.replaced_attention.choice import choose_tokens


def attend_and_choose(
    q: Float[Array, "B T N H"], layer: TokenCodesLayer, lengths: Lengths, replaced: FullTokens, k: int
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K k"]]:
    out, share = attend_replaced(q, layer, lengths, replaced)
    return out, choose_tokens(share, k)
