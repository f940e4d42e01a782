"""Many prompts through one batch that stays full: a row that ends gives its slot to the next prompt, between jitted segments.

A row's tokens depend on its prompt, settings and key alone: rows share no random numbers, see nothing of each other where prompts are
prefilled together, and accept, flush and end independently.
"""

import contextlib
import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.formats.views import BOTH_PLANES, View
from qspec_jax.decoding import capacity, data_parallel
from qspec_jax.decoding.generate import Row, RowStats, summary
from qspec_jax.decoding.limits import Limits, make_limits
from qspec_jax.decoding.pages import PagePool
from qspec_jax.decoding.prefill import Prefill
from qspec_jax.decoding.prepare import ROWS_OF_AUTO, Prepared, prepare
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import Sampler, make_sampler
from qspec_jax.decoding.state import DecodeState
from qspec_jax.decoding.waiting import Ahead, Queue
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket

ROUNDS_PER_SEGMENT = 64  # between two looks, at most
# In tokens times layers: prompts that need more than PART are prefilled in parts. Between two parts, and two prompts, the other rows have
# ROUNDS_BETWEEN rounds if MOST_WAIT has been prefilled since their last (an 8B model on an H200: a second). After every part would be fair
# to them, but rows then end faster than slots fill: of 64 slots 6 were busy, and decoding took seven times as long as with full ones.
PART, MOST_WAIT, ROUNDS_BETWEEN = 1 << 16, 1 << 20, 4
# By backend, how many prompts of up to SHORT tokens each are prefilled together where they follow one another: the weights are then read
# once for all. One by one if so many rows, each with room for the longest line, would have room for more than MOST_ROOM tokens.
TOGETHER, SHORT, MOST_ROOM = {"gpu": 4}, 256, 1 << 14
PAGED = ("gpu",)  # backends whose kernels look pages up as they read; elsewhere that takes a copy (a CPU: 7 % of decoding)
REFILL_SHARE = 1 / 16  # of the running rows, one at least: once so many have ended others take their slots. A look costs milliseconds


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of the request at an index, as `generate.Generation` and its `Stats.rows` have it of a prompt."""

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    stats: RowStats
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclasses.dataclass
class BatchStats:
    """Totals of a run, of `batch_size` rows at a time. slot_rounds counts every slot in every round; busy_rounds counts those that were
    working on a prompt. full_rounds and full_decode_s are of rounds for which every slot had a prompt and others waited, so that the rounds
    ended when one of them did, or `REFILL_SHARE` of them.

    The seconds are all that pass until the last result, but for what is done with results meanwhile, when the device may be reading the
    next prompt; compile_s is apart. held_bytes is the most that rows at work ever held together: their pages, and what each has of its own.
    """

    batch_size: int = 0
    prompts: int = 0
    new_tokens: int = 0
    rounds: int = 0
    slot_rounds: int = 0
    busy_rounds: int = 0
    full_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    full_decode_s: float = 0.0
    held_bytes: int = 0

    def become_total(self, parts: Sequence["BatchStats"]) -> None:
        """Sets these figures to those of several devices that work at the same time. Counts are added, and with full_rounds its seconds;
        those of prefill and decoding are of the device that has taken longest; compile_s and held_bytes are the most of any."""
        slowest = max(parts, key=lambda part: part.prefill_s + part.decode_s)
        for field in dataclasses.fields(self):
            values = [getattr(part, field.name) for part in parts]
            if field.name in ("prefill_s", "decode_s"):
                total = getattr(slowest, field.name)
            else:
                total = max(values) if field.name in ("compile_s", "held_bytes") else sum(values)
            setattr(self, field.name, total)

    @property
    def rates(self) -> dict[str, float | None]:
        """Rates of the run; None where there is nothing to divide by.

        tokens_per_second counts the seconds of prefill and decoding. busy_slots is busy over slot rounds; the ideal is 1.
        draft_acceptance_rate is accepted over drafted tokens.
        """
        divided = lambda part, whole: part / whole if whole else None
        return {
            "tokens_per_second": divided(self.new_tokens, self.prefill_s + self.decode_s),
            "busy_slots": divided(self.busy_rounds, self.slot_rounds),
            "draft_acceptance_rate": divided(self.num_accepted_draft_tokens, self.num_draft_tokens),
        }


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
        batch_size: rows at a time; None: as many as fit the device's memory (`capacity`).
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
        prepared = requests
    else:
        requests = list(requests)
        if not requests or not all(isinstance(request, Request) for request in requests):
            raise InputError("requests should be a list with at least one Request")
        prepared = prepare(model, requests, tokenizer=tokenizer, batch_size=batch_size or ROWS_OF_AUTO)
    cache = prepared.configs[0].cache_config
    if devices is not None and len(devices) > 1 and cache.in_host_memory:
        raise InputError(f"cache {prepared.configs[0].cache} has a part in host memory, which several devices would share; decode on one")
    stats, waiting, count = BatchStats(), Queue(len(prepared.requests)), len(prepared.requests)
    rows = batch_size and min(batch_size, count)
    settings = dict(refill=refill, strategy=strategy, view=view)
    if devices is None or (len(devices) == 1 and data_parallel.is_at((model, prepared.draft), devices[0])):
        return BatchRun(_Slots(prepared, waiting, rows, stats=stats, **settings).run(), stats)
    share = math.ceil(count / len(devices))
    rows = rows and min(rows, share)
    parts: dict[int, BatchStats] = {}  # by the number of an engine, since a device may be given twice
    engines = itertools.count()

    def results_of(place: data_parallel.Place, is_stopped: Callable[[], bool]) -> Generator[tuple[int, BatchStats, Result], None, None]:
        engine, own = next(engines), BatchStats()
        own_model, own_draft = jax.block_until_ready(data_parallel.copied_to((model, prepared.draft), place))
        more = dict(stats=own, share=share, is_stopped=is_stopped)
        slots = _Slots(dataclasses.replace(prepared, model=own_model, draft=own_draft), waiting, rows, **settings, **more)
        parts[engine] = own
        for result in slots.run():
            yield engine, dataclasses.replace(own), result

    def results() -> Generator[Result, None, None]:
        for engine, own, result in data_parallel.side_by_side(devices, results_of):
            parts[engine] = own
            stats.become_total(list(parts.values()))
            yield result

    return BatchRun(results(), stats)


def layers_at_once(layers: int, tokens: int) -> int:
    """How many of so many layers prompts go through before other rows have rounds; the same whether there are others or not.

    tokens: of all prompts together, padded. The parts are as equal as can be, so that there is a program for one or two sizes.
    """
    most = max(1, PART // tokens)
    return math.ceil(layers / math.ceil(layers / most))


class _Slots:
    """The rows of a batch on the device, and which request each works for."""

    def __init__(
        self,
        prepared: Prepared,
        waiting: Queue,
        batch: int | None,
        *,
        refill: bool,
        strategy: Callable[..., Sampler],
        view: View,
        stats: BatchStats,
        share: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ):
        """batch: rows; None: as many as fit, but no more than `share`, or all requests. is_stopped: asked before rounds and parts of
        prefill, which raise `data_parallel.Stopped` once it says so."""
        model, requests, tokenizer = prepared.model, prepared.requests, prepared.tokenizer
        self.requests, self.tokenizer, self.refill, self.stats = requests, tokenizer, refill, stats
        self.most_rows, self.is_stopped = share or len(requests), is_stopped
        configs = prepared.configs
        self.engine = prepared.engine(view=view, on_compile=self._on_compile)
        at_once = TOGETHER.get(jax.default_backend(), 1)
        # How many short prompts are prefilled together.
        self.most_together = at_once if at_once * self.engine.sizes.capacity <= MOST_ROOM else 1
        # On the host, where rows are taken out of them.
        self.sampler, self.limits = jax.device_get((strategy(*configs), make_limits(model, *configs, tokenizer=tokenizer)))
        self.waiting = waiting
        self.waited = 0  # what has been prefilled while running rows have had no round, in tokens times layers
        self.newest: Array | None = None  # what comes of the prefill put into slots last, while the device may be at work on it
        self.ahead: Ahead | None = None  # requests for slots that are not free yet
        self.state: DecodeState | None = None
        self.lap_began = time.perf_counter()  # when what `_lap` counts next began
        self.engine.settle_for(0)
        cache = configs[0].cache_config
        if cache.in_host_memory:
            self.most_together = 1
        # The most groups that the row of each request quantizes: with so many pages no round is ever without one. None: nothing is shared.
        self.groups = None
        if cache.pools and jax.default_backend() in PAGED:
            schedule = cache.schedule_for(model.config.head_dim)
            self.groups = [schedule.groups(len(r.tokens) + r.config.max_new_tokens) for r in requests]
        room = self._room() if batch is None else capacity.enough_for(batch, self.groups)
        stats.batch_size = batch = room.rows
        self.engine.settle_for(batch)
        self.pool = None if room.pages is None else PagePool(room.pages)
        self.pages_of: list[list[int]] = [[] for _ in range(batch)]  # of each slot
        self.request_of: list[int | None] = [None] * batch  # the request of each slot
        self.rows: list[Row | None] = [None] * batch
        self.rounds = np.zeros(batch, np.int32)  # that each row has had
        self.freed = np.zeros(batch, bool)  # which slots the device knows to be empty

    def _room(self) -> capacity.Capacity:
        """As many rows as fit the device's memory."""
        if self.most_together > 1:
            with contextlib.suppress(InputError):
                if (room := self._room_beside_prefills()).rows >= self.most_together:
                    return room
            self.most_together = 1  # which takes less memory
        return self._room_beside_prefills()

    def _room_beside_prefills(self) -> capacity.Capacity:
        by_length = sorted(range(len(self.requests)), key=lambda index: len(self.requests[index].tokens))
        largest = [by_length[-1:]]  # the prompts of those prefills that take most memory
        if len(short := [index for index in by_length if self._is_short(index)]) >= self.most_together:
            largest.append(short[-self.most_together :])
        row = self._prefill(by_length[-1:]).shapes()

        def bytes_of_prefill() -> int:
            temporaries = (self.engine.prefill_temporaries(self._prefill(each)) for each in largest)
            # While some are put into the batch, the next are prefilled.
            return max(temporaries) + 2 * max(map(len, largest)) * bytes_of(row, on_device=True)

        return capacity.that_fits(self.engine, row, bytes_of_prefill, self.groups, self.most_rows)

    def _is_short(self, index: int) -> bool:
        return len(self.requests[index].tokens) <= SHORT

    def _layers(self, indices: Sequence[int]) -> int:
        """How many layers at a time the prompts of requests are prefilled."""
        return layers_at_once(self.engine.target.model.config.num_layers, self._padded(indices))

    def _padded(self, indices: Sequence[int]) -> int:
        """The tokens of requests that are prefilled together, with what pads them."""
        return len(indices) * bucket(max(len(self.requests[index].tokens) for index in indices))

    def _prefill(self, indices: Sequence[int]) -> Prefill:
        sampler, limits = self._settings(indices)
        requests = [self.requests[index] for index in indices]
        prompts, keys = [request.tokens for request in requests], jnp.stack([request.key for request in requests])
        return self.engine.prefill_of(prompts, sampler, keys, limits, layers=self._layers(indices))

    def _compile_ahead(self) -> None:
        """Makes the programs for prompts of all lengths: side by side that takes a fraction of the time."""
        of_length = lambda indices: {bucket(len(self.requests[index].tokens)): index for index in indices}.values()
        short = list(filter(self._is_short, range(len(self.requests))))
        prefills = [[index] for index in of_length(range(len(self.requests)))]
        if 1 < self.most_together <= min(len(self.request_of), len(short)):
            prefills += [[index] * self.most_together for index in of_length(short)]
        self.engine.compile_prefills(map(self._prefill, prefills))

    def run(self) -> Generator[Result, None, None]:
        try:
            yield from self._results()
        finally:
            # The engine, which tells this object of what it compiles, would keep them on the device.
            self.state = self.newest = self.ahead = None

    def _results(self) -> Generator[Result, None, None]:
        self.lap_began = time.perf_counter()
        self._compile_ahead()
        while True:
            placed = yield from self._fill()
            if not self._running:
                return
            if any(self.requests[index].config.stop for index in placed):
                # A row whose first token completes a stop string must have no round. What else may end it the device sees by itself.
                self._lap("prefill_s", self._wait_for_prefill())
                yield from self._ended()
                if None in self.request_of:
                    continue
            yield from self._ended(self._segment())

    @property
    def _running(self) -> int:
        return sum(index is not None for index in self.request_of)

    def _settings(self, indices: Sequence[int]) -> tuple[Sampler, Limits]:
        of_rows = jax.tree.map(lambda x: x[np.array(indices)], (self.sampler, dataclasses.replace(self.limits, eos_token_ids=None)))
        # All in one call: so many arrays one by one take a GPU milliseconds.
        sampler, limits, eos = jax.device_put((*of_rows, self.limits.eos_token_ids))
        return sampler, dataclasses.replace(limits, eos_token_ids=eos)

    def _fill(self) -> Generator[Result, None, list[int]]:
        """Puts requests into empty slots, and returns them. The device may still be at work on the last. Yields what ends while a long
        prompt is prefilled."""
        placed = []
        slots = deque(slot for slot, index in enumerate(self.request_of) if index is None) if self.refill or not self._running else ()
        while slots and (self.waiting or self.ahead):
            yield from self._rounds_of_others()
            indices, pages = self._next_in_line(len(slots))
            if not indices:
                break  # until others end
            placed += indices
            if self.ahead:
                rows, self.ahead = self.ahead.rows, None
            else:
                rows = yield from self._prefilled(indices)
            self._put([slots.popleft() for _ in indices], indices, pages, rows)
            if self.refill:  # rows may have ended meanwhile
                slots = deque(slot for slot, index in enumerate(self.request_of) if index is None)
        return placed

    def _next_in_line(self, slots: int) -> tuple[list[int], list[list[int]]]:
        """The requests to put into slots next, at most so many, with the pages of each; none where the pool has too few pages left."""
        if self.ahead:
            indices = self.ahead.indices
            # Their prefill has begun if as many rows have ended as `_prepare_ahead` counted on. Then there are slots and pages.
            fit = self.ahead.rows is not None or (len(indices) <= slots and self._will_have_pages(indices, 0))
            if fit and self._begin_ahead():
                return indices, self._reserve(indices)
            with self.waiting.lock:
                self.waiting.reserve(indices, None)
            self.ahead = None
        with self.waiting.lock:
            for indices in self._in_line(slots):
                if (pages := self._reserve(indices)) is not None:
                    self.waiting.take(indices)
                    return indices, pages
        return [], []

    def _in_line(self, slots: int) -> list[list[int]]:
        """Candidates for the next prefill, for so many slots, the best first: several requests together, or one."""
        first = self.waiting.first(self.most_together, self)
        together = len(first) == self.most_together <= slots and all(map(self._is_short, first))
        return [first, first[:1]] if together else [first[:1]]

    def _prepare_ahead(self, ending: int) -> None:
        """Reserves the requests for the next so many slots that become free, and does the host's part of their prefill.

        This comes before rounds, while the device is mostly still at work on the last prefill. Prompts that are prefilled in parts are left
        to `_fill`.
        """
        if self.ahead:
            return
        with self.waiting.lock:
            indices = next((each for each in self._in_line(ending) if each and self._will_have_pages(each, ending)), [])
            if not indices or self._layers(indices) < self.engine.target.model.config.num_layers:
                return
            self.waiting.reserve(indices, self)
        self.ahead = Ahead(indices, self.engine.prepare_prefill(self._prefill(indices)))

    def _begin_ahead(self) -> bool:
        """Takes what was prepared ahead, and lets the device begin with its prefill, unless that is done; returns whether it is. It is not
        where another engine has taken them, which found nothing else."""
        if self.ahead.rows is not None:
            return True
        with self.waiting.lock:
            if not self.waiting.take(self.ahead.indices):
                return False
        self.ahead.rows = self.ahead.begin()
        self.waited += self._layers(self.ahead.indices) * self._padded(self.ahead.indices) if self._running else 0
        self._lap("prefill_s")
        return True

    def _will_have_pages(self, indices: Sequence[int], ended: int) -> bool:
        """Whether the pool has pages for these requests once so many rows have given theirs back, whichever they are."""
        if self.pool is None:
            return True
        held = sorted(len(pages) for pages, index in zip(self.pages_of, self.request_of) if index is not None)
        return sum(self.groups[index] for index in indices) <= self.pool.free + sum(held[:ended])

    def _reserve(self, indices: Sequence[int]) -> list[list[int]] | None:
        """Pages for each of these requests, or None where there are too few."""
        if self.pool is None:
            return [[] for _ in indices]
        counts = [self.groups[index] for index in indices]
        if (pages := self.pool.reserve(sum(counts))) is None:
            return None
        pages = iter(pages)
        return [list(itertools.islice(pages, count)) for count in counts]

    def _prefilled(self, indices: Sequence[int]) -> Generator[Result, None, DecodeState]:
        """The state of rows, with rounds of the others between the parts."""
        layers = self._layers(indices)
        for part in self.engine.prefill_in_parts(self._prefill(indices)):
            self._check_stopped()
            self.waited += layers * self._padded(indices) if self._running else 0
            if isinstance(part, DecodeState):
                break
            if self.waited < MOST_WAIT or not self._running:
                continue
            self.newest = part
            yield from self._rounds_of_others()
        return part

    def _rounds_of_others(self) -> Iterator[Result]:
        """Some rounds of the rows at work, where they have waited for `MOST_WAIT`. Yields what ends."""
        if self.waited < MOST_WAIT or not self._running:
            return
        if any(index is not None and self.requests[index].config.stop for index in self.request_of):  # before any round, see `_results`
            self._lap("prefill_s", self._wait_for_prefill())
            yield from self._ended()
        if self._running:
            self._segment(ROUNDS_BETWEEN)
            yield from self._ended()

    def _put(self, slots: Sequence[int], indices: Sequence[int], pages: list[list[int]], rows: DecodeState) -> None:
        self._wait_for_prefill()  # no more than two states at once take memory besides the batch
        self.newest = rows.status
        if self.state is None:
            self.state = self.engine.batch_of(rows, len(self.request_of), self.pool and self.pool.size)
            of_pool = bytes_of([(layer.keys, layer.values) for layer in self.state.cache.layers], on_device=True) if self.pool else 0
            self.bytes_of_row = (bytes_of(self.state, on_device=True) - of_pool) // len(self.request_of)
            self.bytes_of_page = of_pool // self.pool.size if self.pool else 0
        self.state = self.engine.replace(self.state, rows, slots, pages if self.pool else None)
        for slot, index, of_row in zip(slots, indices, pages, strict=True):
            self.pages_of[slot], self.freed[slot] = of_row, False
            request = self.requests[index]
            self.request_of[slot], self.rows[slot], self.rounds[slot] = index, Row(request.config, self.tokenizer, request.tokens), 0
        held = self._running * self.bytes_of_row + (self.pool.taken * self.bytes_of_page if self.pool else 0)
        self.stats.held_bytes = max(self.stats.held_bytes, held)

    def _wait_for_prefill(self) -> float:
        """Waits for the newest row's prefill, and returns the time at which it was ready; without one, when the current lap began."""
        newest, self.newest = self.newest, None
        if newest is None:
            return self.lap_began
        newest.block_until_ready()
        return time.perf_counter()

    def _segment(self, most: int = ROUNDS_PER_SEGMENT) -> int:
        """At most so many rounds; fewer if rows end and requests wait for their slots. Returns how many rows have ended then, at least."""
        self._check_stopped()
        self.waited = 0
        sampler, limits = self._settings([index or 0 for index in self.request_of])  # those of an empty slot do not matter
        # A stop string is looked for after every round, so that what a row does never depends on how long its neighbours run.
        rounds = 1 if any(index is not None and self.requests[index].config.stop for index in self.request_of) else most
        refills = self.refill and bool(self.waiting or self.ahead)
        full = refills and None not in self.request_of
        # Rounds go on while as many run: of 64 rows, 61, so until 4 have ended.
        to_end = max(1, int(self._running * REFILL_SHARE))
        if full:
            self._prepare_ahead(to_end)
        min_running = self._running - to_end + 1 if refills else 1
        empty = np.array([index is None for index in self.request_of])
        if (empty & ~self.freed).any():
            self.state = self.engine.free(self.state, empty)
        self.freed = empty
        self.engine.compile_rounds(self.state, sampler, limits)
        # The call takes milliseconds to reach the device, and on a GPU it returns when the rounds have ended: another thread notes when
        # prefill does.
        prefilled = []
        clock = threading.Thread(target=lambda: prefilled.append(self._wait_for_prefill()))
        clock.start()
        self.state = self.engine.rounds(self.state, sampler, limits, rounds, min_running)
        worked = np.asarray(self.state.counts.rounds) - self.rounds
        clock.join()
        self._lap("prefill_s", *prefilled)
        decode_s = self._lap("decode_s")
        self.rounds += worked
        if full:
            self.stats.full_rounds += int(worked.max())
            self.stats.full_decode_s += decode_s
        self.stats.rounds += int(worked.max())
        self.stats.slot_rounds += int(worked.max()) * len(worked)
        self.stats.busy_rounds += int(worked.sum())
        return to_end if refills and worked.max() < rounds else 0

    def _check_stopped(self) -> None:
        if self.is_stopped():
            raise data_parallel.Stopped

    def _on_compile(self, seconds: float | None) -> None:
        if seconds is None:
            # Or prefill that the device is still at work on would be counted as compiling.
            jax.block_until_ready((self.state, self.newest, self.ahead and self.ahead.rows))
            self._lap("prefill_s")
        elif seconds:
            self._lap("compile_s")

    def _lap(self, what: str, until: float | None = None) -> float:
        """Adds the time since the last lap to the statistics, up to now by default, and returns it."""
        until = time.perf_counter() if until is None else until
        passed, self.lap_began = until - self.lap_began, until
        setattr(self.stats, what, getattr(self.stats, what) + passed)
        return passed

    def _ended(self, at_least: int = 0) -> Iterator[Result]:
        """Results of the rows that have ended, whose slots are free then.

        at_least: how many rows have surely ended. If any have, the device begins with the prefill that was prepared ahead, while the host
        finds out which rows they are.
        """
        seen = [0 if index is None else len(row.token_ids) for index, row in zip(self.request_of, self.rows)]
        fetch = self.engine.start_poll(self.state, seen)
        if at_least and self.ahead:
            self._begin_ahead()
        new = fetch()
        counts = new.counts
        ended = []
        for slot, index in enumerate(self.request_of):
            if index is None:
                continue
            row = self.rows[slot]
            row.update(new.tokens[slot], new.logprobs and new.logprobs[slot], new.status[slot])
            if row.finish_reason is None:
                continue
            self.request_of[slot] = None
            if self.pool:  # no round runs before the slot is freed, or has another row
                self.pool.release(self.pages_of[slot])
            of_row = (counts.rounds, counts.drafted, counts.accepted, counts.histogram, counts.flushes)
            new_tokens, prompt = len(row.token_ids), len(self.requests[index].tokens)
            stats = summary(prompt, new_tokens, *(x[slot] for x in of_row), speculative=self.engine.gamma > 0)
            self.stats.prompts += 1
            self.stats.new_tokens += new_tokens
            self.stats.num_draft_tokens += stats.num_draft_tokens
            self.stats.num_accepted_draft_tokens += stats.num_accepted_draft_tokens
            ended.append(Result(index, row.token_ids, row.text, row.finish_reason, stats, *row.logprobs()))
        self._lap("decode_s")
        yield from ended
        self.lap_began = time.perf_counter()  # what is done with results is not counted
