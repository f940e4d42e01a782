"""The H2O cache, which is lossy: for each KV head the heavy hitters, the tokens with the most accumulated attention, and the recent ones.

A token's attention is accumulated over all queries that have read it, those of the prompt among them, and over the query heads of a KV
head. Keys keep the RoPE of their positions in the text. In prefill nothing is forgotten yet: a token attends to all tokens before it.

Source: H2O (arXiv 2306.14048), section 4. There a token is evicted in each step; here `recent` tokens at a time, on the schedule by which
quantizing caches flush. Between two evictions all tokens read the same ones, so that a round may use drafts.
"""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.reference import attend_readable, attention_weights
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.pytree import pytree
from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.rope_append import rotate_and_append
from qspec_jax.caches.cache import MAX_TOKENS, Reads, at_most_once, bytes_of_tokens, no_tokens
from qspec_jax.caches.evicting import EvictingCache
from qspec_jax.caches.schedule import Schedule
from qspec_jax.models.prompts import equal_parts
from qspec_jax.settings_text import check_settings, setting

CHUNK_QUERIES = 64  # of a prompt, whose attention is computed once more, and held


@dataclasses.dataclass(frozen=True)
class H2OCacheSettings:
    """`recent` to 2 `recent` - 1 of the most recent tokens are kept."""

    heavy: int = setting(128, "How many heavy hitters each KV head keeps.", minimum=1, maximum=MAX_TOKENS)
    recent: int = setting(128, "The minimum number of recent tokens.", minimum=1, maximum=MAX_TOKENS)
    queries: int = setting(
        MAX_TOKENS, "How many of a prompt's last tokens count for the choice of heavy hitters.", minimum=1, maximum=MAX_TOKENS
    )

    def __post_init__(self):
        check_settings("cache h2o:", self)


