"""`qspec bench decode`: a whole decode, its steps one by one, and how near each is to the bytes it must read.

The byte model: a step reads its weights and what every row has cached, once, at the read bandwidth that is measured in the same run. The
drafts of random weights are accepted by chance; with a simulated rate the loop runs as in `generate`, except for which drafts the target
accepts.
"""

import dataclasses
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax import host, plots
from qspec_jax.bench import streamed_step
from qspec_jax.bench.attention_shapes import Shape, bytes_read
from qspec_jax.bench.decode_rows import AUTOREGRESSIVE, METHODS, Case, DecodeRow, Method, StepTiming, compared
from qspec_jax.bench.hlo import large_operations
from qspec_jax.bench.simulated import SimulatedGreedy, ratio_of_rate
from qspec_jax.bench.timing import Bandwidth, copy_bandwidth, loop, loop_trips, read_bandwidth, time_loop
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.host_memory import StreamedCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Call, Engine
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.residence import Residence, refused, residence
from qspec_jax.decoding.sampling import DRAFT, Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.settled import for_prompts
from qspec_jax.decoding.state import UNLIMITED, Counts, DecodeState
from qspec_jax.drafts.draft import Draft, ModelDraft, StepwiseDraft
from qspec_jax.drafts.registry import make_draft
from qspec_jax.drafts.step_bytes import bytes_of, devices_of, reads_of_step, step_bytes, weight_bytes
from qspec_jax.errors import HostMemoryError, InputError, is_out_of_memory, named
from qspec_jax.evaluate.acceptance import repeated_ngrams
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.provenance import Run, this_run

log = logging.getLogger(__name__)

LONG_PREFILL_S = 20.0  # a first prefill of so many seconds is not repeated: what warming up adds to it is negligible
# How many planes a verification reads of a cache, None where that has none, by the beginning of its name. The bytes of other caches are not
# counted.
PLANES = {"full": None, "int8": BOTH_PLANES.planes}


@dataclasses.dataclass(frozen=True)
class DecodeReport(Run):
    """Whole decodes: a row for every method, gamma, context and batch size, and the rows of other programs."""

    read_bandwidth_gb_per_s: float
    model: str
    max_new_tokens: int
    rows: list[DecodeRow]
    devices: int = 1  # that the model is divided over
    copy_bandwidth_gb_per_s: float | None = None  # from host memory to the device; None where no cache is in host memory


def run(
    name: str,
    model: Llama,
    int4: Callable[[], Llama],
    contexts: Sequence[int],
    methods: Sequence[Method],
    gammas: Sequence[int],
    *,
    max_new_tokens: int,
    rates: Mapping[int, float] | None,
    inner_rate: float | None = None,
    batch_sizes: Sequence[int] = (1,),
    beside: Sequence[DecodeRow] = (),
    repeats: int = 20,
    seed: int = 0,
    directory: str | Path | None = None,
    progress: bool | None = None,
) -> DecodeReport:
    """Measures every method at every context and batch size, those that draft with each gamma, greedy, on random prompts.

    int4: makes the model with INT4 weights. rates: simulated acceptance at each context; None verifies for real. inner_rate: that of the
    level below, in a draft that itself verifies; None: the same. batch_sizes: ascending. beside: rows of other programs, to compare with.
    directory: where the model was loaded from, see `make_draft`. progress: a bar on standard error; None where that is a terminal. A method
    that fails (for want of memory, say) gets a row that says so.
    """
    rows = []
    cases = [Case(method, gamma) for method in methods for gamma in (gammas if method.speculative else [0])]
    with tqdm(
        total=1 + len(contexts) * len(batch_sizes) * len(cases), leave=False, disable=None if progress is None else not progress
    ) as bar:
        bar.set_description("read bandwidth")
        copies = any(CacheConfig.parse(method.cache).in_host_memory for method in methods)
        bandwidth = Bandwidth(read_bandwidth(repeats=repeats), copy_bandwidth(repeats=repeats) if copies else None)
        bar.update()
        for context in contexts:
            prompt = jax.random.randint(jax.random.key(seed), (1, bucket(context)), 0, model.config.vocab_size)[:, :context]
            bar.set_description(f"{context:,} tokens: compiling")
            found = []
            settings = dict(rate=rates[context] if rates else None, inner_rate=inner_rate, seed=seed, bandwidth=bandwidth, repeats=repeats)
            settings["directory"] = directory
            for row in measure(model, int4, cases, prompt.tolist(), max_new_tokens, batch_sizes=batch_sizes, **settings):
                found.append(row)
                if progress is not False:
                    _tell(row)
                bar.set_description(f"{context:,} tokens")
                bar.update()
            rows += compared(found + [row for row in beside if row.context == context])
    return DecodeReport(
        **this_run(),
        read_bandwidth_gb_per_s=bandwidth.read,
        copy_bandwidth_gb_per_s=bandwidth.copy,
        model=name,
        max_new_tokens=max_new_tokens,
        rows=rows,
        devices=devices_of(model),
    )


