"""From prompts to text: batches of ragged prompts through prefill and the decode loop, with statistics."""

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from qspec_jax.caches.config import CacheConfig
from qspec_jax.caches.registry import empty_cache
from qspec_jax.decoding import prefill, round, state
from qspec_jax.decoding.compiled import Compiled, rounded_up
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.processors import make_processors, seen_in, seen_since
from qspec_jax.decoding.sampling import TARGET, Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.state import DecodeState, Limits, Logprobs
from qspec_jax.decoding.text import RowText, encoded, text_of
from qspec_jax.drafts import cached_model, quantspec
from qspec_jax.drafts.cached_model import CachedModel, Step
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket, padded

FINISH_REASONS = {state.EOS: "eos", state.LENGTH: "length", state.STOP: "stop"}


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call to generate did: totals over the prompts, and the same counts for each prompt in `rows`.

    num_spec_steps: draft/verify rounds. draft_acceptance_rate: accepted / drafted tokens (the token that the target adds to
    each round not counted); null where nothing was drafted. mean_acceptance_length: 1 + accepted / rounds, tokens per round.
    acceptance_histogram[a]: rounds that accepted a drafts. Seconds: compile_s apart from prefill_s and decode_s;
    tokens_per_second is of decode_s alone, all rows together. cache_bytes: what the KV cache has allocated.
    """

    prompt_tokens: int
    new_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_histogram: list[int]
    flushes: int
    compile_s: float
    prefill_s: float
    decode_s: float
    tokens_per_second: float
    peak_memory_bytes: int | None
    cache_bytes: int
    rows: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The new tokens of each prompt (an EOS included), their text if a tokenizer was given, why each ended ("eos", "stop" or "length").

    token_ids reach to the token in which a stop string was complete; text is without it. logprobs, where they were asked for: the
    target's log-probability of every new token, and in top_logprobs pairs of id and log-probability for the likeliest in each place.
    """

    token_ids: list[list[int]]
    text: list[str] | None
    finish_reason: list[str]
    stats: Stats
    logprobs: list[list[float]] | None = None
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """What came of a few rounds: new token ids, the text that is certain by now, and how many tokens were drafted and accepted, and groups
    flushed. Drafts behind a stop string count, though they are cut off."""

    token_ids: list[int]
    text: str
    drafted: int
    accepted: int
    flushes: int


def _prepare(
    target: CachedModel,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    sampler: Sampler,
    keys: Key[Array, "B"],
    limits: Limits,
    *,
    cache: CacheConfig,
    capacity: int,
    max_new_tokens: int,
    gamma: int,
    logprobs: int | None = None,
) -> DecodeState:
    model = target.model
    empty = empty_cache(model.config, cache, batch=tokens.shape[0], capacity=capacity, num_speculative_tokens=gamma, dtype=model.dtype)
    with jax.named_scope("prefill"):
        logits, filled = prefill.prefill(model, tokens, n, empty)
    seen = seen_in(tokens, n, logits.shape[1]) if limits.asks_what_was_seen else None
    processed = limits.processed(logits[:, None], jnp.zeros_like(n), None if seen is None else seen_since(seen, tokens[:, :0]))
    first, _ = sampler.choose(processed[:, 0], keys, n, TARGET)
    of_first = None if logprobs is None else Logprobs.of(logits[:, None], first[:, None], logprobs)
    return state.start(filled, first, keys, limits, max_new_tokens=max_new_tokens, gamma=gamma, seen=seen, logprobs=of_first)


PREPARE = Compiled(_prepare, static_argnames=("cache", "capacity", "max_new_tokens", "gamma", "logprobs"))
DECODE = Compiled(round.decode, donate_argnames=("state",))


def generate(
    model: Llama,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer=None,
    draft: Step | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    rounds_per_update: int = 1,
) -> Generation:
    """Continues each prompt; the prompts are one batch, of any lengths.

    prompts: texts (then a tokenizer is needed) or lists of token ids. key: `jax.random.key(seed)`, for sampling. draft: see
    `qspec_jax.drafts`; by default, with method "quantspec", the INT4 draft is made here: make it once with
    `drafts.quantspec(model)` for many calls. on_tokens is called with the new tokens of each prompt after prefill and after every
    `rounds_per_update` rounds; after every one where there are stop strings.

    The output is exactly the INT8-KV target's (in exact arithmetic): greedy, its very tokens; sampled, its distribution.
    Raises InputError for an empty prompt, a token id outside the vocabulary, prompts that are too long, and stop strings without a
    tokenizer.
    """
    rounds = rounds_per_update if on_tokens else state.UNLIMITED
    run = _Run(model, prompts, config or GenerationConfig(), key, tokenizer, draft, rounds)
    for look in run.looks():
        if on_tokens:
            on_tokens([new for new, _ in look])
    return run.generation()


