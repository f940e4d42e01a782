"""Attention with replaced tokens in plain JAX, see `pallas_kernels.attention.reference`."""

from jaxtyping import Array

from pallas_kernels.attention.reference import attend_replaced
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer
from pallas_kernels.replaced_attention.choice import chosen


def attend_and_choose(q: Array, layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced, k: int) -> tuple[Array, Array]:
    """See `pallas_kernels.replaced_attention.attend_and_choose`."""
    out, share = attend_replaced(q, layer, lengths, replaced)
    return out, chosen(share, k)
