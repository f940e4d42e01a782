"""Runs, for the bits of `dispatch.fixed_order`: the parts of a row of the batch that have a partial result each.

What a KV head may read of a row is a line of units: its groups, then the chunks of a full buffer; or the chunks of a full-precision cache
up to the multiple of `PASS_SPAN` tokens that comes next. Runs are equal parts of that line; their number depends on its length. Neither
depends on the number of query tokens or rows, nor on which team reads a run.

FOLD_RUNS runs are a fold: their partial results are folded, one after the other, into the fold's. Where there is work enough for teams
that have whole folds, a team folds as it goes on, and writes one partial result for each fold; otherwise the merge folds, by the same
operations. It adds the folds' results in their order. A run that a query sees nothing of adds zeros.
"""

import dataclasses

from pallas_kernels.attention.mosaic_partition import buffered_tokens, groups_to_read
from pallas_kernels.attention.mosaic_plan import FOLD_RUNS, MIN_UNITS, Plan
from pallas_kernels.attention.support import PASS_SPAN
from pallas_kernels.gpu import numerics, ptx


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of what a KV head reads in a row of the batch.

    Attributes:
        batch: the row's number.
        buffered: tokens in full precision, those of the pass included.
        groups: that are read.
    """

    plan: Plan
    batch: ptx.Value
    buffered: ptx.Value
    groups: ptx.Value

    @classmethod
    def of_row(cls, plan: Plan, at: dict, kv_head, batch) -> "Runs":
        return cls(plan, batch, buffered_tokens(plan, at, batch), groups_to_read(plan, at, batch, kv_head))

    @property
    def number(self):
        """The number of runs: at least one, which may be empty, and no more than have room, whatever the lengths."""
        return ptx.maximum(ptx.minimum(self._units // MIN_UNITS, ptx.i32(self.plan.runs_limit)), ptx.i32(1))

    @property
    def chunks(self):
        """The number of chunks of tokens in full precision."""
        return (self.buffered + (self.plan.chunk - 1)) // self.plan.chunk

    @property
    def _units(self):
        if self.plan.planes is not None:
            return self.groups + self.plan.buffer_chunks
        # Whatever the length, there are no more runs than have room.
        held = ptx.minimum(self.buffered - self.plan.tokens, ptx.i32(self.plan.buffer_rows))
        return (held // PASS_SPAN + 1) * (PASS_SPAN // self.plan.chunk)

    def _first_unit(self, run):
        return run * self._units // self.number

    def first_group(self, run):
        """The first group of a run; of one without groups, and of the run after the last, the number of groups."""
        return ptx.minimum(self._first_unit(run), self.groups)

    def first_chunk(self, run):
        """The first chunk of a run; of one that ends with a group 0, and of the run after the last the number of chunks."""
        first = ptx.maximum(self._first_unit(run) - self.groups, ptx.i32(0))
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

    @property
    def folds(self):
        """The number of folds."""
        return (self.number + (FOLD_RUNS - 1)) // FOLD_RUNS

    def dealt(self, number, among):
        """The first run of a team, by its number among those of the row; for the one after the last the number of runs."""
        if not self.plan.whole_folds:
            return number * self.number // among
        return ptx.minimum(number * self.folds // among * FOLD_RUNS, self.number)

    def folded_into(self, before: dict, partial: dict, run) -> dict:
        """The partial result of a run's fold up to this run. before: up to the run before it. Both are by query, as `folded` takes them."""
        begins = run % FOLD_RUNS == 0
        return {query: [ptx.select(begins, own, x) for own, x in zip(new, folded(before[query], new))] for query, new in partial.items()}

    def ends_fold(self, run):
        """Whether a run is the last of its fold."""
        return (run % FOLD_RUNS == FOLD_RUNS - 1) | (run == self.number - 1)

    def place(self, row_block, kv_head, run):
        """The place of a run's partial result among those of all blocks of rows, KV heads and rows of the batch."""
        row = (kv_head * self.plan.blocks_of_rows + row_block) * self.plan.batch + self.batch
        return row * self.plan.max_partials + (run // FOLD_RUNS if self.plan.whole_folds else run)


def folded(old: list, new: list) -> list:
    """A partial result after another one is folded into it: its maximum, then sums of weights and of weighted values in any order."""
    top = ptx.maximum(old[0], new[0])
    down, own = numerics.exp2(old[0] - top), numerics.exp2(new[0] - top)
    return [top, *(numerics.fma(x, own, before * down) for before, x in zip(old[1:], new[1:], strict=True))]
