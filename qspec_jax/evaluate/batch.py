"""Many prompts through one batch that stays full: a row that ends gives its slot to the next prompt, between jitted segments.

A row's tokens depend on its prompt, settings and key alone: rows share no random numbers, are prefilled one by one, and accept, flush
and end independently.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from qspec_jax import decode, prefill
from qspec_jax.compiled import Compiled
from qspec_jax.config import GenerationConfig
from qspec_jax.decode import CachedModel, DecodeState, Limits, Step
from qspec_jax.drafts import quantspec
from qspec_jax.errors import InputError
from qspec_jax.generate import DECODE, PREPARE, Row, make_limits, most_drafts, summary, token_lists
from qspec_jax.model import Llama
from qspec_jax.sampling import Sampler, make_sampler

ROUNDS_PER_SEGMENT = 64  # between two looks, at most
SHARED = ("method", "cache", "eos_token_ids", "ignore_eos", "group_size", "scheme")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, its settings, and the key of its random draws."""

    tokens: Sequence[int]
    config: GenerationConfig
    key: Key[Array, ""]


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of the request at an index, as `generate.Generation` and its `Stats.rows` have it of a prompt."""

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    stats: dict[str, Any]
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


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

    @property
    def rates(self) -> dict[str, float | None]:
        """tokens_per_second: of prefill and decoding together. busy_slots: busy over slot rounds; the ideal is 1. draft_acceptance_rate:
        accepted / drafted. None where there is nothing to divide by."""
        divided = lambda part, whole: part / whole if whole else None
        return {
            "tokens_per_second": divided(self.new_tokens, self.prefill_s + self.decode_s),
            "busy_slots": divided(self.busy_rounds, self.slot_rounds),
            "draft_acceptance_rate": divided(self.num_accepted_draft_tokens, self.num_draft_tokens),
        }


class BatchRun:
    """Results as they come, by iterating over it once; then `stats` is of all of them."""

    def __init__(self, results: Iterator[Result], stats: BatchStats):
        self._results, self.stats = results, stats

    def __iter__(self) -> Iterator[Result]:
        return self._results


def run_batch(
    model: Llama,
    requests: Sequence[Request],
    *,
    batch_size: int = 8,
    draft: Step | None = None,
    tokenizer=None,
    refill: bool = True,
    strategy: Callable[..., Sampler] = make_sampler,
) -> BatchRun:
    """Continues every request, `batch_size` of them at a time.

    draft: as in `generate`. tokenizer: for texts, and for stop strings. refill: False waits until all rows of a batch have ended, for
    comparison. strategy: makes the sampler of the requests' configs, each of its arrays with a row for each. Raises InputError for
    requests that `generate` would not take, and that differ in what a batch shares (`SHARED`).
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
        token_lists(model, [request.tokens], request.config, tokenizer)
    stats = BatchStats()
    slots = _Slots(model, requests, min(batch_size, len(requests)), draft, tokenizer, refill, strategy, stats)
    return BatchRun(slots.run(), stats)