class Stream:
    """One prompt's continuation as it comes: iterate over its pieces. `generation` is there when they have come to their end."""

    def __init__(self, run: "_Run"):
        self.generation: Generation | None = None
        self._pieces = self._run(run)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends it early. Nothing runs between two pieces; what it holds on the device is freed."""
        self._pieces.close()

    def _run(self, run: "_Run") -> Iterator[Piece]:
        before = np.zeros(3, int)
        for new in run.looks():
            now = np.array([count[0] for count in (run.counts.drafted, run.counts.accepted, run.counts.flushes)])
            yield Piece(*new[0], *(now - before).tolist())
            before = now
        self.generation = run.generation()


def stream(
    model: Llama,
    prompt: str | Sequence[int],
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer=None,
    draft: Step | None = None,
    rounds_per_piece: int = 1,
) -> Stream:
    """As `generate`, of one prompt, in pieces: one after prefill, and one after every `rounds_per_piece` rounds, with stop strings after
    every one.

    Their texts never split a character, hold no part of a stop string, and are together the whole text; "" without a tokenizer.
    """
    return Stream(_Run(model, [prompt], config or GenerationConfig(), key, tokenizer, draft, rounds_per_piece, follow=True))


class Row:
    """What has come of one prompt, on the host. follow: with its text as it comes, which stop strings need anyway."""

    def __init__(self, config: GenerationConfig, tokenizer, *, follow: bool = False):
        self.config, self._tokenizer = config, tokenizer
        self._coming = RowText(tokenizer, config.stop) if tokenizer is not None and (follow or config.stop) else None
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None

    def update(self, tokens: Int[np.ndarray, "N"], emitted: int, status: int) -> tuple[list[int], str]:
        """The new token ids and their text, from the row's tokens so far and its status. Nothing once it has ended."""
        if self.finish_reason:
            return [], ""
        new, text = tokens[len(self.token_ids) : emitted].tolist(), ""
        self.finish_reason = FINISH_REASONS.get(int(status))
        if self._coming:
            text = self._coming.add(new)
            if self.finish_reason:
                text += self._coming.end()
            if self._coming.stopped:
                new, self.finish_reason = self._coming.token_ids[len(self.token_ids) :], "stop"
        self.token_ids += new
        return new, text

    @property
    def text(self) -> str | None:
        """None without a tokenizer."""
        if self._coming and self._coming.stopped:
            return self._coming.text
        return None if self._tokenizer is None else text_of(self._tokenizer, self.token_ids)

    def logprobs(self, of_row: Logprobs | None) -> tuple[list[float] | None, list[list[tuple[int, float]]] | None]:
        """Of the row's tokens, and of the likeliest in each place, as `Generation` has them; None where they were not asked for.

        of_row: on the host, of its columns, with as many alternatives or more.
        """
        n, k = len(self.token_ids), self.config.logprobs
        if k is None:
            return None, None
        pairs = zip(of_row.top_ids[:n, :k].tolist(), of_row.top[:n, :k].tolist())
        return of_row.tokens[:n].tolist(), [list(zip(*pair)) for pair in pairs]