@pytree()
class H2OLayer:
    """One layer's tokens and their attention.

    Attributes:
        tokens: heavy hitters in the first rows, in the order of the text, and the recent tokens after them.
        mass: the accumulated attention of each row; 0 after the last token.
        read: the attention of the last positions' queries to each row, which is accumulated at the end of a round; that of position p is in
            row p mod Q.
    """

    tokens: FullLayer
    mass: Float[Array, "B K S"]
    read: Float[Array, "B K Q S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class H2OCache(EvictingCache):
    """Heavy hitters and a buffer of recent tokens. What a quantizing cache quantizes in a flush competes here with the heavy hitters, and
    those with the least attention are forgotten; `lengths.quantized` counts all that ever competed. It is read in one way, whatever the
    view."""

    layers: tuple[H2OLayer, ...]
    lengths: Lengths
    settings: H2OCacheSettings = dataclasses.field(metadata={"static": True})
    row_capacity: int = dataclasses.field(metadata={"static": True})

    Settings: ClassVar[type] = H2OCacheSettings
    name: ClassVar[str] = "h2o"
    chooses_by_head: ClassVar[bool] = True

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.settings.recent)

    @property
    def prompt_queries(self) -> int:
        return self.settings.queries

    @classmethod
    def schedule_of(cls, group_size: int, settings: H2OCacheSettings) -> Schedule:
        return Schedule(settings.recent)

    @classmethod
    def make(cls, model, *, group_size, scheme, settings, batch, capacity, num_speculative_tokens, dtype):
        schedule, (B, K) = cls.schedule_of(group_size, settings), (batch, model.num_kv_heads)
        heavy = min(settings.heavy, schedule.max_flushes(capacity) * settings.recent)
        rows, wide = heavy + schedule.buffer_rows(num_speculative_tokens), accumulation_dtype(dtype)

        def layer() -> H2OLayer:
            tokens = FullLayer.zeros(B, K, rows, model.head_dim, dtype)
            return H2OLayer(tokens, jnp.zeros((B, K, rows), wide), jnp.zeros((B, K, num_speculative_tokens + 1, rows), wide))

        return cls(tuple(layer() for _ in range(model.num_layers)), no_tokens(batch), settings, capacity)

    def reads(self, view, tokens):
        competed = int(self.schedule.quantized_length(tokens))
        return Reads(0, 0, min(competed, self.settings.heavy) + tokens - competed)

    def bytes_of_reads(self, layer, reads):
        held = self.layers[layer].tokens
        return bytes_of_tokens(held, reads.full, held.keys.shape[2]), 0

    def fill(
        self,
        layer: int,
        keys: Float[Array, "B K S H"],
        values: Float[Array, "B K S H"],
        n: Int[Array, "B"],
        queries: Float[Array, "B Q N H"],
    ) -> H2OLayer:
        old = self.layers[layer]
        mass = prompt_mass(queries, keys, n).astype(old.mass.dtype)
        kept = self._kept(mass, self.schedule.quantized_length(n), old.mass.shape[2])
        return dataclasses.replace(old, **_rows(FullLayer(keys, values), mass, kept, n))

    def attend(self, layer, qkv, cos, sin, *, view):
        old, held, T = self.layers[layer], self._held(self.lengths), qkv.shape[1]
        q, tokens = rotate_and_append(qkv, cos, sin, old.tokens, held)
        readable = jnp.arange(old.mass.shape[2]) < (held[:, None] + jnp.arange(1, T + 1))[..., None]
        attended, shares = attend_readable(q, tokens, readable)
        put = jax.vmap(lambda read, new, at: read.at[:, at].set(new))
        return attended, H2OLayer(tokens, old.mass, put(old.read, shares, self._places(self.lengths, T))), None

    def keep(self, lengths: Lengths, kept: Int[Array, "B"]) -> Self:
        queries = self.layers[0].read.shape[2]
        places, stays = self._places(lengths, queries)[:, None, :, None], (jnp.arange(queries) < kept[:, None])[:, None, :, None]

        def accumulated(layer: H2OLayer) -> H2OLayer:
            read = jnp.take_along_axis(layer.read, places, 2)
            return dataclasses.replace(layer, mass=layer.mass + jnp.where(stays, read, 0).sum(2))

        layers = tuple(map(accumulated, self.layers))
        return super(H2OCache, dataclasses.replace(self, layers=layers)).keep(lengths, kept)

    def flushed_layers(self, due: Bool[Array, "B"]) -> tuple[H2OLayer, ...]:
        heavy = self._heavy(self.lengths.quantized)
        rivals = heavy + jnp.where(due, self.settings.recent, 0)
        valid = self._held(self.lengths)

        def flushed(layer: H2OLayer) -> H2OLayer:
            kept = self._kept(layer.mass, rivals, layer.mass.shape[2])
            return dataclasses.replace(layer, **_rows(layer.tokens, layer.mass, kept, valid))

        return at_most_once(due.any(), lambda layers: tuple(map(flushed, layers)), self.layers)

    def _heavy(self, n: Int[Array, "B"]) -> Int[Array, "B"]:
        """How many heavy hitters there are among n tokens."""
        return jnp.minimum(n, self.settings.heavy)

    def _held(self, lengths: Lengths) -> Int[Array, "B"]:
        """How many tokens are there."""
        return self._heavy(lengths.quantized) + lengths.buffered

    def _places(self, lengths: Lengths, T: int) -> Int[Array, "B T"]:
        """Where `H2OLayer.read` has the queries of T tokens from these lengths on."""
        return (lengths.total[:, None] + jnp.arange(T)) % self.layers[0].read.shape[2]

    def _kept(self, mass: Float[Array, "B K S"], rivals: Int[Array, "B"], rows: int) -> Int[Array, "B K rows"]:
        """The numbers of the tokens that are kept, in the order of the text. The first rivals[b] of a row compete for being heavy, and all
        later ones are kept. After the last token come numbers beyond it."""
        size, kept = mass.shape[2], self._heavy(rivals)[:, None, None]
        _, heaviest = lax.top_k(jnp.where(jnp.arange(size) < rivals[:, None, None], mass, -jnp.inf), min(self.settings.heavy, size))
        number = jnp.arange(rows)
        heaviest = jnp.sort(jnp.where(jnp.arange(heaviest.shape[2]) < kept, heaviest, size), -1)
        heavy = jnp.take_along_axis(heaviest, jnp.broadcast_to(jnp.minimum(number, heaviest.shape[2] - 1), (*mass.shape[:2], rows)), 2)
        return jnp.where(number < kept, heavy, rivals[:, None, None] + number - kept)


def prompt_mass(queries: Float[Array, "B Q N H"], keys: Float[Array, "B K S H"], n: Int[Array, "B"]) -> Float[Array, "B K S"]:
    """How much the last Q of a prompt's n[b] tokens attend to each token, added up over them and the query heads of a KV head."""
    (B, Q, N, _), (K, S) = queries.shape, keys.shape[1:3]
    parts = equal_parts(Q, CHUNK_QUERIES)
    at = n[:, None] - Q + jnp.arange(Q)  # negative before a prompt's first token

    def add(mass, part):
        q, at = part
        weights = attention_weights(q, keys, jnp.arange(S) <= jnp.maximum(at, 0)[..., None])
        real = jnp.repeat(at >= 0, N // K, axis=1)[:, None, :, None]
        return mass + jnp.where(real, weights, 0).sum(2), None

    def chunks(x):
        return jnp.moveaxis(x.reshape(B, parts, Q // parts, *x.shape[2:]), 1, 0)

    return lax.scan(add, jnp.zeros((B, K, S), accumulation_dtype(keys.dtype)), (chunks(queries), chunks(at)))[0]


def _rows(tokens: FullLayer, mass: Float[Array, "B K S"], kept: Int[Array, "B K rows"], n: Int[Array, "B"]) -> dict[str, Array | FullLayer]:
    """The rows of a layer that keeps the tokens with these numbers, of n[b], with their mass; the mass is 0 for numbers from n[b] on."""
    own = jnp.take_along_axis(mass, jnp.minimum(kept, mass.shape[2] - 1), 2)
    return dict(tokens=FullLayer(*tokens.read(kept)), mass=jnp.where(kept < n[:, None, None], own, 0))
