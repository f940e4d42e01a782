"""The program of a block of the Mosaic GPU matmul of few rows with INT8 weights.

Producer warps copy weights to a ring, a pass of a tile at a time: rows of 2 KB in all slots that fit, so that memory is never
idle. The first epilogue warp copies the activations, once, while the producers issue their copies. Each math warp takes the same inputs of
every pass; rows of activations are the first operand of the tensor cores, where there is place for 16, and outputs the columns of the
second. Epilogue warps add the math warps' sums of a tile in their order. INT8 codes become bfloat16 as they are multiplied, and sums meet
the outputs' scales at the end. Rings and barriers are described in docs/kernels/matmul.md.
"""

from collections.abc import Sequence

from pallas_kernels.gpu import fragments, numerics, ptx
from pallas_kernels.gpu.ring import Ring, arrive_for_warp
from pallas_kernels.matmul.mosaic_int8_plan import (
    EPILOGUE_WARPS,
    MATH_WARPS,
    PAIR_BYTES,
    PASS,
    PITCH,
    PRODUCER_WARPS,
    ROWS,
    SLOT_BYTES,
    SUMS_SLOTS,
    TILE,
    UNIT,
    WARPS,
    X_BYTES,
    Plan,
)
from pallas_kernels.matmul.tiles import ClusterShare, add_clusters, row_of, sums_of_cluster

STEP_BYTES = 64  # of a row of weights, which four lanes load 16 bytes at a time
STEPS = UNIT // STEP_BYTES
X_WORDS, CODE_WORDS = 8, 4  # of 16 inputs, activations and codes
ACCUMULATORS = 4  # that do not wait for each other: one for each tensor-core product of 4 inputs of a lane


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block: its rings, and the program of each kind of warp."""
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread, block = ptx.thread_index(), ptx.block_index()
    warp, lane = ptx.uniform(thread >> 5), thread & 31
    shared = at["shared"]
    ring = Ring(plan.slots, shared, SLOT_BYTES, shared + plan.layout.at("barriers"))
    sums = Ring(SUMS_SLOTS, shared + plan.layout.at("sums"), MATH_WARPS * plan.tile_bytes, ring.barriers_end)
    share = ClusterShare.of_block(block, cluster=plan.cluster, clusters=plan.clusters, tiles=plan.tiles, parts=plan.units)
    x_barrier = sums.barriers_end
    with ptx.when(thread == 0):
        ring.start(PRODUCER_WARPS, MATH_WARPS)
        sums.start(MATH_WARPS, EPILOGUE_WARPS)
        ptx.barrier_init(x_barrier, 1)
    ptx.synchronize(ptx.i32(0), WARPS)
    with ptx.when(warp < MATH_WARPS):
        ptx.wait_for_arrivals(x_barrier, ptx.i32(0))
        multiply(plan, shared + plan.layout.at("x"), share, ring, sums, warp, lane)
    with ptx.when((ptx.i32(MATH_WARPS - 1) < warp) & (warp < MATH_WARPS + PRODUCER_WARPS)):
        produce(plan, at, share, ring, warp - MATH_WARPS, lane)
    with ptx.when(warp == MATH_WARPS + PRODUCER_WARPS):
        copy_activations(plan, at, share, x_barrier, lane)
    with ptx.when(ptx.i32(MATH_WARPS + PRODUCER_WARPS - 1) < warp):
        add_warps(plan, at, share, sums, thread - 32 * (MATH_WARPS + PRODUCER_WARPS))
    if plan.cluster > 1:
        add_clusters(lambda: add_blocks(plan, at, share, thread))


def row_at(plan: Plan, share: ClusterShare, array, row, item_bytes: int):
    """The address of the block's inputs of a row of an array. item_bytes: of each number."""
    return array + ptx.i64(row) * (item_bytes * plan.inputs) + ptx.i64(share.first) * (item_bytes * UNIT)


def copy_activations(plan: Plan, at: dict, share: ClusterShare, barrier, lane) -> None:
    """Copies the block's inputs of all rows, which stay."""
    size = share.count * (UNIT * X_BYTES)
    with ptx.when(lane == 0):
        ptx.arrive_with(barrier, size * plan.rows)
    with ptx.when(lane < plan.rows):
        ptx.copy_bulk(at["shared"] + plan.layout.at("x") + lane * plan.x_pitch, row_at(plan, share, at["x"], lane, X_BYTES), size, barrier)


