"""`qspec bench decode`: a whole decode, its steps one by one, and how near each is to the bytes it must read.

The byte model: a step reads its weights and what is cached, once, at the read bandwidth that is measured in the same run. The drafts of
random weights are accepted by chance; with a simulated rate the loop runs as in `generate`, except for which drafts the target accepts.
"""

import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
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
from qspec_jax import plots
from qspec_jax.bench.attention_shapes import Shape, bytes_read
from qspec_jax.bench.decode_rows import AUTOREGRESSIVE, METHODS, Case, DecodeRow, Method, StepTiming, compared
from qspec_jax.bench.hlo import large_operations
from qspec_jax.bench.simulated import SimulatedGreedy, ratio_of_rate
from qspec_jax.bench.timing import loop, loop_trips, read_bandwidth, time_loop
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Call, Engine
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.sampling import DRAFT, Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.state import UNLIMITED, Counts, DecodeState
from qspec_jax.drafts.draft import Draft, StepwiseDraft
from qspec_jax.drafts.registry import make_draft
from qspec_jax.drafts.step_bytes import bytes_of, step_bytes, weight_bytes
from qspec_jax.errors import InputError, named
from qspec_jax.evaluate.acceptance import repeated_ngrams
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.provenance import Run, this_run


@dataclasses.dataclass(frozen=True)
class DecodeReport(Run):
    """Whole decodes: a row for every method, gamma and context, and the rows of other programs."""

    read_bandwidth_gb_per_s: float
    model: str
    max_new_tokens: int
    rows: list[DecodeRow]


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
    beside: Sequence[DecodeRow] = (),
    repeats: int = 20,
    seed: int = 0,
    directory: str | Path | None = None,
    progress: bool | None = None,
) -> DecodeReport:
    """Measures every method at every context, those that draft with each gamma, batch 1, greedy, on random prompts.

    int4: makes the model with INT4 weights. rates: simulated acceptance at each context; None verifies for real. beside: rows of other
    programs, to compare with. directory: where the model was loaded from, see `make_draft`. progress: a bar on standard error; None where
    that is a terminal. A method that fails (for want of memory, say) gets a row that says so.
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
            settings = dict(rate=rates[context] if rates else None, seed=seed, bandwidth=bandwidth, repeats=repeats, directory=directory)
            for row in measure(model, int4, cases, prompt.tolist(), max_new_tokens, **settings):
                found.append(row)
                bar.set_description(f"{context:,} tokens")
                bar.update()
            rows += compared(found + [row for row in beside if row.context == context])
    return DecodeReport(
        **this_run(),
        read_bandwidth_gb_per_s=bandwidth,
        model=name,
        max_new_tokens=max_new_tokens,
        rows=rows,
    )


def measure(
    model: Llama,
    int4: Callable[[], Llama],
    cases: Sequence[Case],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    rate: float | None = None,
    seed: int = 0,
    bandwidth: float | None = None,
    repeats: int = 20,
    directory: str | Path | None = None,
) -> Iterator[DecodeRow]:
    """Measures each case after these prompts of one length, and yields its row; a case that fails (for want of memory, say) gets a row too.

    First the drafts are made, which all stay; then all programs are compiled, side by side. rate: simulated acceptance; None verifies for
    real. bandwidth: GB/s, with which the steps are measured too, `repeats` times. directory: where the model was loaded from, see
    `make_draft`.
    """
    make = lambda case: jax.block_until_ready(make_draft(case.method.draft, model, int4=int4, directory=directory))
    made = [_attempt(make, case) for case in cases]
    settings = dict(rate=rate, seed=seed, began=time.perf_counter())
    pool = ThreadPoolExecutor()
    try:
        begun = [
            draft if isinstance(draft, Exception) else _attempt(_Measured, model, draft, case, prompts, max_new_tokens, pool, **settings)
            for case, draft in zip(cases, made)
        ]
        if bandwidth is not None:  # behind what takes longest to compile
            loops = functools.cache(loop)  # which methods share
            begun = [one if isinstance(one, Exception) else _attempt(one.with_steps, pool, bandwidth, loops) for one in begun]
            del loops  # or no program of a step would be freed before the last row
        pool.shutdown()
    except BaseException:  # such as an interrupt
        pool.shutdown(cancel_futures=True)
        raise
    for case in cases:
        measured = begun.pop(0)
        row = measured if isinstance(measured, Exception) else _attempt(measured.row, bandwidth, repeats)
        if isinstance(row, Exception):  # one row of many
            row = DecodeRow(case.method.name, len(prompts[0]), case.gamma, "failed", named(row), case.temperature)
        yield row


def _attempt(function: Callable, *args, **settings):
    """Calls a function and returns its result, or the exception that it raised."""
    try:
        return function(*args, **settings)
    except InputError:  # a draft's settings that do not fit the model, for one
        raise
    except Exception as error:
        return error.with_traceback(None)  # whose frames would keep what they had made


class _Measured:
    """One method after prompts of one length. Making the object begins to compile its programs, `with_steps` those of its steps alone;
    `row` runs them."""

    def __init__(
        self,
        model: Llama,
        draft: Draft | None,
        case: Case,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        pool: Executor,
        *,
        rate: float | None,
        seed: int,
        began: float,
    ):
        self.model, self.method, self.gamma, self.context = model, case.method, case.gamma, len(prompts[0])
        self.config = GenerationConfig(
            draft=case.method.draft,
            cache=case.method.cache,
            num_speculative_tokens=case.gamma,
            max_new_tokens=max_new_tokens,
            temperature=case.temperature,
            ignore_eos=True,
        )
        self.rate = rate if case.method.speculative else None
        self.sampler: Sampler = make_sampler(self.config) if self.rate is None else SimulatedGreedy(jnp.float32(rate))
        self.limits = make_limits(model, self.config)
        self.engine = Engine.for_configs(model, draft, [self.config], prompt_tokens=self.context)
        keys = prompt_keys(jax.random.key(seed), len(prompts))
        self.calls = [
            self.engine.prefill_call([list(prompt)], self.sampler, keys[i : i + 1], self.limits) for i, prompt in enumerate(prompts)
        ]
        self.loops = {}
        self._compile(pool, began)

    def _compile(self, pool: Executor, began: float) -> None:
        state = self.calls[0].shapes()
        rounds = self.engine.rounds_call(state, self.sampler, self.limits, 1, lazy=True)
        self.shapes = state, rounds.args[1]
        compiled = lambda call: pool.submit(lambda: (call.compile()[0], time.perf_counter() - began))
        self.prepare, self.decode = compiled(self.calls[0]), compiled(rounds)

    def with_steps(self, pool: Executor, bandwidth: float, loop: Callable) -> Self:
        """Begins to compile the loops of its steps. loop: as in timing.py, and the same object for the same arguments."""
        state, draft = self.shapes
        tokens = jax.ShapeDtypeStruct((1, self.gamma + 1), jnp.int32)
        for step in self._steps(state, draft, bandwidth):
            call = Call(loop(step.function, step.trips), ((tokens, state.cache, step.kept(state.draft)), step.inputs))
            self.loops[step.name] = pool.submit(call.compile), step.trips
        return self

    def row(self, bandwidth: float | None, repeats: int) -> DecodeRow:
        """Decodes every prompt; where the read bandwidth (GB/s) is given, also times the steps, `repeats` times each."""
        # Waits for all of them first: what cannot be compiled fails before minutes of decoding.
        (prepare, prepare_s), (decode, decode_s) = self.prepare.result(), self.decode.result()
        loops = {name: (program.result()[0], trips) for name, (program, trips) in self.loops.items()}
        jax.block_until_ready((self.model, self.engine.draft))
        state = jax.block_until_ready(prepare(*self.calls[0].args))  # to warm up
        draft = self.engine.draft_in_loop
        row = DecodeRow(
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
        for call in self.calls:
            del state  # its cache is gone before the next is made
            state, prefill_s = _timed(functools.partial(prepare, *call.args))
            lengths, drafting = jax.tree.map(jnp.copy, (state.cache.lengths, state.draft))
            run, state = self._decoded(decode, state, prefill_s)
            runs.append(run)
        row = _totalled(row, runs)
        if bandwidth is None:
            return row
        return dataclasses.replace(
            row,
            steps=self._measured_steps(
                loops, dataclasses.replace(state, cache=state.cache.rollback(lengths), draft=drafting), bandwidth, repeats
            ),
        )

    def _peak_bytes(self, prepare: jax.stages.Compiled, decode: jax.stages.Compiled, in_decode: Draft | None) -> int:
        """The larger of what prefill and decode hold, with the draft as each of them has it; shared arrays count once."""
        held = lambda draft: bytes_of((self.engine.target, draft)) - bytes_of(self.engine.target)
        return max(_working_bytes(prepare) + held(self.engine.draft), _working_bytes(decode) + held(in_decode) - bytes_of(in_decode))

    def _large(self, cache: Cache) -> int:
        """The bytes from which an operation counts as large: the cache's smallest array of codes, keys or values, or two sets of logits."""
        arrays = [leaf for leaf in jax.tree.leaves(cache.layers) if leaf.ndim == 5 or self.method.cache == "full"]
        logits = 4 * (self.gamma + 1) * self.model.config.vocab_size
        return max(2 * logits, min(leaf.size * leaf.dtype.itemsize for leaf in arrays))

    def _decoded(self, decode: jax.stages.Compiled, state: DecodeState, prefill_s: float) -> tuple["_Decode", DecodeState]:
        """Decodes to the end, the first rounds as a warm-up; also returns the state after it."""
        rounds = lambda state, most: decode(*self.engine.rounds_call(state, self.sampler, self.limits, most).args)
        state = jax.block_until_ready(rounds(state, 2))
        before = jax.device_get((state.emitted, state.counts))
        state, decode_s = _timed(lambda: rounds(state, UNLIMITED))
        after = jax.device_get((state.emitted, state.counts))
        emitted, counts = jax.tree.map(lambda a, b: int((a - b).sum()), after, before)
        return _Decode(prefill_s, decode_s, emitted, counts, np.asarray(state.tokens)[0, : after[0][0]].tolist()), state

    def _steps(self, state: DecodeState, draft: Draft | None, bandwidth: float) -> list["_Work"]:
        """The steps of a round, each to be timed alone on a filled cache; `state` is the one after prefill."""
        lengths = state.cache.lengths
        width, vocabulary = self.gamma + 1, self.model.config.vocab_size
        logits = jax.random.normal(jax.random.key(0), (1, width, vocabulary))
        keys, positions = prompt_keys(jax.random.key(0), 1), jnp.arange(width)[None]
        eligible = jnp.full(1, self.gamma, jnp.int32)
        _, proposal = self.sampler.choose(logits[:, 0], keys, positions[:, 0], DRAFT)
        proposals = jnp.broadcast_to(proposal[:, None], (1, self.gamma, proposal.shape[-1]))

        def work_of(name: str, function: Callable, model: Any, size: int) -> _Work:
            return _Work(name, function, (lengths, model), size / bandwidth / 1e9, size)

        verified = _verified_and_observed if draft is not None and draft.observes else _verified
        work = [work_of("target", verified, self.engine.target, self.target_bytes(width))]
        if isinstance(draft, StepwiseDraft):
            work.append(work_of("draft", _drafted, draft, step_bytes(draft, self.config.cache_config, self.context + 1)))
        work.append(_Work("sampling", _sampled, (self.sampler, logits, proposals, eligible, keys, positions), 5e-5))
        if self.method.cache == "int8":
            group = self.config.cache_config.group_size_for(self.model.config.head_dim)
            for name, buffered, seconds in ("flush due", 2 * group, 5e-4), ("flush not due", group, 2.5e-5):
                at = dataclasses.replace(lengths, buffered=jnp.full(1, buffered, jnp.int32))
                work.append(_Work(name, _flushed, (at,), seconds))
        return work

    def _measured_steps(self, loops: dict, state: DecodeState, bandwidth: float, repeats: int) -> dict[str, StepTiming]:
        """Times every step. loops: the program of each step and its trips. The state's cache and its draft's state are spent: a step
        overwrites what the one before wrote, and flushes move its buffer."""
        tokens, cache = jnp.zeros((1, self.gamma + 1), jnp.int32), state.cache
        shown = dataclasses.replace(state, cache=state.cache.rollback(jax.tree.map(jnp.copy, state.cache.lengths)))
        steps = {}
        for work in self._steps(shown, self.engine.draft_in_loop, bandwidth):
            carry = tokens, cache, work.kept(state.draft)
            timing, (tokens, cache, _) = time_loop(*loops[work.name], carry, work.inputs, repeats=repeats)
            steps[work.name] = StepTiming(timing, work.bytes, work.bytes / bandwidth / 1e3 / timing.median_us)
        return steps

    def target_bytes(self, width: int) -> int:
        """The bytes that a verification must read: its weights, and the cache with the tokens that it appends."""
        planes = None if self.method.cache == "full" else BOTH_PLANES.planes
        layers = self.model.config.num_layers
        return weight_bytes(self.model) + layers * layer_bytes_read(self.model, self.context + width, width, planes)


