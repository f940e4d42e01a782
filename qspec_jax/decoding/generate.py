"""From prompts to text: batches of ragged prompts through prefill and the decode loop, with statistics."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from qspec_jax.caches.host_memory import host_bytes
from qspec_jax.decoding import state
from qspec_jax.decoding.chat import with_chats
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.requests import check_draft_length, check_given, checked_prompts, with_tokenizer
from qspec_jax.decoding.sampling import Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.settled import for_prompts, with_costs, with_draft
from qspec_jax.decoding.state import DecodeState, Logprobs
from qspec_jax.decoding.text import RowText
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import make_draft
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

FINISH_REASONS = {state.EOS: "eos", state.LENGTH: "length", state.STOP: "stop"}


@dataclasses.dataclass(frozen=True)
class RowStats:
    """Counts of one row, or of several together.

    Attributes:
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens that were generated.
        num_spec_steps: draft/verify rounds; 0 without a draft.
        num_draft_tokens: tokens that were drafted.
        num_accepted_draft_tokens: drafts that the target accepted.
        draft_acceptance_rate: accepted / drafted tokens (the token that the target adds to each round not counted); None where nothing was
            drafted.
        mean_acceptance_length: 1 + accepted / rounds, tokens per round; None without rounds of a draft.
        acceptance_histogram: [a] counts the rounds that accepted a drafts.
        flushes: groups that left the buffer.
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


@dataclasses.dataclass(frozen=True)
class Stats(RowStats):
    """Totals of a call to generate, over its prompts.

    Attributes:
        compile_s: seconds of compiling, apart from the two that follow.
        prefill_s: seconds of reading the prompts.
        decode_s: seconds of the rounds.
        tokens_per_second: of decode_s alone, all rows together.
        peak_memory_bytes: of the first device; None where it does not say.
        cache_bytes: what the KV cache has allocated, on all devices together and in host memory.
        host_cache_bytes: the part of it in host memory.
        rows: the counts of each prompt.
    """

    compile_s: float
    prefill_s: float
    decode_s: float
    tokens_per_second: float
    peak_memory_bytes: int | None
    cache_bytes: int
    host_cache_bytes: int
    rows: list[RowStats]


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


def generate(
    model: Llama,
    prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]],
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer: Any = None,
    draft: Draft | None = None,
    sampler: Sampler | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    rounds_per_update: int = 1,
) -> Generation:
    """Continues each prompt; the prompts are one batch, of any lengths.

    The output is exactly that of the target with the config's cache (in exact arithmetic): greedy, its very tokens; sampled, its
    distribution.

    Args:
        model: the target.
        prompts: texts, conversations for the chat template, which are lists of messages (both need a tokenizer), or lists of token ids.
        config: what to generate and how; None: the defaults.
        key: `jax.random.key(seed)`, from which all draws come; needed where there are any, and of any generator of JAX (see
            `qspec_jax.decoding.keys`).
        tokenizer: for texts, conversations and stop strings; ids that it does not have are then not generated.
        draft: None: the one that the config names, or that "auto" chooses, is made here. For many calls make it once, with
            `drafts.make_draft("quantspec", model)`.
        sampler: how tokens are chosen, in place of the config's temperature and filters: a `qspec_jax.decoding.sampling.Sampler`.
        on_tokens: called with the new tokens of each prompt after prefill and after every `rounds_per_update` rounds; after every one
            where there are stop strings.
        rounds_per_update: see on_tokens.

    Raises:
        InputError: for an empty prompt, a token id outside the vocabulary, prompts that are too long, stop strings without a tokenizer,
            draws without a key, and a draft that was made for another model or beside draft "none".
    """
    rounds = rounds_per_update if on_tokens else state.UNLIMITED
    run = _Run(model, prompts, config or GenerationConfig(), key, tokenizer, draft, sampler, rounds)
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
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer: Any = None,
    draft: Draft | None = None,
    sampler: Sampler | None = None,
    rounds_per_piece: int = 1,
) -> Stream:
    """As `generate`, of one prompt, in pieces: one after prefill, and one after every `rounds_per_piece` rounds, with stop strings after
    every one.

    Their texts never split a character, hold no part of a stop string, and are together the whole text; "" without a tokenizer.
    """
    return Stream(_Run(model, [prompt], config or GenerationConfig(), key, tokenizer, draft, sampler, rounds_per_piece, follow=True))


class Row:
    """What has come of one prompt, on the host. prompt: its tokens, whose text the new ones continue. follow: with its text as it comes,
    which stop strings need anyway."""

    def __init__(self, config: GenerationConfig, tokenizer, prompt: Sequence[int], *, follow: bool = False):
        self.config = config
        self._text = None if tokenizer is None else RowText(tokenizer, config.stop, prompt)
        self._follows = follow or bool(config.stop)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._logprobs: list[Logprobs] = []

    def update(self, new: list[int], logprobs: Logprobs | None, status: int) -> tuple[list[int], str]:
        """Takes in the new tokens; returns those that count, and their text. Nothing once the row has ended."""
        if self.finish_reason:
            return [], ""
        text = ""
        self.finish_reason = FINISH_REASONS.get(int(status))
        if self._text and self._follows:
            text = self._text.add(new)
            if self.finish_reason:
                text += self._text.end()
            if self._text.stopped:
                new, self.finish_reason = self._text.token_ids[len(self.token_ids) :], "stop"
        self.token_ids += new
        if logprobs is not None:
            self._logprobs.append(logprobs)
        return new, text

    @property
    def text(self) -> str | None:
        """All of it, once the row has ended; None without a tokenizer."""
        if self._text is None:
            return None
        if not self._follows:
            self._text.add(self.token_ids[len(self._text.token_ids) :])
            self._text.end()
        return self._text.text

    def logprobs(self) -> tuple[list[float] | None, list[list[tuple[int, float]]] | None]:
        """Log-probabilities of the row's tokens, and of the likeliest in each place, as `Generation` has them; None where they were not
        asked for."""
        n, k = len(self.token_ids), self.config.logprobs
        if k is None:
            return None, None
        all = jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *self._logprobs)
        pairs = zip(all.top_ids[:, :k].tolist(), all.top[:, :k].tolist())
        return all.tokens.tolist(), [list(zip(*pair)) for pair in pairs]


