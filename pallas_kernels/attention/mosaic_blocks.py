"""The programs of the blocks of the Mosaic GPU attention: one for the partial results, one that merges them."""

import contextlib
import functools
import math

import jax

from pallas_kernels.attention import mosaic_append
from pallas_kernels.attention.mosaic_partition import Partition, buffered_tokens
from pallas_kernels.attention.mosaic_plan import FOLD_RUNS, WARPS, Plan
from pallas_kernels.attention.mosaic_runs import Runs, folded
from pallas_kernels.attention.mosaic_stream import FullSource, Pipeline, QuantizedSource
from pallas_kernels.attention.mosaic_tile import Tile
from pallas_kernels.gpu import fragments, numerics, ptx

# Parts that a warp of the merge loads at once, by the partial results of each: a row has up to 64 that are folded by four, over 8 KV heads.
PARTS_AT_ONCE = {1: 8, FOLD_RUNS: 4}


def copy_queries(plan: Plan, at: dict, queries, thread, batch, kv_head, row_block) -> None:
    """Starts the copies of a block's query rows to shared memory."""
    H, threads = plan.head_dim, 32 * WARPS * plan.config.warpgroups
    pieces = H // 8
    for offset in range(0, plan.block_rows * pieces, threads):
        row, piece = (thread + offset) // pieces, thread % pieces
        with ptx.when(row < plan.block_rows):
            source = plan.query_row(batch, kv_head, ptx.minimum(row_block * plan.block_rows + row, ptx.i32(plan.rows - 1)))
            ptx.copy_async(queries + row * plan.query_pitch + piece * 16, at["q"] + ptx.i64(source) * (2 * H) + ptx.i64(piece * 16))


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block: its teams' shares of one row of the batch, one KV head and one run of query rows."""
    H, team = plan.head_dim, plan.config.team
    warps = plan.config.warpgroups * WARPS
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread, block = ptx.thread_index(), ptx.block_index()
    lane, warp = thread & 31, ptx.uniform(thread >> 5)
    split, rest = block % plan.splits, block // plan.splits
    row_block, kv_head = rest % plan.blocks_of_rows, rest // plan.blocks_of_rows
    part = warp % team
    # A single row of the batch is known before its lengths are, so its list is loaded together with them.
    listed = QuantizedSource.load_list(plan, at, kv_head, lane) if plan.batch == 1 else None
    share = Partition(plan, at, kv_head, lane).of_block(split)
    batch, chunks, groups = share.batch, share.chunks, share.groups
    worker, workers = (split - share.first) * plan.teams + warp // team, (share.end - share.first) * plan.teams
    buffered = buffered_tokens(plan, at, batch)
    runs = Runs(plan, batch, buffered, groups) if plan.fixed_runs else None
    first, last = (runs.dealt(x, workers) if runs else x * (chunks + groups) // workers for x in (worker, worker + 1))
    head = batch * plan.kv_heads + kv_head
    listed = QuantizedSource.load_list(plan, at, head, lane) if listed is None else listed

    queries = at["shared"]
    if plan.appends:
        writes = (split == share.first) & (row_block == 0)
        new = mosaic_append.NewTokens(plan, at, queries, thread, batch, kv_head, row_block, buffered - plan.tokens, writes)
        loaded = new.load(32 * warps)
    else:
        copy_queries(plan, at, queries, thread, batch, kv_head, row_block)
    ptx.commit_copies()

    shared = queries + plan.of_block.total + (warp // team) * (plan.team_bytes + plan.slots * plan.slot_bytes)
    barrier = warp // team + 8
    observed = None
    if plan.observe:
        observed = at["observed"] + ptx.i64(head * plan.groups) * (4 * plan.padded_rows) + ptx.i64(row_block * (4 * plan.block_rows))
    tile = Tile(plan, (queries, shared, observed), lane, part, barrier, buffered)
    ring = functools.partial(Pipeline, plan, shared + plan.team_bytes, tile.meet)
    recent = FullSource(plan, at, head, lane, part, buffered, queries + plan.of_block.at("new"))
    full = ring(recent, *(runs.first_chunk(x) if runs else ptx.minimum(x, chunks) for x in (first, last)))
    streams = [full]
    if plan.planes is not None:
        source = QuantizedSource(plan, at, head, lane, part, listed)
        streams.insert(0, ring(source, *(runs.first_group(x) if runs else ptx.maximum(x - chunks, ptx.i32(0)) for x in (first, last))))
    # The ring fills while the queries come and are prepared.
    streams[0].prefetch()
    any_groups = streams[0].lower < streams[0].upper
    if plan.planes is not None:
        # A team without groups has its whole ring for the buffer.
        with ptx.when(streams[0].upper < streams[0].lower + 1):
            full.prefetch()
    if plan.appends:
        new.place(loaded)
    ptx.wait_for_copies(plan.slots - 1)
    ptx.synchronize(ptx.i32(0), warps)
    width = {"out": H, "top": 1, "total": 1}

    def store(number, partial) -> None:
        """Writes a partial result, by its number among all of them."""
        first_row = number * plan.block_rows

        def place(name, row, entry):
            return at[name] + ptx.i64(first_row + row) * (4 * width[name]) + ptx.i64(entry) * 4

        tile.store(place, partial)

    def finish(run, state, before: dict, is_over=None) -> dict:
        """The partial result of a run, written, where the run is over; with whole folds what it is folded into, which is written once the
        fold is over. before: that of the run before it."""
        if not plan.whole_folds:
            with contextlib.nullcontext() if is_over is None else ptx.when(is_over):
                store(runs.place(row_block, kv_head, run), tile.partial(state))
            return before
        partial = runs.folded_into(before, tile.partial(state), run)
        ends = runs.ends_fold(run)
        with ptx.when(ends if is_over is None else ends & is_over):
            store(runs.place(row_block, kv_head, run), partial)
        return partial if is_over is None else jax.tree.map(functools.partial(ptx.select, is_over), partial, before)

    state = tile.empty()
    before = tile.nothing() if plan.whole_folds else {}
    if plan.planes is not None:
        for n in range(0, plan.block_tiles, warps):
            with ptx.when(warp + n < plan.block_tiles):
                tile.queries_to_float16(warp + n)
        ptx.synchronize(ptx.i32(0), warps)
        operations = tile.quantized_keys, tile.quantized_values
        if runs:

            def of_run(run, carry):
                slot, _, before = carry
                slot, state = streams[0].run_part(runs.first_group(run), runs.first_group(run + 1), *operations, slot, tile.empty())
                before = finish(run, state, before, run < runs.without_chunks)
                # Products follow, which all lanes run together.
                ptx.synchronize(None, 1)
                return slot, state, before

            _, state, before = ptx.loop(first, ptx.minimum(last, runs.with_groups), (ptx.i32(0), state, before), of_run)
        else:
            state = streams[0].run(*operations, state)
        with ptx.when(any_groups):
            ptx.wait_for_copies(0)
            tile.meet()
            full.prefetch()
    sees = tile.causal_mask(row_block * plan.block_rows, buffered)
    fragments = tile.full_queries()

    def keys(slot, chunk, refill):
        recent.add_new(slot, chunk, 0)
        return tile.full_keys(slot, chunk, fragments, sees, refill)

    def values(slot, chunk, *rest):
        recent.add_new(slot, chunk, plan.tokens)
        return tile.full_values(slot, chunk, *rest)

    if not runs:
        state = full.run(keys, values, state)
        store(block * plan.teams + warp // team, tile.partial(state))
        return

    def rest_of_run(run, carry):
        *carry, before = carry
        slot, state = full.run_part(runs.first_chunk(run), runs.first_chunk(run + 1), keys, values, *carry)
        return slot, tile.empty(), finish(run, state, before)

    if plan.planes is not None:
        # The last run that has groups goes on with chunks, unless it ends with a group.
        first = ptx.maximum(first, runs.without_chunks)
        goes_on = first < ptx.minimum(last, runs.with_groups)
        state = jax.tree.map(functools.partial(ptx.select, goes_on), state, tile.empty())
    ptx.loop(first, last, (ptx.i32(0), state, before), rest_of_run)


def emit_merge(plan: Plan, refs: dict) -> None:
    """Emits the merging of the partial results for one query row, which four warps divide among them.

    Where attention is observed, or combined with that over other tokens, it also writes the logarithm (base 2) of the row's sum of
    exponentials. `Tile` wrote that of each group.
    """
    H, R = plan.head_dim, plan.heads_per_kv_head
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread, place = ptx.thread_index(), ptx.block_index()
    lane, warp = thread & 31, ptx.uniform(thread >> 5)
    kv_head = place // R % plan.kv_heads
    batch, token = place // (R * plan.kv_heads * plan.tokens), place // (R * plan.kv_heads) % plan.tokens
    row = token * R + place % R
    row_block, row = row // plan.block_rows, row % plan.block_rows
    if plan.fixed_runs:
        runs = Runs.of_row(plan, at, kv_head, batch)
        # What is folded into the result of a part, and the number of parts.
        each = 1 if plan.whole_folds else FOLD_RUNS
        first, workers, parts = runs.place(row_block, kv_head, 0), runs.folds if each == 1 else runs.number, runs.folds
    else:
        share = Partition(plan, at, kv_head, lane).of_row(batch)
        first, each = share.first, 1
        workers = parts = (share.end - share.first) * plan.teams
        first = ((kv_head * plan.blocks_of_rows + row_block) * plan.splits + first) * plan.teams

    def index(worker):
        return ptx.i64((first + ptx.minimum(worker, workers - 1)) * plan.block_rows + row)

    def load(name, worker):
        return ptx.load_global(at[name] + index(worker) * 4, result="f")[0]

    def highest(i, top):
        return functools.reduce(ptx.maximum, [load("top", i * 128 + lane + k) for k in range(0, 128, 32)], top)

    top = ptx.loop(ptx.i32(0), (workers + 127) // 128, ptx.f32(-math.inf), highest)
    top = fragments.all_rows(fragments.all_columns(top, ptx.maximum), ptx.maximum)
    width = H // 32  # channels of a lane

    def partial(worker) -> list:
        """The maximum, this lane's channels, and the sum of weights of a partial result."""
        top = load("top", worker)
        source = at["out"] + index(worker) * (4 * H) + ptx.i64(lane * (4 * width))
        values = [x for j in range(0, width, 4) for x in ptx.load_global(source + 4 * j, min(4, width), result="f")]
        return [top, *values, load("total", worker)]

    def of_part(part, loaded: list) -> list:
        """The same of what is folded into a part's."""
        found = loaded[0]
        for k, other in enumerate(loaded[1:], 1):
            there = part * each + k < workers
            found = [ptx.select(there, x, old) for x, old in zip(folded(found, other), found)]
        return found

    at_once = PARTS_AT_ONCE[each]  # of a warp

    def add(i, state):
        # The loads of all wait together.
        numbers = [i * (at_once * WARPS) + warp + k * WARPS for k in range(at_once)]
        loaded = [[partial(part * each + k) for k in range(each)] for part in numbers]
        for part, found in zip(numbers, loaded):
            part_top, *values = of_part(part, found)
            weight = ptx.select(part < parts, numerics.exp2(part_top - top), ptx.f32(0.0))
            state = [numerics.fma(weight, x, old) for x, old in zip(values, state)]
        return state

    turn = at_once * WARPS
    state = ptx.loop(ptx.i32(0), (parts + (turn - 1)) // turn, [ptx.f32(0.0)] * (width + 1), add)
    mine = at["shared"] + warp * (4 * (H + 1))
    for i, x in enumerate(state[:-1]):
        ptx.store_shared(mine + (lane * width + i) * 4, x)
    ptx.store_shared(mine + 4 * H, state[-1])
    ptx.synchronize(ptx.i32(0), WARPS)
    pair = thread % (H // 2)

    def merged(i):
        return numerics.total([ptx.load_shared(at["shared"] + (i + k * (H + 1)) * 4, 1, result="f")[0] for k in range(WARPS)])

    divisor = merged(ptx.i32(H))
    if plan.observe or plan.totals:
        with ptx.when(thread == 0):
            ptx.store_global(at["everything"] + ptx.i64(place) * 4, top + numerics.log2(divisor))
    with ptx.when(thread < H // 2):
        both = [merged(pair * 2 + i) / divisor for i in (0, 1)]
        if plan.totals:
            ptx.store_global_words(at["merged"] + ptx.i64(place) * (4 * H) + ptx.i64(pair * 8), *map(ptx.as_bits, both))
        else:
            ptx.store_global(at["merged"] + ptx.i64(place) * (2 * H) + ptx.i64(pair * 4), numerics.pair(*both, "bf16"))
