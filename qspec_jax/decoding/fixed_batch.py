"""A batch of prompts that is not refilled, from prefill to its last round, with texts and statistics."""

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np

from qspec_jax.decoding import state
from qspec_jax.decoding.auto_exact import resolve_exact
from qspec_jax.decoding.config import BITS, GenerationConfig
from qspec_jax.decoding.continued import Continued
from qspec_jax.decoding.exact_bits import check_together, samples_with_bits
from qspec_jax.decoding.keys import stacked
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill import Prefill
from qspec_jax.decoding.prefill_by_row import PrefillByRow
from qspec_jax.decoding.prepare import Prepared
from qspec_jax.decoding.reading import states_of
from qspec_jax.decoding.results import Generation, Stats, summary
from qspec_jax.decoding.sampling import Sampler, make_sampler
from qspec_jax.decoding.state import DecodeState, Logprobs, stopped
from qspec_jax.decoding.text import RowText
from qspec_jax.decoding.traced_rounds import TracedRounds
from qspec_jax.decoding.tracing import DecodedRow, trace_of
from qspec_jax.errors import InputError
from qspec_jax.traces.trace import Trace

FINISH_REASONS = {state.EOS: "eos", state.LENGTH: "length", state.STOP: "stop"}


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
        kept = jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *self._logprobs)
        pairs = zip(kept.top_ids[:, :k].tolist(), kept.top[:, :k].tolist())
        return kept.tokens.tolist(), [list(zip(*pair)) for pair in pairs]


class Run:
    """One batch, from prepared prompts to a `Generation`."""

    def __init__(self, prepared: Prepared, sampler: Sampler | None, rounds_per_update: int, *, follow: bool = False, traced: bool = False):
        if rounds_per_update < 1:
            raise InputError(f"rounds_per_update {rounds_per_update} should be at least 1")
        if sampler is not None and prepared.exact == BITS:
            raise InputError(f"exact {BITS} is not for a sampler of your own; leave one of them out")
        if traced and samples_with_bits(prepared.configs):
            raise InputError(f"exact {BITS} of samples cannot be traced: a trace runs a round in parts; leave one of them out")
        check_together(prepared.configs)
        self.prompts, configs, tokenizer = prepared.prompts, prepared.configs, prepared.tokenizer
        # A stop string is looked for after every round, so that a row does not depend on how often it is updated.
        self.rounds_per_update = 1 if any(config.stop for config in configs) else rounds_per_update
        self.max_new_tokens = max(config.max_new_tokens for config in configs)
        self.n = np.array([len(prompt) for prompt in self.prompts], np.int32)
        self.rows = [Row(request.config, tokenizer, request.tokens, follow=follow) for request in prepared.requests]
        self._compiling: list[float | None] = []  # seconds of programs that are not this engine's; None: one begins
        self.keys = stacked([request.key for request in prepared.requests])
        self.limits = make_limits(prepared.model, *configs, tokenizer=tokenizer)
        self.sampler = sampler or make_sampler(*configs)
        # A sampler of the caller's may draw.
        prepared = prepared if sampler else resolve_exact(prepared, self.sampler, self.keys, self.limits)
        self.engine = prepared.engine()
        self.prepared, self.continued = prepared, None
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

    def compile(self) -> Prefill | PrefillByRow:
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
        decoded = [
            DecodedRow(prompt, row.token_ids, text, row.finish_reason)
            for prompt, row, text in zip(self.prompts, self.rows, texts, strict=True)
        ]
        draft = self.engine.draft if self.engine.speculative else None
        about = self.prepared.model, draft, self.prepared.configs[0], self.sampler, self.prepared.tokenizer
        return trace_of(*about, decoded, self.traced.records, prefill_s=self.prefill_s)

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
