"""The state of a row: everything that is known of the tokens that a model has read, as one immutable value."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.guess import NextTokenGuess
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.states.pages import HeldPages
from qspec_jax.states.pool import Pool


@dataclasses.dataclass(frozen=True)
class Room:
    """The sizes of a state's arrays.

    Attributes:
        text: the maximum number of tokens that are read, and not generated.
        capacity: the maximum number of tokens.
        gamma: the maximum number of drafts in a round.
        appended: the maximum number of tokens that a pass appends before some of them are kept.
    """

    text: int
    capacity: int
    gamma: int
    appended: int


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """What has read the tokens of states. States with the same reader can be continued in one batch.

    Attributes:
        model: the target.
        draft: None where nothing drafts.
        cache: the choice of the target's cache.
        settings: the fields of `GenerationConfig` by which draft and cache were chosen.
        pool: the pages of the states; None for a cache whose rows share nothing.
    """

    model: Llama
    draft: Draft | None
    cache: CacheConfig
    settings: dict[str, Any]
    pool: Pool | None = None

    def reads_as(self, other: "Reader") -> bool:
        """Whether states of the two can be in one batch."""
        return self is other or (
            self.model is other.model and self.draft is other.draft and self.cache == other.cache and self.pool is other.pool
        )

    @functools.cached_property
    def target(self) -> ViewedModel:
        """The model, which reads all of its cache."""
        return ViewedModel(self.model, BOTH_PLANES)

    @functools.cached_property
    def begins(self) -> Draft | None:
        """What has a state of its own: the draft, or what makes the guesses that some caches need."""
        return NextTokenGuess(self.target) if self.cache.guesses else self.draft

    @property
    def schedule(self) -> Schedule:
        return self.cache.schedule_for(self.model.config.head_dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of one row. Nothing changes it: what reads or generates more tokens returns another state.

    After `prefill` and `extend` the logits of the next token are known. After generating, the last token is pending: it is in `tokens`, and
    its keys and values are not cached yet.

    Attributes:
        tokens: all tokens, a pending one included.
        cache: the target's cache of the row; without the groups that are in the reader's pool.
        draft: the state of the draft, or of the guesses that the cache needs (`Reader.begins`).
        logits: after the last cached token; None where the last token is pending, or after `trim`.
        queries: of each layer the queries after RoPE of the last tokens, as the draft needs them to begin; empty if it needs none.
        num_queries: how many of the last rows of `queries` are known.
        adaptive: the history of acceptance, if drafting adapts to it.
        cached: the number of tokens whose keys and values are cached.
        room: the sizes of the arrays.
        reader: what has read the tokens.
        pages: the pages of the row's groups in the reader's pool; None without a pool.
    """

    tokens: Int[np.ndarray, "n"]
    cache: Cache
    draft: Any
    logits: Float[Array, "1 V"] | None
    queries: tuple[Float[Array, "1 Q N H"], ...]
    adaptive: Any
    num_queries: int = dataclasses.field(metadata={"static": True})
    cached: int = dataclasses.field(metadata={"static": True})
    room: Room = dataclasses.field(metadata={"static": True})
    reader: Reader = dataclasses.field(metadata={"static": True})
    pages: HeldPages | None = dataclasses.field(default=None, metadata={"static": True})

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        pending = ", the last one pending" if self.pending else ""
        return f"State({len(self)} tokens{pending}, room for {self.room.capacity - len(self)} more, cache {self.reader.cache.name})"

    @property
    def pending(self) -> bool:
        """Whether the keys and values of the last token are not cached yet."""
        return len(self.tokens) > self.cached

    @property
    def lost(self) -> bool:
        """Whether an interrupted run has consumed the pages, so that nothing can be read from the state."""
        return self.reader.pool is not None and self.reader.pool.lost

    @property
    def num_bytes(self) -> int:
        """Bytes of the state's own arrays, without pages, which other states may share."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def fork(self, n: int) -> list[Self]:
        """n states of the same tokens, which differ in what follows. Nothing is copied: states never change.

        Raises InputError for n less than 1.
        """
        if n < 1:
            raise InputError(f"{n} forks: there should be at least 1")
        return [self] * n

    def trim(self, tokens: int) -> Self:
        """The state of the first `tokens` tokens, to which some should be added by `extend` before anything is generated.

        Codes of a flush cannot be undone, so at most as many tokens can be cut off as the buffer holds. To go back further, keep the state.

        Raises:
            InputError: for a number of tokens whose quantized tokens are other ones than those of this state, for a cache that forgets
                tokens, and for one that needs tokens which left the rings of layers with a sliding window.
        """
        schedule, name = self.reader.schedule, self.reader.cache.kind
        if not 0 < tokens <= len(self):
            raise InputError(f"a state of {len(self)} tokens cannot be trimmed to {tokens}; it should be from 1 to {len(self)}")
        if not self.reader.cache.trims:
            raise InputError(f"cache {name} forgets what it held before, so a state of it cannot be trimmed; keep the earlier state")
        if tokens == len(self):
            return self
        quantized = schedule.quantized_length(self.cached)
        if schedule.quantized_length(tokens) != quantized:
            first = quantized + schedule.flush_size
            raise InputError(
                f"a state of {len(self)} tokens has {quantized} of them quantized, so it can be trimmed to {first} or more, not to "
                f"{tokens}; keep the earlier state"
            )
        cached = min(tokens, self.cached)
        if cached < (shortest := int(self.cache.min_rollback(self.cached))):
            raise InputError(
                f"a state of {len(self)} tokens can be trimmed to {shortest} or more, not to {tokens}, since layers with a sliding window "
                "hold no tokens before that of its end; keep the earlier state"
            )
        cache = self.cache.rollback(schedule.lengths(jnp.array([cached], jnp.int32)))
        known = max(0, self.num_queries - (self.cached - cached))
        queries = tuple(jnp.roll(q, self.cached - cached, 1) for q in self.queries)
        return dataclasses.replace(
            self, tokens=self.tokens[:tokens], cache=cache, cached=cached, logits=None, queries=queries, num_queries=known
        )