class _Run:
    """One batch, from prompts to a `Generation`."""

    def __init__(
        self,
        model: Llama,
        prompts: Sequence,
        config: GenerationConfig,
        key: Key[Array, ""] | None,
        tokenizer,
        draft: Step | None,
        rounds_per_look: int,
        *,
        follow: bool = False,
    ):
        if rounds_per_look < 1:
            raise InputError(f"rounds {rounds_per_look} between two looks should be at least 1")
        self.model, self.config, self.rounds_per_look = model, config, rounds_per_look
        self.target = CachedModel(model, planes=2)
        self.prompts = token_lists(model, prompts, config, tokenizer)
        self.rows = [Row(config, tokenizer, follow=follow) for _ in self.prompts]
        self.gamma = most_drafts(model, config)
        self.draft = quantspec(model) if self.gamma and draft is None else draft
        self.keys = prompt_keys(jax.random.key(0) if key is None else key, len(self.prompts))
        self.n = np.array([len(prompt) for prompt in self.prompts], np.int32)

    def looks(self) -> Iterator[list[tuple[list[int], str]]]:
        """New tokens of each row, and their text: after prefill, and after every so many rounds until all rows have ended."""
        sampler, limits = make_sampler(self.config), make_limits(self.model, *[self.config] * len(self.rows))
        state = self._prefilled(sampler, limits)
        self.cache_bytes, self.decode_s = state.cache.num_bytes, 0.0
        draft = cached_model.in_loop(self.draft) if self.gamma else None
        # A stop string is looked for after every round, so that what a row does never depends on how often somebody looks.
        rounds = jnp.int32(1 if self.config.stop else self.rounds_per_look)
        run_decode, seconds = DECODE.compile(self.target, draft, sampler, state, limits, rounds)
        self.compile_s += seconds
        jax.block_until_ready(draft)
        while True:
            yield self._update(state)
            ended = np.array([row.finish_reason is not None for row in self.rows])
            if ended.all():
                return
            if self.config.stop:
                state = state.stopped(state, ended)
            began = time.perf_counter()
            state = jax.block_until_ready(run_decode(self.target, draft, sampler, state, limits, rounds))
            self.decode_s += time.perf_counter() - began

    def _prefilled(self, sampler: Sampler, limits: Limits) -> DecodeState:
        tokens, n = padded(self.prompts)
        max_new_tokens = bucket(self.config.max_new_tokens)
        args = (self.target, tokens, n, sampler, self.keys, limits)
        static = dict(cache=self.config.cache_config, capacity=tokens.shape[1] + max_new_tokens, max_new_tokens=max_new_tokens)
        run_prepare, self.compile_s = PREPARE.compile(*args, **static, gamma=self.gamma, logprobs=alternatives(self.model, self.config))
        jax.block_until_ready(self.draft)
        began = time.perf_counter()
        state = jax.block_until_ready(run_prepare(*args))
        self.prefill_s = time.perf_counter() - began
        return state

    def _update(self, state: DecodeState) -> list[tuple[list[int], str]]:
        parts = (state.tokens, state.emitted, state.status, state.counts, state.logprobs)
        tokens, emitted, status, self.counts, self.logprobs = jax.device_get(parts)
        return [row.update(*of_row) for row, *of_row in zip(self.rows, tokens, emitted, status)]

    def generation(self) -> Generation:
        """When all rows have ended."""
        texts = [row.text for row in self.rows]
        of_rows = [row.logprobs(jax.tree.map(lambda x: x[i], self.logprobs)) for i, row in enumerate(self.rows)]  # noqa: B023
        chances, top = (None, None) if self.config.logprobs is None else map(list, zip(*of_rows))
        return Generation(
            [row.token_ids for row in self.rows],
            None if texts[0] is None else texts,
            [row.finish_reason for row in self.rows],
            self._stats(),
            chances,
            top,
        )

    def _stats(self) -> Stats:
        counts, new = self.counts, np.array([len(row.token_ids) for row in self.rows])
        of = functools.partial(summary, speculative=self.gamma > 0)
        columns = (self.n, new, counts.rounds, counts.drafted, counts.accepted, counts.histogram, counts.flushes)
        memory = jax.local_devices()[0].memory_stats() or {}
        return Stats(
            **of(*(column.sum(0) for column in columns)),
            compile_s=self.compile_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            # The first token of each row is prefill's. There may be no other.
            tokens_per_second=float((new - 1).sum() / self.decode_s) if self.decode_s else 0.0,
            peak_memory_bytes=memory.get("peak_bytes_in_use"),
            cache_bytes=self.cache_bytes,
            rows=[of(*row) for row in zip(*columns)],
        )


def make_limits(model: Llama, *configs: GenerationConfig) -> Limits:
    """Of each row. EOS ids are the first one's."""
    eos = () if configs[0].ignore_eos else eos_ids(model, configs[0])
    column = lambda name, dtype: jnp.array([getattr(config, name) for config in configs], dtype)
    return Limits(
        column("max_new_tokens", jnp.int32),
        column("num_speculative_tokens", jnp.int32),
        jnp.array(eos + (-1,) * (rounded_up(max(1, len(eos))) - len(eos)), jnp.int32),
        _stop_sequences(configs),
        make_processors(*configs),
        column("min_draft_confidence", jnp.float32) if any(config.min_draft_confidence for config in configs) else None,
        jnp.array([config.adaptive * config.draft_cost for config in configs], jnp.float32) if any(c.adaptive for c in configs) else None,
    )


def eos_ids(model: Llama, config: GenerationConfig) -> tuple[int, ...]:
    """The config's own, or the checkpoint's."""
    return model.config.eos_token_ids if config.eos_token_ids is None else config.eos_token_ids


def alternatives(model: Llama, *configs: GenerationConfig) -> int | None:
    """To how many alternatives log-probabilities are computed: all that a row asks for, or more. None: not even to the token."""
    asked = [config.logprobs for config in configs if config.logprobs is not None]
    return min(rounded_up(max(asked)), model.config.vocab_size) if asked else None


