"""Runs, for bits that depend on a row's length alone: the parts of a row of the batch that have a partial result each.

A row's groups are divided into runs by their number, and its buffer into runs of a fixed number of chunks, counted from its start. Neither
knows how many query tokens or rows there are, nor which team reads a run. The merge adds a row's partial results in the order of its runs:
those of groups, then those of the buffer. A run that a query sees nothing of adds zeros.
"""

import dataclasses
import math

from pallas_kernels.attention.mosaic_partition import buffered_tokens, groups_to_read
from pallas_kernels.attention.mosaic_plan import Plan
from pallas_kernels.dispatch import multiprocessors
from pallas_kernels.gpu import ptx

RUNS = 6  # of a row, for each multiprocessor that a KV head has: 1, 2, 3 or 6 teams of a multiprocessor share them evenly
BUFFER_RUNS = 3  # of these, those of a buffer of 2 G + 16 tokens with G = 128
MIN_GROUPS = 4  # of a run, where a row has them: a partial result then costs little beside reading them
BUFFER_TOKENS, FULL_TOKENS = 128, 512  # of a run of the buffer, and of a full-precision cache


def max_group_runs(plan: Plan) -> int:
    """Runs of groups of a row, at most."""
    return max(1, RUNS * (multiprocessors() // plan.kv_heads) - BUFFER_RUNS)


def chunks_of_run(plan: Plan) -> int:
    """Chunks of the buffer that a run has."""
    return (BUFFER_TOKENS if plan.planes else FULL_TOKENS) // plan.chunk


def max_buffer_runs(plan: Plan) -> int:
    """Runs of a row's buffer, at most."""
    return math.ceil(math.ceil(plan.buffer_rows / plan.chunk) / chunks_of_run(plan))


def max_runs(plan: Plan) -> int:
    """Partial results that a row has room for."""
    groups = 0 if plan.planes is None else plan.groups if plan.list_width is None else plan.list_width
    of_groups = min(max_group_runs(plan), max(min(groups, 1), groups // MIN_GROUPS))
    return of_groups + max_buffer_runs(plan)


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
    def of_groups(self):
        """The number of runs of groups, which are the first."""
        if self.plan.planes is None:
            return ptx.i32(0)
        most = ptx.minimum(self.groups // MIN_GROUPS, ptx.i32(max_group_runs(self.plan)))
        return ptx.maximum(most, ptx.minimum(self.groups, ptx.i32(1)))

    @property
    def number(self):
        """The number of runs. At least one is of the buffer, though that may be empty, and no more than have room, whatever the lengths."""
        each = chunks_of_run(self.plan)
        of_chunks = ptx.minimum((self.chunks + (each - 1)) // each, ptx.i32(max_buffer_runs(self.plan)))
        return self.of_groups + ptx.maximum(of_chunks, ptx.i32(1))

    def first_group(self, run):
        """The first group of a run; of a run of the buffer, the number of groups."""
        return ptx.minimum(run, self.of_groups) * self.groups // ptx.maximum(self.of_groups, ptx.i32(1))

    def first_chunk(self, run):
        """The first chunk of a run; of a run of groups 0, and of the run after the last the number of chunks."""
        return ptx.minimum(ptx.maximum(run - self.of_groups, ptx.i32(0)) * chunks_of_run(self.plan), self.chunks)

    def place(self, row_block, kv_head, run):
        """The number of a run's partial result among those of all blocks of rows, KV heads and rows of the batch."""
        return ((kv_head * self.plan.blocks_of_rows + row_block) * self.plan.batch + self.batch) * max_runs(self.plan) + run
