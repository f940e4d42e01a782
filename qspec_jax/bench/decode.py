"""`qspec bench decode`: a whole decode, its steps one by one, and how near each is to the bytes it must read.

The byte model: a step reads its weights and what every row has cached, once, at the read bandwidth that is measured in the same run. The
drafts of random weights are accepted by chance; with a simulated rate the loop runs as in `generate`, except for which drafts the target
accepts.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from qspec_jax.bench.decode_case import MeasuredCase, Settings, verifies
from qspec_jax.bench.decode_report import DecodeReport
from qspec_jax.bench.decode_rows import Case, DecodeMethod, DecodeRow, attempt, compared
from qspec_jax.bench.streamed_step import StreamedStep
from qspec_jax.bench.timing import Bandwidth, copy_bandwidth, loop, read_bandwidth
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.prepare import prepare
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import AUTO, NONE, make_draft
from qspec_jax.drafts.step_bytes import devices_of
from qspec_jax.errors import InputError, is_out_of_memory, more_memory, named
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import formatted, this_run


def run(
    name: str,
    model: Llama,
    int4: Callable[[], Llama],
    contexts: Sequence[int],
    methods: Sequence[DecodeMethod],
    gammas: Sequence[int],
    settings: Settings,
    *,
    rates: Mapping[int, float] | None,
    batch_sizes: Sequence[int] = (1,),
    exact: Sequence[str] = (AUTO,),
    beside: Sequence[DecodeRow] = (),
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> DecodeReport:
    """Measures every method at every context and batch size, those that draft with each gamma, greedy, on random prompts.

    A method that fails, for lack of memory for example, gets a row that says so.

    Args:
        name: the model's, for the report.
        model: the target.
        int4: makes the model with INT4 weights.
        contexts: tokens of the prompts.
        methods: to measure.
        gammas: numbers of drafts a round.
        settings: their rate is replaced by that of the context, and their bandwidth by the one that is measured.
        rates: simulated acceptance at each context; None: drafts are verified.
        batch_sizes: rows decoded together, ascending.
        exact: see `GenerationConfig`; each case is measured with each, one after the other.
        beside: rows of other programs, to compare with.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.
    """
    rows = []
    cases = [Case(method, gamma, exact=each) for method in methods for gamma in method.gammas(gammas) for each in exact]
    with progress_bar(total=1 + len(contexts) * len(batch_sizes) * len(cases), progress=progress) as bar:
        copies = any(CacheConfig.parse(method.cache).in_host_memory for method in methods)
        bandwidth = kept.measured("bandwidth", Bandwidth, lambda: _bandwidth(settings.repeats, copies=copies))
        bar.update()
        for context in contexts:
            prompt = jax.random.randint(jax.random.key(settings.seed), (1, bucket(context)), 0, model.config.vocab_size)[:, :context]
            settings = dataclasses.replace(settings, rate=rates[context] if rates else None, bandwidth=bandwidth)
            found = []
            for row in measure(model, int4, cases, prompt.tolist(), settings, batch_sizes=batch_sizes, kept=kept):
                found.append(row)
                bar.update()
            rows += compared(found + [row for row in beside if row.context == context])
    return DecodeReport(
        **this_run(),
        read_bandwidth_gb_per_s=bandwidth.read,
        copy_bandwidth_gb_per_s=bandwidth.copy,
        model=name,
        max_new_tokens=settings.max_new_tokens,
        rows=rows,
        devices=devices_of(model),
        allocated_bytes=_peak_allocated_bytes(),
    )


def _peak_allocated_bytes() -> int | None:
    """See `DecodeReport.allocated_bytes`."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max(filter(None, peaks), default=None)


def _bandwidth(repeats: int, *, copies: bool) -> Bandwidth:
    """The device's; copies: whether also that of copies from host memory."""
    return Bandwidth(read_bandwidth(repeats=repeats), copy_bandwidth(repeats=repeats) if copies else None)


def _is_measured(row: DecodeRow) -> bool:
    return row.status == "measured"


def described(row: DecodeRow) -> str:
    """What is said of a row once it is known."""
    return formatted(row.tokens_per_second, ",.1f", " tokens/s") if row.status == "measured" else f"{row.status}: {row.note}"