@dataclasses.dataclass(frozen=True)
class _Work:
    """A step to be timed: tokens, cache, state = function(tokens, cache, state, *inputs), where the state is the draft's in a step of the
    draft. seconds: about how long it takes. bytes: what it must read (0: not counted)."""

    name: str
    function: Callable
    inputs: tuple
    seconds: float
    bytes: int = 0

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
    state, cache = draft.after_steps(state, cache, stepped)
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
    """The decode of one prompt. decode_s, new_tokens and counts leave the warm-up out; tokens are all that it emitted."""

    prefill_s: float
    decode_s: float
    new_tokens: int
    counts: Counts
    tokens: list[int]


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
        repeated_ngrams=repeated_ngrams([run.tokens for run in runs]),
        tokens_per_second=new / decode_s,
        ms_per_token=1e3 * decode_s / new,
    )


def layer_bytes_read(model: Llama, context: int, width: int, planes: int | None) -> int:
    """The bytes that queries of `width` tokens read of one layer of a cache of so many tokens, themselves among them."""
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
    """Two tables: whole decodes, and their steps."""
    simulated = "".join(f"Acceptance is SIMULATED{of}\n" for of in _simulated(report))
    head = Text.assemble(
        (f"Decode of {report.model} on {report.device}", "bold"),
        f", {report.date}: reads {report.read_bandwidth_gb_per_s:,.0f} GB/s\n",
        simulated,
    )
    whole = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in ("context", "method", "gamma", "accepted", "tokens/s", "ms/token", "speed-up", "byte limit", "of it"):
        whole.add_column(label, justify="left" if label == "method" else "right", no_wrap=True)
    for label in ("prefill s", "compile s", "cache GB", "peak GB", "copies"):
        whole.add_column(label, justify="right")
    whole.add_column("")
    steps = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in ("context", "method", "step", "us", "quartiles", "MB", "of its floor"):
        steps.add_column(label, justify="left" if label in ("method", "step") else "right", no_wrap=True)
    for row in report.rows:
        name = f"{row.context:,}", row.method
        if row.status != "measured":
            whole.add_row(*name, str(row.gamma), *["-"] * 11, f"{row.status}: {row.note}")
            continue
        number = lambda x, form: "-" if x is None else format(x, form)
        accepted = number(row.acceptance_ratio, ".3f") + ("" if row.simulated_rate is None else " (sim.)")
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        figures = [number(row.tokens_per_second, ",.1f"), number(row.ms_per_token, ",.2f"), speedup]
        figures += [number(row.byte_limit, ".2f"), number(row.share_of_limit, ".0%"), f"{row.prefill_s:.2f}", f"{row.compile_s:.1f}"]
        gigabytes = lambda size: "-" if size is None else f"{size / 1e9:.2f}"
        figures += [gigabytes(row.cache_bytes), gigabytes(row.peak_memory_bytes)]
        copies = "-" if row.cache_bytes is None else str(len(row.large_operations))
        whole.add_row(*name, str(row.gamma), accepted, *figures, copies)
        for step, found in row.steps.items():
            t = found.timing
            floor = [f"{found.bytes / 1e6:,.1f}", f"{1 / found.share:.2f}x"] if found.bytes else ["-", "-"]
            steps.add_row(*name, step, f"{t.median_us:,.1f}", f"{t.lower_us:,.1f} - {t.upper_us:,.1f}", *floor)
    others = {f"{row.method}: {row.note}." for row in report.rows if row.status == "measured" and row.note}
    notes = [
        "Batch 1, greedy, random prompts. speed-up: over autoregressive decoding with a bfloat16 cache at the same context.",
        "byte limit: the speed-up if every step took as long as reading its weights and cache.",
        "peak: weights, cache and what prefill or decode need besides. copies: operations of the size of a cache or more in the loop.",
        "of its floor: time over that of reading the bytes.",
        *sorted(others),
    ]
    return Group(head, whole, Text(), steps, Text("\n" + " ".join(notes), "dim"))


