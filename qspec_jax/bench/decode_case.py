"""One method of `qspec bench decode`: its programs are compiled, and then it decodes after each prompt."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from qspec_jax.bench.decode_rows import Case, DecodeRow
from qspec_jax.bench.decode_steps import StepsOfRound
from qspec_jax.bench.hlo import large_operations
from qspec_jax.bench.simulated import SimulatedGreedy, ratio_of_rate
from qspec_jax.bench.timing import Bandwidth
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.host_memory import StreamedCache, to_device, to_host
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.auto_exact import exact_of_rows
from qspec_jax.decoding.compiled import Call
from qspec_jax.decoding.config import BITS
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.exact_bits import check_bits
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill import Executables
from qspec_jax.decoding.sampling import Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.state import UNLIMITED, Counts, DecodeState
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import AUTO
from qspec_jax.drafts.step_bytes import bytes_of, devices_of
from qspec_jax.evaluate.acceptance import repeated_ngrams
from qspec_jax.models.llama import Llama
from qspec_jax.progress import working

LONG_PREFILL_S = 20.0  # a first prefill that takes longer is not repeated: what warming up adds to it is negligible


@dataclasses.dataclass(frozen=True)
class Settings:
    """How each case is measured.

    Attributes:
        max_new_tokens: tokens that each decode adds.
        rate: simulated acceptance of each draft, given those before it; None: drafts are verified.
        inner_rate: simulated acceptance of the level below, in a draft that itself verifies; None: the same.
        seed: of the random draws.
        bandwidth: with which the steps are measured too; None: whole decodes alone.
        repeats: timed batches of each step.
    """

    max_new_tokens: int
    rate: float | None = None
    inner_rate: float | None = None
    seed: int = 0
    bandwidth: Bandwidth | None = None
    repeats: int = 20


def verifies(draft: Draft | None) -> bool:
    """Whether a draft, or one that it is of, itself verifies."""
    return draft is not None and any(each.verifies for each in draft.in_turn())


class MeasuredCase:
    """One method after prompts of one length, with batch_size rows of each. Making the object begins to compile its programs, `with_steps`
    those of its steps alone; `row` runs them."""

    def __init__(
        self,
        model: Llama,
        draft: Draft | None,
        case: Case,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        pool: Executor,
        batch_size: int,
        began: float,
    ):
        self.batch_size = batch_size
        self.devices = devices_of(model)
        self.model, self.method, self.gamma, self.context = model, case.method, case.gamma, len(prompts[0])
        self.config = case.config(settings.max_new_tokens)
        self.fed = 1 if self.config.cache_config.guesses else case.gamma  # tokens of a pass besides the pending one
        self.rate = settings.rate if case.method.speculative else None
        self.inner_rate = settings.inner_rate if self.rate is not None and verifies(draft) else None

        def simulated():
            return SimulatedGreedy(*(None if each is None else jnp.float32(each) for each in (self.rate, self.inner_rate)))

        self.sampler: Sampler = make_sampler(self.config) if self.rate is None else simulated()
        self.limits = make_limits(model, self.config)
        self.keys = prompt_keys(jax.random.key(settings.seed), len(prompts))
        if case.exact == BITS:
            check_bits(model, self.config, draft, case.gamma)
        elif case.exact == AUTO:
            rows = [list(prompts[0])] * batch_size
            exact = exact_of_rows(model, draft, self.config, rows, self.sampler, self.keys[:1], self.limits)
            self.config = dataclasses.replace(self.config, exact=exact)
        self.engine = Engine.for_configs(model, draft, [self.config], prompt_tokens=self.context)
        if batch_size > 1:  # rows that the prompt's is repeated for
            self.engine.settle_for(batch_size)
        self.prefills = [
            self.engine.prefill_of([list(prompt)], self.sampler, self.keys[i : i + 1], self.limits) for i, prompt in enumerate(prompts)
        ]
        self.loops = {}
        self._compile(pool, began)

    def _compile(self, pool: Executor, began: float) -> None:
        def compiled(call):
            return pool.submit(lambda: (call.compile()[0], time.perf_counter() - began))

        state = self.prefills[0].shapes()
        fork = self._fork_call(0, state) if self.batch_size > 1 else None
        state = state if fork is None else fork.shapes()
        rounds = self.engine.rounds_call(state, self.sampler, self.limits, 1, lazy=True)
        self.shapes = state, rounds.args[1]
        self.prepare, self.decode = compiled(self.prefills[0]), compiled(rounds)
        self.fork: Future | None = fork and compiled(fork)

    def _fork_call(self, prompt: int, row: DecodeState) -> Call:
        """Makes the batch of a prompt's row. Rows of one key would draw alike, and accept in lockstep."""
        return self.engine.fork_call(row, prompt_keys(self.keys[prompt], self.batch_size))

    def with_steps(self, pool: Executor, bandwidth: Bandwidth, loop: Callable) -> Self:
        """Begins to compile the loops of its steps. loop: as in timing.py, and the same object for the same arguments."""
        state, draft = self.shapes
        self.steps = StepsOfRound(
            *(self.engine.target, self.sampler, self.config.cache_config, state.cache),
            batch_size=self.batch_size,
            context=self.context,
            gamma=self.fed,
            bandwidth=bandwidth,
        )
        tokens = jax.ShapeDtypeStruct((self.batch_size, self.fed + 1), jnp.int32)
        for step in self.steps.of(state, draft):
            call = Call(loop(step.function, step.trips), ((tokens, state.cache, step.kept(state.draft)), step.inputs))
            self.loops[step.name] = pool.submit(call.compile), step.trips
        return self

    def row(self, bandwidth: Bandwidth | None, repeats: int) -> DecodeRow:
        """Decodes every prompt; where the bandwidth is given, also times the steps, `repeats` times each."""
        # Waits for all of them first: what cannot be compiled fails before minutes of decoding.
        (prepare, prepare_s), (decode, decode_s) = self.prepare.result(), self.decode.result()
        fork, fork_s = (None, 0.0) if self.fork is None else self.fork.result()
        loops = {name: (program.result()[0], trips) for name, (program, trips) in self.loops.items()}
        jax.block_until_ready((self.model, self.engine.draft))
        with working("prefilling"):
            state, prefill_s = _timed(functools.partial(self.prefills[0].run, prepare))  # to warm up
        draft, cache = self.engine.draft_in_loop, self.shapes[0].cache
        streamed = isinstance(cache.streamed_part, StreamedCache)
        row = DecodeRow(
            self.method.name,
            self.context,
            self.gamma,
            "measured",
            cache=_with_residence(self.prefills[0].sizes.cache, self.method.cache),
            exact=self.config.exact,
            temperature=self.config.temperature,
            batch_size=self.batch_size,
            simulated_rate=self.rate,
            simulated_inner_rate=self.inner_rate,
            simulated_ratio=None if self.rate is None else ratio_of_rate(self.rate, self.gamma),
            compile_s=max(prepare_s, fork_s, decode_s),
            cache_bytes=cache.num_bytes,
            peak_memory_bytes=self._peak_bytes(prepare, fork, decode, draft),
            large_operations=large_operations(decode.as_text(), self._large(cache), streamed=streamed),
        )
        runs = []
        for i, prefill in enumerate(self.prefills):
            if i or prefill_s < LONG_PREFILL_S:
                del state  # its cache is gone before the next is made
                with working(f"prefilling prompt {i + 1} of {len(self.prefills)}"):
                    state, prefill_s = _timed(functools.partial(prefill.run, prepare))
            if bandwidth is not None and i == len(self.prefills) - 1:
                # What the steps are timed from, of one row. It waits in host memory: of 24 GB a draft's own cache takes a fifth.
                prepared = jax.block_until_ready(jax.tree.map(to_host, (state.cache.lengths, state.draft)))
            if fork is not None:
                state = jax.block_until_ready(fork(*self._fork_call(i, state).args))
            with working(f"decoding prompt {i + 1} of {len(self.prefills)}"):
                run, state = self._decoded(decode, state, prefill_s)
            runs.append(run)
        row = _totalled(row, runs)
        if bandwidth is None:
            return row
        state = dataclasses.replace(state, draft=())  # freed before the one that the draft began with is back
        prepared = jax.tree.map(to_device, prepared)
        if fork is not None:
            prepared = jax.tree.map(lambda x: jnp.repeat(x, self.batch_size, axis=0), prepared)
        lengths, drafting = prepared
        state = dataclasses.replace(state, cache=state.cache.rollback(lengths), draft=drafting)
        row = dataclasses.replace(row, steps=self.steps.timed(state, draft, loops, repeats))
        if row.round_floor_us is None:
            return row
        # The tokens that the rows emit in a round, on average.
        limit = self.batch_size * (row.new_tokens / row.rounds) * 1e6 / row.round_floor_us
        return dataclasses.replace(row, tokens_per_second_limit=limit)

    def _peak_bytes(
        self,
        prepare: Executables,
        fork: jax.stages.Compiled | None,
        decode: jax.stages.Compiled,
        in_decode: Draft | None,
    ) -> int:
        """The largest of what the programs hold, with the draft as each of them has it; shared arrays count once."""
        bytes_held = functools.partial(bytes_of, on_device=True)

        def held(draft):
            return bytes_held((self.engine.target, draft)) - bytes_held(self.engine.target)

        # Decode is given the whole draft, in which arrays that are the target's would count again. Prefill runs beside the draft.
        peaks = [
            max(map(_working_bytes, prepare.values())) + held(self.engine.draft),
            _working_bytes(decode) + held(in_decode) - bytes_held(in_decode),
        ]
        if fork is not None:  # which is given neither target nor draft
            peaks.append(_working_bytes(fork) + bytes_held((self.engine.target, in_decode)))
        return max(peaks)

    def _large(self, cache: Cache) -> int:
        """The bytes from which an operation counts as large: the cache's smallest array of codes, keys or values, or two sets of logits."""
        leaves = jax.tree.leaves(cache.layers)
        arrays = [leaf for leaf in leaves if leaf.ndim == 5] or leaves
        logits = 4 * self.batch_size * (self.fed + 1) * self.model.config.vocab_size
        return max(2 * logits, min(leaf.size * leaf.dtype.itemsize for leaf in arrays) // self.devices)

    def _decoded(self, decode: jax.stages.Compiled, state: DecodeState, prefill_s: float) -> tuple["_Decode", DecodeState]:
        """Decodes until the first row ends, so that the batch is full throughout, the first rounds as a warm-up; also returns the state
        after it."""

        def rounds(state, most):
            return decode(*self.engine.rounds_call(state, self.sampler, self.limits, most, self.batch_size).args)

        state = jax.block_until_ready(rounds(state, 2))
        before = jax.device_get((state.emitted, state.counts))
        state, decode_s = _timed(lambda: rounds(state, UNLIMITED))
        after = jax.device_get((state.emitted, state.counts))
        emitted, counts = jax.tree.map(lambda a, b: int((a - b).sum()), after, before)
        tokens = [row[:count].tolist() for row, count in zip(np.asarray(state.tokens), after[0])]
        return _Decode(prefill_s, decode_s, emitted, counts, tokens), state


@dataclasses.dataclass(frozen=True)
class _Decode:
    """The decode of one prompt, by all its rows. decode_s, new_tokens and counts leave the warm-up out; tokens are all that each row
    emitted."""

    prefill_s: float
    decode_s: float
    new_tokens: int
    counts: Counts
    tokens: list[list[int]]


def _totalled(row: DecodeRow, runs: Sequence[_Decode]) -> DecodeRow:
    """The row with the totals, means and rates of these decodes."""

    def total(figure):
        return sum(map(figure, runs))

    decode_s, new, drafted = total(lambda run: run.decode_s), total(lambda run: run.new_tokens), total(lambda run: run.counts.drafted)
    return dataclasses.replace(
        row,
        prefill_s=total(lambda run: run.prefill_s) / len(runs),
        decode_s=decode_s,
        new_tokens=new,
        rounds=total(lambda run: run.counts.rounds),
        flushes=total(lambda run: run.counts.flushes),
        acceptance_ratio=total(lambda run: run.counts.accepted) / drafted if drafted else None,
        repeated_ngrams=repeated_ngrams([tokens for run in runs for tokens in run.tokens]),
        tokens_per_second=new / decode_s,
        ms_per_token=1e3 * decode_s * row.batch_size / new,
    )


def _with_residence(cache: CacheConfig, text: str) -> str:
    """The text of a cache, with how many of its layers were resident where it left that open."""
    share = getattr(cache.settings, "resident", None)
    return text if share is None or "resident=" in text else f"{text},resident={share:.3g}"


def _timed(function: Callable):
    """The function's result, ready on the device, and the seconds that it took."""
    began = time.perf_counter()
    result = jax.block_until_ready(function())
    return result, time.perf_counter() - began


def _working_bytes(executable: jax.stages.Compiled) -> int:
    """Bytes of a program's arguments, results and temporaries; what is given back in place counts once."""
    m = executable.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
