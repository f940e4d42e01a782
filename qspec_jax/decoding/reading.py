"""States of rows: made by prefill, extended by more tokens, and put together into a batch that generates."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from qspec_jax.caches.cache import Cache, PooledCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.adaptive import Adaptive
from qspec_jax.decoding.compiled import rounded_up
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine, max_drafts
from qspec_jax.decoding.extend import BEGIN_AGAIN, FLUSH, PASS, Extended, tokens_of_pass
from qspec_jax.decoding.host_residence import none_resident, refused
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.prepare import OF_STATES, Prepared, config_of, prepare
from qspec_jax.decoding.requests import check_length, checked_prompt
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import DecodeState
from qspec_jax.decoding.state_arrays import concatenated, enlarged, first_groups, row_of
from qspec_jax.errors import HostMemoryError, InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.states.pages import HeldPages, num_shared
from qspec_jax.states.pool import Pool
from qspec_jax.states.state import Reader, Room, State

ROOM = 4096  # tokens for which a state has room after its prompt, unless said otherwise
GENERATED = 1024  # of these, tokens that are generated, by which drafts with a cache of their own measure their memory
# Tokens that go through the model at a time when more are read; kernels for caches whose tokens have codes of their own take fewer.
TOGETHER, TOGETHER_IN_CODES = 64, 16
# Tokens of a prefix that rows share, times the rows but one, from which on a pass reads the prefix once for all rows: that takes launches
# of its own.
MIN_SHARED_READS = 16384


def prefill(model: Llama, prompt: Any, *, config: GenerationConfig | None = None, tokenizer: Any = None, room: int | None = None) -> State:
    """The state of a prompt that the model has read, from which generating and reading go on.

    Args:
        model: the target.
        prompt: a text, token ids, or a conversation, as `generate` takes it.
        config: draft, cache and number of drafts for which the state is made; its other settings have no effect here.
        tokenizer: for a text or a conversation.
        room: tokens that the arrays have room for after the prompt; they grow when more are read. None: `ROOM`, or what the model's
            positions leave.

    Raises:
        InputError: as `generate` does.
    """
    prepared = prepare(model, [prompt], config=_greedy(config or GenerationConfig()), tokenizer=tokenizer)
    reader, tokens = _reader(prepared), prepared.prompts[0]
    room = room_for(reader, len(tokens), ROOM if room is None else room)
    return _read(reader, tokens, room, room.capacity)


def states_of(prepared: Prepared) -> list[State]:
    """The states of prompts with room for their new tokens, one for each sample; each prompt is read once."""
    reader, samples = _reader(prepared), prepared.samples
    room = room_for(reader, prepared.longest_prompt, max(config.max_new_tokens for config in prepared.configs))
    prompts, states = prepared.prompts[::samples], []
    for first, tokens in zip(range(0, len(prepared.requests), samples), prompts, strict=True):
        more = [config.max_new_tokens for config in prepared.configs[first : first + samples]]
        states += _read(reader, tokens, room, *(len(tokens) + new for new in more)).fork(samples)
    return states


def state_of_prefix(prepared: Prepared) -> State:
    """The state of the prefix that these requests have in common, with room for the longest of them."""
    reader = _reader(prepared)
    new = max(len(request.tokens) + request.config.max_new_tokens for request in prepared.requests) - prepared.longest_prompt
    first = prepared.requests[0]
    return _read(reader, first.tokens[: first.prefix], room_for(reader, prepared.longest_prompt, new), first.prefix)


def reader_of(model: Llama, config: GenerationConfig, tokens: int) -> Reader:
    """What reads rows of `tokens` tokens with the draft and the cache of a config."""
    return _reader(prepare(model, [[0] * tokens], config=_greedy(config)))


def _greedy(config: GenerationConfig) -> GenerationConfig:
    """The config with the least that can be generated, and without draws."""
    return dataclasses.replace(config, max_new_tokens=1, min_new_tokens=0, temperature=0.0, num_return_sequences=1)


def _read(reader: Reader, tokens: Sequence[int], room: Room, *lengths: int) -> State:
    """The state of these tokens. lengths: those of the rows that are to go on from it, for which the pool grows at once."""
    sizes = dict(gamma=room.gamma, prompt_tokens=room.text, max_new_tokens=room.capacity - room.text, appended=room.appended)
    found = Engine(reader.model, reader.draft, cache=reader.cache, **sizes).read(tokens)
    pages, own = None, found.cache
    if reader.pool is not None:
        count = reader.schedule.max_flushes(len(tokens))
        reader.pool.make_room(count + sum(reader.schedule.max_flushes(length) - count for length in lengths))
        pages = reader.pool.reserve(count)
        own = reader.pool.put(found.cache, pages)
    return State(
        np.array(tokens, np.int32),
        own,
        found.draft,
        found.logits,
        found.queries,
        None,
        num_queries=min(found.queries[0].shape[1], len(tokens)) if found.queries else 0,
        cached=len(tokens),
        room=room,
        reader=reader,
        pages=pages,
    )


def _reader(prepared: Prepared) -> Reader:
    model, config = prepared.model, prepared.requests[0].config
    cache = none_resident(config.cache_config)  # a state is copied where it is continued, for which the device should have room
    settings = {name: getattr(config, name) for name in OF_STATES} | {"draft": prepared.config.draft}
    reader = Reader(model, prepared.draft, cache, settings)
    if not cache.pools:
        return reader
    pool = Pool.of((id(model), cache, str(model.dtype)), lambda: first_groups(reader.target, cache))
    return dataclasses.replace(reader, pool=pool)


def room_for(reader: Reader, tokens: int, more: int) -> Room:
    """The sizes of a state of `tokens` tokens that has room for more, as far as the positions of model and draft go."""
    most = reader.model.config.max_length
    if reader.draft is not None and reader.draft.max_length is not None:
        most = min(most, reader.draft.max_length)
    more = max(1, min(more, most - tokens))
    text, gamma = bucket(tokens + more), max_drafts(reader.model, config_of(reader))
    of_round = gamma + (0 if reader.draft is None else reader.draft.extra_rows)
    return Room(text, text + bucket(min(more, GENERATED)), gamma, max(of_round, together(reader.cache) - 1))


def together(cache: CacheConfig) -> int:
    """How many tokens go through the model at a time."""
    return TOGETHER if cache.pools or cache.kind == "full" else TOGETHER_IN_CODES


def extend(state: State, prompt: Any, *, tokenizer: Any = None) -> State:
    """The state after reading more tokens.

    It is that of one-by-one decoding in which these tokens were chosen, however they are divided over calls. The draft begins again, with
    the last tokens in view.

    Args:
        state: the state before, which stays as it is. A pending token is read first.
        prompt: a text, to which no BOS is added, or token ids.
        tokenizer: for a text.

    Raises:
        InputError: as `generate` does, and for more tokens than the model has positions for.
    """
    config = GenerationConfig(max_new_tokens=1)
    more = checked_prompt(state.reader.model, continuation_ids(prompt, tokenizer), config, name="the text")
    tokens = np.concatenate([state.tokens, np.array(more, np.int32)])
    check_reads(state, "the text", len(more))
    return read_to(state, tokens, len(tokens))


def check_reads(state: State, name: str, tokens: int) -> None:
    """Raises InputError if a state cannot read `tokens` tokens more and one new one. name: what the message calls these tokens."""
    check_length(state.reader.model, f"the state with {name}", len(state), tokens + 1)


def continuation_ids(prompt: Any, tokenizer: Any) -> Any:
    """A text as token ids that go on from others: without BOS, and with a blank at its beginning if it has one. Token ids as they are."""
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InputError("the text should be given with a tokenizer, or as token ids")
    # Some tokenizers put a blank before a text: what comes after a token that ends a line is the text alone.
    ids, line = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\n" + prompt, "\n"))
    if ids[: len(line)] == line and len(ids) > len(line):
        return ids[len(line) :]
    return tokenizer(prompt, add_special_tokens=False)["input_ids"]


def read_to(state: State, tokens: Int[np.ndarray, "n"], cached: int) -> State:
    """The state of tokens that begin with those of `state`. cached: how many of them to read, all or all but the last, which is pending."""
    reader = state.reader
    if len(tokens) > state.room.text:
        state = with_room(state, room_for(reader, len(tokens), ROOM))
    rows = joined([state], [cached])
    rows.read([state], [tokens], [cached])
    return rows.state(0, state, tokens, cached)


def with_room(state: State, room: Room) -> State:
    """The state with larger arrays, in which what it holds comes first. Its buffer keeps its size: another backend may have chosen it."""
    generated = max(room.capacity - room.text, state.room.capacity - state.room.text)
    room = dataclasses.replace(state.room, text=room.text, capacity=room.text + generated)
    cache, draft = enlarged(state.reader, room, None if state.reader.pool else state.cache, state.draft)
    return dataclasses.replace(state, cache=state.cache if cache is None else cache, draft=draft, room=room)


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
        borrowed: whether the arrays are still those of the one state that is the row, which no program may consume.
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
        width = min(rounded_up(max(new)), self.room.appended + 1, together(self.reader.cache)) if reader.cache.takes_drafts else 1
        self.own()
        text, end = jnp.asarray(text), _int32(cached)
        with self.in_use():
            counts, scored = self._passes(text, end, begun, cached, width, scores=scores)
            if self.queries:
                self.num_queries = [min(known + more, self.queries[0].shape[1]) for known, more in zip(self.num_queries, new, strict=True)]
            if (draft := reader.begins) is not None and not draft.guesses and not scores:
                rows = self.draft, self.lent(self.cache), self.queries, _int32(self.num_queries)
                args = draft.in_prefill(), *rows, text, end, _int32(begun)
                program, _ = BEGIN_AGAIN.compile(*args, room=self.room)
                self.draft = program(*args)
        if not scores:
            return []
        logprobs, likely = zip(*jax.device_get(scored))
        return [_of_row(b, of_row, logprobs, likely) for b, of_row in enumerate(zip(*counts, strict=True))]

    def _passes(
        self, text: Array, end: Array, begun: Sequence[int], cached: Sequence[int], width: int, *, scores: bool
    ) -> tuple[list[list[int]], list[tuple[Array, Array] | None]]:
        """Runs passes until each row has read its tokens. Returns how many each row has read in each pass, and the scores of each."""
        reader, schedule, n = self.reader, self.reader.schedule, list(begun)
        guesses = reader.begins if reader.cache.guesses else None
        counts, scored, program = [], [], None
        while n != list(cached):
            counts.append([tokens_of_pass(schedule, *of_row, width) for of_row in zip(n, cached, strict=True)])
            due = any(count == schedule.room(tokens) for tokens, count in zip(n, counts[-1]))
            n = [tokens + count for tokens, count in zip(n, counts[-1])]
            before = Extended(self.lent(self.cache), self.draft if guesses else (), self.logits, self.queries)
            args = reader.target, guesses, before, text, end
            if program is None:
                program, _ = PASS.compile(*args, width=width, scores=scores)
            found, of_pass = program(*args)
            self.cache, self.logits, self.queries = self.taken_back(found.cache), found.logits, found.queries
            if guesses:
                self.draft = found.draft
            if due:
                lent = self.lent(self.cache)
                flush, _ = FLUSH.compile(lent)
                self.cache = self.taken_back(flush(lent))
            scored.append(of_pass)
        return counts, scored

    def state(self, b: int, before: State, tokens: Int[np.ndarray, "n"], cached: int) -> State:
        """The state of a row that has read `cached` of these tokens. before: the state that the row was made of."""
        cache, draft, logits, queries = row_of((self.cache, self.draft, self.logits, self.queries), b, len(self.num_queries))
        pages = None
        if self.pages is not None:
            pages = self.reader.pool.shorter(self.pages[b], self.reader.schedule.max_flushes(cached))
        return dataclasses.replace(
            before,
            tokens=tokens,
            cache=_alone(cache),
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


def joined(states: Sequence[State], lengths: Sequence[int]) -> Rows:
    """States as a batch whose rows have pages for `lengths` tokens. Raises HostMemoryError where host memory cannot hold the rows."""
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
        cache = dataclasses.replace(cache, pages=pool.table(pages, schedule.max_flushes(room.capacity)))
        shared = num_shared(pages) if len(pages) > 1 else 0
        if shared * schedule.flush_size * (len(pages) - 1) >= MIN_SHARED_READS:
            cache = dataclasses.replace(cache, shared_groups=jnp.full(len(pages), shared, jnp.int32))
    return Rows(reader, room, cache, draft, logits, queries, [state.num_queries for state in states], pages, borrowed)


class Continued:
    """States while a batch of them generates.

    Args:
        states: those that are continued.
        texts: of each row all tokens of its prompt, which begin with those of the state.
        new: the maximum number of new tokens of a row.

    Attributes:
        states: those after the new tokens, of rows that have ended.
    """

    def __init__(self, states: Sequence[State], texts: Sequence[Sequence[int]], new: int):
        room, longest = states[0].room, max(map(len, texts))
        if longest > room.text or longest + new > room.capacity:
            text = bucket(longest + new)
            larger = dataclasses.replace(room, text=text, capacity=text + room.capacity - room.text)
            grown = {id(state): with_room(state, larger) for state in states}
            states = [grown[id(state)] for state in states]
        self._before, self.states = tuple(states), [None] * len(states)
        self._texts = [np.array(text, np.int32) for text in texts]
        self._kept: DecodeState | None = None
        self._rows = joined(self._before, [len(text) + new for text in texts])

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
        waiting = _int32([tokens[-1] if waits else -1 for tokens, waits in zip(self._texts, pending, strict=True)])
        adaptive = None
        if limits.draft_cost is not None:
            adaptive = concatenated([Adaptive.begin(1) if state.adaptive is None else state.adaptive for state in states])
        started = engine.resume(rows.logits, seen, _int32(cached), sampler, keys, limits, waiting, adaptive)
        return dataclasses.replace(started, cache=rows.cache, draft=rows.draft)

    def in_use(self) -> AbstractContextManager:
        """See `Rows.in_use`."""
        return self._rows.in_use()

    def num_cache_bytes(self, state: DecodeState) -> int:
        """Bytes of the state's cache with the groups of the pool."""
        with self.in_use():
            return self._rows.lent(state.cache).num_bytes

    def lent(self, state: DecodeState) -> DecodeState:
        """The state with the groups of the pool, for a program that may consume it."""
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
        after = dict(cache=_alone(row.cache), draft=row.draft, adaptive=row.adaptive, pages=pages)
        return dataclasses.replace(before, tokens=tokens, cached=cached, logits=None, num_queries=0, **after)


def _alone(cache: Cache) -> Cache:
    """The cache of a row without the table of its pages, which a state has on the host."""
    return dataclasses.replace(cache, pages=None, shared_groups=None) if isinstance(cache, PooledCache) else cache


def _int32(numbers: Sequence[int]) -> Int[Array, "B"]:
    return jnp.array(numbers, jnp.int32)