def _tell(row: DecodeRow) -> None:
    """Logs a row once it is measured: with many batch sizes a run takes long, and may be ended before its report."""
    told = f"{row.tokens_per_second:,.1f} tokens/s" if row.status == "measured" else f"{row.status}: {row.note}"
    log.info("%s tokens, batch size %d, %s, gamma %d: %s", f"{row.context:,}", row.batch_size, row.method, row.gamma, told)


def measure(
    model: Llama,
    int4: Callable[[], Llama],
    cases: Sequence[Case],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    batch_sizes: Sequence[int] = (1,),
    rate: float | None = None,
    inner_rate: float | None = None,
    seed: int = 0,
    bandwidth: Bandwidth | None = None,
    repeats: int = 20,
    directory: str | Path | None = None,
) -> Iterator[DecodeRow]:
    """Measures each case with each batch size after these prompts of one length, and yields its row; a case that fails (for want of memory,
    say) gets a row too.

    First the drafts are made, which all stay; then, for one batch size after the other, all programs are compiled, side by side.
    batch_sizes: ascending; a prompt is read once and its row repeated. Where a case does not fit the memory, it is skipped with more rows.
    rate, inner_rate: simulated acceptance, see `run`; None verifies for real. bandwidth: with which the steps are measured too,
    `repeats` times. directory: where the model was loaded from, see `make_draft`. Raises InputError for an inner rate that no draft uses.
    """

    def make(case: Case) -> Draft | None:
        draft = make_draft(case.method.draft, model, int4=int4, directory=directory)
        return jax.block_until_ready(for_prompts(model, draft, [config_of(case, max_new_tokens)], prompts))

    made = [(case, _attempt(make, case)) for case in cases]
    if inner_rate is not None and not any(isinstance(draft, Exception) or _verifies(draft) for _, draft in made):
        raise InputError("an inner rate of acceptance is for drafts that themselves verify, such as triforce; none of these does")
    too_many: dict[Case, int] = {}  # the batch size with which a case did not fit
    for batch_size in batch_sizes:
        fitting = [(case, draft) for case, draft in made if case not in too_many]
        settings = dict(batch_size=batch_size, rate=rate, inner_rate=inner_rate, seed=seed, bandwidth=bandwidth, repeats=repeats)
        results = _results(model, fitting, prompts, max_new_tokens, **settings)
        for case in cases:
            without_figures = functools.partial(
                DecodeRow, case.method.name, len(prompts[0]), case.gamma, temperature=case.temperature, batch_size=batch_size
            )
            if (fewer := too_many.get(case, batch_size)) < batch_size:
                yield without_figures("skipped", f"batch size {fewer} did not fit")
                continue
            result = next(results)
            if isinstance(result, Exception):  # one row of many
                if is_out_of_memory(result):
                    too_many[case] = batch_size
                result = without_figures("failed", named(result))
            yield result


def _verifies(draft: Draft | None) -> bool:
    return draft is not None and any(each.verifies for each in draft.in_turn())


def _results(
    model: Llama,
    made: Sequence[tuple[Case, Draft | Exception | None]],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    batch_size: int,
    rate: float | None,
    inner_rate: float | None,
    seed: int,
    bandwidth: Bandwidth | None,
    repeats: int,
) -> Iterator[DecodeRow | Exception]:
    """The row of each case with its draft, or why there is none; see `measure`."""
    settings = dict(batch_size=batch_size, rate=rate, inner_rate=inner_rate, seed=seed, began=time.perf_counter())
    pool = ThreadPoolExecutor()
    try:
        begun: list[_Measured | _StepAlone | Exception] = []
        for case, draft in made:
            if isinstance(draft, Exception):
                begun.append(draft)
            elif bandwidth and (alone := _StepAlone.needed(model, case, len(prompts[0]), max_new_tokens, batch_size)):
                begun.append(alone)
            else:
                begun.append(_attempt(_Measured, model, draft, case, prompts, max_new_tokens, pool, **settings))
        if bandwidth is not None:  # behind what takes longest to compile
            loops = functools.cache(loop)  # which methods share
            begun = [_attempt(one.with_steps, pool, bandwidth, loops) if isinstance(one, _Measured) else one for one in begun]
            del loops  # or no program of a step would be freed before the last row
        pool.shutdown()
    except BaseException:  # such as an interrupt
        pool.shutdown(cancel_futures=True)
        raise
    while begun:
        measured = begun.pop(0)
        yield measured if isinstance(measured, Exception) else _attempt(measured.row, bandwidth, repeats)


