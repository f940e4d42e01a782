"""The two operations one after the other, each by whichever of its kernels can run."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.formats.views import View
from pallas_kernels.rope_append import rotate_and_append


def append_and_attend(
    qkv: Array, cos: Array, sin: Array, layer: Layer, lengths: Lengths, view: View
) -> tuple[Float[Array, "B filled N H"], Layer, Float[Array, "B K T C"] | None]:
    tokens, passed_over = cos.shape[1], qkv.shape[1] - cos.shape[1]
    q, buffer = rotate_and_append(qkv[:, :tokens], cos, sin, layer.buffer, lengths.buffered)
    new = layer.with_buffer(buffer)
    longer = dataclasses.replace(lengths, buffered=lengths.buffered + tokens)
    attended, mass = decode_attention(q, new, longer, view)
    return jnp.pad(attended, ((0, 0), (0, passed_over), (0, 0), (0, 0))), new, mass