def measure(
    model: Llama,
    int4: Callable[[], Llama],
    cases: Sequence[Case],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    batch_sizes: Sequence[int] = (1,),
    kept: KeptRows = NOT_KEPT,
) -> Iterator[DecodeRow]:
    """Measures each case with each batch size after these prompts of one length, and yields its row; a case that fails, for lack of memory
    for example, gets a row too.

    First the drafts are made, which all stay; then, for one batch size after the other, all programs are compiled, side by side.

    Args:
        batch_sizes: ascending; a prompt is read once and its row repeated. Where a case does not fit the memory, it is skipped with more
            rows.
        kept: the rows of an earlier run.

    Raises:
        InputError: for an inner rate that no draft uses.
    """

    def make(case: Case) -> Draft | None:
        draft = make_draft(case.method.draft, model, int4=int4)
        config = dataclasses.replace(case.config(settings.max_new_tokens), draft=draft or NONE)
        return jax.block_until_ready(prepare(model, prompts, config=config, key=key_of(settings.seed)).draft)

    def label(case: Case, batch_size: int) -> str:
        settings = f"batch size {batch_size}, temperature {case.temperature:g}"
        exact = "" if case.exact == AUTO else f", exact {case.exact}"
        return f"{len(prompts[0]):,} tokens, {settings}, {case.method.name}, gamma {case.gamma}{exact}"

    missing = [case for case in cases if any(label(case, batch_size) not in kept for batch_size in batch_sizes)]
    made = [(case, attempt(make, case)) for case in missing]
    if settings.inner_rate is not None and made and not any(isinstance(draft, Exception) or verifies(draft) for _, draft in made):
        raise InputError("an inner rate of acceptance is for drafts that themselves verify, such as cascade; none of these does")
    too_many: dict[Case, int] = {}  # the batch size with which a case did not fit
    for batch_size in batch_sizes:
        fitting = [(case, draft) for case, draft in made if case not in too_many and label(case, batch_size) not in kept]
        results = _results(model, fitting, prompts, settings, batch_size)

        def row(case: Case, batch_size: int = batch_size, results: Iterator[DecodeRow | Exception] = results) -> DecodeRow:
            known = dict(temperature=case.temperature, batch_size=batch_size, exact=None if case.exact == AUTO else case.exact)
            without_figures = functools.partial(DecodeRow, case.method.name, len(prompts[0]), case.gamma, **known)
            if (fewer := too_many.get(case, batch_size)) < batch_size:
                return without_figures("skipped", f"batch size {fewer} did not fit")
            result = next(results)
            if isinstance(result, Exception):  # one row of many
                full = is_out_of_memory(result)
                if full:
                    too_many[case] = batch_size
                return without_figures("failed", named(result) + (more_memory() if full else ""))
            return result

        for case in cases:
            yield kept.measured(label(case, batch_size), DecodeRow, functools.partial(row, case), described, _is_measured)


def _results(
    model: Llama,
    made: Sequence[tuple[Case, Draft | Exception | None]],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    batch_size: int,
) -> Iterator[DecodeRow | Exception]:
    """The row of each case with its draft, or why there is none; see `measure`."""
    began = time.perf_counter()
    pool = ThreadPoolExecutor()
    try:
        begun: list[MeasuredCase | StreamedStep | Exception] = []
        for case, draft in made:
            if isinstance(draft, Exception):
                begun.append(draft)
            elif settings.bandwidth and (alone := StreamedStep.needed(model, case, len(prompts[0]), settings.max_new_tokens, batch_size)):
                begun.append(alone)
            else:
                begun.append(attempt(MeasuredCase, model, draft, case, prompts, settings, pool, batch_size, began))
        if settings.bandwidth is not None:  # after the programs that take longest to compile
            loops = functools.cache(loop)  # which methods share
            begun = [attempt(one.with_steps, pool, settings.bandwidth, loops) if isinstance(one, MeasuredCase) else one for one in begun]
            del loops  # or no program of a step would be freed before the last row
        with working("compiling"):
            pool.shutdown()
    except BaseException:  # such as an interrupt
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    while begun:
        measured = begun.pop(0)
        yield measured if isinstance(measured, Exception) else attempt(measured.row, settings.bandwidth, settings.repeats)
