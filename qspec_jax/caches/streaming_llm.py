"""The StreamingLLM cache, which is lossy: the first tokens of the text, the attention sinks, and a window of the most recent ones.

Source: StreamingLLM (arXiv 2309.17453). There the tokens that are kept are numbered without a gap; here keys keep the RoPE of their
positions in the text, as in the rest of this library, since no text is longer here than the model has positions for. In prefill nothing
is forgotten yet: a token attends to all tokens before it.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import attend_readable
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.caches.cache import MAX_TOKENS, Reads, bytes_of_tokens, no_tokens
from qspec_jax.caches.evicting import EvictingCache
from qspec_jax.caches.ring import row_of_token, token_in_row, with_tokens
from qspec_jax.caches.schedule import Schedule
from qspec_jax.settings_text import check_settings, setting


@dataclasses.dataclass(frozen=True)
class StreamingCacheSettings:
    """The settings of the cache."""

    sinks: int = setting(4, "How many tokens from the start of the text stay.", minimum=0, maximum=MAX_TOKENS)
    window: int = setting(252, "How many of the most recent tokens a token reads, itself included.", minimum=1, maximum=MAX_TOKENS)

    def __post_init__(self):
        check_settings("cache streaming-llm:", self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamingCache(EvictingCache):
    """Sinks, and a ring that has room for the window and for what a round appends: what that overwrites has left the window even of the
    round's first token, so that a rollback loses nothing.

    Which tokens are read depends on the positions of the reader and of what is read alone. So there is no schedule, and a round may use any
    number of drafts. It is read in one way, whatever the view. layers: rows of `qspec_jax.caches.ring`.
    """

    layers: tuple[FullLayer, ...]
    lengths: Lengths
    settings: StreamingCacheSettings = dataclasses.field(metadata={"static": True})
    row_capacity: int = dataclasses.field(metadata={"static": True})

    Settings: ClassVar[type] = StreamingCacheSettings
    name: ClassVar[str] = "streaming-llm"

    @property
    def schedule(self) -> Schedule:
        return Schedule(None)

    @classmethod
    def schedule_of(cls, group_size: int, settings: StreamingCacheSettings) -> Schedule:
        return Schedule(None)

    @classmethod
    def make(cls, model, *, group_size, scheme, settings, batch, capacity, num_speculative_tokens, dtype):
        rows = settings.sinks + min(settings.window, capacity) + num_speculative_tokens + 1
        shape = dict(batch=batch, kv_heads=model.num_kv_heads, rows=rows, head_dim=model.head_dim, dtype=dtype)
        layers = tuple(FullLayer.zeros(**shape) for _ in range(model.num_layers))
        return cls(layers, no_tokens(batch), settings, capacity)

    def reads(self, view, tokens):
        return Reads(0, 0, min(tokens, self.layers[0].keys.shape[2]))

    def bytes_of_reads(self, layer, reads):
        return bytes_of_tokens(self.layers[layer], reads.full, self.layers[layer].keys.shape[2]), 0

    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"]) -> FullLayer:
        return FullLayer(*FullLayer(keys, values).read(self._positions(n)[:, None]))

    def attend(self, layer, qkv, cos, sin, *, view):
        held, n, T = self.layers[layer], self.lengths.total, qkv.shape[1]
        q, *new = split_and_rotate(qkv, cos, sin, kv_heads=held.keys.shape[1])
        reader = n[:, None] + jnp.arange(T)
        held = with_tokens(held, *new, row_of_token(reader, *self._kept_and_ring(n)))
        read, reader = self._positions(n + T)[:, None], reader[..., None]
        readable = (read <= reader) & ((read < self.settings.sinks) | (read > reader - self.settings.window))
        return attend_readable(q, held, readable)[0], held, None

    def _kept_and_ring(self, n: Int[Array, "B"]) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """How many rows the sinks have, and the ring."""
        sinks = self.settings.sinks
        return jnp.full_like(n, sinks), jnp.full_like(n, self.layers[0].keys.shape[2] - sinks)

    def _positions(self, n: Int[Array, "B"]) -> Int[Array, "B S"]:
        """The position in the text of what lies in each row, after n[b] tokens; beyond n where there is none yet."""
        return token_in_row(jnp.arange(self.layers[0].keys.shape[2]), n, *self._kept_and_ring(n))