def plot(report: DecodeReport, path: Path) -> None:
    """Three panels against context, with each method's best gamma: speed-up, the time of a quantspec round by its steps, and memory.

    Raises InputError if nothing was measured, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.status == "measured"]
    if not rows:
        raise InputError(f"--plot {path}: nothing was measured")
    best = {}
    for row in sorted(rows, key=lambda row: row.tokens_per_second):
        best[row.method, row.context] = row
    lines = defaultdict(list)
    for row in best.values():
        lines[row.method].append(row)
    contexts = sorted({row.context for row in rows})
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    speed, time, memory = figure.subplots(1, 3)
    for axes in (speed, memory):
        plots.context_axis(axes, contexts)
    for number, name in enumerate([*METHODS, *sorted(lines.keys() - METHODS.keys())]):
        found = sorted(lines.get(name, []), key=lambda row: row.context)
        style = dict(color=f"C{number}", marker="o", label=name)
        if speedups := [(row.context, row.speedup) for row in found if row.speedup and name != AUTOREGRESSIVE]:
            speed.plot(*zip(*speedups), **style)
            if limits := [(row.context, row.byte_limit) for row in found if row.byte_limit]:
                speed.plot(*zip(*limits), color=f"C{number}", linestyle=":")
        if peaks := [(row.context, row.peak_memory_bytes / 1e9) for row in found if row.peak_memory_bytes]:
            memory.plot(*zip(*peaks), **style)
    speed.set(ylabel="speed-up over autoregressive, bf16 cache", title="Speed-up (dotted: by the bytes alone)")
    memory.set(ylabel="GB", title="Peak memory", ylim=(0, None))
    rounds = sorted(lines.get("quantspec", []), key=lambda row: row.context)
    bottom = [0.0] * len(rounds)
    for step, times in (("draft", lambda row: row.gamma), ("target", lambda row: 1), ("sampling", lambda row: 1)):
        heights = [times(row) * row.steps[step].timing.median_us / 1e3 for row in rounds]
        time.bar([f"{row.context:,}\n{row.gamma} drafts" for row in rounds], heights, bottom=bottom, label=step)
        bottom = [a + b for a, b in zip(bottom, heights)]
    time.set(xlabel="context (tokens)", ylabel="ms", title="A round of quantspec")
    for axes in (speed, time, memory):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    simulated = "; acceptance SIMULATED" if _simulated(report) else ""
    figure.suptitle(f"Decoding {report.model} on {report.device}, {report.date}{simulated}", fontsize=11)
    plots.save(figure, path)


def _simulated(report: DecodeReport) -> list[str]:
    """How acceptance was simulated: a phrase for each rate."""
    contexts, ratios = defaultdict(set), defaultdict(set)
    for row in report.rows:
        if row.simulated_rate is not None:
            contexts[row.simulated_rate].add(row.context)
            ratios[row.simulated_rate].add(row.simulated_ratio)
    where = lambda rate: "" if len(contexts) == 1 else f" at {', '.join(f'{context:,}' for context in sorted(contexts[rate]))} tokens"
    mean = lambda rate: f", in the mean {min(ratios[rate]):.3f} of those drafted" if len(ratios[rate]) == 1 else ""
    return [f"{where(rate)}: {rate:.3f} of each draft, given those before it{mean(rate)}" for rate in contexts]
