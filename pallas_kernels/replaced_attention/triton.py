"""Attention with replaced tokens through jax-triton, for NVIDIA GPUs from Ampere on."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attention import low_bits
from pallas_kernels.attention.low_bits import attend_replaced
from pallas_kernels.dispatch import no_triton
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer

__all__ = ["attend_replaced", "unsupported"]


def unsupported(q: Array, layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if reason := no_triton() or low_bits.unsupported(q, layer, lengths):
        return reason
    if others := {x.dtype.name for x in (replaced.keys, replaced.values)} - {"bfloat16"}:
        return f"needs keys and values in bfloat16, not {', '.join(sorted(others))}"
    if replaced.positions.dtype != jnp.int32 or not replaced.positions.shape[2]:
        return "needs room for replaced tokens, and their positions in int32"
    return None
