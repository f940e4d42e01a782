"""The KV caches: immutable pytrees with static shapes, one array per layer, every length per row.

The schedule: a row of n cached tokens has `quantized_length(n)` of them quantized, whatever way it came to n, and the others,
fewer than 2G, in the full-precision buffer. See QuantSpec (arXiv 2502.10424), section 4.3 and algorithm 1.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.append import rotate_and_append
from pallas_kernels.attention import decode_attention
from pallas_kernels.flush import flush
from pallas_kernels.kv_format import FullLayer, HierarchicalLayer, Lengths, quantize_groups
from qspec_jax.config import CacheConfig, LlamaConfig


def quantized_length(n: Array | int, group_size: int) -> Array | int:
    """Of n cached tokens, how many are quantized: whole groups, and the last G to 2G - 1 tokens never."""
    return jnp.maximum(0, n // group_size - 1) * group_size


class _Cache:
    """What both caches share: lengths. Each has `attend` besides, as `model.AttendingCache` says."""

    layers: tuple
    lengths: Lengths

    def advance(self, layers: tuple, tokens: int) -> Self:
        """The cache with these layers, every row `tokens` longer."""
        lengths = dataclasses.replace(self.lengths, buffered=self.lengths.buffered + tokens)
        return dataclasses.replace(self, layers=layers, lengths=lengths)

    def rollback(self, lengths: Lengths) -> Self:
        """The cache at earlier lengths. Nothing is moved: what lies beyond is masked and later overwritten."""
        return dataclasses.replace(self, lengths=lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys, values, codes, scales and zeros."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.layers))


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


Cache = HierarchicalCache | FullCache


def empty_cache(model: LlamaConfig, config: CacheConfig, *, batch: int, capacity: int, num_speculative_tokens: int, dtype) -> Cache:
    """A cache without tokens, for rows of at most `capacity` cached tokens and rounds of `num_speculative_tokens` drafts."""
    lengths = Lengths(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))
    shape = dict(batch=batch, kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype)
    layers = range(model.num_layers)
    if config.kind == "full":
        rows = capacity + num_speculative_tokens + 1
        return FullCache(tuple(FullLayer.zeros(**shape, rows=rows) for _ in layers), lengths)
    G = config.group_size_for(model.head_dim)
    rows = 2 * G + num_speculative_tokens + 1
    groups = max(0, capacity // G - 1)
    layer = lambda: HierarchicalLayer.zeros(**shape, groups=groups, group_size=G, buffer_rows=rows)
    return HierarchicalCache(tuple(layer() for _ in layers), lengths, config.scheme)


def _longer(lengths: Lengths, tokens: int) -> Lengths:
    return dataclasses.replace(lengths, buffered=lengths.buffered + tokens)
