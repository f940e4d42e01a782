"""States while a batch of them generates."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from qspec_jax.decoding.adaptive import Adaptive
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.reading import read_to, with_room
from qspec_jax.decoding.rows import alone, int32, joined
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import DecodeState
from qspec_jax.decoding.state_arrays import concatenated, row_of
from qspec_jax.models.prompts import bucket
from qspec_jax.states.state import State


class Continued:
    """States while a batch of them generates.

    Args:
        states: those that are continued.
        texts: of each row all tokens of its prompt, which begin with those of the state.
        new: the maximum number of new tokens of a row.
        on_compile: see `Rows`.

    Attributes:
        states: those after the new tokens, of rows that have ended.
    """

    def __init__(self, states: Sequence[State], texts: Sequence[Sequence[int]], new: int, on_compile: Callable[[float], None]):
        room, longest = states[0].room, max(map(len, texts))
        if longest > room.text or longest + new > room.capacity:
            text = bucket(longest + new)
            larger = dataclasses.replace(room, text=text, capacity=text + room.capacity - room.text)
            grown = {id(state): with_room(state, larger, on_compile) for state in states}
            states = [grown[id(state)] for state in states]
        self._before, self.states = tuple(states), [None] * len(states)
        self._texts = [np.array(text, np.int32) for text in texts]
        self._kept: DecodeState | None = None
        self._rows = joined(self._before, [len(text) + new for text in texts], on_compile)

    def begin(self, engine: Engine, sampler: Sampler, keys: Key[Array, "B"], limits: Limits) -> DecodeState:
        """The state before the first round, without the groups that are in the pool."""
        states, rows = self._before, self._rows
        pending = [len(text) == len(state) and state.pending for state, text in zip(states, self._texts, strict=True)]
        cached = [len(text) - waits for text, waits in zip(self._texts, pending, strict=True)]
        if any(end > state.cached for end, state in zip(cached, states, strict=True)):
            rows.read(states, self._texts, cached)
        seen = None
        if limits.asks_what_was_seen:
            seen = np.zeros((len(states), rows.room.capacity), np.int32)
            for row, tokens in zip(seen, self._texts, strict=True):
                row[: len(tokens)] = tokens
            seen = jnp.asarray(seen)
        waiting = int32([tokens[-1] if waits else -1 for tokens, waits in zip(self._texts, pending, strict=True)])
        adaptive = None
        if limits.draft_cost is not None:
            adaptive = concatenated([Adaptive.begin(1) if state.adaptive is None else state.adaptive for state in states])
        started = engine.resume(rows.logits, seen, int32(cached), sampler, keys, limits, waiting, adaptive)
        return dataclasses.replace(started, cache=rows.cache, draft=rows.draft)

    def in_use(self) -> AbstractContextManager:
        """See `Rows.in_use`."""
        return self._rows.in_use()

    def num_cache_bytes(self, state: DecodeState) -> int:
        """Bytes of the state's cache with the groups of the pool."""
        with self.in_use():
            return self._rows.lent(state.cache).num_bytes

    def lent(self, state: DecodeState) -> DecodeState:
        """The state with the groups of the pool, for a program that may consume it; before the first round a copy of borrowed arrays."""
        if self._rows.borrowed:  # before the first round
            self._rows.own()
            state = dataclasses.replace(state, cache=self._rows.cache, draft=self._rows.draft)
        return dataclasses.replace(state, cache=self._rows.lent(state.cache))

    def taken_back(self, state: DecodeState) -> DecodeState:
        """The state that the program has returned, without these groups."""
        return dataclasses.replace(state, cache=self._rows.taken_back(state.cache))

    def keep(self, state: DecodeState) -> None:
        """Keeps the state before a round after which text may be cut off: see `end`."""
        self._kept = jax.tree.map(jnp.copy, state)

    def end(self, state: DecodeState, b: int, new: Sequence[int]) -> None:
        """Makes the state of a row that has ended with these new tokens.

        A stop string may have cut off tokens of the last round, perhaps more than can be taken back. Then the row goes on from the state
        that was kept before the round, and reads those that count.
        """
        if int(state.emitted[b]) == len(new):
            self.states[b] = self._state(row_of(state, b, len(self.states)), b, new)
            return
        row = row_of(self._kept, b, len(self.states))
        before = self._before[b]
        if count := int(row.emitted[0]):
            before = self._state(row, b, new[:count])
        tokens = np.concatenate([self._texts[b], np.array(new, np.int32)])
        self.states[b] = read_to(before, tokens, len(tokens) - 1)

    def _state(self, row: DecodeState, b: int, new: Sequence[int]) -> State:
        before, pages = self._before[b], None
        tokens = np.concatenate([self._texts[b], np.array(new, np.int32)])
        cached = len(tokens) - 1
        if (pool := before.reader.pool) is not None:
            pages = pool.shorter(self._rows.pages[b], before.reader.schedule.max_flushes(cached))
        after = dict(cache=alone(row.cache), draft=row.draft, adaptive=row.adaptive, pages=pages)
        return dataclasses.replace(before, tokens=tokens, cached=cached, logits=None, num_queries=0, **after)
