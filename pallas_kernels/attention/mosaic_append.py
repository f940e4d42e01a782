"""The newest tokens, where attention takes the projections as they are: RoPE, and new keys and values at the end of the buffer.

Each block rotates the queries that it reads and, for itself, all new keys of its KV head, so that no block waits for another. No block of
the launch reads what another writes to the buffer.
"""

import dataclasses

from pallas_kernels.attention.mosaic_plan import Plan
from pallas_kernels.gpu import numerics, ptx


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The projections of a row's T tokens that a block needs: its queries, then T keys and T values.

    Attributes:
        at: addresses by the names of the arrays.
        queries: the address of the block's queries in shared memory.
        batch, kv_head, row_block: which row of the batch, KV head and query rows the block works on.
        offset: the row of the buffer at which the new keys and values go.
        writes: whether this block writes the buffer.
    """

    plan: Plan
    at: dict
    queries: ptx.Value
    thread: ptx.Value
    batch: ptx.Value
    kv_head: ptx.Value
    row_block: ptx.Value
    offset: ptx.Value
    writes: ptx.Value

    def load(self, threads: int) -> list[tuple]:
        """Starts the loads, and returns the argument of `place`. In each turn a thread loads two neighbouring channels and the two half a
        head further, with which RoPE pairs them."""
        plan = self.plan
        pairs = plan.head_dim // 4
        everything = (plan.block_rows + 2 * plan.tokens) * pairs
        return [self._loaded(self.thread + first, everything, pairs) for first in range(0, everything, threads)]

    def _loaded(self, item, everything: int, pairs: int) -> tuple:
        plan, H = self.plan, self.plan.head_dim
        kept = ptx.minimum(item, ptx.i32(everything - 1))
        row, within = kept // pairs, kept % pairs * 4
        token, head, is_query, is_value = self._row(row)
        place = self.batch * plan.tokens + token
        every = plan.kv_heads * (plan.heads_per_kv_head + 2)
        source = self.at["q"] + ptx.i64(place * every + head) * (2 * H) + ptx.i64(within)
        angle = ptx.i64(place) * H + ptx.i64(within)
        loaded = [source, source + H, self.at["cos"] + angle, self.at["sin"] + angle]
        return item < everything, row, within, token, is_query, is_value, [ptx.load_global(at)[0] for at in loaded]

    def _row(self, row) -> tuple:
        """The token of a row, its head among those of all projections, and whether it is a query or a value."""
        plan = self.plan
        heads = plan.kv_heads * plan.heads_per_kv_head
        query = ptx.minimum(self.row_block * plan.block_rows + row, ptx.i32(plan.rows - 1))
        is_query, is_value = row < plan.block_rows, ptx.i32(plan.block_rows + plan.tokens - 1) < row
        head = ptx.select(is_value, ptx.i32(heads + plan.kv_heads), ptx.i32(heads)) + self.kv_head
        head = ptx.select(is_query, self.kv_head * plan.heads_per_kv_head + query % plan.heads_per_kv_head, head)
        new = row - plan.block_rows
        token = ptx.select(is_query, query // plan.heads_per_kv_head, new - ptx.select(is_value, ptx.i32(plan.tokens), ptx.i32(0)))
        return token, head, is_query, is_value

    def place(self, loaded: list[tuple]) -> None:
        """Rotates the loaded channels, and puts them into shared memory and into the buffer. The block must meet before it reads any."""
        plan, H = self.plan, self.plan.head_dim
        # As `rotate_and_append`: nothing is written beyond the buffer.
        offset = ptx.maximum(ptx.minimum(self.offset, ptx.i32(plan.buffer_rows - max(2, plan.tokens))), ptx.i32(0))
        for there, row, within, token, is_query, is_value, (a, b, cos, sin) in loaded:
            first, second = numerics.rotated(a, b, cos, sin)
            first, second = ptx.select(is_value, a, first), ptx.select(is_value, b, second)
            new = self.queries + plan.of_block.at("new") + (row - plan.block_rows) * (2 * H)
            to = ptx.select(is_query, self.queries + row * plan.query_pitch, new) + within
            with ptx.when(there):
                ptx.store_shared(to, first)
                ptx.store_shared(to + H, second)
            with ptx.when(there & (ptx.i32(plan.block_rows - 1) < row) & self.writes):
                kept = (self.batch * plan.kv_heads + self.kv_head) * plan.buffer_rows + offset + token
                array = ptx.select(is_value, self.at["values"], self.at["keys"])
                to = array + ptx.i64(kept) * (2 * H) + ptx.i64(within)
                ptx.store_global(to, first)
                ptx.store_global(to + H, second)