def _attempt(function: Callable, *args, **settings):
    """Calls a function and returns its result, or the exception that it raised."""
    try:
        return function(*args, **settings)
    except HostMemoryError as error:  # one row of many, as where the device's memory is too small
        return error.with_traceback(None)
    except InputError:  # a draft's settings that do not fit the model, for one
        raise
    except Exception as error:
        return error.with_traceback(None)  # whose frames would keep what they had made


def config_of(case: Case, max_new_tokens: int) -> GenerationConfig:
    """What a case decodes with."""
    return GenerationConfig(
        draft=case.method.draft,
        cache=case.method.cache,
        num_speculative_tokens=case.gamma,
        max_new_tokens=max_new_tokens,
        temperature=case.temperature,
        ignore_eos=True,
    )


@dataclasses.dataclass(frozen=True)
class _StepAlone:
    """The baseline over a cache that host memory cannot hold: a step alone. unmeasured: its row without figures. capacity: of the cache, in
    tokens. host_bytes: that are free."""

    model: Llama
    unmeasured: DecodeRow
    found: Residence
    capacity: int
    host_bytes: int

    @classmethod
    def needed(cls, model: Llama, case: Case, context: int, max_new_tokens: int, batch_size: int) -> Self | None:
        """None for another method, and where there is memory enough."""
        cache = CacheConfig.parse(case.method.cache)
        if case.method.name != AUTOREGRESSIVE or cache.kind != "full:host" or devices_of(model) > 1:
            return None
        capacity = bucket(context) + bucket(max_new_tokens)
        found = residence(cache, model, batch=batch_size, capacity=capacity, num_speculative_tokens=0)
        if not refused(cache.kind, found.host_bytes):
            return None
        row = DecodeRow(case.method.name, context, 0, "failed", temperature=case.temperature, batch_size=batch_size)
        return cls(model, row, found, capacity, host.room_bytes(pooled=jax.default_backend() == "gpu"))

    def row(self, bandwidth: Bandwidth, repeats: int) -> DecodeRow:
        """Times it."""
        sizes = dict(capacity=self.capacity, host_bytes=self.host_bytes, bandwidth=bandwidth, repeats=repeats)
        read = target_bytes(self.model, "full", self.unmeasured.context, 1, self.unmeasured.batch_size)
        return streamed_step.measured(self.unmeasured, self.model, self.found, **sizes, read_bytes=read)


