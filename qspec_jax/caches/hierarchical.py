"""QuantSpec's hierarchical cache (arXiv 2502.10424, section 4.2): two 4-bit planes, and a double full-precision buffer.

A draft reads the upper plane (INT4), the target both (INT8). The most recent G to 2G - 1 tokens are never quantized.
"""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.append_attend import append_and_attend
from pallas_kernels.flush import flush
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, Planes, dequantize_tokens, quantize_groups, rows_from
from pallas_kernels.formats.rounding import accumulation_dtype
from qspec_jax.caches.cache import Gives, KeysValues, PooledCache, Reads, at_most_once, bytes_of_tokens, no_tokens
from qspec_jax.caches.host_memory import NONE, HostSettings
from qspec_jax.caches.schedule import Schedule
from qspec_jax.models.prompts import by_heads
from qspec_jax.settings_text import setting


@dataclasses.dataclass(frozen=True)
class HierarchicalSettings(HostSettings):
    """See `HostSettings`."""

    host: str = setting(
        NONE,
        "The part of the cache in host memory, the lower plane or both, which each pass that reads it copies to the device.",
        choices=(NONE, "lower", "all"),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HierarchicalCache(PooledCache):
    """Upper and lower 4-bit planes for all but the most recent tokens, which a double full-precision buffer holds.

    scheme: how values become codes, a key of `pallas_kernels.formats.quantization.SCHEMES`. pages, shared_groups: see `HierarchicalLayer`;
    they are the same for all layers, and therefore not in `layers`.
    """

    layers: tuple[HierarchicalLayer, ...]
    lengths: Lengths
    scheme: str = dataclasses.field(metadata={"static": True})
    pages: Int[Array, "B C"] | None = None
    shared_groups: Int[Array, "B"] | None = None

    Settings: ClassVar[type] = HierarchicalSettings
    gives: ClassVar[frozenset[Gives]] = frozenset({Gives.GROUPS, Gives.TOKENS})
    observable: ClassVar[bool] = True

    @property
    def group_size(self) -> int:
        return self.layers[0].group_size

    @property
    def groups(self) -> int:
        """Capacity of the quantized region of a row, in groups."""
        return self._layer(0).groups

    @property
    def num_pages(self) -> int | None:
        return None if self.pages is None else self.layers[0].keys.upper.shape[0]

    @property
    def capacity(self) -> int:
        return self.groups * self.group_size + self.layers[0].buffer.keys.shape[2]

    def whole_layer(self, layer: int) -> HierarchicalLayer:
        """A layer with both of its planes on the device."""
        return self._layer(layer)

    def _layer(self, layer: int) -> HierarchicalLayer:
        """A layer with its pages."""
        return dataclasses.replace(self.layers[layer], pages=self.pages, shared_groups=self.shared_groups)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.group_size)

    @classmethod
    def schedule_of(cls, group_size: int, settings: HierarchicalSettings) -> Schedule:
        return Schedule(group_size)

    @classmethod
    def make(cls, model, *, group_size, scheme, settings, batch, capacity, num_speculative_tokens, dtype):
        schedule = Schedule(group_size)
        shape = dict(batch=batch, kv_heads=model.num_kv_heads, group_size=group_size, head_dim=model.head_dim, dtype=dtype)
        shape |= dict(groups=schedule.max_flushes(capacity), buffer_rows=schedule.buffer_rows(num_speculative_tokens))
        return cls(tuple(HierarchicalLayer.zeros(**shape) for _ in range(model.num_layers)), no_tokens(batch), scheme)

    def reads(self, view, tokens):
        quantized = int(self.schedule.quantized_length(tokens))
        return Reads(view.planes, quantized, tokens - quantized)

    def bytes_of_reads(self, layer, reads):
        held = self.layers[layer]
        names = ("upper", "lower", "scale", "zero") if reads.planes == 2 else ("upper", "scale", "zero")
        coded = [getattr(planes, name) for planes in (held.keys, held.values) for name in names]
        read = bytes_of_tokens(coded, reads.quantized, held.keys.upper.shape[2] * self.group_size)
        return read + bytes_of_tokens(held.buffer, reads.full, held.buffer.keys.shape[2]), 0

    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"]) -> HierarchicalLayer:
        """See `Cache.fill`. Whole groups are quantized, the rest is in the buffer. Not for rows that share a pool."""
        old, G = self.layers[layer], self.group_size
        rows = old.buffer.keys.shape[2]
        start = self.schedule.quantized_length(n)

        old = dataclasses.replace(old, buffer=FullLayer(rows_from(keys, start, rows), rows_from(values, start, rows)))
        groups = min(old.groups, self.schedule.max_flushes(keys.shape[2]))
        if groups == 0:
            return old

        def split(x):
            return x[:, :, : groups * G].reshape(*x.shape[:2], groups, G, x.shape[-1])

        def quantized(*both):
            return quantize_groups(*map(split, both), scheme=self.scheme, dtype=old.keys.scale.dtype)

        codes = by_heads(quantized, keys, values)
        return dataclasses.replace(old, keys=self._put(old.keys, codes[0]), values=self._put(old.values, codes[1]))

    def _put(self, held: Planes, new: Planes) -> Planes:
        """The planes with the first groups overwritten by new ones."""
        return jax.tree.map(lambda held, new: lax.dynamic_update_slice_in_dim(held, new, 0, axis=2), held, new)

    def pooled(self, batch: int, pages: int) -> Self:
        def layer(old: HierarchicalLayer) -> HierarchicalLayer:
            def of_pool(x):
                return jnp.zeros((pages, x.shape[1], 1, *x.shape[3:]), x.dtype)

            def of_rows(x):
                return jnp.zeros((batch, *x.shape[1:]), x.dtype)

            buffer = jax.tree.map(of_rows, old.buffer)
            return HierarchicalLayer(jax.tree.map(of_pool, old.keys), jax.tree.map(of_pool, old.values), buffer)

        table = jnp.zeros((batch, self.groups), jnp.int32)
        return dataclasses.replace(self, layers=tuple(map(layer, self.layers)), lengths=no_tokens(batch), pages=table)

    def with_rows(self, rows: Self, slots: Int[Array, "k"], pages: Int[Array, "k C"] | None = None) -> Self:
        if self.pages is None:
            return super().with_rows(rows, slots)
        k, C = pages.shape
        # Groups without a page get an index beyond the pool, which is dropped.
        to = jnp.where(pages == 0, self.layers[0].keys.upper.shape[0], pages).reshape(k * C)

        def layer(old: HierarchicalLayer, new: HierarchicalLayer) -> HierarchicalLayer:
            def by_group(x):
                return jnp.swapaxes(x, 1, 2).reshape(k * C, x.shape[1], 1, *x.shape[3:])

            def put(pool, x):
                return pool.at[to].set(by_group(x), mode="drop")

            keys, values = jax.tree.map(put, (old.keys, old.values), (new.keys, new.values))
            return HierarchicalLayer(keys, values, jax.tree.map(lambda x, row: x.at[slots].set(row), old.buffer, new.buffer))

        lengths = jax.tree.map(lambda x, row: x.at[slots].set(row), self.lengths, rows.lengths)
        layers = tuple(map(layer, self.layers, rows.layers))
        return dataclasses.replace(self, layers=layers, lengths=lengths, pages=self.pages.at[slots].set(pages))

    def tokens(self, layer: int, positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None) -> KeysValues:
        quantized = self.lengths.quantized if batch_rows is None else self.lengths.quantized[batch_rows]
        held, quantized = self.whole_layer(layer), quantized[:, None, None]
        recent = held.buffer.read(positions - quantized, batch_rows)
        if held.groups == 0:
            return recent
        wide = accumulation_dtype(held.buffer.keys.dtype)
        old = dequantize_tokens(held, positions, batch_rows, dtype=wide)

        def choose(old, recent):
            return jnp.where((positions < quantized)[..., None], old.astype(recent.dtype), recent)

        return tuple(map(choose, old, recent))

    def recent_tokens(self, layer, positions):
        if positions.shape[-1] > self.group_size:  # which the buffer may have no more, just after a flush
            return self.tokens(layer, positions)
        return self.layers[layer].buffer.read(positions - self.lengths.quantized[:, None, None])

    def attend(self, layer, qkv, cos, sin, *, view):
        attended, new, mass = append_and_attend(qkv, cos, sin, self._layer(layer), self.lengths, view)
        return attended, dataclasses.replace(new, pages=None, shared_groups=None), mass

    def flushed_layers(self, due: Bool[Array, "B"]) -> tuple[HierarchicalLayer, ...]:
        def flushed(layer: HierarchicalLayer) -> HierarchicalLayer:
            new = flush(dataclasses.replace(layer, pages=self.pages), self.lengths, due, scheme=self.scheme)
            return dataclasses.replace(new, pages=None)

        return at_most_once(due.any(), lambda layers: tuple(map(flushed, layers)), self.layers)
