"""How many rows of a batch fit a device's memory, and how many pages they share."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np

from qspec_jax import host
from qspec_jax.decoding.device_memory import bytes_of_round, free_bytes
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.state import DecodeState
from qspec_jax.drafts.step_bytes import bytes_in_loop, bytes_of
from qspec_jax.errors import HostMemoryError, InputError
from qspec_jax.models.sharding import mesh_of

log = logging.getLogger(__name__)

UNKNOWN_ROWS = 8  # where a device does not report its memory
PREFILL_ROWS_AHEAD = 2  # rows, in host memory, that are prefilled while others are put into the batch


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The size of a batch.

    Attributes:
        rows: the number of rows.
        pages: the number of pages in the pool that they share, page 0 included; None if they share none.
    """

    rows: int
    pages: int | None


def enough_for(rows: int, groups: Sequence[int] | None) -> Capacity:
    """`rows` rows, and enough pages for any `rows` consecutive requests.

    Rows do not end in order, so sometimes those that run together need more, and the next request waits for pages. If lengths differ much,
    pages for any set of requests would be two or three times the number, and most of them would never be used.

    groups: the maximum number of groups that the row of each request quantizes; None if rows share no pages.
    """
    if groups is None:
        return Capacity(rows, None)
    before = np.cumsum([0, *groups])
    return Capacity(rows, 1 + int((before[min(rows, len(groups)) :] - before[: -min(rows, len(groups))]).max()))


def that_fits(engine: Engine, row: DecodeState, of_prefill: Callable[[], int], groups: Sequence[int] | None, requests: int) -> Capacity:
    """The most rows that fit the free memory beside weights and draft, and pages for them.

    Requests need different numbers of pages, so the rows are those that would fit if each needed the average number; sometimes one has to
    wait for pages. A cache in host memory must fit there too, and the copies of two of its layers are on the device.

    Args:
        engine: the engine of the batch.
        row: shapes of the state of one row.
        of_prefill: returns the bytes that prefill holds besides the batch.
        groups: as in `enough_for`.
        requests: the maximum number of rows.

    Raises:
        InputError: if not even one row fits.
    """
    free = free_bytes(mesh_of(engine.target))
    layers = [bytes_of(layer) - bytes_of(layer, on_device=True) for layer in row.cache.layers]  # bytes of each in host memory
    if (room := host.room_bytes(pooled=jax.default_backend() == "gpu")) is not None and any(layers):
        requests = min(requests, room // sum(layers) - PREFILL_ROWS_AHEAD)
        if requests < 1:
            needed = f"{1 + PREFILL_ROWS_AHEAD} of them take {(1 + PREFILL_ROWS_AHEAD) * sum(layers) / 1e9:.1f} GB of host memory"
            raise HostMemoryError(f"batch size auto: not one row fits; {needed}, of {room / 1e9:.1f} GB that it may take")
    if free is None:
        rows = min(UNKNOWN_ROWS, requests)
        log.info("batch size auto: %d rows, since this device does not report its memory", rows)
        return enough_for(rows, groups)

    def size(batch: int, pages: int) -> int:
        return bytes_of(engine.batch_shapes(row, batch, None if groups is None else pages), on_device=True)

    one = size(1, 2)  # a row with page 0 and another
    of_page = size(1, 3) - one
    of_round = bytes_of_round(engine.target.model.config, engine.gamma)
    copied = 2 * max(layers) if engine.sizes.cache.streams else 0
    of_row = size(2, 2) - one + of_round + copied
    besides = of_prefill() + bytes_in_loop(engine.draft)
    found = divided(free - besides, of_row, of_page, groups, requests)
    if found is None:
        short = besides + of_row + of_page * (1 + max(groups or [0])) - free
        raise InputError(f"batch size auto: not one row fits; the largest request takes {short / 1e9:.1f} GB more than are free")
    shared = "" if found.pages is None else f", with a pool of {found.pages - 1:,} groups"
    log.info("batch size auto: %d rows fit %.1f GB of free memory%s", found.rows, free / 1e9, shared)
    return found


def divided(free: float, of_row: float, of_page: float, groups: Sequence[int] | None, requests: int) -> Capacity | None:
    """The most rows, of `of_row` bytes each, and pages, of `of_page`, that fit `free` bytes, see `that_fits`; None if the largest request
    does not fit."""
    if groups is None:
        rows = min(requests, int(free // of_row))
        return Capacity(rows, None) if rows >= 1 else None
    mean = sum(groups) / len(groups)
    for rows in range(min(requests, int(free // (of_row + of_page * mean))), 0, -1):
        pages = min(enough_for(rows, groups).pages, int((free - rows * of_row) // of_page))
        if pages > max(groups):  # or there is no room for the largest, beside page 0
            return Capacity(rows, pages)
    return None