class _Measured:
    """One method after prompts of one length, with batch_size rows of each. Making the object begins to compile its programs, `with_steps`
    those of its steps alone; `row` runs them."""

    def __init__(
        self,
        model: Llama,
        draft: Draft | None,
        case: Case,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        pool: Executor,
        *,
        batch_size: int,
        rate: float | None,
        inner_rate: float | None,
        seed: int,
        began: float,
    ):
        self.batch_size = batch_size
        self.devices = devices_of(model)
        self.model, self.method, self.gamma, self.context = model, case.method, case.gamma, len(prompts[0])
        self.config = config_of(case, max_new_tokens)
        self.rate = rate if case.method.speculative else None
        self.inner_rate = inner_rate if self.rate is not None and _verifies(draft) else None
        simulated = lambda: SimulatedGreedy(*(None if each is None else jnp.float32(each) for each in (self.rate, self.inner_rate)))
        self.sampler: Sampler = make_sampler(self.config) if self.rate is None else simulated()
        self.limits = make_limits(model, self.config)
        self.engine = Engine.for_configs(model, draft, [self.config], prompt_tokens=self.context)
        self.keys = prompt_keys(jax.random.key(seed), len(prompts))
        self.calls = [
            self.engine.prefill_call([list(prompt)], self.sampler, self.keys[i : i + 1], self.limits) for i, prompt in enumerate(prompts)
        ]
        self.loops = {}
        self._compile(pool, began)

    def _compile(self, pool: Executor, began: float) -> None:
        compiled = lambda call: pool.submit(lambda: (call.compile()[0], time.perf_counter() - began))
        state = self.calls[0].shapes()
        fork = self._fork_call(0, state) if self.batch_size > 1 else None
        state = state if fork is None else fork.shapes()
        rounds = self.engine.rounds_call(state, self.sampler, self.limits, 1, lazy=True)
        self.shapes = state, rounds.args[1]
        self.prepare, self.decode = compiled(self.calls[0]), compiled(rounds)
        self.fork: Future | None = fork and compiled(fork)

    def _fork_call(self, prompt: int, row: DecodeState) -> Call:
        """Makes the batch of a prompt's row. Rows of one key would draw alike, and accept in lockstep."""
        return self.engine.fork_call(row, prompt_keys(self.keys[prompt], self.batch_size))

    def with_steps(self, pool: Executor, bandwidth: Bandwidth, loop: Callable) -> Self:
        """Begins to compile the loops of its steps. loop: as in timing.py, and the same object for the same arguments."""
        state, draft = self.shapes
        tokens = jax.ShapeDtypeStruct((self.batch_size, self.gamma + 1), jnp.int32)
        for step in self._steps(state, draft, bandwidth):
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
        state, prefill_s = _timed(functools.partial(prepare, *self.calls[0].args))  # to warm up
        draft, cache = self.engine.draft_in_loop, self.shapes[0].cache
        row = DecodeRow(
            self.method.name,
            self.context,
            self.gamma,
            "measured",
            cache=_with_residence(self.calls[0].static["cache"], self.method.cache),
            temperature=self.config.temperature,
            batch_size=self.batch_size,
            simulated_rate=self.rate,
            simulated_inner_rate=self.inner_rate,
            simulated_ratio=None if self.rate is None else ratio_of_rate(self.rate, self.gamma),
            compile_s=max(prepare_s, fork_s, decode_s),
            cache_bytes=cache.num_bytes,
            peak_memory_bytes=self._peak_bytes(prepare, fork, decode, draft),
            large_operations=large_operations(decode.as_text(), self._large(cache)),
        )
        runs = []
        for i, call in enumerate(self.calls):
            if i or prefill_s < LONG_PREFILL_S:
                del state  # its cache is gone before the next is made
                state, prefill_s = _timed(functools.partial(prepare, *call.args))
            prepared = jax.tree.map(jnp.copy, (state.cache.lengths, state.draft))  # of one row
            if fork is not None:
                state = jax.block_until_ready(fork(*self._fork_call(i, state).args))
            run, state = self._decoded(decode, state, prefill_s)
            runs.append(run)
        row = _totalled(row, runs)
        if bandwidth is None:
            return row
        state = dataclasses.replace(state, draft=())  # gone before the one to begin with is repeated
        if fork is not None:
            prepared = jax.tree.map(lambda x: jnp.repeat(x, self.batch_size, axis=0), prepared)
        lengths, drafting = prepared
        state = dataclasses.replace(state, cache=state.cache.rollback(lengths), draft=drafting)
        row = dataclasses.replace(row, steps=self._measured_steps(loops, state, bandwidth, repeats))
        if row.round_floor_us is None:
            return row
        # In a round every row emits so many tokens in the mean.
        limit = self.batch_size * (row.new_tokens / row.rounds) * 1e6 / row.round_floor_us
        return dataclasses.replace(row, tokens_per_second_limit=limit)

    def _peak_bytes(
        self,
        prepare: jax.stages.Compiled,
        fork: jax.stages.Compiled | None,
        decode: jax.stages.Compiled,
        in_decode: Draft | None,
    ) -> int:
        """The largest of what the programs hold, with the draft as each of them has it; shared arrays count once."""
        bytes_held = functools.partial(bytes_of, on_device=True)
        held = lambda draft: bytes_held((self.engine.target, draft)) - bytes_held(self.engine.target)
        # Decode is given the whole draft, in which arrays that are the target's would count again. Prefill runs beside the draft.
        peaks = [_working_bytes(prepare) + held(self.engine.draft), _working_bytes(decode) + held(in_decode) - bytes_held(in_decode)]
        if fork is not None:  # which is given neither target nor draft
            peaks.append(_working_bytes(fork) + bytes_held((self.engine.target, in_decode)))
        return max(peaks)

    def _large(self, cache: Cache) -> int:
        """The bytes from which an operation counts as large: the cache's smallest array of codes, keys or values, or two sets of logits."""
        leaves = jax.tree.leaves(cache.layers)
        arrays = [leaf for leaf in leaves if leaf.ndim == 5] or leaves
        logits = 4 * self.batch_size * (self.gamma + 1) * self.model.config.vocab_size
        return max(2 * logits, min(leaf.size * leaf.dtype.itemsize for leaf in arrays) // self.devices)

    def _decoded(self, decode: jax.stages.Compiled, state: DecodeState, prefill_s: float) -> tuple["_Decode", DecodeState]:
        """Decodes until the first row ends, so that the batch is full throughout, the first rounds as a warm-up; also returns the state
        after it."""
        rounds = lambda state, most: decode(*self.engine.rounds_call(state, self.sampler, self.limits, most, self.batch_size).args)
        state = jax.block_until_ready(rounds(state, 2))
        before = jax.device_get((state.emitted, state.counts))
        state, decode_s = _timed(lambda: rounds(state, UNLIMITED))
        after = jax.device_get((state.emitted, state.counts))
        emitted, counts = jax.tree.map(lambda a, b: int((a - b).sum()), after, before)
        tokens = [row[:count].tolist() for row, count in zip(np.asarray(state.tokens), after[0])]
        return _Decode(prefill_s, decode_s, emitted, counts, tokens), state

    def _steps(self, state: DecodeState, draft: Draft | None, bandwidth: Bandwidth) -> list["_Work"]:
        """The steps of a round, each to be timed alone on a filled cache. state: the one after prefill, or of several rows after `fork`."""
        lengths, B = state.cache.lengths, self.batch_size
        width, vocabulary = self.gamma + 1, self.model.config.vocab_size
        logits = jax.random.normal(jax.random.key(0), (B, width, vocabulary))
        keys, positions = prompt_keys(jax.random.key(0), B), jnp.broadcast_to(jnp.arange(width), (B, width))
        eligible = jnp.full(B, self.gamma, jnp.int32)
        _, proposal = self.sampler.choose(logits[:, 0], keys, positions[:, 0], DRAFT)
        proposals = jnp.broadcast_to(proposal[:, None], (B, self.gamma, proposal.shape[-1]))

        def work_of(name: str, function: Callable, model: Any, size: int, host_bytes: int = 0) -> _Work:
            return _Work(name, function, (lengths, model), max(5e-5, bandwidth.seconds(size, host_bytes)), size, host_bytes)

        verified = _verified_and_observed if draft is not None and draft.observes else _verified
        size = target_bytes(self.model, self.config.cache_config.kind, self.context, width, B)
        work = [work_of("target", verified, self.engine.target, size, _copied_bytes(self.shapes[0].cache))]
        if isinstance(draft, StepwiseDraft):
            size = step_bytes(draft, self.config.cache_config, self.context + 1, batch=B, on_device=True)
            work.append(work_of("draft", _drafted, draft, 0 if self._draft_copies(draft) else size))
        # Goes through the logits a few times.
        seconds = max(5e-5, bandwidth.seconds(4 * logits.nbytes))
        work.append(_Work("sampling", _sampled, (self.sampler, logits, proposals, eligible, keys, positions), seconds))
        if (group := self.config.cache_config.schedule_for(self.model.config.head_dim).group_size) is not None:
            for name, buffered, seconds in ("flush due", 2 * group, 5e-4), ("flush not due", group, 2.5e-5):
                at = dataclasses.replace(lengths, buffered=jnp.full(B, buffered, jnp.int32))
                work.append(_Work(name, _flushed, (at,), seconds))
        return work

    def _measured_steps(self, loops: dict, state: DecodeState, bandwidth: Bandwidth, repeats: int) -> dict[str, StepTiming]:
        """Times every step. loops: the program of each step and its trips. The state's cache and its draft's state are spent: a step
        overwrites what the one before wrote, and flushes move its buffer."""
        tokens, cache = jnp.zeros((self.batch_size, self.gamma + 1), jnp.int32), state.cache
        shown = dataclasses.replace(state, cache=state.cache.rollback(jax.tree.map(jnp.copy, state.cache.lengths)))
        steps = {}
        for work in self._steps(shown, self.engine.draft_in_loop, bandwidth):
            carry = tokens, cache, work.kept(state.draft)
            timing, (tokens, cache, _) = time_loop(*loops[work.name], carry, work.inputs, repeats=repeats)
            share = bandwidth.seconds(work.bytes, work.host_bytes) * 1e6 / timing.median_us
            steps[work.name] = StepTiming(timing, work.bytes, share, work.host_bytes)
        return steps

    def _draft_copies(self, draft: StepwiseDraft) -> bool:
        """Whether a step of the draft may copy something of the target's cache from host memory. What that takes is not counted."""
        if not isinstance(draft, ModelDraft) or draft.own_cache or not isinstance(self.shapes[0].cache, StreamedCache):
            return False
        if self.config.cache_config.kind.startswith("full"):
            return True
        return any(reads.planes == 2 for reads in reads_of_step(draft, self.config.cache_config, self.context + 1))


@dataclasses.dataclass(frozen=True)
class _Work:
    """A step to be timed: tokens, cache, state = function(tokens, cache, state, *inputs), where the state is the draft's in a step of the
    draft. seconds: about how long it takes. bytes: what it must read on the device (0: not counted). host_bytes: what it copies to it."""

    name: str
    function: Callable
    inputs: tuple
    seconds: float
    bytes: int = 0
    host_bytes: int = 0

    @property
    def trips(self) -> int:
        return loop_trips(self.seconds)

    def kept(self, state: Any) -> Any:
        """What the loop has of the draft's state: no step but the draft's needs it, and without it drafts share the program."""
        return state if self.function is _drafted else ()


def _verified(tokens, cache, state, lengths, target, *, observe=False):
    return *_forward(tokens, cache, lengths, target, width=tokens.shape[1], observe=observe), state


def _verified_and_observed(tokens, cache, state, lengths, target):
    return _verified(tokens, cache, state, lengths, target, observe=True)


def _drafted(tokens, cache, state, lengths, draft):
    tokens, stepped = _forward(tokens, draft.cache_of_steps(state, cache), lengths, draft.step_in_round(state, cache), width=1)
    state, cache = draft.after_steps(state, cache, stepped, jnp.ones(tokens.shape[0], bool))
    return tokens, cache, state


def _forward(tokens, cache, lengths, model, *, width, observe=False):
    positions, before = lengths.total[:, None] + jnp.arange(width), cache.lengths
    logits, cache, *masses = model(tokens[:, :width], positions, cache, observe=observe)
    for mass in jax.tree.leaves(masses):  # which are never negative, but have to be computed
        logits = jnp.where((mass < 0).any(), 0, logits)
    return tokens.at[:, :width].set(jnp.argmax(logits, -1).astype(jnp.int32)), cache.rollback(before)


def _sampled(tokens, cache, state, sampler, logits, *proposal_and_keys):
    # The tokens enter, or the loop would do it once.
    logits = logits + (tokens[..., None] < 0)
    _, after = sampler.verify(logits, tokens[:, 1:], *proposal_and_keys)
    return tokens.at[:, 0].set(after), cache, state


def _flushed(tokens, cache, state, lengths):
    return tokens, dataclasses.replace(cache.rollback(lengths).flush()[0], lengths=lengths), state


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
    total = lambda figure: sum(map(figure, runs))
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


def target_bytes(model: Llama, kind: str, context: int, width: int, batch_size: int) -> int:
    """The bytes that each device must read to verify so many tokens a row: its weights, and the cache of every row with the tokens that it
    appends. 0 for a kind of cache of which nobody has counted them."""
    kind = kind.partition(":")[0]
    if kind not in PLANES:
        return 0
    of_cache = batch_size * model.config.num_layers * layer_bytes_read(model, context + width, width, PLANES[kind])
    return weight_bytes(model, on_device=True) + of_cache // devices_of(model)


def _with_residence(cache: CacheConfig, text: str) -> str:
    """The text of a cache, with how many of its layers were resident where it left that open."""
    share = getattr(cache.settings, "resident", None)
    return text if share is None or "resident=" in text else f"{text},resident={share:.3g}"


def _copied_bytes(cache: Cache) -> int:
    """Bytes that a verification copies to the device of a cache, or of its shapes, in host memory. 0 for one that fetches single tokens."""
    if not isinstance(cache, StreamedCache):
        return 0
    return bytes_of([cache.host_part(layer, BOTH_PLANES) for layer in range(len(cache.layers))])


def layer_bytes_read(model: Llama, context: int, width: int, planes: int | None) -> int:
    """The bytes that a row's queries of `width` tokens read of one layer of a cache of so many tokens, themselves among them."""
    c = model.config
    group = CacheConfig().group_size_for(c.head_dim)
    return bytes_read(Shape("", planes, width, c.num_heads, c.num_kv_heads, (context,), c.head_dim, group))


def _timed(function: Callable):
    """The function's result, ready on the device, and the seconds that it took."""
    began = time.perf_counter()
    result = jax.block_until_ready(function())
    return result, time.perf_counter() - began


def _working_bytes(executable: jax.stages.Compiled) -> int:
    """Bytes of a program's arguments, results and temporaries; what is given back in place counts once."""
    m = executable.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def table(report: DecodeReport) -> Group:
    """Two tables: whole decodes, and their steps. Where the batch size is not always 1, they say what it is."""
    batches = any(row.batch_size > 1 for row in report.rows)
    simulated = "".join(f"Acceptance is SIMULATED{of}\n" for of in _simulated(report))
    of_host = [] if report.copy_bandwidth_gb_per_s is None else ["MB copied", "GB/s"]
    head = Text.assemble(
        (f"Decode of {report.model} on {f'{report.devices} x ' if report.devices > 1 else ''}{report.device}", "bold"),
        f", {report.date}: reads {report.read_bandwidth_gb_per_s:,.0f} GB/s",
        "" if of_host == [] else f", copies {report.copy_bandwidth_gb_per_s:.1f} GB/s of host memory",
        "\n",
        simulated,
    )
    columns = _columns(batches)
    whole = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in columns:
        wraps = label in ("prefill s", "compile s", "cache GB", "peak GB", "copies")
        whole.add_column(label, justify="left" if label == "method" else "right", no_wrap=not wraps)
    names = [label for label in ("context", "rows", "method") if label in columns]
    steps = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in (*names, "step", "us", "quartiles", "MB", *of_host, "of its floor"):
        steps.add_column(label, justify="left" if label in ("method", "step") else "right", no_wrap=True)
    missing = ""
    for row in report.rows:
        whole.add_row(*(cell(row) for cell in columns.values()))
        if row.status != "measured":
            size = f", batch size {row.batch_size}" if batches else ""
            missing += f"\n{row.context:,} tokens{size}, {row.method}, gamma {row.gamma}: {row.status}: {row.note}"
        for step, found in row.steps.items():
            t = found.timing
            floor = [f"{found.bytes / 1e6:,.1f}", f"{1 / found.share:.2f}x"] if found.bytes else ["-", "-"]
            if report.copy_bandwidth_gb_per_s is not None:
                rate = found.host_bytes / t.median_us / 1e3
                floor[1:1] = [f"{found.host_bytes / 1e6:,.1f}", f"{rate:.1f}"] if found.host_bytes else ["-", "-"]
            name = [columns[label](row) for label in names]
            steps.add_row(*name, step, f"{t.median_us:,.1f}", f"{t.lower_us:,.1f} - {t.upper_us:,.1f}", *floor)
    baseline = next((row.cache for row in report.rows if row.method == AUTOREGRESSIVE and row.cache), "full")
    of_batches = [
        "Greedy, random prompts. rows: decoded together after the same prompt, with random draws of their own, until the first one ends.",
        "tokens/s: of all rows. by bytes: these, if every step took as long as reading its weights and every row's cache.",
        f"ms/token: of each row. speed-up: over autoregressive decoding with a {baseline} cache at the same context and as many rows.",
        "peak: weights, cache and what prefill, repeating its row or decode need besides.",
    ]
    of_one_row = [
        f"Batch 1, greedy, random prompts. speed-up: over autoregressive decoding with a {baseline} cache at the same context.",
        "byte limit: the speed-up if every step took as long as reading its weights and cache.",
        "peak: weights, cache and what prefill or decode need besides.",
    ]
    notes = [
        *(of_batches if batches else of_one_row),
        "copies: operations of the size of a cache or more in the loop. of its floor: time over that of reading the bytes"
        + (", or of copying those of the cache that are in host memory where that takes longer." if of_host else "."),
        *sorted({f"{row.method}: {row.note}." for row in report.rows if row.status == "measured" and row.note}),
    ]
    return Group(head, whole, Text(missing and missing + "\n"), steps, Text("\n" + " ".join(notes), "dim"))


def _columns(batches: bool) -> dict[str, Callable[[DecodeRow], str]]:
    """The columns of whole decodes; of batches those that depend on how many rows there are."""
    number = lambda form: lambda figure: "-" if figure is None else format(figure, form)
    figure = lambda name, form: lambda row: number(form)(getattr(row, name))
    ratio = lambda row: number(".3f")(row.acceptance_ratio) + ("" if row.simulated_rate is None else " (sim.)")
    share = lambda row: number(".0%")(row.tokens_per_second_limit and row.tokens_per_second / row.tokens_per_second_limit)
    gigabytes = lambda name: lambda row: number(".2f")(getattr(row, name) and getattr(row, name) / 1e9)
    rows = {"rows": figure("batch_size", "d")}
    by_bytes = {"by bytes": figure("tokens_per_second_limit", ",.1f"), "of it": share}
    limit = {"byte limit": figure("byte_limit", ".2f"), "of it": figure("share_of_limit", ".0%")}
    once = {"prefill s": figure("prefill_s", ".2f"), "compile s": figure("compile_s", ".1f")}
    return {
        "context": figure("context", ",d"),
        **(rows if batches else {}),
        "method": lambda row: row.method,
        "gamma": figure("gamma", "d"),
        "accepted": ratio,
        "tokens/s": figure("tokens_per_second", ",.1f"),
        **(by_bytes if batches else {}),
        "ms/token": figure("ms_per_token", ",.2f"),
        "speed-up": lambda row: "-" if row.speedup is None else f"{row.speedup:.2f}x",
        **({} if batches else limit | once),
        "cache GB": gigabytes("cache_bytes"),
        "peak GB": gigabytes("peak_memory_bytes"),
        "copies": lambda row: "-" if row.cache_bytes is None or row.large_operations is None else str(len(row.large_operations)),
        "": lambda row: "" if row.status == "measured" else row.status,
    }


def plot(report: DecodeReport, path: Path) -> None:
    """Each method with its best gamma. Of several batch sizes: tokens/s against rows, a panel for each context. Of one: speed-up, the time
    of a quantspec round by its steps, and memory, against context.

    Raises InputError if nothing was measured, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.status == "measured"]
    if not rows:
        raise InputError(f"--plot {path}: nothing was measured")
    best = {}
    for row in sorted(rows, key=lambda row: row.tokens_per_second):
        best[row.method, row.context, row.batch_size] = row
    lines = defaultdict(list)
    for row in sorted(best.values(), key=lambda row: (row.context, row.batch_size)):
        lines[row.method].append(row)
    # METHODS have the same colors in every plot.
    lines = {
        name: (f"C{number}", lines[name]) for number, name in enumerate([*METHODS, *sorted(lines.keys() - METHODS.keys())]) if name in lines
    }
    batch_sizes = sorted({row.batch_size for row in rows})
    figure = Figure(layout="constrained")
    if len(batch_sizes) > 1:
        _plot_batches(figure, lines)
    else:
        _plot_contexts(figure, lines)
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    simulated = "; acceptance SIMULATED" if _simulated(report) else ""
    alike = f", {batch_sizes[0]} rows" if len(batch_sizes) == 1 and batch_sizes[0] > 1 else ""
    figure.suptitle(f"Decoding {report.model} on {report.device}{alike}, {report.date}{simulated}", fontsize=11)
    plots.save(figure, path)


def _plot_contexts(figure, lines: Mapping[str, tuple[str, list[DecodeRow]]]) -> None:
    """Three panels against context. lines: each method's color and its rows, by context."""
    contexts = sorted({row.context for _, rows in lines.values() for row in rows})
    figure.set_size_inches(15, 4.5)
    speed, time, memory = figure.subplots(1, 3)
    for axes in (speed, memory):
        plots.context_axis(axes, contexts)
    for name, (color, found) in lines.items():
        style = dict(color=color, marker="o", label=name)
        if speedups := [(row.context, row.speedup) for row in found if row.speedup and name != AUTOREGRESSIVE]:
            speed.plot(*zip(*speedups), **style)
            if limits := [(row.context, row.byte_limit) for row in found if row.byte_limit]:
                speed.plot(*zip(*limits), color=color, linestyle=":")
        if peaks := [(row.context, row.peak_memory_bytes / 1e9) for row in found if row.peak_memory_bytes]:
            memory.plot(*zip(*peaks), **style)
    speed.set(ylabel="speed-up over autoregressive", title="Speed-up (dotted: by the bytes alone)")
    memory.set(ylabel="GB", title="Peak memory", ylim=(0, None))
    _, rounds = lines.get("quantspec", ("", []))
    bottom = [0.0] * len(rounds)
    for step, times in (("draft", lambda row: row.gamma), ("target", lambda row: 1), ("sampling", lambda row: 1)):
        heights = [times(row) * row.steps[step].timing.median_us / 1e3 for row in rounds]
        time.bar([f"{row.context:,}\n{row.gamma} drafts" for row in rounds], heights, bottom=bottom, label=step)
        bottom = [a + b for a, b in zip(bottom, heights)]
    time.set(xlabel="context (tokens)", ylabel="ms", title="A round of quantspec")


def _plot_batches(figure, lines: Mapping[str, tuple[str, list[DecodeRow]]]) -> None:
    """A panel for each context, against the rows of a batch. lines: each method's color and its rows, by batch size within a context."""
    contexts = sorted({row.context for _, rows in lines.values() for row in rows})
    figure.set_size_inches(5 * len(contexts) + 1, 4.5)
    for axes, context in zip(figure.subplots(1, len(contexts), squeeze=False)[0], contexts):
        for name, (color, rows) in lines.items():
            found = [row for row in rows if row.context == context]
            if not found:
                continue
            axes.plot([row.batch_size for row in found], [row.tokens_per_second for row in found], color=color, marker="o", label=name)
            if limits := [(row.batch_size, row.tokens_per_second_limit) for row in found if row.tokens_per_second_limit]:
                axes.plot(*zip(*limits), color=color, linestyle=":")
        batch_sizes = sorted({row.batch_size for _, rows in lines.values() for row in rows if row.context == context})
        axes.set_xscale("log", base=2)
        axes.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
        axes.minorticks_off()
        axes.set(xlabel="rows", ylabel="tokens/s of all rows", ylim=(0, None), title=f"{context:,} tokens (dotted: by the bytes alone)")
        axes.grid(alpha=0.3)


def _simulated(report: DecodeReport) -> list[str]:
    """How acceptance was simulated: a phrase for each rate."""
    contexts, ratios = defaultdict(set), defaultdict(set)
    for row in report.rows:
        if row.simulated_rate is not None:
            contexts[row.simulated_rate].add(row.context)
            ratios[row.simulated_rate].add(row.simulated_ratio)
    where = lambda rate: "" if len(contexts) == 1 else f" at {', '.join(f'{context:,}' for context in sorted(contexts[rate]))} tokens"
    mean = lambda rate: f", in the mean {min(ratios[rate]):.3f} of those drafted" if len(ratios[rate]) == 1 else ""
    inner = [f", at {rate:.3f} of an inner draft" for rate in {row.simulated_inner_rate for row in report.rows} - {None}]
    return [f"{where(rate)}: {rate:.3f} of each draft, given those before it{mean(rate)}{''.join(inner)}" for rate in contexts]
