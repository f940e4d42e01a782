"""Attention with replaced tokens through jax-triton, for NVIDIA GPUs from Ampere on."""

from jaxtyping import Array

from pallas_kernels.attention import low_bits
from pallas_kernels.attention.low_bits import attend_replaced
from pallas_kernels.attention.support import unsupported_replaced
from pallas_kernels.dispatch import no_triton
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer

__all__ = ["attend_replaced", "unsupported"]


def unsupported(q: Array, layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    return no_triton() or low_bits.unsupported(q, layer, lengths) or unsupported_replaced(replaced)
