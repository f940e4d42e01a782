"""States as the rows of a batch, which reads more tokens."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qspec_jax.caches.cache import Cache, PooledCache
from qspec_jax.decoding.compiled import Compiled, rounded_up
from qspec_jax.decoding.extend import BEGIN_AGAIN, FLUSH, PASS, Extended, tokens_of_pass
from qspec_jax.decoding.host_residence import refused
from qspec_jax.decoding.state_arrays import concatenated, row_of
from qspec_jax.drafts.draft import Taps
from qspec_jax.errors import HostMemoryError
from qspec_jax.states.pages import HeldPages, num_shared
from qspec_jax.states.pool import with_table
from qspec_jax.states.state import Reader, Room, State

# Tokens that go through the model at a time when more are read; kernels for caches whose tokens have codes of their own take fewer.
TOGETHER, TOGETHER_IN_CODES = 64, 16
# Tokens of a prefix that rows share, times the rows but one, from which on a pass reads the prefix once for all rows: that takes launches
# of its own.
MIN_SHARED_READS = 16384


def together(reader: Reader) -> int:
    """How many tokens go through the model at a time."""
    return TOGETHER if reader.cache.pools(reader.model.config) or reader.cache.kind == "full" else TOGETHER_IN_CODES


@dataclasses.dataclass
class Rows:
    """States as the rows of a batch.

    Attributes:
        reader, room: of all states.
        cache: without the groups that are in the pool.
        draft: the draft's state.
        logits: after the last cached token; of a row whose last token is pending they mean nothing.
        queries, num_queries: see `State`.
        pages: those of each row, with room for more tokens; None without a pool.
        borrowed: whether the batch is one state whose arrays it still uses; `own` copies them before a program consumes them.
        on_compile: called with the seconds that a program took to compile, 0 if it was there.
    """

    reader: Reader
    room: Room
    cache: Cache
    draft: Any
    logits: Float[Array, "B V"]
    queries: tuple[Float[Array, "B Q N H"], ...]
    num_queries: list[int]
    pages: list[HeldPages] | None
    borrowed: bool
    on_compile: Callable[[float], None]

    def own(self) -> None:
        """Makes the arrays those of the rows alone, which a program may consume."""
        if self.borrowed:
            arrays = (self.cache, self.draft, self.logits, self.queries)
            self.cache, self.draft, self.logits, self.queries = concatenated([arrays])
            self.borrowed = False

    def in_use(self) -> AbstractContextManager:
        """To be entered from `lent` to `taken_back`: other threads wait for the pool."""
        return nullcontext() if self.reader.pool is None else self.reader.pool.lock

    def lent(self, cache: Cache) -> Cache:
        """The cache of the rows with the groups of the pool."""
        return cache if self.reader.pool is None else self.reader.pool.lent(cache)

    def taken_back(self, cache: Cache) -> Cache:
        """The cache that a program has returned, without these groups."""
        return cache if self.reader.pool is None else self.reader.pool.take_back(cache)

    def read(
        self, states: Sequence[State], texts: Sequence[Sequence[int]], cached: Sequence[int], *, scores: bool = False
    ) -> list[tuple[Float[np.ndarray, "n"], Bool[np.ndarray, "n"]]]:
        """Reads texts in all rows. The device may still be at work on it.

        Args:
            states: those that the rows are made of.
            texts: of each row all tokens, which begin with those of its state.
            cached: how many of them to read.
            scores: whether to score the tokens that are read. A draft then does not begin again: its state stays as it is.

        Returns:
            If they are scored, for each row the log-probabilities of the tokens that were read, and whether each is the most likely one;
            those of a pending token mean nothing.
        """
        reader = self.reader
        text = np.zeros((len(states), self.room.text), np.int32)
        for row, tokens in zip(text, texts, strict=True):
            row[: len(tokens)] = tokens
        begun = [state.cached for state in states]
        new = [end - n for n, end in zip(begun, cached, strict=True)]
        width = min(rounded_up(max(new)), self.room.appended + 1, together(reader)) if reader.cache.takes_drafts else 1
        self.own()
        text, end, taps = jnp.asarray(text), int32(cached), None if scores else self._taps(max(new), width)
        with self.in_use():
            counts, scored, features = self._passes(text, end, begun, cached, width, scores=scores, taps=taps)
            if self.queries:
                self.num_queries = [min(known + more, self.queries[0].shape[1]) for known, more in zip(self.num_queries, new, strict=True)]
            if (draft := reader.begins) is not None and not draft.guesses and not scores:
                rows = self.draft, self.lent(self.cache), self.queries, int32(self.num_queries), features
                args = draft.in_prefill(), *rows, text, end, int32(begun)
                self.draft = self._run(BEGIN_AGAIN, *args, room=self.room)
        if not scores:
            return []
        logprobs, likely = zip(*jax.device_get(scored))
        return [_of_row(b, of_row, logprobs, likely) for b, of_row in enumerate(zip(*counts, strict=True))]

    def _taps(self, new: int, width: int) -> Taps | None:
        """The features that the draft is to be given once at most `new` tokens of a row were read; no more than one pass has, if it has all
        of them."""
        draft = self.reader.begins
        taps = None if draft is None else draft.taps
        return dataclasses.replace(taps, last=min(taps.last, width)) if taps and new <= width else taps

    def _passes(
        self, text: Array, end: Array, begun: Sequence[int], cached: Sequence[int], width: int, *, scores: bool, taps: Taps | None
    ) -> tuple[list[list[int]], list[tuple[Array, Array] | None], Array | None]:
        """Runs passes until each row has read its tokens. Returns how many each row has read in each pass, the scores of each, and the
        features (`Extended`)."""
        reader, schedule, n = self.reader, self.reader.schedule, list(begun)
        guesses = reader.begins if reader.cache.guesses else None
        counts, scored, features = [], [], None
        if taps is not None:
            features = jnp.zeros((len(n), *features_shape(reader, taps)), reader.model.dtype)
        while n != list(cached):
            counts.append([tokens_of_pass(schedule, *of_row, width) for of_row in zip(n, cached, strict=True)])
            due = any(count == schedule.until_flush(tokens) for tokens, count in zip(n, counts[-1]))
            n = [tokens + count for tokens, count in zip(n, counts[-1])]
            before = Extended(self.lent(self.cache), self.draft if guesses else (), self.logits, self.queries, features)
            args = reader.target, guesses, before, text, end
            found, of_pass = self._run(PASS, *args, width=width, scores=scores, taps=taps)
            self.cache, self.logits, self.queries, features = self.taken_back(found.cache), found.logits, found.queries, found.features
            if guesses:
                self.draft = found.draft
            if due:
                self.cache = self.taken_back(self._run(FLUSH, self.lent(self.cache)))
            scored.append(of_pass)
        return counts, scored, features

    def _run(self, program: Compiled, *args: Any, **static: Any) -> Any:
        executable, seconds = program.compile(*args, **static)
        self.on_compile(seconds)
        return executable(*args)

    def state(self, b: int, before: State, tokens: Int[np.ndarray, "n"], cached: int) -> State:
        """The state of a row that has read `cached` of these tokens. before: the state that the row was made of."""
        cache, draft, logits, queries = row_of((self.cache, self.draft, self.logits, self.queries), b, len(self.num_queries))
        pages = None
        if self.pages is not None:
            pages = self.reader.pool.shorter(self.pages[b], self.reader.schedule.max_flushes(cached))
        return dataclasses.replace(
            before,
            tokens=tokens,
            cache=alone(cache),
            draft=draft,
            logits=None if len(tokens) > cached else logits,
            queries=queries,
            num_queries=self.num_queries[b],
            cached=cached,
            pages=pages,
        )


def _of_row(b: int, counts: Sequence[int], *scores: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The scores of the tokens that row b has read, of which it has read counts[i] in pass i. scores: of all rows, in each pass."""
    return tuple(np.concatenate([of_pass[b, :count] for of_pass, count in zip(each, counts, strict=True)]) for each in scores)


