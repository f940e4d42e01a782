"""How many rows of a batch fit a device's memory, with the pages that they share."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np

from qspec_jax import host
from qspec_jax.caches.host_memory import StreamedCache
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.room import bytes_of_round, free_bytes
from qspec_jax.decoding.state import DecodeState
from qspec_jax.drafts.step_bytes import bytes_in_loop, bytes_of
from qspec_jax.errors import HostMemoryError, InputError
from qspec_jax.models.sharding import mesh_of

log = logging.getLogger(__name__)

UNKNOWN_ROWS = 8  # where a device does not say how much memory it has
BESIDE = 2  # rows that are prefilled while others are put into the batch, in host memory


@dataclasses.dataclass(frozen=True)
class Capacity:
    """rows: of a batch. pages: of their pool, page 0 among them; None where rows share none."""

    rows: int
    pages: int | None


def enough_for(rows: int, groups: Sequence[int] | None) -> Capacity:
    """So many rows, and pages enough for any so many requests that follow one another.

    Rows do not end in their order, so now and then those at work together need more; then the next request waits for pages. Pages for
    whichever requests run together would be two or three times as many where lengths differ much, and most of them would never be used.

    groups: the most that each request's row quantizes; None where rows share no pages.
    """
    if groups is None:
        return Capacity(rows, None)
    before = np.cumsum([0, *groups])
    return Capacity(rows, 1 + int((before[min(rows, len(groups)) :] - before[: -min(rows, len(groups))]).max()))


def that_fits(engine: Engine, row: DecodeState, of_prefill: Callable[[], int], groups: Sequence[int] | None, requests: int) -> Capacity:
    """As many rows of so many requests as fit the memory that is free, weights and draft being there, and pages for them.

    Requests differ in what they need, so the rows are as many as would fit if each needed what all need on average; now and then one has to
    wait for pages. Of a cache in host memory they are as many as that has room for too, and what a pass copies of two layers is on the
    device. row: shapes of the state of one row. of_prefill: bytes that prefill holds besides the batch. groups: as in `enough_for`.
    Raises InputError where not even one row fits.
    """
    free = free_bytes(mesh_of(engine.target))
    layers = [bytes_of(layer) - bytes_of(layer, on_device=True) for layer in row.cache.layers]  # what of each is in host memory
    if (room := host.room_bytes(pooled=jax.default_backend() == "gpu")) is not None and any(layers):
        requests = min(requests, room // sum(layers) - BESIDE)
        if requests < 1:
            needed = f"{1 + BESIDE} of them take {(1 + BESIDE) * sum(layers) / 1e9:.1f} GB of host memory"
            raise HostMemoryError(f"batch size auto: not one row fits; {needed}, of {room / 1e9:.1f} GB that it may take")
    if free is None:
        rows = min(UNKNOWN_ROWS, requests)
        log.info("batch size auto: %d rows, for this device does not say how much memory it has", rows)
        return enough_for(rows, groups)
    size = lambda batch, pages: bytes_of(engine.batch_shapes(row, batch, None if groups is None else pages), on_device=True)
    one = size(1, 2)  # a row with page 0 and another
    of_page = size(1, 3) - one
    of_round = bytes_of_round(engine.target.model.config, engine.gamma)
    copied = 2 * max(layers) if isinstance(row.cache, StreamedCache) else 0
    of_row = size(2, 2) - one + of_round + copied
    besides = of_prefill() + bytes_in_loop(engine.draft)
    found = divided(free - besides, of_row, of_page, groups, requests)
    if found is None:
        short = besides + of_row + of_page * (1 + max(groups or [0])) - free
        raise InputError(f"batch size auto: not one row fits; the request that needs most takes {short / 1e9:.1f} GB more than are free")
    shared = "" if found.pages is None else f", with a pool of {found.pages - 1:,} groups"
    log.info("batch size auto: %d rows fit %.1f GB of free memory%s", found.rows, free / 1e9, shared)
    return found


def divided(free: float, of_row: float, of_page: float, groups: Sequence[int] | None, requests: int) -> Capacity | None:
    """The most rows and pages that fit `free` bytes, of which a row and a page take so many; None where the largest request does not fit.
    See `that_fits`."""
    if groups is None:
        rows = min(requests, int(free // of_row))
        return Capacity(rows, None) if rows >= 1 else None
    mean = sum(groups) / len(groups)
    for rows in range(min(requests, int(free // (of_row + of_page * mean))), 0, -1):
        pages = min(enough_for(rows, groups).pages, int((free - rows * of_row) // of_page))
        if pages > max(groups):  # or there is no room for the largest, beside page 0
            return Capacity(rows, pages)
    return None
