"""Many prompts through one batch that stays full: a row that ends gives its slot to the next prompt, between jitted segments.

A row's tokens depend on its prompt, settings and key alone: rows share no random numbers, see nothing of each other where prompts are
prefilled together, and accept, flush and end independently.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax

from pallas_kernels.formats.views import BOTH_PLANES, View
from qspec_jax.decoding import data_parallel
from qspec_jax.decoding.config import BITS
from qspec_jax.decoding.exact_bits import decodes_in_turn
from qspec_jax.decoding.fixed_batch_results import results_of
from qspec_jax.decoding.prepare import ROWS_OF_AUTO, Prepared, prepare
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.results import BatchStats, Result
from qspec_jax.decoding.sampling import Sampler, make_sampler
from qspec_jax.decoding.shared_prefixes import run_shared
from qspec_jax.decoding.slots import Slots
from qspec_jax.decoding.waiting import Queue
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

log = logging.getLogger(__name__)


class BatchRun:
    """Results as they come, by iterating over it once; `stats` is of those that have come."""

    def __init__(self, results: Generator[Result, None, None], stats: BatchStats):
        self._results, self.stats = results, stats

    def __iter__(self) -> Iterator[Result]:
        return self._results

    def close(self) -> None:
        """Ends it early; what it holds on the device is freed. Between two results one device may be prefilling the next prompt, and
        several go on."""
        self._results.close()


def run_batch(
    model: Llama,
    requests: Iterable[Request] | Prepared,
    *,
    batch_size: int | None = 8,
    tokenizer: Any = None,
    refill: bool = True,
    strategy: Callable[..., Sampler] = make_sampler,
    view: View = BOTH_PLANES,
    devices: Sequence[Any] | None = None,
) -> BatchRun:
    """Continues requests, `batch_size` of them at a time.

    Args:
        model: the target.
        requests: of one draft and cache (`prepare.SHARED`); or what `prepare` returned for this model, which has the tokenizer.
        batch_size: rows at a time; None: the number that fits the device's memory (`capacity`).
        tokenizer: for texts and stop strings.
        refill: False waits until all rows of a batch have ended, for comparison.
        strategy: makes the sampler of the requests' configs, whose arrays have a row for each.
        view: what the target reads of its cache, see `Engine`.
        devices: JAX's devices, or meshes if the model is divided over one. Each has an engine with copies of the weights and the draft that
            decodes `batch_size` rows; all take requests from one queue. None: one engine, where the weights are.

    Raises:
        InputError: as `prepare` does.
    """
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch size {batch_size} should be at least 1")
    if isinstance(requests, Prepared):
        if tokenizer is not None:
            raise InputError("tokenizer should be given to `prepare`, since these requests are prepared already")
        if requests.model is not model:
            raise InputError("the requests were prepared for another model")
        prepared = requests
    else:
        requests = list(requests)
        if not requests or not all(isinstance(request, Request) for request in requests):
            raise InputError("requests should be a list with at least one Request")
        prepared = prepare(model, requests, tokenizer=tokenizer, batch_size=batch_size or ROWS_OF_AUTO)
    if prepared.states is not None:
        raise InputError("states are continued by `generate` and `stream`; a batch reads prompts")
    if strategy is not make_sampler and not prepared.keyed:
        raise InputError("a strategy of your own draws, so `prepare` should be given a key, such as jax.random.key(0)")
    if strategy is not make_sampler and prepared.exact == BITS:
        raise InputError(f"exact {BITS} is not for a strategy of your own; leave one of them out")
    cache = prepared.configs[0].cache_config
    if devices is not None and len(devices) > 1 and cache.in_host_memory:
        raise InputError(f"cache {prepared.configs[0].cache} has a part in host memory, which several devices would share; decode on one")
    stats, waiting, count = BatchStats(), Queue(len(prepared.requests)), len(prepared.requests)
    rows = batch_size and min(batch_size, count)
    settings = dict(refill=refill, strategy=strategy, view=view)
    alone = devices is None or (len(devices) == 1 and data_parallel.is_at((model, prepared.draft), devices[0]))
    if any(request.prefix for request in prepared.requests):
        if view != BOTH_PLANES:
            raise InputError("view is for requests without a prefix; leave it, or the prefixes, out")
        if not alone:
            raise InputError("requests with a prefix are decoded on one device; leave devices out, or the prefixes")
        return BatchRun(_with_shared(prepared, rows, stats, settings), stats)
    if decodes_in_turn(prepared.configs):
        if view != BOTH_PLANES:
            raise InputError(f"view is not for samples with exact {BITS}; leave one of them out")
        log.info("exact %s of samples: on a GPU rows are decoded one after the other, whatever the batch size", BITS)
        decoded = _in_turn
    else:
        decoded = _in_slots
    if alone:
        return BatchRun(decoded(prepared, waiting, rows, stats=stats, **settings), stats)
    share = math.ceil(count / len(devices))
    rows = rows and min(rows, share)
    parts: dict[int, BatchStats] = {}  # by the number of an engine, since a device may be given twice
    engines = itertools.count()

    def results_at(place: data_parallel.Place, is_stopped: Callable[[], bool]) -> Generator[tuple[int, BatchStats, Result], None, None]:
        engine, own = next(engines), BatchStats()
        own_model, own_draft = jax.block_until_ready(data_parallel.copied_to((model, prepared.draft), place))
        more = dict(stats=own, share=share, is_stopped=is_stopped)
        here = dataclasses.replace(prepared, model=own_model, draft=own_draft)
        parts[engine] = own
        for result in decoded(here, waiting, rows, **settings, **more):
            yield engine, dataclasses.replace(own), result

    def results() -> Generator[Result, None, None]:
        for engine, own, result in data_parallel.side_by_side(devices, results_at):
            parts[engine] = own
            stats.become_total(list(parts.values()))
            yield result

    return BatchRun(results(), stats)


def _in_slots(prepared: Prepared, waiting: Queue, rows: int | None, **settings: Any) -> Generator[Result, None, None]:
    """The results of the requests that one engine takes. settings: see `Slots`."""
    return Slots(prepared, waiting, rows, **settings).run()


def _in_turn(
    prepared: Prepared,
    waiting: Queue,
    rows: int | None,
    *,
    strategy: Callable[..., Sampler],
    stats: BatchStats,
    is_stopped: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Generator[Result, None, None]:
    """What `_in_slots` gives, of requests that are decoded one after the other, each as if it were alone: rows and other settings of slots
    make no difference."""
    stats.batch_size = 1
    while True:
        if is_stopped():
            raise data_parallel.Stopped
        with waiting.lock:
            indices = waiting.first(1, None)
            waiting.take(indices)
        if not indices:
            return
        yield from results_of(prepared.select(indices), indices, strategy, stats)


def _with_shared(prepared: Prepared, rows: int | None, stats: BatchStats, settings: dict[str, Any]) -> Generator[Result, None, None]:
    """The results of requests of which some name a prefix: first those of these, then those of the others.

    Args:
        prepared: the requests.
        rows: the maximum of rows at a time; None: the number that fits.
        stats: the totals of the run, to which each result is added.
        settings: refill, strategy and view, as `Slots` takes them.
    """
    yield from run_shared(prepared, rows, settings["strategy"], stats)
    plain = [index for index, request in enumerate(prepared.requests) if not request.prefix]
    if plain:
        others = Slots(prepared.select(plain), Queue(len(plain)), rows and min(rows, len(plain)), stats=stats, **settings)
        for result in others.run():
            yield dataclasses.replace(result, index=plain[result.index])