class _Run:
    """One batch, from prompts to a `Generation`."""

    def __init__(
        self,
        model: Llama,
        prompts: Sequence,
        config: GenerationConfig,
        key: Key[Array, ""] | None,
        tokenizer,
        draft: Draft | None,
        sampler: Sampler | None,
        rounds_per_look: int,
        *,
        follow: bool = False,
    ):
        if rounds_per_look < 1:
            raise InputError(f"rounds {rounds_per_look} between two looks should be at least 1")
        if not (sampler is None or hasattr(sampler, "verify")):
            raise InputError(f"sampler should have the methods of qspec_jax.decoding.sampling.Sampler, and {sampler!r:.60} has not")
        if key is None and (config.temperature or sampler is not None):
            draws = "a sampler of your own draws" if sampler is not None else f"temperature {config.temperature:g} draws tokens at random"
            raise InputError(f"{draws}, so key should be given, such as jax.random.key(0)")
        check_given(draft, config)
        self.prompts = checked_prompts(model, with_chats(prompts, tokenizer), config, tokenizer)
        config = with_tokenizer(config, model, tokenizer)
        # A stop string is looked for after every round, so that what a row does never depends on how often somebody looks.
        self.rounds_per_look = 1 if config.stop else rounds_per_look
        self.n = np.array([len(prompt) for prompt in self.prompts], np.int32)
        (self.config,) = with_draft(model, [config], [int(self.n.max())], batch=len(self.prompts), draft=draft)
        self.rows = [Row(config, tokenizer, prompt, follow=follow) for prompt in self.prompts]
        if draft is None and self.config.num_speculative_tokens:
            draft = make_draft(self.config.draft, model)
        draft = for_prompts(model, draft, [self.config], self.prompts)
        self.engine = Engine.for_configs(model, draft, [self.config], prompt_tokens=int(self.n.max()))
        configs = with_costs(model, [self.config] * len(self.prompts), self.n.tolist(), self.engine.draft)
        check_draft_length(self.engine.draft, self.prompts, configs)
        self.keys = prompt_keys(key_of(0) if key is None else key, len(self.prompts))
        self.sampler, self.limits = sampler or make_sampler(config), make_limits(model, *configs, tokenizer=tokenizer)

    def looks(self) -> Iterator[list[tuple[list[int], str]]]:
        """New tokens of each row, and their text: after prefill, and after every so many rounds until all rows have ended."""
        state, self.prefill_s = self._prefilled()
        self.cache_bytes, self.host_cache_bytes, self.decode_s = state.cache.num_bytes, host_bytes(state.cache), 0.0
        self.engine.compile_rounds(state, self.sampler, self.limits)
        while True:
            yield self._look(state)
            ended = [row.finish_reason is not None for row in self.rows]
            if all(ended):
                return
            if self.config.stop:
                state = self.engine.stop(state, ended)
            began = time.perf_counter()
            with jax.profiler.TraceAnnotation("rounds"):
                state = jax.block_until_ready(self.engine.rounds(state, self.sampler, self.limits, self.rounds_per_look))
            self.decode_s += time.perf_counter() - began

    def _prefilled(self) -> tuple[DecodeState, float]:
        begin = self.engine.begin_prefill(self.engine.prefill_of(self.prompts, self.sampler, self.keys, self.limits))
        jax.block_until_ready(self.engine.draft)
        began = time.perf_counter()
        with jax.profiler.TraceAnnotation("prefill"):
            state = jax.block_until_ready(begin())
        return state, time.perf_counter() - began

    def _look(self, state: DecodeState) -> list[tuple[list[int], str]]:
        new = self.engine.poll(state, [len(row.token_ids) for row in self.rows])
        self.counts = new.counts
        logprobs = new.logprobs or [None] * len(self.rows)
        return [row.update(*of_row) for row, *of_row in zip(self.rows, new.tokens, logprobs, new.status)]

    def generation(self) -> Generation:
        """What came of the batch, when all rows have ended."""
        texts = [row.text for row in self.rows]
        chances, top = (None, None) if self.config.logprobs is None else map(list, zip(*(row.logprobs() for row in self.rows)))
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
        of = functools.partial(summary, speculative=self.engine.gamma > 0)
        columns = (self.n, new, counts.rounds, counts.drafted, counts.accepted, counts.histogram, counts.flushes)
        memory = jax.local_devices()[0].memory_stats() or {}
        return Stats(
            **vars(of(*(column.sum(0) for column in columns))),
            compile_s=self.engine.compile_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            # The first token of each row is prefill's. There may be no other.
            tokens_per_second=float((new - 1).sum() / self.decode_s) if self.decode_s else 0.0,
            peak_memory_bytes=memory.get("peak_bytes_in_use"),
            cache_bytes=self.cache_bytes,
            host_cache_bytes=self.host_cache_bytes,
            rows=[of(*row) for row in zip(*columns)],
        )


def summary(prompt_tokens, new_tokens, rounds, drafted, accepted, histogram, flushes, *, speculative: bool) -> RowStats:
    """The counts of a row, or of several together."""
    return RowStats(
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
