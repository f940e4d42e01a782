"""Many prompts through one batch that stays full: a row that ends gives its slot to the next prompt, between jitted segments.

A row's tokens depend on its prompt, settings and key alone: rows share no random numbers, are prefilled one by one, and accept, flush
and end independently.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from qspec_jax import decode, prefill
from qspec_jax.compiled import Compiled
from qspec_jax.config import GenerationConfig
from qspec_jax.decode import CachedModel, DecodeState, Limits, Step
from qspec_jax.drafts import quantspec
from qspec_jax.errors import InputError
from qspec_jax.generate import DECODE, FINISH_REASONS, PREPARE, make_limits, most_drafts, summary, token_lists
from qspec_jax.model import Llama
from qspec_jax.sampling import Sampler, make_sampler

ROUNDS_PER_SEGMENT = 64  # between two looks, at most
SHARED = ("method", "cache", "eos_token_ids", "ignore_eos", "group_size", "scheme")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, its settings, and the key of its random draws.

    stop: strings that end it; the first one and what follows are cut off. stop_token_ids: sequences of new tokens that end it, and stay.
    """

    tokens: Sequence[int]
    config: GenerationConfig
    key: Key[Array, ""]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of the request at an index. text: without a stop string that ended it, None without a tokenizer; token_ids reach to the
    token in which that was complete. stats: the row's counts, as `generate.Stats.rows` has them."""

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    stats: dict[str, Any]


@dataclasses.dataclass
class BatchStats:
    """Of a whole run. slot_rounds: rounds times slots, of which `busy_rounds` worked for a prompt. Seconds: compiling is apart."""

    prompts: int = 0
    new_tokens: int = 0
    rounds: int = 0
    slot_rounds: int = 0
    busy_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class BatchRun:
    """Results as they come, by iterating over it once; then `stats` is of all of them."""

    def __init__(self, results: Iterator[Result], stats: BatchStats):
        self._results, self.stats = results, stats

    def __iter__(self) -> Iterator[Result]:
        return self._results


def run_batch(
    model: Llama, requests: Sequence[Request], *, batch_size: int = 8, draft: Step | None = None, tokenizer=None, refill: bool = True
) -> BatchRun:
    """Continues every request, `batch_size` of them at a time.

    draft: as in `generate`. tokenizer: for texts, and for stop strings. refill: False waits until all rows of a batch have ended, for
    comparison. Raises InputError for requests that `generate` would not take, and that differ in what a batch shares (`SHARED`).
    """
    if batch_size < 1:
        raise InputError(f"batch size {batch_size} should be at least 1")
    if not requests:
        raise InputError("requests should be a list with at least one")
    configs = [request.config for request in requests]
    for name in SHARED:
        if len({getattr(config, name) for config in configs}) > 1:
            raise InputError(f"all requests should have the same {name}")
    for request in requests:
        token_lists(model, [request.tokens], request.config)
    if tokenizer is None and any(request.stop for request in requests):
        raise InputError("stop strings need a tokenizer")
    stats = BatchStats()
    return BatchRun(_Slots(model, requests, min(batch_size, len(requests)), draft, tokenizer, refill, stats).run(), stats)


