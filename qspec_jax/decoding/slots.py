"""The slots of a running batch: which request each works for, and when the next one takes it."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.formats.views import View
from qspec_jax.decoding import capacity, data_parallel
from qspec_jax.decoding.fixed_batch import Row
from qspec_jax.decoding.prefill_groups import PrefillGroups
from qspec_jax.decoding.prepare import Prepared
from qspec_jax.decoding.results import BatchStats, LapTimes, Result, summary
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import DecodeState, freed
from qspec_jax.decoding.waiting import Ahead, Queue
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.states.pages import PagePool
from qspec_jax.states.pool import groups_of_layers

ROUNDS_PER_SEGMENT = 64  # between two polls, at most
# In tokens times layers. Between two parts of a prefill, and two prompts, the other rows have ROUNDS_BETWEEN rounds if MAX_WAIT has been
# prefilled since their last (an 8B model on an H200: a second). After every part would be fair to them, but rows then end faster than
# slots fill: of 64 slots 6 were busy, and decoding took seven times as long as with full ones.
MAX_WAIT, ROUNDS_BETWEEN = 1 << 20, 4
PAGED = ("gpu",)  # backends whose kernels look pages up as they read; elsewhere that takes a copy (a CPU: 7 % of decoding)
REFILL_SHARE = 1 / 16  # of the running rows, at least one: once this share has ended others take their slots. A poll costs milliseconds


class Slots:
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
        """
        Args:
            prepared: the requests and their draft.
            waiting: the indices of requests that no engine has taken.
            batch: rows; None: the number that fits, at most `share`.
            refill: whether a free slot gets the next request at once, and not when all are free.
            strategy: makes a sampler of configs.
            view: what the target reads of its cache.
            stats: filled in during the run.
            share: the maximum of rows; None: one for each request.
            is_stopped: asked before rounds and parts of prefill, which raise `data_parallel.Stopped` once it returns True.
        """
        model, requests, tokenizer = prepared.model, prepared.requests, prepared.tokenizer
        self.requests, self.tokenizer, self.refill, self.stats = requests, tokenizer, refill, stats
        self.laps, self.is_stopped = LapTimes(stats), is_stopped
        self.engine = prepared.engine(view=view, on_compile=self._on_compile)
        self.prefills = PrefillGroups(self.engine, prepared, strategy)
        self.waiting = waiting
        self.waited = 0  # what has been prefilled while running rows have had no round, in tokens times layers
        self.newest: Array | None = None  # what comes of the prefill put into slots last, while the device may be at work on it
        self.ahead: Ahead | None = None  # requests for slots that are not free yet
        self.state: DecodeState | None = None
        self.engine.settle_for(0)
        cache = prepared.configs[0].cache_config
        # The maximum of groups that the row of each request quantizes: with that many pages no round lacks one. None: nothing is shared.
        self.groups = None
        if cache.pools(model.config) and jax.default_backend() in PAGED:
            schedule = cache.schedule_for(model.config.head_dim)
            self.groups = [schedule.max_flushes(len(r.tokens) + r.config.max_new_tokens) for r in requests]
        room = self.prefills.room(self.groups, share or len(requests)) if batch is None else capacity.enough_for(batch, self.groups)
        batch = room.rows
        stats.batch_size = max(stats.batch_size, batch)  # rows over a prefix may have been more
        self.engine.settle_for(batch)
        self.pool = None if room.pages is None else PagePool(room.pages)
        self.pages_of: list[list[int]] = [[] for _ in range(batch)]  # of each slot
        self.request_of: list[int | None] = [None] * batch  # the request of each slot
        self.rows: list[Row | None] = [None] * batch
        self.rounds = np.zeros(batch, np.int32)  # that each row has had
        self.freed = np.zeros(batch, bool)  # which slots the device knows to be empty

    def run(self) -> Generator[Result, None, None]:
        try:
            yield from self._results()
        finally:
            # The engine, which tells this object of what it compiles, would keep them on the device.
            self.state = self.newest = self.ahead = None

    def _results(self) -> Generator[Result, None, None]:
        self.laps.restart()
        self.prefills.compile_ahead(len(self.request_of))
        while True:
            placed = yield from self._fill()
            if not self._running:
                return
            if any(self.requests[index].config.stop for index in placed):
                # A row whose first token completes a stop string must have no round. What else may end it the device sees by itself.
                self.laps.add("prefill_s", self._wait_for_prefill())
                yield from self._ended()
                if None in self.request_of:
                    continue
            yield from self._ended(self._segment())

    @property
    def _running(self) -> int:
        return sum(index is not None for index in self.request_of)

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
        """The requests for the next free slots, and the pages of each; none if the pool has too few pages left."""
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
        """Candidates for the next prefill if this number of slots is free, the best first: several requests together, or one."""
        first = self.waiting.first(self.prefills.rows_at_once, self)
        at_once = len(first) == self.prefills.rows_at_once <= slots and all(map(self.prefills.is_short, first))
        return [first, first[:1]] if at_once else [first[:1]]

    def _prepare_ahead(self, ending: int) -> None:
        """Reserves requests for the next slots that become free, `ending` of them, and does the host's part of their prefill.

        This comes before rounds, while the device is mostly still at work on the last prefill. Prompts that are prefilled in parts are left
        to `_fill`.
        """
        if self.ahead:
            return
        with self.waiting.lock:
            indices = next((each for each in self._in_line(ending) if each and self._will_have_pages(each, ending)), [])
            if not indices or self.prefills.layers(indices) < self.engine.target.model.config.num_layers:
                return
            self.waiting.reserve(indices, self)
        self.ahead = Ahead(indices, self.engine.prepare_prefill(self.prefills.prefill(indices)))

    def _begin_ahead(self) -> bool:
        """Takes what was prepared ahead, and lets the device begin with its prefill, unless that is done; returns whether it is. It is not
        where another engine has taken them, which found nothing else."""
        if self.ahead.rows is not None:
            return True
        with self.waiting.lock:
            if not self.waiting.take(self.ahead.indices):
                return False
        self.ahead.rows = self.ahead.begin()
        self.waited += self.prefills.layers(self.ahead.indices) * self.prefills.padded(self.ahead.indices) if self._running else 0
        self.laps.add("prefill_s")
        return True

    def _will_have_pages(self, indices: Sequence[int], ended: int) -> bool:
        """Whether the pool has pages for these requests once any `ended` rows have given theirs back."""
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
        layers = self.prefills.layers(indices)
        for part in self.engine.prefill_in_parts(self.prefills.prefill(indices)):
            self._check_stopped()
            self.waited += layers * self.prefills.padded(indices) if self._running else 0
            if isinstance(part, DecodeState):
                break
            if self.waited < MAX_WAIT or not self._running:
                continue
            self.newest = part
            yield from self._rounds_of_others()
        return part

    def _rounds_of_others(self) -> Iterator[Result]:
        """Some rounds of the rows at work, where they have waited for `MAX_WAIT`. Yields what ends."""
        if self.waited < MAX_WAIT or not self._running:
            return
        if any(index is not None and self.requests[index].config.stop for index in self.request_of):  # before any round, see `_results`
            self.laps.add("prefill_s", self._wait_for_prefill())
            yield from self._ended()
        if self._running:
            self._segment(ROUNDS_BETWEEN)
            yield from self._ended()

    def _put(self, slots: Sequence[int], indices: Sequence[int], pages: list[list[int]], rows: DecodeState) -> None:
        self._wait_for_prefill()  # no more than two states at once take memory besides the batch
        self.newest = rows.status
        if self.state is None:
            self.state = self.engine.batch_of(rows, len(self.request_of), self.pool and self.pool.size)
            of_pool = bytes_of(groups_of_layers(self.state.cache), on_device=True) if self.pool else 0
            self.bytes_of_row = (bytes_of(self.state, on_device=True) - of_pool) // len(self.request_of)
            self.bytes_of_page = of_pool // self.pool.size if self.pool else 0
        self.state = self.engine.replace(self.state, rows, slots, pages if self.pool else None)
        for slot, index, of_row in zip(slots, indices, pages, strict=True):
            self.pages_of[slot], self.freed[slot] = of_row, False
            request = self.requests[index]
            self.request_of[slot], self.rows[slot], self.rounds[slot] = index, Row(request.config, self.tokenizer, request.tokens), 0
        held = self._running * self.bytes_of_row + (self.pool.reserved * self.bytes_of_page if self.pool else 0)
        self.stats.held_bytes = max(self.stats.held_bytes, held)

    def _wait_for_prefill(self) -> float:
        """Waits for the newest row's prefill, and returns the time at which it was ready; without one, when the current lap began."""
        newest, self.newest = self.newest, None
        if newest is None:
            return self.laps.began
        newest.block_until_ready()
        return time.perf_counter()

    def _segment(self, most: int = ROUNDS_PER_SEGMENT) -> int:
        """Runs at most `most` rounds; fewer if rows end and requests wait for their slots. Returns the minimum of rows that have ended."""
        self._check_stopped()
        self.waited = 0
        sampler, limits = self.prefills.settings([index or 0 for index in self.request_of])  # those of an empty slot do not matter
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
            self.state = freed(self.state, jnp.asarray(empty))
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
        self.laps.add("prefill_s", *prefilled)
        decode_s = self.laps.add("decode_s")
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
            self.laps.add("prefill_s")
        elif seconds:
            self.laps.add("compile_s")

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
            stats = summary(prompt, new_tokens, *(x[slot] for x in of_row), speculative=self.engine.speculative)
            self.stats.prompts += 1
            self.stats.new_tokens += new_tokens
            self.stats.num_draft_tokens += stats.num_draft_tokens
            self.stats.num_accepted_draft_tokens += stats.num_accepted_draft_tokens
            ended.append(Result(index, row.token_ids, row.text, row.finish_reason, stats, *row.logprobs()))
        self.laps.add("decode_s")
        yield from ended
        self.laps.restart()  # what is done with results is not counted
