"""What the blocks of the Mosaic GPU attention do: one for the partial results, one that merges them."""

import functools
import math

from pallas_kernels import warp as w
from pallas_kernels.attention.mosaic_plan import WARPS, Plan
from pallas_kernels.attention.mosaic_stream import FullSource, Pipeline, QuantizedSource
from pallas_kernels.attention.mosaic_tile import Tile


def deal(plan: Plan, at: dict) -> tuple[list, list]:
    """(chunks of the buffer, groups) of each row of the batch, and the first of its blocks, ending with their number.

    The blocks of a KV head are dealt to the rows in proportion to what there is to read, one at least. Chunks and groups count alike.
    """
    units = []
    for b in range(plan.batch):
        quantized, buffered = (w.load_global(at[name] + 4 * b)[0] for name in ("quantized", "buffered"))
        groups = w.minimum(quantized // plan.group_size, w.i32(plan.groups)) if plan.planes else w.i32(0)
        units.append(((buffered + (plan.chunk - 1)) // plan.chunk, groups))
    total = w.maximum(w.total([x for unit in units for x in unit]), w.i32(1))
    firsts, seen = [w.i32(0)], w.i32(0)
    for b, unit in enumerate(units[:-1]):
        seen = seen + w.total(unit)
        firsts.append(seen * (plan.splits - plan.batch) // total + (b + 1))
    return units, [*firsts, w.i32(plan.splits)]


def emit_block(plan: Plan, refs: dict) -> None:
    """What a block does: its teams' shares of one row of the batch, KV head and run of query rows."""
    H, team = plan.head_dim, plan.config.team
    warps = plan.config.warpgroups * WARPS
    at = {name: w.address(ref) for name, ref in refs.items()}
    thread, block = w.thread_index(), w.block_index()
    lane, warp = thread & 31, w.uniform(thread >> 5)
    split, rest = block % plan.splits, block // plan.splits
    row_block, kv_head = rest % plan.blocks_of_rows, rest // plan.blocks_of_rows
    part = warp % team
    units, firsts = deal(plan, at)
    batch, (chunks, groups), first, last = w.i32(0), units[0], firsts[0], firsts[1]
    for b in range(1, plan.batch):
        here = firsts[b] < split + 1
        new = (w.i32(b), *units[b], firsts[b], firsts[b + 1])
        batch, chunks, groups, first, last = (w.select(here, x, old) for x, old in zip(new, (batch, chunks, groups, first, last)))
    worker, workers = (split - first) * plan.teams + warp // team, (last - first) * plan.teams
    first, last = ((worker + i) * (chunks + groups) // workers for i in (0, 1))
    buffered = w.load_global(at["buffered"] + w.i64(batch) * 4)[0]
    head = batch * plan.kv_heads + kv_head

    queries = at["shared"]
    pieces = H // 8
    for offset in range(0, plan.block_rows * pieces, 32 * warps):
        row, piece = (thread + offset) // pieces, thread % pieces
        with w.when(row < plan.block_rows):
            source = plan.query_row(batch, kv_head, w.minimum(row_block * plan.block_rows + row, w.i32(plan.rows - 1)))
            w.copy_async(queries + row * plan.query_pitch + piece * 16, at["q"] + w.i64(source) * (2 * H) + w.i64(piece * 16))
    w.commit_copies()

    shared = queries + plan.query_bytes + (warp // team) * (plan.team_bytes + plan.slots * plan.slot_bytes)
    barrier = warp // team + 8
    tile = Tile(plan, (queries, shared), lane, part, barrier, buffered)
    ring = functools.partial(Pipeline, plan, shared + plan.team_bytes, tile.meet)
    full = ring(FullSource(plan, at, head, lane, part, buffered), *(w.minimum(x, chunks) for x in (first, last)))
    streams = [full]
    if plan.planes is not None:
        source = QuantizedSource(plan, at, head, lane, part)
        streams.insert(0, ring(source, *(w.maximum(x - chunks, w.i32(0)) for x in (first, last))))
    # The ring fills while the queries come and are prepared.
    streams[0].prefetch()
    w.wait_for_copies(plan.slots - 1)
    w.synchronize(w.i32(0), warps)
    state = tile.empty()
    if plan.planes is not None:
        for n in range(0, plan.block_tiles, warps):
            with w.when(warp + n < plan.block_tiles):
                tile.halve_queries(warp + n)
        w.synchronize(w.i32(0), warps)
        state = streams[0].run(tile.quantized_keys, tile.quantized_values, state)
        w.wait_for_copies(0)
        tile.meet()
        full.prefetch()
    limits = tile.limits(row_block * plan.block_rows, buffered)
    fragments = tile.full_queries()
    state = full.run(lambda slot, i, refill: tile.full_keys(slot, i, fragments, limits, refill), tile.full_values, state)
    tile.store(at, (block * plan.teams + warp // team) * plan.block_rows, state)


def emit_merge(plan: Plan, refs: dict) -> None:
    """Merges what the workers found for one query row, the workers among four warps."""
    H, R = plan.head_dim, plan.heads_per_kv_head
    at = {name: w.address(ref) for name, ref in refs.items()}
    thread, place = w.thread_index(), w.block_index()
    lane, warp = thread & 31, w.uniform(thread >> 5)
    kv_head = place // R % plan.kv_heads
    batch, token = place // (R * plan.kv_heads * plan.tokens), place // (R * plan.kv_heads) % plan.tokens
    row = token * R + place % R
    row_block, row = row // plan.block_rows, row % plan.block_rows
    _, firsts = deal(plan, at)
    first, last = firsts[0], firsts[1]
    for b in range(1, plan.batch):
        first, last = (w.select(batch == b, x, old) for x, old in zip(firsts[b : b + 2], (first, last)))
    workers = (last - first) * plan.teams
    first = ((kv_head * plan.blocks_of_rows + row_block) * plan.splits + first) * plan.teams
    index = lambda worker: w.i64((first + w.minimum(worker, workers - 1)) * plan.block_rows + row)
    load = lambda name, worker: w.load_global(at[name] + index(worker) * 4, result="f")[0]

    def highest(i, top):
        return functools.reduce(w.maximum, [load("top", i * 128 + lane + k) for k in range(0, 128, 32)], top)

    top = w.loop(w.i32(0), (workers + 127) // 128, w.f32(-math.inf), highest)
    top = w.all_rows(w.all_columns(top, w.maximum), w.maximum)
    width = H // 32  # channels of a lane

    def add(i, state):
        # Eight workers at a time, so that the loads wait together.
        for k in range(8):
            worker = i * (8 * WARPS) + warp + k * WARPS
            weight = w.select(worker < workers, w.exp2(load("top", worker) - top), w.f32(0.0))
            source = at["out"] + index(worker) * (4 * H) + w.i64(lane * (4 * width))
            values = [x for j in range(0, width, 4) for x in w.load_global(source + 4 * j, min(4, width), result="f")]
            values.append(load("total", worker))
            state = [w.fma(weight, x, old) for x, old in zip(values, state)]
        return state

    state = w.loop(w.i32(0), (workers + (8 * WARPS - 1)) // (8 * WARPS), [w.f32(0.0)] * (width + 1), add)
    mine = at["shared"] + warp * (4 * (H + 1))
    for i, x in enumerate(state[:-1]):
        w.store_shared(mine + (lane * width + i) * 4, x)
    w.store_shared(mine + 4 * H, state[-1])
    w.synchronize(w.i32(0), WARPS)
    pair = thread % (H // 2)
    merged = lambda i: w.total([w.load_shared(at["shared"] + (i + k * (H + 1)) * 4, 1, result="f")[0] for k in range(WARPS)])
    divisor = merged(w.i32(H))
    with w.when(thread < H // 2):
        word = w.pair(merged(pair * 2) / divisor, merged(pair * 2 + 1) / divisor, "bf16")
        w.store_global(at["merged"] + w.i64(place) * (2 * H) + w.i64(pair * 4), word)