def produce(plan: Plan, at: dict, share: ClusterShare, ring: Ring, warp, lane) -> None:
    """Fills the ring with a producer warp's rows of all passes of all tiles."""
    arrays = [at[f"codes{i}"] for i in range(len(plan.outputs))]
    rows = TILE // PRODUCER_WARPS
    output = warp * rows + (lane & (rows - 1))

    def one_tile(tile, carry):
        source = row_at(plan, share, *row_of(arrays, plan.outputs, tile * TILE + output), 1)

        def one_pass(number, carry):
            slot, parity = carry
            ptx.wait_for_arrivals(ring.emptied_barrier(slot), parity)
            size = ptx.minimum(share.count - number * MATH_WARPS, ptx.i32(MATH_WARPS)) * UNIT
            # In the last pass of a smaller share there may be nothing to copy.
            with ptx.when(lane == 0):
                ptx.arrive_with(ring.filled_barrier(slot), size * rows)
            with ptx.when((lane < rows) & (ptx.i32(0) < size)):
                ptx.copy_bulk(ring.slot(slot) + output * PITCH, source + ptx.i64(number) * PASS, size, ring.filled_barrier(slot))
            return ring.following(slot, parity)

        return ptx.loop(ptx.i32(0), ptx.i32(plan.passes), carry, one_pass)

    ptx.loop(share.lower, share.upper, (ptx.i32(0), ptx.i32(1)), one_tile)


def multiply(plan: Plan, x, share: ClusterShare, ring: Ring, sums: Ring, warp, lane) -> None:
    """Multiplies the warp's inputs of all tiles, and puts its sums of each in the ring of sums. x: the address of the activations."""
    g, t = lane >> 2, lane & 3
    within = warp * UNIT + t * 16
    # Rows that are not there repeat the last.
    x_at = [x + ptx.minimum(g + ROWS * i, ptx.i32(plan.rows - 1)) * plan.x_pitch for i in range(plan.row_tiles)]

    def take(at, item_bytes, words):
        return [ptx.load_shared(at + STEP_BYTES * item_bytes * step, words) for step in range(STEPS)]

    def one_pass(number, carry):
        slot, parity, totals = carry
        ptx.wait_for_arrivals(ring.filled_barrier(slot), parity)
        codes = take(ring.slot(slot) + g * PITCH + within, 1, CODE_WORDS)
        there = number * MATH_WARPS + warp < share.count
        # A warp without inputs in this pass multiplies what it may read, and adds nothing.
        offset = within + number * PASS if plan.whole else ptx.select(there, within + number * PASS, ptx.i32(0))
        rows = [take(at + offset * X_BYTES, X_BYTES, X_WORDS) for at in x_at]
        # Words that are loaded at once: it is enough to wait for the first.
        arrive_for_warp(ptx.once_loaded(ring.emptied_barrier(slot), [words[0] for words in codes]), lane)
        weights = [[pair for word in words for pair in numerics.int8_to_bf16(word)] for words in codes]
        new = add_products(totals, rows, weights)
        if not plan.whole:
            new = [[ptx.select(there, *both) for both in zip(*pair)] for pair in zip(new, totals)]
        return *ring.following(slot, parity), new

    def one_tile(tile, carry):
        slot, parity, sums_slot, sums_parity = carry
        nothing = [[ptx.f32(0.0)] * 4 for _ in range(ACCUMULATORS)]
        slot, parity, totals = ptx.loop(ptx.i32(0), ptx.i32(plan.passes), (slot, parity, nothing), one_pass)
        total = [numerics.total(each) for each in zip(*totals)]
        ptx.wait_for_arrivals(sums.emptied_barrier(sums_slot), sums_parity)
        to = sums.slot(sums_slot) + warp * plan.tile_bytes + lane * PAIR_BYTES
        for i in range(plan.row_tiles):
            ptx.store_shared(to + i * (32 * PAIR_BYTES), *total[2 * i : 2 * i + 2])
        arrive_for_warp(sums.filled_barrier(sums_slot), lane)
        return slot, parity, *sums.following(sums_slot, sums_parity)

    ptx.loop(share.lower, share.upper, (ptx.i32(0), ptx.i32(0), ptx.i32(0), ptx.i32(1)), one_tile)


