"""The full-precision cache."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.rope_append import rotate_and_append
from qspec_jax.caches.lengths import _Cache, _longer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FullCache(_Cache):
    """Keys and values in the model's own precision. `lengths.quantized` is always 0."""

    layers: tuple[FullLayer, ...]
    lengths: Lengths

    @property
    def draft_room(self) -> Int[Array, "B"]:
        """No limit: nothing is ever quantized."""
        return jnp.full_like(self.lengths.buffered, jnp.iinfo(jnp.int32).max)

    def attend(self, layer, qkv, cos, sin, *, planes):
        q, new = rotate_and_append(qkv, cos, sin, self.layers[layer], self.lengths.buffered)
        return decode_attention(q, new, _longer(self.lengths, q.shape[1]), planes=None), new

    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"]) -> FullLayer:
        """A layer that holds S prompt tokens."""
        old = self.layers[layer]
        keep = lambda cache, new: lax.dynamic_update_slice_in_dim(cache, new[:, :, : cache.shape[2]], 0, axis=2)
        return FullLayer(keep(old.keys, keys), keep(old.values, values))

    def filled(self, layers: tuple[FullLayer, ...], n: Int[Array, "B"]) -> Self:
        """The cache of these layers, whose rows hold n tokens."""
        return FullCache(layers, Lengths(jnp.zeros_like(n), n))

    def flush(self) -> tuple[Self, Int[Array, "B"]]:
        """Nothing to do."""
        return self, jnp.zeros_like(self.lengths.buffered)
