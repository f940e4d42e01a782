"""Runs, for bits that depend on a row's length alone: the parts of a row of the batch that have a partial result each.

What a KV head may read of a row is a line of units: its groups, then the chunks of a full buffer. Runs are equal parts of that line; their
number depends on its length. A full-precision cache has runs of a fixed number of chunks, counted from its start. Neither depends on the
number of query tokens or rows, nor on which team reads a run.

SPAN runs are a span: their partial results are folded, one after the other, into the span's. Where there is work enough for teams that have
whole spans, a team folds as it stores, and there is one partial result for each span; otherwise the merge folds, by the same operations. It
adds the spans' results in their order. A run that a query sees nothing of adds zeros.
"""

import dataclasses

from pallas_kernels.attention.mosaic_partition import buffered_tokens, groups_to_read
from pallas_kernels.attention.mosaic_plan import MIN_UNITS, SPAN, Plan
from pallas_kernels.gpu import numerics, ptx


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
            each = self.plan.chunks_of_run
            return ptx.maximum(ptx.minimum((self.chunks + (each - 1)) // each, ptx.i32(self.plan.max_runs)), ptx.i32(1))
        return ptx.maximum(ptx.minimum(self._units // MIN_UNITS, ptx.i32(self.plan.runs_limit)), ptx.i32(1))

    @property
    def _units(self):
        return self.groups + self.plan.buffer_chunks

    def _first_unit(self, run):
        return run * self._units // self.number

    def first_group(self, run):
        """The first group of a run; of one without groups, and of the run after the last, the number of groups."""
        return ptx.minimum(self._first_unit(run), self.groups)

    def first_chunk(self, run):
        """The first chunk of a run; of one that ends with a group 0, and of the run after the last the number of chunks."""
        in_runs = self.plan.planes is None
        first = run * self.plan.chunks_of_run if in_runs else ptx.maximum(self._first_unit(run) - self.groups, ptx.i32(0))
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
    def spans(self):
        """The number of spans."""
        return (self.number + (SPAN - 1)) // SPAN

    def dealt(self, number, among):
        """The first run of a team, by its number among those of the row; for the one after the last the number of runs."""
        if not self.plan.whole_spans:
            return number * self.number // among
        return ptx.minimum(number * self.spans // among * SPAN, self.number)

    def is_folded(self, run):
        """Whether the partial result of a run is folded into the one that its place has."""
        return ptx.i32(0) < run % SPAN if self.plan.whole_spans else None

    def place(self, row_block, kv_head, run):
        """The place of a run's partial result among those of all blocks of rows, KV heads and rows of the batch."""
        row = (kv_head * self.plan.blocks_of_rows + row_block) * self.plan.batch + self.batch
        return row * self.plan.max_partials + (run // SPAN if self.plan.whole_spans else run)


def folded(old: list, new: list) -> list:
    """A partial result after another one is folded into it: its maximum, then sums of weights and of weighted values in any order."""
    top = ptx.maximum(old[0], new[0])
    down, own = numerics.exp2(old[0] - top), numerics.exp2(new[0] - top)
    return [top, *(numerics.fma(x, own, before * down) for before, x in zip(old[1:], new[1:], strict=True))]