class _Slots:
    """The rows of a batch on the device, and which request each works for."""

    def __init__(
        self, model: Llama, requests: Sequence[Request], batch: int, draft: Step | None, tokenizer, refill: bool, stats: BatchStats
    ):
        self.model, self.requests, self.tokenizer, self.refill, self.stats = model, requests, tokenizer, refill, stats
        configs = [request.config for request in requests]
        longest = dataclasses.replace(
            configs[0],
            max_new_tokens=max(config.max_new_tokens for config in configs),
            num_speculative_tokens=max(config.num_speculative_tokens for config in configs),
        )
        gamma = most_drafts(model, longest)
        self.draft = decode.in_loop(quantspec(model) if draft is None else draft) if gamma else None
        self.static = dict(
            cache=longest.cache_config,
            capacity=max(prefill.bucket(len(r.tokens)) for r in requests) + prefill.bucket(longest.max_new_tokens),
            max_new_tokens=prefill.bucket(longest.max_new_tokens),
            gamma=gamma,
        )
        self.sampler = make_sampler(*configs)
        self.limits = dataclasses.replace(make_limits(model, *configs), stop=_stop_sequences(requests))
        self.of: list[int | None] = [None] * batch  # the request of each slot

    def run(self) -> Iterator[Result]:
        waiting, state = deque(range(len(self.requests))), None
        while True:
            if self.refill or all(index is None for index in self.of):
                for slot, index in enumerate(self.of):
                    if index is None and waiting:
                        state = self._put(state, slot, waiting.popleft())
            running = [slot for slot, index in enumerate(self.of) if index is not None]
            if not running:
                return
            state = self._segment(state, len(running) if waiting and self.refill else 1)
            yield from self._ended(state, running)
            idle = jnp.array([index is None for index in self.of])
            # A row that a stop string has ended runs on otherwise.
            state = dataclasses.replace(state, status=jnp.where(idle & (state.status == decode.RUNNING), decode.STOP, state.status))

    def _rows(self) -> tuple[Sampler, Limits]:
        """Settings of the requests in the slots; those of an empty slot do not matter."""
        return self._settings([index or 0 for index in self.of])

    def _settings(self, indices: list[int]) -> tuple[Sampler, Limits]:
        take = lambda tree: jax.tree.map(lambda x: x[np.array(indices)], tree)
        of_rows = dataclasses.replace(self.limits, eos_token_ids=None)
        return take(self.sampler), dataclasses.replace(take(of_rows), eos_token_ids=self.limits.eos_token_ids)

    def _put(self, state: DecodeState | None, slot: int, index: int) -> DecodeState:
        """The state with a request, prefilled, in a slot."""
        request = self.requests[index]
        tokens = np.zeros((1, prefill.bucket(len(request.tokens))), np.int32)
        tokens[0, : len(request.tokens)] = request.tokens
        sampler, limits = self._settings([index])
        args = (self.model, jnp.asarray(tokens), jnp.array([len(request.tokens)], jnp.int32), sampler, request.key[None], limits)
        row = self._timed(PREPARE, "prefill_s", *args, **self.static)
        if state is None:
            state = self._timed(REPEAT, "prefill_s", row, batch=len(self.of))
        self.of[slot] = index
        return self._timed(REPLACE, "prefill_s", state, row, jnp.array([slot]))

    def _segment(self, state: DecodeState, least_running: int) -> DecodeState:
        sampler, limits = self._rows()
        before = np.asarray(state.counts.rounds)
        # A stop string is looked for after every round, so that what a row does never depends on how long its neighbours run.
        rounds = 1 if any(index is not None and self.requests[index].stop for index in self.of) else ROUNDS_PER_SEGMENT
        args = (CachedModel(self.model, planes=2), self.draft, sampler, state, limits, jnp.int32(rounds), jnp.int32(least_running))
        state = self._timed(DECODE, "decode_s", *args)
        worked = np.asarray(state.counts.rounds) - before
        self.stats.rounds += int(worked.max())
        self.stats.slot_rounds += int(worked.max()) * len(worked)
        self.stats.busy_rounds += int(worked.sum())
        return state

    def _timed(self, compiled: Compiled, what: str, *args, **static) -> Any:
        executable, seconds = compiled.compile(*args, **static)
        self.stats.compile_s += seconds
        began = time.perf_counter()
        result = jax.block_until_ready(executable(*args))
        setattr(self.stats, what, getattr(self.stats, what) + time.perf_counter() - began)
        return result

    def _ended(self, state: DecodeState, running: list[int]) -> Iterator[Result]:
        tokens, emitted, status, counts = jax.device_get((state.tokens, state.emitted, state.status, state.counts))
        for slot in running:
            index = self.of[slot]
            request = self.requests[index]
            token_ids, reason = tokens[slot, : emitted[slot]].tolist(), FINISH_REASONS.get(int(status[slot]))
            text = None
            if self.tokenizer is not None and (reason or request.stop):
                text = self._text(token_ids)
                if (cut := first_stop(text, request.stop)) is not None:
                    token_ids, text, reason = self._shortest(token_ids, request.stop), text[:cut], "stop"
            if reason:
                self.of[slot] = None
                of_row = (counts.rounds, counts.drafted, counts.accepted, counts.histogram, counts.flushes)
                stats = summary(len(request.tokens), len(token_ids), *(x[slot] for x in of_row), speculative=state.gamma > 0)
                self.stats.prompts += 1
                self.stats.new_tokens += len(token_ids)
                self.stats.num_draft_tokens += stats["num_draft_tokens"]
                self.stats.num_accepted_draft_tokens += stats["num_accepted_draft_tokens"]
                yield Result(index, token_ids, text, reason, stats)

    def _text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _shortest(self, token_ids: list[int], stop: tuple[str, ...]) -> list[int]:
        """Up to the token in which a stop string is complete."""
        return next(token_ids[:n] for n in range(1, len(token_ids) + 1) if first_stop(self._text(token_ids[:n]), stop) is not None)


def _stop_sequences(requests: Sequence[Request]) -> Int[Array, "N K L"] | None:
    """As `decode.Limits` wants them; None where no request has any."""
    sequences = [request.stop_token_ids for request in requests]
    lengths = [len(sequence) for of_row in sequences for sequence in of_row]
    if not lengths:
        return None
    stop = np.full((len(requests), max(map(len, sequences)), max(lengths)), -1, np.int32)
    for row, of_row in zip(stop, sequences):
        for columns, sequence in zip(row, of_row):
            columns[len(columns) - len(sequence) :] = sequence
    return jnp.asarray(stop)


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the strings begins in a text."""
    found = [at for string in stop if (at := text.find(string)) >= 0]
    return min(found, default=None)


def _repeat(row: DecodeState, batch: int) -> DecodeState:
    rows = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), row)
    return dataclasses.replace(rows, status=jnp.full(batch, decode.LENGTH, jnp.int32))


REPEAT = Compiled(_repeat, static_argnames=("batch",))
REPLACE = Compiled(decode.replace_rows, donate_argnames=("state",))