def add_products(totals: list, rows: list, weights: list) -> list:
    """Adds the products of one more unit to the totals: [accumulator] of the four that a lane has of `fragments.mma`, rows g and g + 8 of
    outputs 2 t and 2 t + 1.

    rows, weights: [row tile][step] and [step], the words of a lane's 16 inputs. Which inputs these are makes no difference, as long as
    they are the same for both.
    """
    totals, absent = list(totals), (ptx.i32(0),) * len(weights[0])
    for step, words in enumerate(weights):
        upper, lower = (rows[i][step] if i < len(rows) else absent for i in (0, 1))
        for k in range(0, len(words), 2):
            a = upper[k], lower[k], upper[k + 1], lower[k + 1]
            totals[k // 2] = list(fragments.mma(totals[k // 2], a, words[k : k + 2], "bf16"))
    return totals


def add_warps(plan: Plan, at: dict, share: ClusterShare, sums: Ring, thread) -> None:
    """Adds the math warps' sums of all tiles: outputs, or where there are other blocks in the cluster the block's part of them."""
    lane = thread & 31

    def one_tile(tile, carry):
        slot, parity = carry
        # On their way while the sums are waited for.
        scales = scales_of(plan, at, tile, thread) if plan.cluster == 1 else ()
        ptx.wait_for_arrivals(sums.filled_barrier(slot), parity)
        with ptx.when(thread < plan.pairs):
            start = sums.slot(slot) + thread * PAIR_BYTES
            found = [ptx.load_shared(start + warp * plan.tile_bytes, 2, "f") for warp in range(MATH_WARPS)]
            pair = [numerics.total(column) for column in zip(*found)]
            if plan.cluster > 1:
                item = (tile - share.lower) * plan.pairs + thread
                ptx.store_shared(at["shared"] + plan.layout.at("partials") + item * PAIR_BYTES, *pair)
            else:
                write_pair(plan, at["y"], tile, thread, pair, scales)
        arrive_for_warp(sums.emptied_barrier(slot), lane)
        return sums.following(slot, parity)

    ptx.loop(share.lower, share.upper, (ptx.i32(0), ptx.i32(0)), one_tile)


def add_blocks(plan: Plan, at: dict, share: ClusterShare, thread) -> None:
    """Adds what the blocks of the cluster found of its tiles, in the order of their ranks; each block takes some of the outputs."""
    items, everyone = (share.upper - share.lower) * plan.pairs, plan.cluster * 32 * WARPS

    def some(turn, carry):
        item = turn * everyone + share.rank * (32 * WARPS) + thread
        with ptx.when(item < items):
            tile, number = share.lower + item // plan.pairs, item % plan.pairs
            scales = scales_of(plan, at, tile, number)
            pair = sums_of_cluster([at["shared"] + plan.layout.at("partials") + item * PAIR_BYTES], 2, plan.cluster)
            write_pair(plan, at["y"], tile, number, pair, scales)
        return carry

    ptx.loop(ptx.i32(0), (items + (everyone - 1)) // everyone, (), some)


def scales_of(plan: Plan, at: dict, tile, pair) -> Sequence:
    """The scales of a pair of outputs of a tile."""
    arrays = [at[f"scale{i}"] for i in range(len(plan.outputs))]
    array, output = row_of(arrays, plan.outputs, tile * TILE + 2 * (pair & 3))
    return ptx.load_global(array + ptx.i64(output) * 4, 2, "f")


def write_pair(plan: Plan, y, tile, pair, found: list, scales: Sequence) -> None:
    """Writes a pair of outputs of a tile, times their scales: pair 4 row + i is outputs 2 i and 2 i + 1."""
    row, i = pair >> 2, pair & 3
    place = ptx.i64(row * plan.width + tile * TILE + 2 * i)
    found = [x * (scale * numerics.INT8_DIVISOR) for x, scale in zip(found, scales)]
    if plan.float32_out:
        ptx.store_global_words(y + place * 4, *map(ptx.as_bits, found))
    else:
        ptx.store_global(y + place * 2, numerics.pair(*found, "bf16"))