def joined(states: Sequence[State], lengths: Sequence[int], on_compile: Callable[[float], None] = lambda seconds: None) -> Rows:
    """States as a batch whose rows have pages for `lengths` tokens. on_compile: see `Rows`.

    Raises HostMemoryError where host memory cannot hold the rows.
    """
    reader, room = states[0].reader, states[0].room
    host_bytes = sum(state.cache.num_host_bytes for state in states)
    if host_bytes and (reason := refused(reader.cache.name, host_bytes)):
        raise HostMemoryError(reason)
    dtype = jnp.promote_types(reader.model.dtype, jnp.float32)
    none = jnp.zeros((1, reader.model.config.vocab_size), dtype)
    parts = [(state.cache, state.draft, none if state.logits is None else state.logits, state.queries) for state in states]
    borrowed, pages = len(parts) == 1, None
    cache, draft, logits, queries = parts[0] if borrowed else concatenated(parts)
    if (pool := reader.pool) is not None:
        schedule = reader.schedule
        pool.make_room(sum(max(0, schedule.max_flushes(length) - len(state.pages)) for state, length in zip(states, lengths, strict=True)))
        pages = [pool.longer(state.pages, schedule.max_flushes(length)) for state, length in zip(states, lengths, strict=True)]
        shared, shared_groups = num_shared(pages) if len(pages) > 1 else 0, None
        if shared * schedule.flush_size * (len(pages) - 1) >= MIN_SHARED_READS:
            shared_groups = jnp.full(len(pages), shared, jnp.int32)
        cache = with_table(cache, pool.table(pages, schedule.max_flushes(room.capacity)), shared_groups)
    return Rows(reader, room, cache, draft, logits, queries, [state.num_queries for state in states], pages, borrowed, on_compile)


def features_shape(reader: Reader, taps: Taps) -> tuple[int, int]:
    """The shape of the features of a row: tokens and channels."""
    return taps.first + taps.last, len(taps.layers) * reader.model.config.hidden_size


def features_bytes(reader: Reader) -> int:
    """The most bytes of the features that the draft is given of a row that reads more; 0 for a draft that reads none."""
    taps = None if reader.begins is None else reader.begins.taps
    return 0 if taps is None else math.prod(features_shape(reader, taps)) * reader.model.dtype.itemsize


def alone(cache: Cache) -> Cache:
    """The cache of a row without the table of its pages, which a state has on the host."""
    return with_table(cache, None) if isinstance(cache, PooledCache) else cache


def int32(numbers: Sequence[int]) -> Int[Array, "B"]:
    return jnp.array(numbers, jnp.int32)
