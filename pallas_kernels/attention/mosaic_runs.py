"""Runs, for bits that depend on a row's length alone: the parts of a row of the batch that have a partial result each.

What a KV head may read of a row is a line of units: its groups, then the chunks of a full buffer. Runs are equal parts of that line; their
number depends on its length. A full-precision cache has runs of a fixed number of chunks, counted from its start. Neither depends on the
number of query tokens or rows, nor on which team reads a run. The merge adds a row's partial results in the order of its runs. A run that a
query sees nothing of adds zeros.
"""

import dataclasses
import math

from pallas_kernels.attention.mosaic_partition import buffered_tokens, groups_to_read
from pallas_kernels.attention.mosaic_plan import RUNS, Plan
from pallas_kernels.attention.support import MAX_ROUND_TOKENS
from pallas_kernels.dispatch import multiprocessors
from pallas_kernels.gpu import ptx

MIN_UNITS = 2  # of a run: a partial result of many query tokens may take as long as a unit
FULL_TOKENS = 512  # of a run of a full-precision cache


def buffer_chunks(plan: Plan) -> int:
    """Chunks of a full buffer beside groups."""
    return math.ceil((2 * plan.group_size + MAX_ROUND_TOKENS) / plan.chunk)


def max_runs(plan: Plan) -> int:
    """Partial results that a row has room for."""
    if plan.planes is None:
        return math.ceil(math.ceil(plan.buffer_rows / plan.chunk) / chunks_of_run(plan))
    groups = plan.groups if plan.list_width is None else plan.list_width
    return min(_most(plan), max(1, (groups + buffer_chunks(plan)) // MIN_UNITS))


def chunks_of_run(plan: Plan) -> int:
    """Chunks of a run of a full-precision cache."""
    return FULL_TOKENS // plan.chunk


def _most(plan: Plan) -> int:
    return max(1, RUNS * (multiprocessors() // plan.kv_heads))


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of what a KV head reads in a row of the batch.

    Attributes:
        batch: the row's number.
        chunks, groups: what is read: chunks of the buffer, and groups.
    """

    plan: Plan
    batch: ptx.Value
    chunks: ptx.Value
    groups: ptx.Value

    @classmethod
    def of_row(cls, plan: Plan, at: dict, kv_head, batch) -> "Runs":
        chunks = (buffered_tokens(plan, at, batch) + (plan.chunk - 1)) // plan.chunk
        return cls(plan, batch, chunks, groups_to_read(plan, at, batch, kv_head))

    @property
    def number(self):
        """The number of runs: at least one, which may be empty, and no more than have room, whatever the lengths."""
        if self.plan.planes is None:
            each = chunks_of_run(self.plan)
            return ptx.maximum(ptx.minimum((self.chunks + (each - 1)) // each, ptx.i32(max_runs(self.plan))), ptx.i32(1))
        return ptx.maximum(ptx.minimum(self._units // MIN_UNITS, ptx.i32(_most(self.plan))), ptx.i32(1))

    @property
    def _units(self):
        return self.groups + buffer_chunks(self.plan)

    def _first_unit(self, run):
        return run * self._units // self.number

    def first_group(self, run):
        """The first group of a run; of one without groups, and of the run after the last, the number of groups."""
        return ptx.minimum(self._first_unit(run), self.groups)

    def first_chunk(self, run):
        """The first chunk of a run; of one that ends with a group 0, and of the run after the last the number of chunks."""
        in_runs = self.plan.planes is None
        first = run * chunks_of_run(self.plan) if in_runs else ptx.maximum(self._first_unit(run) - self.groups, ptx.i32(0))
        # The last run takes what is left, for there may be more than `MAX_ROUND_TOKENS` new tokens.
        return ptx.select(run < self.number, ptx.minimum(first, self.chunks), self.chunks)

    @property
    def with_groups(self):
        """The number of runs that have groups; these are the first."""
        return self._ceiled(self.groups)

    @property
    def without_chunks(self):
        """The number of runs that end with a group; these are the first."""
        return ptx.maximum(self._ceiled(self.groups + 1) - 1, ptx.i32(0))

    def _ceiled(self, unit):
        """The number of runs that begin before a unit."""
        return (unit * self.number + (self._units - 1)) // self._units

    def place(self, row_block, kv_head, run):
        """The number of a run's partial result among those of all blocks of rows, KV heads and rows of the batch."""
        return ((kv_head * self.plan.blocks_of_rows + row_block) * self.plan.batch + self.batch) * max_runs(self.plan) + run
