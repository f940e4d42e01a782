"""What RoPE, append and attention in one are given, as their implementations get it."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from pallas_kernels.attention.arguments import AttentionArguments
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.formats.views import View
from pallas_kernels.rope_append.arguments import RopeAppendArguments


class AppendAttendArguments(NamedTuple):
    """The arguments of `pallas_kernels.append_attend.append_and_attend`."""

    qkv: Float[Array, "B T channels"]
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    layer: Layer
    lengths: Lengths
    view: View

    @property
    def of_append(self) -> RopeAppendArguments:
        """The arguments of RoPE and append."""
        return RopeAppendArguments(self.qkv, self.cos, self.sin, self.layer.buffer, self.lengths.buffered)

    @property
    def of_attention(self) -> AttentionArguments:
        """The arguments of attention, of whose queries after RoPE there is the shape."""
        _, K, _, H = self.layer.buffer.keys.shape
        q = jax.ShapeDtypeStruct((*self.qkv.shape[:2], self.qkv.shape[2] // H - 2 * K, H), self.qkv.dtype)
        return AttentionArguments(q, self.layer, self.lengths, self.view)
