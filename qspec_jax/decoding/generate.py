"""From prompts to text: batches of ragged prompts through prefill and the decode loop, with statistics."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from qspec_jax.decoding import state
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.continued import Continued
from qspec_jax.decoding.displayed import generation_html
from qspec_jax.decoding.keys import stacked
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill import Prefill
from qspec_jax.decoding.prepare import Prepared, prepare
from qspec_jax.decoding.reading import states_of
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import Sampler, make_sampler
from qspec_jax.decoding.state import DecodeState, Logprobs, stopped
from qspec_jax.decoding.text import RowText
from qspec_jax.decoding.traced_rounds import TracedRounds
from qspec_jax.decoding.tracing import trace_of
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import mesh_of
from qspec_jax.states.state import State
from qspec_jax.traces.trace import Trace

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
    """The result of `generate`. A notebook shows it as a table with the histogram of accepted drafts.

    Attributes:
        token_ids: the new tokens of each prompt, or of each sample of each prompt in turn, an EOS included, and up to the token in which a
            stop string was complete.
        text: of each prompt's new tokens, without a stop string; None without a tokenizer.
        finish_reason: "eos", "stop" or "length" for each prompt.
        stats: totals, and in `rows` the counts of each prompt.
        logprobs: the target's log-probability of each new token; None if they were not asked for.
        top_logprobs: pairs of token id and log-probability for the most likely tokens of each position.
        states: where states were continued, those after the new tokens; else None.
        trace: what happened in each round, if it was asked for.
    """

    token_ids: list[list[int]]
    text: list[str] | None
    finish_reason: list[str]
    stats: Stats
    logprobs: list[list[float]] | None = None
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None
    states: list[State] | None = None
    trace: Trace | None = None

    def _repr_html_(self) -> str:
        return generation_html(self.stats, self.text, self.token_ids, self.finish_reason)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a stream.

    Attributes:
        token_ids: new tokens.
        text: the text that is certain by now.
        drafted: the number of draft tokens; those after a stop string count, though they are cut off.
        accepted: the number of accepted draft tokens.
        flushes: groups that left the buffer.
    """

    token_ids: list[int]
    text: str
    drafted: int
    accepted: int
    flushes: int


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | State


def generate(
    model: Llama,
    prompts: Prompt | Sequence[Prompt] | Prepared,
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer: Any = None,
    sampler: Sampler | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    rounds_per_update: int = 1,
    trace: bool = False,
) -> Generation:
    """Continues prompts; they are one batch, of any lengths.

    The output is exactly that of the target with the config's cache (in exact arithmetic): greedy, its very tokens; sampled, its
    distribution.

    Args:
        model: the target.
        prompts: texts, conversations for the chat template, which are lists of messages (both need a tokenizer), or lists of token ids; a
            single text or list of token ids; states, which are continued and stay as they are; or what `prepare` returned for this model,
            which has config, key and tokenizer.
        config: what to generate and how, with the draft; None: the defaults. For many calls, make the draft once:
            `GenerationConfig(draft=make_draft("quantspec", model))`.
        key: `jax.random.key(seed)`, from which all draws come; needed where there are any, and of any generator of JAX (see
            `qspec_jax.decoding.keys`).
        tokenizer: for texts, conversations and stop strings; ids that it does not have are then not generated.
        sampler: chooses tokens instead of the config's temperature and filters: a `qspec_jax.decoding.sampling.Sampler`.
        on_tokens: called with the new tokens of each prompt after prefill and after every `rounds_per_update` rounds; after every round
            if there are stop strings.
        rounds_per_update: see on_tokens.
        trace: whether to record each round (`Generation.trace`). Rounds then run one at a time, in a program for each phase, which takes
            longer, and the tokens are the same.

    Returns:
        What was generated for each prompt, with one entry for a single prompt.

    Raises:
        InputError: for an empty prompt, a token id outside the vocabulary, prompts that are too long, stop strings without a tokenizer,
            draws without a key, a draft that was made for another model, and a trace of a model that is divided over devices.
    """
    _check_sampler(sampler, key, prompts)
    if trace:
        check_traceable(model)
    rounds = rounds_per_update if on_tokens else state.UNLIMITED
    run = Run(_prepared(model, prompts, config, key, tokenizer), sampler, rounds, traced=trace)
    for update in run.updates():
        if on_tokens:
            on_tokens([new for new, _ in update])
    return run.generation()


def check_traceable(model: Llama) -> None:
    """Raises InputError for a model whose rounds cannot be traced: one that is divided over devices."""
    if mesh_of(model) is not None:
        raise InputError("a trace is of a model on one device, and this model is divided over several; leave trace out, or the devices")


