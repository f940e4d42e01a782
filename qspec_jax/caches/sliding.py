"""A cache for models in which some layers have a sliding window: these keep a ring of recent tokens, and another cache has all others.

A ring is in full precision, whatever that cache is. Its lengths are those of the other layers, so a rollback moves nothing: the ring has
room for the window and for what a pass appends, and what that overwrites has left the window even of the pass's first token.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import attend_readable
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.caches.cache import NOTHING, AppendedCache, Cache, KeysValues, PooledCache, Reads, bytes_of_tokens, no_tokens
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.ring import row_of_token, token_in_row, with_tokens
from qspec_jax.caches.schedule import Schedule
from qspec_jax.models.config import LlamaConfig


class RingsBeside(AppendedCache):
    """Rings of the layers with a window, beside a cache of the others. A subclass is a frozen dataclass registered as a pytree.

    Attributes:
        held: the cache of the layers without a window.
        rings: a ring for each of the other layers: token p is in row p modulo their number.
        has_window: of each layer of the model whether it has one.
        window: the number of tokens that a token attends to there, itself included.
    """

    held: AppendedCache
    rings: tuple[FullLayer, ...]
    has_window: tuple[bool, ...]
    window: int

    @property
    @abc.abstractmethod
    def in_text(self) -> Int[Array, "B"]:
        """How many tokens of its text each row has read, those that a round has appended included."""

    @property
    def layers(self) -> tuple[Any, ...]:
        held, rings = iter(self.held.layers), iter(self.rings)
        return tuple(next(rings if of_ring else held) for of_ring in self.has_window)

    @property
    def lengths(self) -> Lengths:
        return self.held.lengths

    @property
    def observable(self) -> bool:
        return self.held.observable

    @property
    def compiler_options(self) -> dict[str, str]:
        return self.held.compiler_options

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, of_ring in enumerate(self.has_window) if not of_ring)

    def held_index(self, layer: int) -> int | None:
        """The number in `held` of a layer of the model; None for one with a window."""
        return None if self.has_window[layer] else self.has_window[:layer].count(False)

    def ring(self, layer: int) -> FullLayer:
        """The ring of a layer of the model that has a window."""
        return self.rings[self.has_window[:layer].count(True)]

    def with_layers(self, layers: tuple[Any, ...]) -> Self:
        held = tuple(layer for layer, of_ring in zip(layers, self.has_window, strict=True) if not of_ring)
        rings = tuple(layer for layer, of_ring in zip(layers, self.has_window, strict=True) if of_ring)
        return dataclasses.replace(self, held=self.held.with_layers(held), rings=rings)

    def part(self, part: slice) -> Self:
        layers, has_window = self.layers[part], self.has_window[part]
        return dataclasses.replace(self, has_window=has_window).with_layers(layers)

    def rollback(self, lengths: Lengths) -> Self:
        return dataclasses.replace(self, held=self.held.rollback(lengths))

    def for_pass(self, views):
        views = tuple(view for view, of_ring in zip(views, self.has_window, strict=True) if not of_ring)
        return _Pass(self, self.held.for_pass(views))

    def attend(self, layer, qkv, cos, sin, *, view):
        return _Pass(self, self.held).attend(layer, qkv, cos, sin, view=view)

    def attend_in_window(
        self, layer: int, qkv: Float[Array, "B T channels"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
    ) -> tuple[Float[Array, "B T N H"], FullLayer]:
        """The attended values of a layer with a window, and its ring with these tokens."""
        ring, n, T = self.ring(layer), self.in_text, qkv.shape[1]
        if (room := ring.keys.shape[2] - self.window) < T:
            raise ValueError(f"a pass appends {T} tokens, and the cache was made for at most {room}")
        q, *new = split_and_rotate(qkv, cos, sin, kv_heads=ring.keys.shape[1])
        reader = n[:, None] + jnp.arange(T)
        ring = with_tokens(ring, *new, row_of_token(reader, *self._kept_and_size(n)))
        read, reader = self.positions(n + T)[:, None], reader[..., None]
        return attend_readable(q, ring, (read <= reader) & (read > reader - self.window))[0], ring

    def reads_of_layer(self, layer, reads, tokens):
        if not self.has_window[layer]:
            return self.held.reads_of_layer(self.held_index(layer), reads, tokens)
        return reads if reads == NOTHING else Reads(0, 0, min(tokens, self.window))

    def bytes_of_reads(self, layer, reads):
        if not self.has_window[layer]:
            return self.held.bytes_of_reads(self.held_index(layer), reads)
        ring = self.ring(layer)
        return bytes_of_tokens(ring, reads.quantized + reads.full, ring.keys.shape[2]), 0

    def positions(self, n: Int[Array, "B"]) -> Int[Array, "B S"]:
        """The position of the token in each row of a ring, after n[b] tokens; beyond n where there is none yet."""
        return token_in_row(jnp.arange(self.rings[0].keys.shape[2]), n, *self._kept_and_size(n))

    def _kept_and_size(self, n: Int[Array, "B"]) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        return jnp.zeros_like(n), jnp.full_like(n, self.rings[0].keys.shape[2])


class _Pass:
    """A pass over all layers. reading: what a pass over the layers without a window reads."""

    def __init__(self, cache: RingsBeside, reading: Any):
        self._cache, self._reading = cache, reading

    def attend(self, layer, qkv, cos, sin, *, view):
        if (index := self._cache.held_index(layer)) is not None:
            return self._reading.attend(index, qkv, cos, sin, view=view)
        return *self._cache.attend_in_window(layer, qkv, cos, sin), None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepsBesideRings(RingsBeside):
    """What the steps of a draft append to that has a cache of its own: that one in layers without a window, the target's rings in others.

    Attributes:
        held: the draft's own cache.
        rings, has_window, window: those of the target's cache.
        own_lengths, text_lengths: lengths of the draft's own cache and of the target's, before the round.
    """

    held: AppendedCache
    rings: tuple[FullLayer, ...]
    has_window: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})
    own_lengths: Lengths
    text_lengths: Lengths

    @property
    def in_text(self) -> Int[Array, "B"]:
        return self.text_lengths.total + self.lengths.total - self.own_lengths.total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlidingCache(RingsBeside, Cache):
    """A target's cache: rings, and beside them any cache, whose lengths are those of all layers. Attributes as of `RingsBeside`."""

    held: Cache
    rings: tuple[FullLayer, ...]
    has_window: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})

    @property
    def in_text(self) -> Int[Array, "B"]:
        return self.lengths.total

    @property
    def schedule(self) -> Schedule:
        return self.held.schedule

    @property
    def capacity(self) -> int:
        return self.held.capacity

    @property
    def prompt_queries(self) -> int:
        return self.held.prompt_queries

    @property
    def num_host_bytes(self) -> int:
        return self.held.num_host_bytes

    @property
    def streamed_part(self) -> Cache:
        return self.held.streamed_part

    def steps_over(self, own: AppendedCache) -> AppendedCache:
        return StepsBesideRings(own, self.rings, self.has_window, self.window, own.lengths, self.lengths)

    def from_steps(self, stepped: StepsBesideRings) -> tuple[AppendedCache, Self]:
        return stepped.held, dataclasses.replace(self, rings=stepped.rings)

    def keep(self, lengths: Lengths, kept: Int[Array, "B"]) -> Self:
        return dataclasses.replace(self, held=self.held.keep(lengths, kept))

    def flush(self) -> tuple[Self, Int[Array, "B"]]:
        held, flushed = self.held.flush()
        return dataclasses.replace(self, held=held), flushed

    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"], *queries: Array) -> Any:
        if not self.has_window[layer]:
            return self.held.fill(self.held_index(layer), keys, values, n, *queries)
        return FullLayer(*FullLayer(keys, values).read(self.positions(n)[:, None]))

    def tokens(self, layer: int, positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None) -> KeysValues:
        """See `Cache.tokens`. Of a layer with a window the tokens before it have no meaning."""
        if not self.has_window[layer]:
            return self.held.tokens(self.held_index(layer), positions, batch_rows)
        ring = self.ring(layer)
        return ring.read(positions % ring.keys.shape[2], batch_rows)

    def recent_tokens(self, layer, positions):
        return self.tokens(layer, positions) if self.has_window[layer] else self.held.recent_tokens(self.held_index(layer), positions)

    def with_layer_on_device(self, layer, *, after):
        if self.has_window[layer]:
            return self, after
        held, after = self.held.with_layer_on_device(self.held_index(layer), after=after)
        return dataclasses.replace(self, held=held), after

    def min_rollback(self, tokens):
        # All that a pass may append, and is rolled back, may have been written after the row's last token: then a ring has just the window
        # before the token that comes next, and the one before that.
        return jnp.where(tokens <= self.window, 0, tokens - 1)

    def guided(self, **guess):
        return dataclasses.replace(self, held=self.held.guided(**guess))

    def with_fetched(self, rows, before):
        return dataclasses.replace(self, held=self.held.with_fetched(rows, before.held))

    def reads(self, view, tokens):
        return self.held.reads(view, tokens)

    def with_rows(self, rows: Self, slots: Int[Array, "k"], pages: Int[Array, "k C"] | None = None) -> Self:
        rings = jax.tree.map(lambda x, row: x.at[slots].set(row), self.rings, rows.rings)
        return dataclasses.replace(self, held=self.held.with_rows(rows.held, slots, pages), rings=rings)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlidingPooledCache(SlidingCache, PooledCache):
    """A `SlidingCache` around a cache whose rows may share a pool."""

    held: PooledCache

    @property
    def pages(self) -> Int[Array, "B C"] | None:
        return self.held.pages

    @property
    def groups(self) -> int:
        return self.held.groups

    @property
    def group_size(self) -> int:
        return self.held.group_size

    def whole_layer(self, layer: int) -> HierarchicalLayer:
        return self.held.whole_layer(self.held_index(layer))

    @property
    def num_pages(self) -> int | None:
        return self.held.num_pages

    def pooled(self, batch: int, pages: int) -> Self:
        rings = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype), self.rings)
        return dataclasses.replace(self, held=self.held.pooled(batch, pages), rings=rings)

    @property
    def pooled_part(self) -> HierarchicalCache:
        return self.held.pooled_part

    def with_pooled_part(self, part: HierarchicalCache) -> Self:
        return dataclasses.replace(self, held=self.held.with_pooled_part(part))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoLayersCache(Cache):
    """The lengths alone, for models in which every layer has a window.

    Attributes:
        own_schedule: of the cache that it takes the place of, by which callers count.
        row_capacity: the maximum number of tokens of a row.
    """

    lengths: Lengths
    own_schedule: Schedule = dataclasses.field(metadata={"static": True})
    row_capacity: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, batch: int, schedule: Schedule, capacity: int) -> Self:
        return cls(no_tokens(batch), schedule, capacity)

    @property
    def layers(self) -> tuple[()]:
        return ()

    @property
    def schedule(self) -> Schedule:
        return self.own_schedule

    @property
    def capacity(self) -> int:
        return self.row_capacity

    def with_layers(self, layers):
        return self

    def reads(self, view, tokens):
        """What a ring, which is in full precision, reads at most."""
        return Reads(0, 0, tokens)

    def _no_layer(self, *args, **kwargs):
        raise AssertionError("every layer has a window, so no other cache holds one")

    attend = fill = tokens = bytes_of_reads = _no_layer


