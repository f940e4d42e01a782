"""Which blocks of a KV head read which row of the batch: rows get blocks in proportion to what there is to read in them, one at least.

Every warp computes this for itself: a lane has every 32nd row, so that code and registers hardly grow with the batch.
"""

import dataclasses
import functools

from pallas_kernels.attention.mosaic_plan import Plan
from pallas_kernels.gpu import fragments, ptx

LANES = 32


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a KV head's blocks that reads one row of the batch.

    Attributes:
        chunks, groups: what the KV head reads in the row: chunks of the buffer, and groups.
        first, end: its first block, and the one after its last.
    """

    batch: ptx.Value
    chunks: ptx.Value
    groups: ptx.Value
    first: ptx.Value
    end: ptx.Value


def groups_to_read(plan: Plan, at: dict, row, kv_head):
    """How many groups a KV head reads in a row of the batch: the count of its list, or all that are quantized."""
    if plan.planes is None:
        return ptx.i32(0)
    if plan.list_width is None:
        return ptx.minimum(ptx.load_global(at["quantized"] + ptx.i64(row) * 4)[0] // plan.group_size, ptx.i32(plan.groups))
    (count,) = ptx.load_global(at["count"] + ptx.i64(kv_head + row * plan.kv_heads) * 4)
    return ptx.minimum(ptx.maximum(count, ptx.i32(0)), ptx.i32(plan.list_width))


def buffered_tokens(plan: Plan, at: dict, row):
    """How many tokens of a row of the batch are in full precision, including those that the kernel appends."""
    (buffered,) = ptx.load_global(at["buffered"] + ptx.i64(row) * 4)
    return buffered + plan.tokens if plan.appends else buffered


class Partition:
    """The blocks of a KV head, divided among the rows of the batch.

    Row b starts at block b + (what the rows before it read) * (blocks - rows) // (what all rows read), where a chunk counts as much as a
    group.
    """

    def __init__(self, plan: Plan, at: dict, kv_head, lane):
        self.plan = plan
        if plan.batch == 1:
            self.only = Share(ptx.i32(0), *_units(plan, at, ptx.i32(0), kv_head), ptx.i32(0), ptx.i32(plan.splits))
            return
        self.rows = [lane + start for start in range(0, plan.batch, LANES)]
        self.chunks, self.groups, seen = [], [], []  # of these rows
        before = ptx.i32(0)
        for row in self.rows:
            there = row < plan.batch
            units = _units(plan, at, ptx.minimum(row, ptx.i32(plan.batch - 1)), kv_head)
            chunks, groups = (ptx.select(there, x, ptx.i32(0)) for x in units)
            earlier, every = _summed_before(chunks + groups, lane)
            self.chunks.append(chunks)
            self.groups.append(groups)
            seen.append(before + earlier)
            before = before + every
        total = ptx.maximum(before, ptx.i32(1))
        firsts = [units * (plan.splits - plan.batch) // total + row for units, row in zip(seen, self.rows)]
        self.firsts = [ptx.select(row < plan.batch, first, ptx.i32(plan.splits)) for row, first in zip(self.rows, firsts)]

    def of_block(self, split) -> Share:
        """The share that the `split`-th block of the KV head belongs to."""
        if self.plan.batch == 1:
            return self.only
        began = [ptx.select(first < split + 1, row, ptx.i32(0)) for first, row in zip(self.firsts, self.rows)]
        last = functools.reduce(ptx.maximum, began)
        return self.of_row(fragments.all_rows(fragments.all_columns(last, ptx.maximum), ptx.maximum))

    def of_row(self, batch) -> Share:
        """The share of a row of the batch, on which all lanes agree."""
        if self.plan.batch == 1:
            return self.only
        chunks, groups, first = (_entry(words, batch) for words in (self.chunks, self.groups, self.firsts))
        final = ptx.i32(self.plan.batch - 1)
        end = ptx.select(batch == final, ptx.i32(self.plan.splits), _entry(self.firsts, ptx.minimum(batch + 1, final)))
        return Share(batch, chunks, groups, first, end)


def _units(plan: Plan, at: dict, row, kv_head) -> tuple:
    """What a KV head reads in a row: chunks of the buffer, and groups."""
    return (buffered_tokens(plan, at, row) + (plan.chunk - 1)) // plan.chunk, groups_to_read(plan, at, row, kv_head)


def _summed_before(x, lane) -> tuple:
    """The sum of x over the lanes before this one, and over all lanes."""
    before, total = ptx.i32(0), x
    for bit in (1, 2, 4, 8, 16):
        other = ptx.shuffle("bfly", total, bit)
        before = before + ptx.select((lane & bit) == 0, ptx.i32(0), other)
        total = total + other
    return before, total


def _entry(words: list, number):
    """Entry `number` of those that lanes have, the entries lane, lane + 32, ... each."""
    word = words[0]
    for i, other in enumerate(words[1:], 1):
        word = ptx.select(number < i * LANES, word, other)
    return ptx.of_lane(word, number & (LANES - 1))
