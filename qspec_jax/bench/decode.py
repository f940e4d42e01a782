"""`qspec bench decode`: a whole decode, its steps one by one, and how near each is to the bytes it must read.

The byte model: a step reads its weights and what is cached, once, at the read bandwidth that is measured in the same run. Random
weights say nothing of acceptance: with a simulated rate the loop runs as in `generate`, but for which drafts the target takes.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax.bench.attention_shapes import Shape, bytes_read
from qspec_jax.bench.decode_rows import Case, Method, Report, Row, Step, compared
from qspec_jax.bench.hlo import large_operations
from qspec_jax.bench.rows import one_line, this_run
from qspec_jax.bench.simulated import SimulatedGreedy, ratio_of_rate
from qspec_jax.bench.timing import loop, loop_trips, read_bandwidth, time_loop
from qspec_jax.caches.cache import Cache
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import DECODE, PREPARE, make_limits
from qspec_jax.decoding.sampling import DRAFT, Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.state import Counts, DecodeState
from qspec_jax.drafts.cached_model import CachedModel, in_loop
from qspec_jax.evaluate.acceptance import repeated_ngrams
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket


def run(
    name: str,
    model: Llama,
    drafts: Callable[[bool], Llama],
    contexts: Sequence[int],
    methods: Sequence[Method],
    gammas: Sequence[int],
    *,
    max_new_tokens: int,
    rates: Mapping[int, float] | None,
    beside: Sequence[Row] = (),
    repeats: int = 20,
    seed: int = 0,
    progress: bool | None = None,
) -> Report:
    """Measures every method at every context, those that draft with each gamma, batch 1, greedy, on random prompts.

    drafts(int4): the draft's model. rates: simulated acceptance at each context; None verifies for real. beside: rows of others, to
    compare. progress: a bar on standard error; None where that is a terminal. A method that fails, for want of memory say, is a row that
    says so.
    """
    rows = []
    cases = [Case(method, gamma) for method in methods for gamma in (gammas if method.speculative else [0])]
    with tqdm(total=1 + len(contexts) * len(cases), leave=False, disable=None if progress is None else not progress) as bar:
        bar.set_description("read bandwidth")
        bandwidth = read_bandwidth(repeats=repeats)
        bar.update()
        for context in contexts:
            prompt = jax.random.randint(jax.random.key(seed), (1, bucket(context)), 0, model.config.vocab_size)[:, :context]
            bar.set_description(f"{context:,} tokens: compiling")
            found = []
            settings = dict(rate=rates[context] if rates else None, seed=seed, bandwidth=bandwidth, repeats=repeats)
            for row in measure(model, drafts, cases, prompt.tolist(), max_new_tokens, **settings):
                found.append(row)
                bar.set_description(f"{context:,} tokens")
                bar.update()
            rows += compared(found + [row for row in beside if row.context == context])
    return Report(
        **this_run(),
        read_bandwidth_gb_per_s=bandwidth,
        model=name,
        max_new_tokens=max_new_tokens,
        rows=rows,
    )


def measure(
    model: Llama,
    drafts: Callable[[bool], Llama],
    cases: Sequence[Case],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    rate: float | None = None,
    seed: int = 0,
    bandwidth: float | None = None,
    repeats: int = 20,
) -> Iterator[Row]:
    """Each case's row, after these prompts of one length; where it fails, for want of memory say, a row that says so.

    First the drafts are made, which all stay; then all programs are compiled, side by side. rate: simulated acceptance; None verifies for
    real. bandwidth: GB/s, with which the steps are measured too, `repeats` times.
    """
    make = lambda case: jax.block_until_ready(drafts(case.method.int4)) if case.method.speculative else None
    made = [_attempt(make, case) for case in cases]
    settings = dict(rate=rate, seed=seed, bandwidth=bandwidth, began=time.perf_counter())
    pool = ThreadPoolExecutor()
    try:
        begun = [
            draft if isinstance(draft, Exception) else _attempt(_Measured, model, draft, case, prompts, max_new_tokens, pool, **settings)
            for case, draft in zip(cases, made)
        ]
        pool.shutdown()
    except BaseException:  # an interrupt, say
        pool.shutdown(cancel_futures=True)
        raise
    for case in cases:
        measured = begun.pop(0)
        row = measured if isinstance(measured, Exception) else _attempt(measured.row, bandwidth, repeats)
        if isinstance(row, Exception):  # one row of many
            row = Row(case.method.name, len(prompts[0]), case.gamma, "failed", one_line(row), case.temperature)
        yield row


def _attempt(function: Callable, *args, **settings):
    """What the function returns or raises."""
    try:
        return function(*args, **settings)
    except Exception as error:
        return error.with_traceback(None)  # whose frames would keep what they had made


class _Measured:
    """One method after prompts of one length. Its programs begin to be compiled as it is made."""

    def __init__(
        self,
        model: Llama,
        draft: Llama | None,
        case: Case,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        pool: Executor,
        *,
        rate: float | None,
        seed: int,
        bandwidth: float | None,
        began: float,
    ):
        self.model, self.method, self.gamma, self.context = model, case.method, case.gamma, len(prompts[0])
        self.config = GenerationConfig(
            method="quantspec" if case.method.speculative else "autoregressive",
            cache=case.method.cache,
            num_speculative_tokens=case.gamma,
            max_new_tokens=max_new_tokens,
            temperature=case.temperature,
            ignore_eos=True,
        )
        self.target = CachedModel(model, 2)
        self.draft = CachedModel(draft, 1, head_bits=8 if case.method.int4 else 16) if draft is not None else None
        self.rate = rate if case.method.speculative else None
        self.sampler: Sampler = make_sampler(self.config) if self.rate is None else SimulatedGreedy(jnp.float32(rate))
        self.limits = make_limits(model, self.config)
        tokens = jnp.pad(jnp.array(prompts, jnp.int32), ((0, 0), (0, bucket(self.context) - self.context)))
        n, keys = jnp.full(1, self.context, jnp.int32), prompt_keys(jax.random.key(seed), len(prompts))
        self.inputs = [(self.target, tokens[i : i + 1], n, self.sampler, keys[i : i + 1], self.limits) for i in range(len(prompts))]
        self._compile(pool, bandwidth, began)

    def _compile(self, pool: Executor, bandwidth: float | None, began: float) -> None:
        new = bucket(self.config.max_new_tokens)
        static = dict(cache=self.config.cache_config, capacity=bucket(self.context) + new, max_new_tokens=new, gamma=self.gamma)
        state, draft = PREPARE.shapes(*self.inputs[0], **static), jax.eval_shape(in_loop, self.draft)

        def compiled(program: Compiled, *args, **static) -> Future:
            return pool.submit(lambda: (program.compile(*args, **static)[0], time.perf_counter() - began))

        self.prepare = compiled(PREPARE, *self.inputs[0], **static)
        self.decode = compiled(DECODE, self.target, draft, self.sampler, state, self.limits, jnp.int32(1))
        self.loops = {}
        if bandwidth is not None:
            carry = jax.ShapeDtypeStruct((1, self.gamma + 1), jnp.int32), state.cache
            for step in self._steps(state.cache.lengths, draft, bandwidth):
                self.loops[step.name] = compiled(loop(step.function, step.trips), carry, step.inputs), step.trips

    def row(self, bandwidth: float | None, repeats: int) -> Row:
        # All of them now: to fail before minutes of decoding.
        (prepare, prepare_s), (decode, decode_s) = self.prepare.result(), self.decode.result()
        loops = {name: (program.result()[0], trips) for name, (program, trips) in self.loops.items()}
        jax.block_until_ready((self.model, self.draft))
        state = jax.block_until_ready(prepare(*self.inputs[0]))  # to warm up
        draft = in_loop(self.draft)
        row = Row(
            self.method.name,
            self.context,
            self.gamma,
            "measured",
            temperature=self.config.temperature,
            simulated_rate=self.rate,
            simulated_ratio=None if self.rate is None else ratio_of_rate(self.rate, self.gamma),
            compile_s=max(prepare_s, decode_s),
            cache_bytes=state.cache.num_bytes,
            peak_memory_bytes=self._peak_bytes(prepare, decode, draft),
            large_operations=large_operations(decode.as_text(), self._large(state.cache)),
        )
        runs = []
        for inputs in self.inputs:
            del state  # its cache is gone before the next is made
            state, prefill_s = _timed(functools.partial(prepare, *inputs))
            lengths = jax.tree.map(jnp.copy, state.cache.lengths)
            run, state = self._decoded(functools.partial(decode, self.target, draft, self.sampler), state, prefill_s)
            runs.append(run)
        row = _totalled(row, runs)
        if bandwidth is None:
            return row
        return dataclasses.replace(row, steps=self._measured_steps(loops, state.cache.rollback(lengths), draft, bandwidth, repeats))

    def _peak_bytes(self, prepare: jax.stages.Compiled, decode: jax.stages.Compiled, in_decode: CachedModel | None) -> int:
        """Of prefill, beside which the draft is held, or of decode, with what the draft is there; shared arrays count once."""
        held = lambda draft: _bytes_of((self.target, draft)) - _bytes_of(self.target)
        return max(_working_bytes(prepare) + held(self.draft), _working_bytes(decode) + held(in_decode) - _bytes_of(in_decode))

    def _large(self, cache: Cache) -> int:
        """Bytes of the cache's smallest array of codes, keys or values; of two sets of logits, where that is more."""
        arrays = [leaf for leaf in jax.tree.leaves(cache.layers) if leaf.ndim == 5 or self.method.cache == "full"]
        logits = 4 * (self.gamma + 1) * self.model.config.vocab_size
        return max(2 * logits, min(leaf.size * leaf.dtype.itemsize for leaf in arrays))

    def _decoded(self, step: Callable, state: DecodeState, prefill_s: float) -> tuple["_Decode", DecodeState]:
        """A whole decode, whose first rounds warm up, and the state after it."""
        state = jax.block_until_ready(step(state, self.limits, jnp.int32(2)))
        before = jax.device_get((state.emitted, state.counts))
        state, decode_s = _timed(lambda: step(state, self.limits, jnp.int32(np.iinfo(np.int32).max)))
        after = jax.device_get((state.emitted, state.counts))
        emitted, counts = jax.tree.map(lambda a, b: int((a - b).sum()), after, before)
        return _Decode(prefill_s, decode_s, emitted, counts, np.asarray(state.tokens)[0, : after[0][0]].tolist()), state

    def _steps(self, lengths: Lengths, draft: CachedModel | None, bandwidth: float) -> list["_Work"]:
        """Each step alone, on a filled cache of these lengths."""
        width, vocabulary = self.gamma + 1, self.model.config.vocab_size
        logits = jax.random.normal(jax.random.key(0), (1, width, vocabulary))
        keys, positions = prompt_keys(jax.random.key(0), 1), jnp.arange(width)[None]
        eligible = jnp.full(1, self.gamma, jnp.int32)
        _, proposal = self.sampler.choose(logits[:, 0], keys, positions[:, 0], DRAFT)
        proposals = jnp.broadcast_to(proposal[:, None], (1, self.gamma, proposal.shape[-1]))

        def forward(tokens, cache, lengths, model, *, width):
            positions = lengths.total[:, None] + jnp.arange(width)
            logits, cache = model(tokens[:, :width], positions, cache)
            return tokens.at[:, :width].set(jnp.argmax(logits, -1).astype(jnp.int32)), cache.rollback(lengths)

        def sample(tokens, cache, lengths, sampler, logits):
            # The tokens enter, or the loop would do it once.
            logits = logits + (tokens[..., None] < 0)
            _, after = sampler.verify(logits, tokens[:, 1:], proposals, eligible, keys, positions)
            return tokens.at[:, 0].set(after), cache

        def flush(tokens, cache, lengths):
            return tokens, dataclasses.replace(cache.rollback(lengths).flush()[0], lengths=lengths)

        def step(name: str, model: CachedModel, width: int) -> _Work:
            size = self.step_bytes(model, width)
            return _Work(name, functools.partial(forward, width=width), (lengths, model), size / bandwidth / 1e9, size)

        work = [step("target", self.target, width)]
        if draft is not None:
            work.append(step("draft", draft, 1))
        work.append(_Work("sampling", sample, (lengths, self.sampler, logits), 5e-5))
        if self.method.cache == "int8":
            group = self.config.cache_config.group_size_for(self.model.config.head_dim)
            for name, buffered, seconds in ("flush due", 2 * group, 5e-4), ("flush not due", group, 2.5e-5):
                at = dataclasses.replace(lengths, buffered=jnp.full(1, buffered, jnp.int32))
                work.append(_Work(name, flush, (at,), seconds))
        return work

    def _measured_steps(self, loops: dict, cache: Cache, draft: CachedModel | None, bandwidth: float, repeats: int) -> dict[str, Step]:
        """loops: the program of each step, and its trips. The cache is spent: a step writes over what the one before wrote, and flushes
        move its buffer."""
        carry = jnp.zeros((1, self.gamma + 1), jnp.int32), cache
        steps = {}
        for work in self._steps(jax.tree.map(jnp.copy, cache.lengths), draft, bandwidth):
            timing, carry = time_loop(*loops[work.name], carry, work.inputs, repeats=repeats)
            steps[work.name] = Step(timing, work.bytes, work.bytes / bandwidth / 1e3 / timing.median_us)
        return steps

    def step_bytes(self, model: CachedModel, width: int) -> int:
        """What a step must read: its weights, and the cache with its own tokens."""
        planes = None if self.method.cache == "full" else model.planes
        return weight_bytes(model.model) + cache_bytes_read(self.model, self.context + width, width, planes)