def beside_rings(
    make: Callable[[LlamaConfig], Cache],
    model: LlamaConfig,
    schedule: Schedule,
    *,
    batch: int,
    capacity: int,
    num_speculative_tokens: int,
    dtype: jnp.dtype,
) -> SlidingCache:
    """The cache of a model with a window.

    Args:
        make: makes the cache of the layers without one; its argument is the model without the others.
        model: the shape of the model.
        schedule: of the cache that `make` makes.
        batch, capacity, num_speculative_tokens, dtype: see `qspec_jax.caches.registry.RegisteredCache.make`.
    """
    if model.full_layers:
        held = make(dataclasses.replace(model, num_layers=len(model.full_layers), sliding_layers=(), sliding_window=None))
    else:
        held = NoLayersCache.of(batch, schedule, capacity)
    rows = model.sliding_window + num_speculative_tokens + 1
    shape = dict(batch=batch, kv_heads=model.num_kv_heads, rows=rows, head_dim=model.head_dim, dtype=dtype)
    has_window = tuple(i in model.windowed_layers for i in range(model.num_layers))
    kind = SlidingPooledCache if isinstance(held, PooledCache) else SlidingCache
    return kind(held, tuple(FullLayer.zeros(**shape) for _ in range(sum(has_window))), has_window, model.sliding_window)