def _prepared(model: Llama, prompts: Any, config: GenerationConfig | None, key: Key[Array, ""] | None, tokenizer: Any) -> Prepared:
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], Request):
        raise InputError("a Request has settings and a key of its own: give requests to run_batch, or to prepare and what it returns here")
    if not isinstance(prompts, Prepared):
        return prepare(model, prompts, config=config or GenerationConfig(), key=key, tokenizer=tokenizer)
    if given := [name for name, value in dict(config=config, key=key, tokenizer=tokenizer).items() if value is not None]:
        raise InputError(f"{given[0]} should be given to `prepare`, since these prompts are prepared already")
    if prompts.model is not model:
        raise InputError("the prompts were prepared for another model")
    return prompts


def _check_sampler(sampler: Sampler | None, key: Key[Array, ""] | None, prompts: Any) -> None:
    if not (sampler is None or hasattr(sampler, "verify")):
        raise InputError(f"sampler should have the methods of qspec_jax.decoding.sampling.Sampler, and {sampler!r:.60} has not")
    if sampler is not None and not (prompts.keyed if isinstance(prompts, Prepared) else key is not None):
        raise InputError("a sampler of your own draws, so key should be given, such as jax.random.key(0)")


class Stream:
    """The continuation of one prompt while it is generated: iterate over its pieces. After the last one, `generation` has the result."""

    def __init__(self, run: "Run"):
        self.generation: Generation | None = None
        self._pieces = self._run(run)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends it early. Nothing runs between two pieces; what it holds on the device is freed."""
        self._pieces.close()

    def _run(self, run: "Run") -> Iterator[Piece]:
        before = np.zeros(3, int)
        for new in run.updates():
            now = np.array([count[0] for count in (run.counts.drafted, run.counts.accepted, run.counts.flushes)])
            yield Piece(*new[0], *(now - before).tolist())
            before = now
        self.generation = run.generation()


def stream(
    model: Llama,
    prompt: Prompt | Prepared,
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer: Any = None,
    sampler: Sampler | None = None,
    rounds_per_update: int = 1,
) -> Stream:
    """Continues one prompt, as `generate` does, in pieces: one after prefill, and one after every `rounds_per_update` rounds; after every
    round if there are stop strings.

    The texts of the pieces never split a character, hold no part of a stop string, and are together the whole text; "" without a tokenizer.
    """
    _check_sampler(sampler, key, prompt)
    prepared = _prepared(model, prompt if isinstance(prompt, Prepared) else [prompt], config, key, tokenizer)
    if len(prepared.requests) > 1:
        raise InputError(f"stream continues one prompt, and {len(prepared.requests)} are prepared")
    return Stream(Run(prepared, sampler, rounds_per_update, follow=True))


class Row:
    """The new tokens of one prompt, on the host.

    Args:
        config: the row's settings.
        tokenizer: for the text; None: there is none.
        prompt: token ids, whose text the new ones continue.
        follow: whether the text is made with every update, as stop strings need it; otherwise at the end.
    """

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
        """Log-probabilities of the row's tokens, and of the most likely tokens of each position; None if they were not asked for."""
        n, k = len(self.token_ids), self.config.logprobs
        if k is None:
            return None, None
        all = jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *self._logprobs)
        pairs = zip(all.top_ids[:, :k].tolist(), all.top[:, :k].tolist())
        return all.tokens.tolist(), [list(zip(*pair)) for pair in pairs]


