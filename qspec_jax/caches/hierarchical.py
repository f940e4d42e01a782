"""The hierarchical cache."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.flush import flush
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, quantize_groups
from pallas_kernels.rope_append import rotate_and_append
from qspec_jax.caches.lengths import _Cache, _longer
from qspec_jax.caches.schedule import quantized_length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HierarchicalCache(_Cache):
    """Upper and lower 4-bit planes for all but the most recent tokens, which a double full-precision buffer holds."""

    layers: tuple[HierarchicalLayer, ...]
    lengths: Lengths
    scheme: str = dataclasses.field(metadata={"static": True})

    @property
    def group_size(self) -> int:
        return self.layers[0].group_size

    @property
    def draft_room(self) -> Int[Array, "B"]:
        """Drafts a row may verify before one-by-one decoding would have flushed; with more, the target would read other codes."""
        return 2 * self.group_size - 1 - self.lengths.buffered

    def attend(self, layer, qkv, cos, sin, *, planes):
        old = self.layers[layer]
        q, buffer = rotate_and_append(qkv, cos, sin, old.buffer, self.lengths.buffered)
        new = dataclasses.replace(old, buffer=buffer)
        return decode_attention(q, new, _longer(self.lengths, q.shape[1]), planes=planes), new

    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"]) -> HierarchicalLayer:
        """A layer that holds the first n[b] of S prompt tokens: whole groups quantized, the rest in the buffer."""
        old, G = self.layers[layer], self.group_size
        rows = old.buffer.keys.shape[2]
        start = quantized_length(n, G)

        def recent(x: Array) -> Array:
            padded = jnp.pad(x, ((0, 0), (0, 0), (0, rows), (0, 0)))
            return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, rows, axis=1))(padded, start)

        old = dataclasses.replace(old, buffer=FullLayer(recent(keys), recent(values)))
        groups = min(old.groups, int(max(0, keys.shape[2] // G - 1)))
        if groups == 0:
            return old
        split = lambda x: x[:, :, : groups * G].reshape(*x.shape[:2], groups, G, x.shape[-1])
        codes = quantize_groups(split(keys), split(values), scheme=self.scheme, dtype=old.keys.scale.dtype)
        write = lambda cache, new: lax.dynamic_update_slice_in_dim(cache, new, 0, axis=2)
        key_planes, value_planes = jax.tree.map(write, (old.keys, old.values), codes)
        return dataclasses.replace(old, keys=key_planes, values=value_planes)

    def filled(self, layers: tuple[HierarchicalLayer, ...], n: Int[Array, "B"]) -> Self:
        """The cache of these layers, whose rows hold n tokens."""
        quantized = quantized_length(n, self.group_size)
        return dataclasses.replace(self, layers=layers, lengths=Lengths(quantized, n - quantized))

    def flush(self) -> tuple[Self, Int[Array, "B"]]:
        """Quantizes the oldest group of every row that buffers 2G tokens; also returns 1 for each such row, else 0."""
        G, lengths = self.group_size, self.lengths
        due = lengths.buffered >= 2 * G

        def once(carry):
            layers, _ = carry
            return tuple(flush(layer, lengths, due, scheme=self.scheme) for layer in layers), jnp.array(False)

        # A loop of at most one trip: lax.cond would copy the caches that it passes through (seen in jax 0.10).
        layers, _ = lax.while_loop(lambda carry: carry[1], once, (self.layers, due.any()))
        moved = due.astype(lengths.buffered.dtype)
        return HierarchicalCache(layers, Lengths(lengths.quantized + G * moved, lengths.buffered - G * moved), self.scheme), moved
