"""States of rows: made by prefill, and extended by more tokens."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from qspec_jax.decoding.config import BITS, GenerationConfig
from qspec_jax.decoding.engine import Engine, max_drafts
from qspec_jax.decoding.host_residence import none_resident
from qspec_jax.decoding.prepare import OF_STATES, Prepared, config_of, prepare
from qspec_jax.decoding.requests import check_length, checked_prompt
from qspec_jax.decoding.rows import joined, together
from qspec_jax.decoding.state_arrays import enlarged, first_groups
from qspec_jax.errors import BitsRefused, InputError, is_out_of_memory
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.states.pool import Pool
from qspec_jax.states.state import Reader, Room, State

log = logging.getLogger(__name__)
ROOM = 4096  # tokens for which a state has room after its prompt, unless said otherwise
GENERATED = 1024  # of these, tokens that are generated, by which drafts with a cache of their own measure their memory


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


def states_of(prepared: Prepared, on_compile: Callable[[float | None], None]) -> list[State]:
    """The states of prompts with room for their new tokens, one for each sample; each prompt is read once. on_compile: see `Engine`."""
    reader, samples = _reader(prepared), prepared.samples
    room = room_for(reader, prepared.longest_prompt, max(config.max_new_tokens for config in prepared.configs))
    prompts, states = prepared.prompts[::samples], []
    for first, tokens in zip(range(0, len(prepared.requests), samples), prompts, strict=True):
        more = [config.max_new_tokens for config in prepared.configs[first : first + samples]]
        states += _read(reader, tokens, room, *(len(tokens) + new for new in more), on_compile=on_compile).fork(samples)
    return states


def state_of_prefix(prepared: Prepared, on_compile: Callable[[float | None], None]) -> State:
    """The state of the prefix that these requests have in common, with room for the longest of them. on_compile: see `Engine`."""
    reader = _reader(prepared)
    new = max(len(request.tokens) + request.config.max_new_tokens for request in prepared.requests) - prepared.longest_prompt
    first = prepared.requests[0]
    room = room_for(reader, prepared.longest_prompt, new)
    return _read(reader, first.tokens[: first.prefix], room, first.prefix, on_compile=on_compile)


def reader_of(model: Llama, config: GenerationConfig, tokens: int) -> Reader:
    """What reads rows of `tokens` tokens with the draft and the cache of a config."""
    return _reader(prepare(model, [[0] * tokens], config=_greedy(config)))


def _greedy(config: GenerationConfig) -> GenerationConfig:
    """The config with the least that can be generated, and without draws."""
    return dataclasses.replace(config, max_new_tokens=1, min_new_tokens=0, temperature=0.0, num_return_sequences=1)


def _read(
    reader: Reader, tokens: Sequence[int], room: Room, *lengths: int, on_compile: Callable[[float | None], None] = lambda seconds: None
) -> State:
    """The state of these tokens. lengths: those of the rows that are to go on from it, for which the pool grows at once."""
    sizes = dict(gamma=room.gamma, prompt_tokens=room.text, max_new_tokens=room.capacity - room.text, appended=room.appended)
    found = Engine(reader.model, reader.draft, cache=reader.cache, on_compile=on_compile, **sizes).read(tokens)
    pages, own = None, found.cache
    if reader.pool is not None:
        count = reader.schedule.max_flushes(len(tokens))
        try:
            reader.pool.make_room(count + sum(reader.schedule.max_flushes(length) - count for length in lengths))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # What goes on from the state may need less; if not, it says so then.
            log.info("no memory for the pages of what follows %d tokens; they are reserved when they are needed", len(tokens))
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
    if prepared.exact == BITS:
        raise BitsRefused("is for whole prompts, not for states")
    model, config = prepared.model, prepared.requests[0].config
    cache = none_resident(config.cache_config)  # a state is copied where it is continued, for which the device should have room
    settings = {name: getattr(config, name) for name in OF_STATES} | {"draft": prepared.config.draft}
    reader = Reader(model, prepared.draft, cache, settings)
    if not cache.pools(model.config):
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
    return Room(text, text + bucket(min(more, GENERATED)), gamma, max(of_round, together(reader) - 1))


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


def with_room(state: State, room: Room, on_compile: Callable[[float], None] = lambda seconds: None) -> State:
    """The state with larger arrays, in which what it holds comes first. Its buffer keeps its size: another backend may have chosen it."""
    generated = max(room.capacity - room.text, state.room.capacity - state.room.text)
    room = dataclasses.replace(state.room, text=room.text, capacity=room.text + generated)
    cache, draft, seconds = enlarged(state.reader, room, None if state.reader.pool else state.cache, state.draft)
    on_compile(seconds)
    return dataclasses.replace(state, cache=state.cache if cache is None else cache, draft=draft, room=room)
