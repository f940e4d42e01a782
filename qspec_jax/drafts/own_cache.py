"""The KV cache of a draft's own model: of the whole text of each row, or of its first tokens and a window of the most recent ones."""

import abc
import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from qspec_jax.caches.cache import AppendedCache, Cache, longer
from qspec_jax.caches.compact import CompactCache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts.draft import Prompt
from qspec_jax.drafts.sink_window import SinkWindow
from qspec_jax.models.eagle3 import Eagle3Head
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket


class OwnText(abc.ABC):
    """What a model has read of the rows' texts. Passes append to `cache`; `keep` takes in some of the tokens that a pass has appended."""

    cache: AppendedCache

    @property
    @abc.abstractmethod
    def read_so_far(self) -> Int[Array, "B"]:
        """How many tokens of its text each row was given, whether or not they are still there."""

    @property
    @abc.abstractmethod
    def position(self) -> Int[Array, "B"]:
        """The position that the model gives to the next token."""

    @abc.abstractmethod
    def keep(self, model: Llama | Eagle3Head, fed: AppendedCache, count: Int[Array, "B"], most: int) -> Self:
        """The texts with the first count[b] of at most `most` tokens that were appended. fed: the cache after that."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholeText(OwnText):
    """Every token stays."""

    cache: Cache

    @classmethod
    def begin(cls, model: Llama, prompt: Prompt, appended: int) -> Self:
        """The texts after a prefill of the prompts. appended: the most tokens of a pass or of a round's passes."""
        empty = _empty(model, prompt.n.shape[0], prompt.capacity, appended)
        return cls(prefill(model, prompt.tokens[:, : prompt.width], prompt.n, empty)[1])

    @property
    def read_so_far(self) -> Int[Array, "B"]:
        return self.cache.lengths.total

    @property
    def position(self) -> Int[Array, "B"]:
        return self.read_so_far

    def keep(self, model: Llama | Eagle3Head, fed: AppendedCache, count: Int[Array, "B"], most: int) -> Self:
        return WholeText(fed.rollback(longer(self.cache.lengths, count)))

    def can_cut(self, length: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Whether `cut` leaves all that the model reads of each text; a sliding window may be gone."""
        return self.cache.min_rollback(self.read_so_far) <= length

    def cut(self, length: Int[Array, "B"]) -> Self:
        """The texts without what they hold after their first length[b] tokens."""
        lengths = self.cache.lengths
        return WholeText(self.cache.rollback(dataclasses.replace(lengths, buffered=jnp.minimum(lengths.buffered, length))))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window(SinkWindow, OwnText):
    """The first tokens stay, and the most recent ones.

    A prompt longer than sinks + window is read as its first and last tokens alone. In a later pass each token sees the window as of the
    pass's start, plus the pass's earlier tokens. skipped: how many tokens were not read.
    """

    skipped: Int[Array, "B"]

    @classmethod
    def begin(cls, model: Llama, prompt: Prompt, appended: int, *, sinks: int, window: int) -> Self:
        """As `WholeText.begin`, for `sinks` first tokens and a window of `window` tokens."""
        size, S = sinks + window, prompt.tokens.shape[1]
        width, n = min(bucket(size), prompt.width or S), jnp.minimum(prompt.n, size)
        skipped, column = prompt.n - n, jnp.arange(width)
        at = jnp.where(column < sinks, column, column + skipped[:, None])
        tokens = jnp.take_along_axis(prompt.tokens, jnp.minimum(at, S - 1), 1)
        _, read = prefill(model, tokens, n, _empty(model, n.shape[0], width, 0))
        return cls.of(read, n, skipped, appended, sinks=sinks, window=window)

    @classmethod
    def of(cls, read: Cache, n: Int[Array, "B"], skipped: Int[Array, "B"], appended: int, *, sinks: int, window: int) -> Self:
        """The texts whose first tokens and most recent ones a full-precision cache holds: n[b] in all, after which there may be others."""
        size = sinks + window

        def rows(x):
            return jnp.pad(x[:, :, :size], ((0, 0), (0, 0), (0, max(0, size - x.shape[2])), (0, 0)))

        layers = [(rows(layer.keys), rows(layer.values)) for layer in read.layers]
        places = dict(kept=jnp.full_like(n, sinks), ring=jnp.full_like(n, window), taken=n)
        cache = CompactCache.of([CompactCache.make_layer(*layer, kind="full", appended=appended) for layer in layers], **places)
        return cls(cache, tuple(keys[:, :, :sinks] for keys, _ in layers) if sinks else (), skipped)

    @property
    def read_so_far(self) -> Int[Array, "B"]:
        return self.cache.taken + self.skipped

    @property
    def position(self) -> Int[Array, "B"]:
        return self.cache.taken

    def keep(self, model: Llama | Eagle3Head, fed: AppendedCache, count: Int[Array, "B"], most: int) -> Self:
        rows = self.cache.rows[:, None] + jnp.arange(most)
        return dataclasses.replace(self, cache=fed).take_in(model, [layer.read(rows[:, None]) for layer in fed.layers], count)


def _empty(model: Llama, batch: int, capacity: int, appended: int) -> Cache:
    sizes = dict(batch=batch, capacity=capacity, num_speculative_tokens=appended, dtype=model.dtype)
    return CacheConfig("full").empty(model.config, **sizes)