class _Slots:
    """The rows of a batch on the device, and which request each works for."""

    def __init__(
        self,
        model: Llama,
        requests: Sequence[Request],
        batch: int,
        draft: Step | None,
        tokenizer,
        refill: bool,
        strategy: Callable[..., Sampler],
        stats: BatchStats,
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
            logprobs=max((config.logprobs for config in configs if config.logprobs is not None), default=None),
        )
        self.target = CachedModel(model, planes=2)
        # On the host, where rows are taken out of them.
        self.sampler, self.limits = jax.device_get((strategy(*configs), make_limits(model, *configs)))
        self.executables: dict[Any, jax.stages.Compiled] = {}
        self.of: list[int | None] = [None] * batch  # the request of each slot
        self.rows: list[Row | None] = [None] * batch

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
            # Before the rounds too: a first token may have ended a row, and what it does must not depend on its neighbours.
            yield from self._ended(state, running)
            idle = np.array([index is None for index in self.of])
            if idle[running].any():
                # A row that a stop string has ended runs on otherwise.
                state = decode.stopped(state, jnp.asarray(idle))
            else:
                state = self._segment(state, len(running) if waiting and self.refill else 1)

    def _rows(self) -> tuple[Sampler, Limits]:
        """Settings of the requests in the slots; those of an empty slot do not matter."""
        return self._settings([index or 0 for index in self.of])

    def _settings(self, indices: list[int]) -> tuple[Sampler, Limits]:
        take = lambda tree: jax.tree.map(lambda x: jnp.asarray(x[np.array(indices)]), tree)
        of_rows = dataclasses.replace(self.limits, eos_token_ids=None)
        return take(self.sampler), dataclasses.replace(take(of_rows), eos_token_ids=jnp.asarray(self.limits.eos_token_ids))

    def _put(self, state: DecodeState | None, slot: int, index: int) -> DecodeState:
        """The state with a request, prefilled, in a slot."""
        request = self.requests[index]
        sampler, limits = self._settings([index])
        args = (self.model, *prefill.padded([request.tokens]), sampler, request.key[None], limits)
        row = self._timed(PREPARE, "prefill_s", *args, **self.static)
        if state is None:
            state = self._timed(REPEAT, "prefill_s", row, batch=len(self.of))
        self.of[slot], self.rows[slot] = index, Row(request.config, self.tokenizer)
        return self._timed(REPLACE, "prefill_s", state, row, jnp.array([slot]))

    def _segment(self, state: DecodeState, least_running: int) -> DecodeState:
        sampler, limits = self._rows()
        before = np.asarray(state.counts.rounds)
        # A stop string is looked for after every round, so that what a row does never depends on how long its neighbours run.
        rounds = 1 if any(index is not None and self.requests[index].config.stop for index in self.of) else ROUNDS_PER_SEGMENT
        args = (self.target, self.draft, sampler, state, limits, jnp.int32(rounds), jnp.int32(least_running))
        state = self._timed(DECODE, "decode_s", *args)
        worked = np.asarray(state.counts.rounds) - before
        self.stats.rounds += int(worked.max())
        self.stats.slot_rounds += int(worked.max()) * len(worked)
        self.stats.busy_rounds += int(worked.sum())
        return state

    def _timed(self, compiled: Compiled, what: str, *args, **static) -> Any:
        # What is called differs in nothing but the length of a prompt; to find that out from all shapes takes milliseconds.
        key = compiled, args[1].shape if compiled is PREPARE else None
        if key not in self.executables:
            self.executables[key], seconds = compiled.compile(*args, **static)
            self.stats.compile_s += seconds
        began = time.perf_counter()
        result = jax.block_until_ready(self.executables[key](*args))
        setattr(self.stats, what, getattr(self.stats, what) + time.perf_counter() - began)
        return result

    def _ended(self, state: DecodeState, running: list[int]) -> Iterator[Result]:
        parts = (state.tokens, state.emitted, state.status, state.counts, state.logprobs)
        tokens, emitted, status, counts, logprobs = jax.device_get(parts)
        for slot in running:
            index, row = self.of[slot], self.rows[slot]
            row.update(tokens[slot], emitted[slot], status[slot])
            if row.finish_reason is None:
                continue
            self.of[slot] = None
            of_row = (counts.rounds, counts.drafted, counts.accepted, counts.histogram, counts.flushes)
            new, prompt = len(row.token_ids), len(self.requests[index].tokens)
            stats = summary(prompt, new, *(x[slot] for x in of_row), speculative=state.gamma > 0)
            self.stats.prompts += 1
            self.stats.new_tokens += new
            self.stats.num_draft_tokens += stats["num_draft_tokens"]
            self.stats.num_accepted_draft_tokens += stats["num_accepted_draft_tokens"]
            own = row.logprobs(jax.tree.map(lambda x: x[slot], logprobs))  # noqa: B023
            yield Result(index, row.token_ids, row.text, row.finish_reason, stats, *own)


def _repeat(row: DecodeState, batch: int) -> DecodeState:
    rows = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), row)
    return dataclasses.replace(rows, status=jnp.full(batch, decode.LENGTH, jnp.int32))


REPEAT = Compiled(_repeat, static_argnames=("batch",))
REPLACE = Compiled(decode.replace_rows, donate_argnames=("state",))