@dataclasses.dataclass(frozen=True)
class _Work:
    """A step, tokens and cache = function(tokens, cache, *inputs); about so many seconds, and the bytes that it must read (0: not
    counted)."""

    name: str
    function: Callable
    inputs: tuple
    seconds: float
    bytes: int = 0

    @property
    def trips(self) -> int:
        return loop_trips(self.seconds)


@dataclasses.dataclass(frozen=True)
class _Decode:
    """One prompt's: decode_s, new_tokens and counts are behind the warm-up; tokens are all that it emitted."""

    prefill_s: float
    decode_s: float
    new_tokens: int
    counts: Counts
    tokens: list[int]


def _totalled(row: Row, runs: Sequence[_Decode]) -> Row:
    """The row with the figures of these decodes together."""
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
        repeated_ngrams=repeated_ngrams([run.tokens for run in runs]),
        tokens_per_second=new / decode_s,
        ms_per_token=1e3 * decode_s / new,
    )


def weight_bytes(model: Llama) -> int:
    """Of the weights that a step reads; of an embedding that is not the head too it reads a row."""
    weights = dict(model.weights())
    if model.head is not None:
        weights.pop("embedding")
    return _bytes_of(weights)


def cache_bytes_read(model: Llama, context: int, width: int, planes: int | None) -> int:
    """Of all layers of a cache of this many tokens, for queries of `width` more."""
    c = model.config
    group = GenerationConfig().cache_config.group_size_for(c.head_dim)
    shape = Shape("", planes, width, c.num_heads, c.num_kv_heads, (context,), c.head_dim, group)
    return c.num_layers * bytes_read(shape)


def _timed(function: Callable):
    began = time.perf_counter()
    result = jax.block_until_ready(function())
    return result, time.perf_counter() - began


def _bytes_of(tree) -> int:
    """Of its arrays, each counted once."""
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays.values())


def _working_bytes(executable: jax.stages.Compiled) -> int:
    """Arguments, results and temporaries; what is given back in place counts once."""
    m = executable.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