class Run:
    """One batch, from prepared prompts to a `Generation`."""

    def __init__(self, prepared: Prepared, sampler: Sampler | None, rounds_per_update: int, *, follow: bool = False, traced: bool = False):
        if rounds_per_update < 1:
            raise InputError(f"rounds_per_update {rounds_per_update} should be at least 1")
        self.prompts, configs, tokenizer = prepared.prompts, prepared.configs, prepared.tokenizer
        # A stop string is looked for after every round, so that a row does not depend on how often it is updated.
        self.rounds_per_update = 1 if any(config.stop for config in configs) else rounds_per_update
        self.max_new_tokens = max(config.max_new_tokens for config in configs)
        self.n = np.array([len(prompt) for prompt in self.prompts], np.int32)
        self.rows = [Row(request.config, tokenizer, request.tokens, follow=follow) for request in prepared.requests]
        self.engine = prepared.engine()
        self.prepared, self.continued = prepared, None
        self._compiling: list[float | None] = []  # seconds of programs that are not this engine's; None: one begins
        self.keys = stacked([request.key for request in prepared.requests])
        self.sampler, self.limits = sampler or make_sampler(*configs), make_limits(prepared.model, *configs, tokenizer=tokenizer)
        self.traced = TracedRounds(self.engine, self.sampler, self.limits, len(self.rows)) if traced else None

    @property
    def compile_s(self) -> float:
        """Seconds of compiling until now."""
        return self.engine.compile_s + sum(seconds or 0.0 for seconds in self._compiling)

    def updates(self) -> Iterator[list[tuple[list[int], str]]]:
        """New tokens of each row, and their text: after prefill, and after every `rounds_per_update` rounds until all rows have ended."""
        state, self.prefill_s = self._prefilled()
        rows = self.continued
        lent, taken_back, in_use = (rows.lent, rows.taken_back, rows.in_use) if rows else (_same, _same, nullcontext)
        self.cache_bytes = rows.num_cache_bytes(state) if rows else state.cache.num_bytes
        self.host_cache_bytes, self.decode_s = state.cache.num_host_bytes, 0.0
        while True:
            yield self._update(state)
            ended = [row.finish_reason is not None for row in self.rows]
            if self.continued:
                for b, row in enumerate(self.rows):
                    if ended[b] and self.continued.states[b] is None:
                        self.continued.end(state, b, row.token_ids)
            if all(ended):
                return
            if any(row.config.stop for row in self.rows):
                state = stopped(state, jnp.asarray(ended))
                if self.continued:
                    self.continued.keep(state)
            with in_use():
                state, seconds = self._rounds(lent(state))
                state = taken_back(state)
            self.decode_s += seconds

    def _rounds(self, state: DecodeState) -> tuple[DecodeState, float]:
        """The state after the rounds of an update, which consume the one given, and the seconds that they took."""
        if self.traced:
            state = self.traced.run(state)
            return state, sum(self.traced.records.seconds[-1])
        self.engine.compile_rounds(state, self.sampler, self.limits)
        began = time.perf_counter()
        with jax.profiler.TraceAnnotation("rounds"):
            state = jax.block_until_ready(self.engine.rounds(state, self.sampler, self.limits, self.rounds_per_update))
        return state, time.perf_counter() - began

    def _prefilled(self) -> tuple[DecodeState, float]:
        if self.prepared.states or self.prepared.samples > 1:
            began = time.perf_counter()
            states = self.prepared.states or states_of(self.prepared, self._compiling.append)
            self.continued = Continued(states, self.prompts, self.max_new_tokens, self._compiling.append)
            state = jax.block_until_ready(self.continued.begin(self.engine, self.sampler, self.keys, self.limits))
            return state, time.perf_counter() - began - self.compile_s
        begin = self.engine.prepare_prefill(self.compile())
        jax.block_until_ready(self.engine.draft)
        began = time.perf_counter()
        with jax.profiler.TraceAnnotation("prefill"):
            state = jax.block_until_ready(begin())
        return state, time.perf_counter() - began

    def compile(self) -> Prefill:
        """The prefill of the prompts, once its programs and that of rounds are compiled, side by side."""
        prefill = self.engine.prefill_of(self.prompts, self.sampler, self.keys, self.limits)
        has_rounds = self.max_new_tokens > 1 and not self.traced  # which have programs of their own
        self.engine.compile_prefills([prefill], rounds_after=prefill if has_rounds else None)
        return prefill

    def _update(self, state: DecodeState) -> list[tuple[list[int], str]]:
        new = self.engine.poll(state, [len(row.token_ids) for row in self.rows])
        self.counts = new.counts
        logprobs = new.logprobs or [None] * len(self.rows)
        return [row.update(*of_row) for row, *of_row in zip(self.rows, new.tokens, logprobs, new.status)]

    def generation(self) -> Generation:
        """The result, once all rows have ended."""
        texts = [row.text for row in self.rows]
        silent = all(row.config.logprobs is None for row in self.rows)
        chances, top = (None, None) if silent else map(list, zip(*(row.logprobs() for row in self.rows)))
        return Generation(
            [row.token_ids for row in self.rows],
            None if texts[0] is None else texts,
            [row.finish_reason for row in self.rows],
            self._stats(),
            chances,
            top,
            self.continued and self.continued.states,
            self.traced and self._trace(texts),
        )

    def _trace(self, texts: Sequence[str | None]) -> Trace:
        of_rows = zip(self.prompts, (row.token_ids for row in self.rows), texts, (row.finish_reason for row in self.rows), strict=True)
        draft = self.engine.draft if self.engine.speculative else None
        about = self.prepared.model, draft, self.prepared.configs[0], self.sampler, self.prepared.tokenizer
        return trace_of(*about, list(of_rows), self.traced.records, prefill_s=self.prefill_s)

    def _stats(self) -> Stats:
        counts, new = self.counts, np.array([len(row.token_ids) for row in self.rows])
        of = functools.partial(summary, speculative=self.engine.speculative)
        columns = (self.n, new, counts.rounds, counts.drafted, counts.accepted, counts.histogram, counts.flushes)
        memory = jax.local_devices()[0].memory_stats() or {}
        return Stats(
            **vars(of(*(column.sum(0) for column in columns))),
            compile_s=self.compile_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            # The first token of each row is prefill's. There may be no other.
            tokens_per_second=float((new - 1).sum() / self.decode_s) if self.decode_s else 0.0,
            peak_memory_bytes=memory.get("peak_bytes_in_use"),
            cache_bytes=self.cache_bytes,
            host_cache_bytes=self.host_cache_bytes,
            rows=[of(*row) for row in zip(*columns)],
        )


def _same(state: DecodeState) -> DecodeState:
    return state


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
