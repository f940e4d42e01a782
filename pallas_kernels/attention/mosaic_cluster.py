"""Merging the partial results of a KV head within the launch that finds them, where its blocks are a cluster.

First each block merges its teams, in its own shared memory; then the blocks of a row of the batch read each other's, and divide the
query rows and channels among them.
"""

import functools

from pallas_kernels.attention.mosaic_partition import Share
from pallas_kernels.attention.mosaic_plan import WARPS, Plan
from pallas_kernels.gpu import numerics, ptx

CHANNELS = 4  # of a thread: a load of 16 bytes


def merge(plan: Plan, at: dict, partials, thread, rank, share: Share, rows: tuple) -> None:
    """Emits the merging, by all warps of a block; `at` holds where "merged" goes and, where attention is observed, "everything".

    partials: the address of the partial results of the block's first team. rank: the block's number in the cluster. share: the one
    that the block belongs to. rows: the KV head, and the block of query rows.
    """
    H, pitch, stride = plan.head_dim, plan.partial_pitch, plan.team_bytes + plan.slots * plan.slot_bytes
    threads = 32 * WARPS * plan.config.warpgroups
    pieces = H // CHANNELS
    items = min(plan.block_rows, plan.rows) * pieces
    batch, first, end = share.batch, share.first, share.end
    kv_head, row_block = rows
    # Where a row's maximum and sum are: what a block merges must not replace what another thread still reads of the first team.
    merged_at = 4 * H if plan.teams == 1 else 4 * (H + 2)

    def merged(sources: list, sums_at: int, load, there: list | None = None) -> tuple:
        """The maximum, the sum of weights and the channels of partial results at these addresses, of those that are `there`."""
        sums = [load(source[0] + sums_at, 2, "f") for source in sources]
        values = [load(source[1], CHANNELS, "f") for source in sources]
        top = functools.reduce(ptx.maximum, [pair[0] for pair in sums])
        weights = [numerics.exp2(pair[0] - top) for pair in sums]
        if there is not None:
            weights = [ptx.select(condition, weight, ptx.f32(0.0)) for condition, weight in zip(there, weights)]
        found = [ptx.f32(0.0)] * (CHANNELS + 1)
        for weight, pair, channels in zip(weights, sums, values):
            found = [numerics.fma(weight, x, old) for x, old in zip((pair[1], *channels), found)]
        return top, found[0], found[1:]

    ptx.synchronize(ptx.i32(0), threads // 32)
    if plan.teams > 1:

        def of_teams(k, carry):
            item = thread + k * threads
            with ptx.when(item < items):
                row = partials + item // pieces * pitch
                piece = row + item % pieces * (4 * CHANNELS)
                top, total, channels = merged([(row + i * stride, piece + i * stride) for i in range(plan.teams)], 4 * H, ptx.load_shared)
                ptx.store_shared(piece, *channels)
                with ptx.when(item % pieces == 0):
                    ptx.store_shared(row + merged_at, top, total)
            return carry

        ptx.loop(ptx.i32(0), ptx.i32(-(-items // threads)), (), of_teams)
    ptx.meet_cluster()
    ranks = [ptx.minimum(first + i, end - 1) for i in range(plan.splits)]
    there = [first + i < end for i in range(plan.splits)]
    everyone = (end - first) * threads

    def of_blocks(k, carry):
        item = (rank - first) * threads + thread + k * everyone
        row = row_block * plan.block_rows + item // pieces
        with ptx.when((item < items) & (row < plan.rows)):
            mine = partials + item // pieces * pitch
            piece = mine + item % pieces * (4 * CHANNELS)
            sources = [(ptx.in_block(mine, other), ptx.in_block(piece, other)) for other in ranks]
            top, total, channels = merged(sources, merged_at, ptx.load_cluster, there)
            place = ptx.i64(plan.query_row(batch, kv_head, row))
            words = [numerics.pair(*(x / total for x in channels[i : i + 2]), "bf16") for i in range(0, CHANNELS, 2)]
            ptx.store_global_words(at["merged"] + place * (2 * H) + ptx.i64(item % pieces * (2 * CHANNELS)), *words)
            if plan.observe:
                with ptx.when(item % pieces == 0):
                    ptx.store_global(at["everything"] + place * 4, top + numerics.log2(total))
        return carry

    ptx.loop(ptx.i32(0), (everyone + (items - 1)) // everyone, (), of_blocks)
    # Nobody ends while others read what it has.
    ptx.meet_cluster()
