"""Attention with replaced tokens through jax-triton, for NVIDIA GPUs from Ampere on."""

from jaxtyping import Array

from pallas_kernels.attention import low_bits
from pallas_kernels.attention.support import unsupported_replaced
from pallas_kernels.dispatch import no_triton
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer
from pallas_kernels.replaced_attention.choice import chosen


def unsupported(q: Array, layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    return no_triton() or low_bits.unsupported(q, layer, lengths) or unsupported_replaced(replaced)


def attend_and_choose(q: Array, layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced, k: int) -> tuple[Array, Array]:
    """See `pallas_kernels.replaced_attention.attend_and_choose`."""
    out, share = low_bits.attend_replaced(q, layer, lengths, replaced)
    return out, chosen(share, k)