def _stop_sequences(configs: Sequence[GenerationConfig]) -> Int[Array, "B K L"] | None:
    """As `state.Limits` wants them; None where no row has any."""
    sequences = [config.stop_token_ids for config in configs]
    lengths = [len(sequence) for of_row in sequences for sequence in of_row]
    if not lengths:
        return None
    stop = np.full((len(configs), rounded_up(max(map(len, sequences))), rounded_up(max(lengths))), -1, np.int32)
    for row, of_row in zip(stop, sequences):
        for columns, sequence in zip(row, of_row):
            columns[len(columns) - len(sequence) :] = sequence
    return jnp.asarray(stop)


def most_drafts(model: Llama, config: GenerationConfig) -> int:
    """Drafts that a round is compiled for: no more than could ever be eligible."""
    if config.method != "quantspec":
        return 0
    gamma = min(config.num_speculative_tokens, bucket(config.max_new_tokens))
    return gamma if config.cache == "full" else min(gamma, 2 * config.cache_config.group_size_for(model.config.head_dim) - 1)


def token_lists(
    model: Llama, prompts: Sequence[str] | Sequence[Sequence[int]], config: GenerationConfig, tokenizer=None
) -> list[list[int]]:
    """The token ids of each prompt. Raises InputError for whatever `generate` cannot continue."""
    if isinstance(prompts, str) or not len(prompts):
        raise InputError("prompts should be a list with at least one prompt")
    rows = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InputError("prompts are texts, so a tokenizer is needed")
            prompt = encoded(tokenizer, prompt)
        try:
            row = [operator.index(token) for token in prompt]
        except TypeError:
            raise InputError(f"prompt {i} should be a text or a list of token ids") from None
        if not row:
            raise InputError(f"prompt {i} is empty; it should have at least one token")
        if min(row) < 0 or max(row) >= model.config.vocab_size:
            raise InputError(f"prompt {i} has a token id outside the vocabulary of {model.config.vocab_size}")
        rows.append(row)
    _check_lengths(model, rows, config)
    _check_ids(model, config)
    if config.stop and tokenizer is None:
        raise InputError("stop strings need a tokenizer")
    if special := set(config.stop) & set(getattr(tokenizer, "all_special_tokens", ())):
        raise InputError(f"stop string {min(special)!r} is a special token, which is never in a text; stop at its id, as stop_token_ids")
    return rows


def _check_ids(model: Llama, config: GenerationConfig) -> None:
    size = model.config.vocab_size
    sequences = (config.logit_bias, config.banned_token_ids, config.eos_token_ids or (), *config.stop_token_ids)
    for token in (token for sequence in sequences for token in sequence):
        if not 0 <= token < size:
            raise InputError(f"token id {token} to favour, ban or stop at is outside the vocabulary of {size}")
    forbidden = {*config.banned_token_ids, *(token for token, bias in config.logit_bias.items() if bias == -math.inf)}
    eos = eos_ids(model, config) if config.min_new_tokens and not config.ignore_eos else ()
    if len(forbidden.union(eos)) >= size:
        raise InputError("no token is left that may be generated: fewer should be banned")
    if config.top_logprobs > size:
        raise InputError(f"top_logprobs {config.top_logprobs} should be at most the vocabulary of {size}")


def _check_lengths(model: Llama, rows: list[list[int]], config: GenerationConfig) -> None:
    most, short = model.config.max_length, model.config.short_length
    for i, row in enumerate(rows):
        if len(row) + config.max_new_tokens > most:
            room = most - len(row)
            advice = (
                f"ask for at most {room} new tokens" if room > 0 else f"shorten it to at most {max(1, most - config.max_new_tokens)} tokens"
            )
            raise InputError(
                f"prompt {i} of {len(row)} tokens and {config.max_new_tokens} new ones exceed the model's {most} positions; {advice}"
            )
        # The last new token is never fed back.
        if short is not None and len(row) <= short < len(row) + config.max_new_tokens - 1:
            raise InputError(
                f"prompt {i} of {len(row)} tokens and {config.max_new_tokens} new ones cross the {short} tokens behind which the model "
                f"turns to its long RoPE factors, which is not supported; ask for at most {short - len(row) + 1} new tokens, or give a "
                f"prompt of more than {short}"
            )


def summary(prompt_tokens, new_tokens, rounds, drafted, accepted, histogram, flushes, *, speculative: bool) -> dict[str, Any]:
    """The counts of a row, or of several together, by the names of `Stats`."""
    return dict(
        prompt_tokens=int(prompt_tokens),
        new_tokens=int(new_tokens),
        num_spec_steps=int(rounds) if speculative else 0,
        num_draft_tokens=int(drafted),
        num_accepted_draft_tokens=int(accepted),
        draft_acceptance_rate=float(accepted / drafted) if drafted else None,
        mean_acceptance_length=float(1 + accepted / rounds) if speculative and rounds else None,
        acceptance_histogram=histogram.tolist() if speculative else [],
        flushes=int(flushes),
    )
