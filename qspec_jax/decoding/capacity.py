"""How many rows of a batch fit a device's memory, with the pages that they share."""

import dataclasses
import logging
from collections.abc import Sequence

import jax

from qspec_jax.decoding.engine import Call, Engine
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.errors import InputError

log = logging.getLogger(__name__)

UNKNOWN_ROWS = 8  # where a device does not say how much memory it has
KEPT_BACK = 0.03  # of a device's memory, for what nobody counts
# What a round holds for each of its tokens besides the batch: so many float32 arrays as wide as the vocabulary, and as an MLP.
ARRAYS = 8


@dataclasses.dataclass(frozen=True)
class Capacity:
    """rows: of a batch. pages: of their pool, page 0 among them; None where the cache has no groups to share."""

    rows: int
    pages: int | None


def free_bytes() -> int | None:
    """The memory of the first device that is not in use; None where it does not say, as a CPU does not."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"] * (1 - KEPT_BACK)) - stats["bytes_in_use"]


def for_rows(rows: int, groups: Sequence[int] | None) -> Capacity:
    """So many rows, with pages for any of the requests together. groups: of each request; None where none are shared."""
    return Capacity(rows, None if groups is None else 1 + sum(sorted(groups)[-rows:]))


def that_fits(engine: Engine, prefill: Call, groups: Sequence[int] | None, requests: int) -> Capacity:
    """As many rows as fit the memory that is free, weights and draft being there, and the pages that are left for them.

    Requests differ in what they need, so the rows are as many as would fit if each needed what all need in the mean; at times one has to
    wait for pages. prefill: of the longest prompt; it is compiled. groups: of each request; None where none are shared.
    Raises InputError where not even one row fits.
    """
    free = free_bytes()
    if free is None:
        log.info("batch size auto: %d rows, for this device does not say how much memory it has", min(UNKNOWN_ROWS, requests))
        return for_rows(min(UNKNOWN_ROWS, requests), groups)
    row = prefill.shapes()
    size = lambda batch, pages: bytes_of(engine.batch_shapes(row, batch, None if groups is None else pages))
    one = size(1, 2)
    of_page, config = size(1, 3) - one, engine.target.model.config
    of_round = 4 * ARRAYS * (engine.gamma + 1) * (config.vocab_size + 2 * config.intermediate_size)
    of_row = size(2, 2) - one + of_round
    # Two rows at once are being prefilled, at most.
    besides = 2 * bytes_of(row) + prefill.compile()[0].memory_analysis().temp_size_in_bytes + _bytes_in_loop(engine)
    found = fitting(free - besides, of_row, of_page, groups, requests)
    if found is None:
        needed = besides + of_row + of_page * max(groups or [0])
        raise InputError(f"batch size auto: not one row fits; the longest prompt takes {(needed - free) / 1e9:.1f} GB more than there are")
    shared = "" if found.pages is None else f", with a pool of {found.pages - 1:,} groups"
    log.info("batch size auto: %d rows fit %.1f GB of free memory%s", found.rows, free / 1e9, shared)
    return found


def _bytes_in_loop(engine: Engine) -> int:
    """What the draft takes in rounds beyond what it takes before."""
    shapes = jax.eval_shape(lambda draft: draft and draft.in_loop(), engine.draft)
    return max(0, bytes_of(shapes) - bytes_of(engine.draft))


def fitting(free: float, of_row: float, of_page: float, groups: Sequence[int] | None, requests: int) -> Capacity | None:
    """The most rows, of so many requests, and pages that fit `free` bytes; None where the largest request does not. See `that_fits`."""
    needs = groups or [0]
    mean = sum(needs) / len(needs)
    rows = min(requests, int(free // (of_row + of_page * mean)))
    if rows < 1:
        return None
    pages = for_rows(rows, groups).pages
    if pages is not None:
        pages = min(pages, int((free - rows * of_row) // of_page) if of_page else pages)
        while rows > 1 and pages <= max(needs):  # room for the largest, with fewer rows beside it
            rows -= 1
            pages = int((free - rows * of_row) // of_page)
        if pages <= max(needs):
            return None
    return Capacity(rows, pages)
