"""Requests that share what they begin with: a prefix that several have is read once, and its pages are there once."""

import dataclasses
import logging
import time
from collections.abc import Callable, Generator

import jax

from qspec_jax.decoding import capacity
from qspec_jax.decoding.device_memory import bytes_of_round, free_bytes
from qspec_jax.decoding.fixed_batch_results import results_of
from qspec_jax.decoding.prepare import Prepared
from qspec_jax.decoding.reading import state_of_prefix
from qspec_jax.decoding.results import BatchStats, Result
from qspec_jax.decoding.rows import features_bytes
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.drafts.step_bytes import bytes_in_loop, bytes_of
from qspec_jax.models.sharding import mesh_of
from qspec_jax.states.state import State

log = logging.getLogger(__name__)


def by_prefix(prepared: Prepared) -> list[list[int]]:
    """The indices of requests that name a prefix, those with the same together, in the order in which prefixes first come."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(prepared.requests):
        if request.prefix:
            groups.setdefault(tuple(request.tokens[: request.prefix]), []).append(index)
    return list(groups.values())


def run_shared(prepared: Prepared, batch: int | None, strategy: Callable[..., Sampler], stats: BatchStats) -> Generator[Result, None, None]:
    """Continues the requests that name a prefix, those with the same one after another, so that no prefix is read twice.

    What a request gives depends on its own prefix, prompt, settings and key alone: it reads its prefix by prefill, and then the rest.

    Args:
        prepared: all requests of the batch; those without a prefix are left out.
        batch: the maximum of rows at a time; None: the number that fits beside each prefix.
        strategy: makes a sampler of configs.
        stats: the totals of the run, to which each group of rows is added.
    """
    for group in by_prefix(prepared):
        of_group = prepared.select(group)
        began, compiling = time.perf_counter(), []
        prefix = jax.block_until_ready(state_of_prefix(of_group, compiling.append))
        compile_s = sum(seconds or 0.0 for seconds in compiling)  # None: it begins
        stats.prefill_s += time.perf_counter() - began - compile_s
        stats.compile_s += compile_s
        at_once = min(batch or rows_that_fit(of_group, prefix), len(group))
        stats.batch_size = max(stats.batch_size, at_once)
        for first in range(0, len(group), at_once):
            indices = group[first : first + at_once]
            forks = dataclasses.replace(prepared.select(indices), states=tuple(prefix.fork(len(indices))))
            yield from results_of(forks, indices, strategy, stats)
        del prefix, forks  # their memory is free before the next prefix is read


def rows_that_fit(prepared: Prepared, prefix: State) -> int:
    """The number of rows over a prefix that fit the free memory, one at least.

    A row needs its own arrays twice, as rows are put together out of states, the features that a draft is given of what it reads, and
    pages for what follows the prefix.
    """
    reader, count = prefix.reader, len(prepared.requests)
    free = free_bytes(mesh_of(reader.target))
    if free is None:
        return min(capacity.UNKNOWN_ROWS, count)
    free -= bytes_in_loop(prepared.draft)
    own = 2 * bytes_of(prefix, on_device=True) + bytes_of_round(reader.model.config, prefix.room.gamma) + features_bytes(reader)
    needed = [0] * count
    if (pool := reader.pool) is not None:
        lengths = (len(request.tokens) + request.config.max_new_tokens for request in prepared.requests)
        of_page = bytes_of(pool.groups, on_device=True) // pool.pages.size
        needed = sorted((of_page * (reader.schedule.max_flushes(length) - len(prefix.pages)) for length in lengths), reverse=True)
    rows, used = 0, 0
    while rows < count and used + own + needed[rows] <= free:
        used += own + needed[rows]
        rows += 1
    log.info("batch size auto: %d rows over a prefix of %d tokens fit %.1f GB of free memory", max(rows, 1), len(prefix), free / 1e9)
    return max(rows, 1)
