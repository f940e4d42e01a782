"""Attention with replaced tokens on NVIDIA Hopper in Pallas Mosaic GPU."""

from jaxtyping import Array

from pallas_kernels.attention import mosaic_low_bits
from pallas_kernels.attention.mosaic_low_bits import attend_replaced
from pallas_kernels.attention.support import unsupported_replaced
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer

__all__ = ["attend_replaced", "unsupported"]


def unsupported(q: Array, layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if reason := mosaic_low_bits.unsupported(q, layer, lengths) or unsupported_replaced(replaced):
        return reason
    return None if layer.keys.tokens else "needs room for tokens in codes"
