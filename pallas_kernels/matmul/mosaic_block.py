"""What a block of the Mosaic GPU INT4 matmul does, stage after stage.

Codes enter the tensor cores as 128 + code in bfloat16, which costs no arithmetic. What is too much is 128 times the sum of the
activations, and goes with the zero: y = scale (sum x (128 + code)) + (zero - 128 scale) sum x, group by group.

Between two stages all blocks wait for each other, at a counter in global memory, for a stage's inputs are all of the outputs before.
The ring does not wait: weights of the next stage are on their way already.
"""

from pallas_kernels import warp as w
from pallas_kernels.matmul.mosaic_plan import (
    CODE_BYTES,
    CODE_PITCH,
    COPIERS,
    GROUP_SIZE,
    MOST_SLOTS,
    NUMBERS,
    PARAMETER_PITCH,
    PASS,
    ROWS,
    SLOT_BYTES,
    TILE,
    WARPS,
    Plan,
    Stage,
)

EXCESS = 128.0
STEPS = GROUP_SIZE // 32  # words of a lane in a group
PIECES = GROUP_SIZE // NUMBERS  # of a group of activations
THREADS = 32 * WARPS  # that compute
LOG2_E = 1.4426950408889634


def emit_block(plan: Plan, refs: dict) -> None:
    at = {name: w.address(ref) for name, ref in refs.items()}
    thread = w.thread_index()
    warp = w.uniform(thread >> 5)
    share = Share(plan, w.block_index())
    ring = Ring(plan, at["shared"])
    with w.when(thread == 0):
        for slot in range(plan.slots):
            w.arrivals_init(ring.filled(w.i32(slot)), 33 * COPIERS)
            w.arrivals_init(ring.emptied(w.i32(slot)), WARPS)
    w.synchronize(w.i32(0), WARPS + COPIERS)
    with w.when(warp < WARPS):
        compute(plan, at, share, ring, warp, thread)
    with w.when(w.i32(WARPS - 1) < warp):
        copy(plan, at, share, ring, warp - WARPS, thread & 31)


class Share:
    """What of a stage is a block's: tiles of outputs, and a slice of the inputs."""

    def __init__(self, plan: Plan, block):
        self.plan, self.part, self.block = plan, block // plan.blocks, block % plan.blocks

    def tiles(self, stage: Stage) -> tuple:
        """First and last + 1."""
        return self.block * stage.tiles // self.plan.blocks, (self.block + 1) * stage.tiles // self.plan.blocks

    def groups(self, stage: Stage) -> tuple:
        """First and how many."""
        size = self.plan.slice_groups(stage)
        first = self.part * size
        return first, w.minimum(w.i32(stage.groups) - first, w.i32(size))


class Ring:
    """Slots for passes: of each the codes [output][group][64 bytes], then scales and zeros [array][output][group]."""

    def __init__(self, plan: Plan, shared):
        self.slots, self.start, self.arrivals = plan.slots, shared + plan.ring_start, shared + plan.arrivals_start

    def slot(self, slot):
        return self.start + slot * SLOT_BYTES

    def filled(self, slot):
        return self.arrivals + 8 * slot

    def emptied(self, slot):
        return self.arrivals + 8 * (slot + MOST_SLOTS)

    def following(self, slot, parity) -> tuple:
        """The next slot, and its parity."""
        last = slot == self.slots - 1
        return w.select(last, w.i32(0), slot + 1), w.select(last, parity ^ 1, parity)


# The warps that copy -------------------------------------------------------------------------------------------------------


def copy(plan: Plan, at: dict, share: Share, ring: Ring, warp, lane) -> None:
    """Fills the ring, with all passes of all stages."""
    carry = (w.i32(0), w.i32(1))
    for number in range(len(plan.stages)):
        carry = copy_stage(plan, number, at, share, ring, warp, lane, carry)


def copy_stage(plan: Plan, number: int, at: dict, share: Share, ring: Ring, warp, lane, carry: tuple) -> tuple:
    """carry: slot of the ring, and its parity."""
    stage = plan.stages[number]
    passes, groups = plan.passes(stage), share.groups(stage)
    lower, upper = share.tiles(stage)

    def step(unit, carry):
        slot, parity = carry
        w.wait_for_arrivals(ring.emptied(slot), parity)
        source = lambda name, output: weight_row(stage, number, at, name, unit // passes, output)
        copy_pass(stage, groups, unit % passes * PASS, source, ring.slot(slot), ring.filled(slot), warp, lane)
        return ring.following(slot, parity)

    return w.loop(lower * passes, upper * passes, carry, step)


def copy_pass(stage: Stage, groups: tuple, before, source, slot, arrival, warp, lane) -> None:
    """A warp's rows of a tile in a pass, which begins `before` groups into the slice; scales and zeros are 0 for groups that are not
    there."""
    rows, words = TILE // COPIERS, PASS // 2  # words of scales hold two groups each
    first, count = groups
    left = w.minimum(w.maximum(count - before, w.i32(0)), w.i32(PASS))
    row_bytes = left * CODE_BYTES
    with w.when(lane == 0):
        w.arrive_with(arrival, row_bytes * rows)
    with w.when((lane < rows) & (w.i32(0) < left)):
        output = warp * rows + lane
        array, row = source("codes", output)
        place = w.i64(row) * stage.groups + w.i64(first + before)
        w.copy_bulk(slot + output * CODE_PITCH, array + place * CODE_BYTES, row_bytes, arrival)
    output, pair = warp * rows + lane // words, lane % words * 2
    there = pair < left
    group = w.i64(first + w.select(there, before + pair, w.i32(0)))
    for i, name in enumerate(("scale", "zero")):
        array, row = source(name, output)
        to = slot + TILE * CODE_PITCH + (output + i * TILE) * PARAMETER_PITCH + pair * 2
        w.copy_async(to, array + (w.i64(row) * stage.groups + group) * 2, w.select(there, w.i32(4), w.i32(0)), width=4)
    w.arrive_after_copies(arrival)


def weight_row(stage: Stage, number: int, at: dict, name: str, tile, output) -> tuple:
    """The array of the stage's weight that an output of a tile belongs to, and its row there."""
    arrays = [at[f"{name}{number}_{i}"] for i in range(len(stage.outputs))]
    if stage.gated:  # half a tile of each
        half = TILE // 2
        return w.select(output < half, *arrays), tile * half + (output & (half - 1))
    row = tile * TILE + output
    array, before, local = arrays[0], 0, row
    for outputs, other in zip(stage.outputs, arrays[1:]):
        before += outputs
        beyond = w.i32(before - 1) < row
        array, local = w.select(beyond, other, array), w.select(beyond, row - before, local)
    return array, local


# The warps that compute ----------------------------------------------------------------------------------------------------


def compute(plan: Plan, at: dict, share: Share, ring: Ring, warp, thread) -> None:
    x = Activations(plan, at, share, warp, thread)
    carry = (w.i32(0), w.i32(0), w.i32(0))
    mask, _ = w.nibble_masks(thread >> 31)
    norms = 0
    for number, stage in enumerate(plan.stages):
        before = at[f"y{number - 1}"] if number else at["x"]
        residual = x.fetch_residual(stage, norms) if stage.normed else None
        if number:
            meet(plan, at["arrivals"] + 4 * (number - 1), thread)
        if stage.normed:
            x.place_normed(stage, norms, before, residual)
            norms += 1
        else:
            x.place(stage, before)
        everyone()
        carry = multiply(plan, stage, at[f"y{number}"], share, ring, x, mask, carry)


def everyone() -> None:
    """Waits for all warps that compute."""
    w.synchronize(w.i32(1), WARPS)


def meet(plan: Plan, counter, thread) -> None:
    """Waits for all blocks to have come here, and sees what they have written."""
    everyone()
    with w.when(thread == 0):
        w.add_released(counter, w.i32(1))
        w.wait_acquired(counter, w.i32(plan.blocks))
    everyone()


class Activations:
    """In shared memory: the inputs of a stage [row][input], in pairs (0, 2) and (1, 3) of every four, 0 for groups that are not there;
    their sums over groups [group][row]."""

    def __init__(self, plan: Plan, at: dict, share: Share, warp, thread):
        self.plan, self.at, self.share, self.warp, self.thread, self.lane = plan, at, share, warp, thread, thread & 31
        self.x = at["shared"]
        self.sums = self.x + plan.x_bytes
        self.squares = self.sums + plan.room * plan.group_pitch

    def pieces(self, stage: Stage) -> list:
        """(row, piece of the row in the slice) of this thread, wherever there is room."""
        count = self.plan.passes(stage) * PASS * PIECES
        return [(row, self.thread + start) for row in range(self.plan.rows) for start in range(0, count, THREADS)]

    def load(self, array, stage: Stage, row: int, piece) -> list:
        """A piece of a row, 0 where there is none."""
        first, count = self.share.groups(stage)
        there = piece < count * PIECES
        place = first * PIECES + w.select(there, piece, w.i32(0))
        words = w.load_global(array + w.i64(place * (2 * NUMBERS)) + row * (2 * GROUP_SIZE * stage.groups), NUMBERS // 2)
        return [w.select(there, word, w.i32(0)) for word in words]

    def place(self, stage: Stage, array) -> None:
        """Copies a stage's inputs."""
        pieces = self.pieces(stage)
        found = [self.load(array, stage, *piece) for piece in pieces]
        for (row, piece), words in zip(pieces, found):
            self.put(stage, row, piece, words)

    def put(self, stage: Stage, row: int, piece, words: list) -> None:
        total = w.total([x for word in words for x in w.bf16_entries(word)])
        for bit in (1, 2, 4, 8):
            total = total + w.shuffle("bfly", total, bit)
        with w.when(piece < self.plan.passes(stage) * (PASS * PIECES)):
            to = self.x + row * self.plan.x_pitch + piece * (2 * NUMBERS)
            w.store_shared(to, *w.swap_neighbours(*words[:2]), *w.swap_neighbours(*words[2:]))
            with w.when((self.lane & (PIECES - 1)) == 0):
                w.store_shared(self.sums + piece // PIECES * self.plan.group_pitch + row * 4, total)

    def fetch_residual(self, stage: Stage, norm: int) -> list:
        """The residual stream and the norm's weight, where this thread's pieces are."""
        x, weight = self.at[f"residual{norm}"], self.at[f"norm{norm}"]
        return [(self.load(x, stage, row, piece), self.load(weight, stage, 0, piece)) for row, piece in self.pieces(stage)]

    def place_normed(self, stage: Stage, norm: int, added, residual: list) -> None:
        """The residual stream with what is added, which the first block writes, and its norm."""
        plan, pieces, width = self.plan, self.pieces(stage), stage.groups * GROUP_SIZE
        found = [self.load(added, stage, *piece) for piece in pieces]
        totals, squares = [], [w.f32(0.0)] * plan.rows
        for (row, piece), words, (x, _) in zip(pieces, found, residual):
            words = [w.combine_bf16(w.add, a, b) for a, b in zip(x, words)]
            with w.when((self.share.block == 0) & (piece < width // NUMBERS)):
                w.store_global_words(self.at[f"residual{norm + 1}"] + w.i64(piece * (2 * NUMBERS)) + row * (2 * width), *words)
            squares[row] = w.total([squares[row], *(x * x for word in words for x in w.bf16_entries(word))])
            totals.append(words)
        for row, square in enumerate(squares):
            square = w.all_rows(w.all_columns(square, w.add), w.add)
            with w.when(self.lane == 0):
                w.store_shared(self.squares + row * (4 * WARPS) + self.warp * 4, square)
        everyone()
        means = [w.total(w.load_shared(self.squares + row * (4 * WARPS), WARPS, "f")) * (1 / width) for row in range(plan.rows)]
        scales = [w.rsqrt(mean + plan.eps) for mean in means]
        for (row, piece), words, (_, weights) in zip(pieces, totals, residual):
            rounded = [w.pair(*(x * scales[row] for x in w.bf16_entries(word)), "bf16") for word in words]
            self.put(stage, row, piece, [w.combine_bf16(w.multiply, x, weight) for x, weight in zip(rounded, weights)])

    def operands(self, number, n: int) -> tuple[list, tuple]:
        """Of the warp's group in a pass, row tile n: [half][step] a pair of words for each word of codes (word s of a lane's codes holds
        inputs 4 (STEPS t + s) .. + 3 of a group's first half in the low nibbles, of its second half in the high ones), and the sums of rows
        2 t and 2 t + 1. Rows that are not there repeat the last."""
        g, t = self.lane >> 2, self.lane & 3
        group = number * PASS + self.warp
        row = w.minimum(g + n * ROWS, w.i32(self.plan.rows - 1))
        at = self.x + row * self.plan.x_pitch + group * (2 * GROUP_SIZE) + t * (8 * STEPS)
        halves = [w.load_shared(at + half * GROUP_SIZE, 2 * STEPS) for half in (0, 1)]
        sums = w.load_shared(self.sums + group * self.plan.group_pitch + (n * ROWS + 2 * t) * 4, 2, "f")
        return [[words[2 * s : 2 * s + 2] for s in range(STEPS)] for words in halves], sums


def multiply(plan: Plan, stage: Stage, y, share: Share, ring: Ring, x: Activations, mask, carry: tuple) -> tuple:
    """The block's tiles of a stage. carry: slot of the ring, its parity, and which of the buffers of sums."""
    lane, warp = x.lane, x.warp
    g, t = lane >> 2, lane & 3
    codes_at = g * CODE_PITCH + warp * CODE_BYTES + t * 16
    parameters_at = TILE * CODE_PITCH + g * PARAMETER_PITCH + (warp >> 1) * 4
    shift = ((warp & 1) ^ 1) << 4  # a word holds two groups: to the upper half

    def step(tile, carry):
        slot, parity, buffer = carry

        def one_pass(number, carry):
            slot, parity, totals = carry
            operands = [x.operands(number, n) for n in range(plan.row_tiles)]
            w.wait_for_arrivals(ring.filled(slot), parity)
            start = ring.slot(slot)
            codes = [w.load_shared(start + codes_at + more * CODE_PITCH, STEPS) for more in (0, 8)]
            one = lambda row: w.as_float((w.load_shared(start + parameters_at + row * PARAMETER_PITCH, 1)[0] << shift) & 0xFFFF0000)
            parameters = [(one(row), one(TILE + row)) for row in (0, 8)]
            totals = add_group(totals, codes, parameters, *zip(*operands), mask)
            w.synchronize(None, 1)
            with w.when(lane == 0):
                w.arrive(ring.emptied(slot))
            return *ring.following(slot, parity), totals

        totals = [[w.f32(0.0)] * 4 for _ in range(plan.row_tiles)]
        slot, parity, totals = w.loop(w.i32(0), w.i32(plan.passes(stage)), (slot, parity, totals), one_pass)
        sums = x.x + plan.sums_start + buffer * (WARPS * plan.tile_bytes)
        for n, total in enumerate(totals):
            w.store_shared(sums + warp * plan.tile_bytes + n * (4 * TILE * ROWS) + lane * 16, *total)
        # All are there, and all are done with the other buffer.
        everyone()
        finish_tile(plan, stage, sums, y, x.thread, tile, share.part)
        return slot, parity, buffer ^ 1

    return w.loop(*share.tiles(stage), carry, step)


def add_group(totals: list, codes: list, parameters: list, x: list, sums: list, mask) -> list:
    """totals [row tile][2 i + c], outputs g + 8 i and rows 2 t + c, and the products of one more group."""
    # A chain for each half, for a product waits for the one before it.
    acc = [[(w.f32(0.0),) * 4 for _ in totals] for half in (0, 1)]
    for s in range(STEPS):
        a, b = (w.unpack_bf16(row[s], mask) for row in codes)
        for half in (0, 1):
            fragment = (a[half][0], b[half][0], a[half][1], b[half][1])
            acc[half] = [w.mma(old, fragment, x[n][half][s], "bf16") for n, old in enumerate(acc[half])]
    new = []
    for n, total in enumerate(totals):
        products = [low + high for low, high in zip(acc[0][n], acc[1][n])]
        new.append([])
        for i, (scale, zero) in enumerate(parameters):
            zero = zero - scale * EXCESS
            new[n] += [w.fma(products[2 * i + c], scale, w.fma(sums[n][c], zero, total[2 * i + c])) for c in (0, 1)]
    return new


def finish_tile(plan: Plan, stage: Stage, sums, y, thread, tile, part) -> None:
    """Adds what the warps found of a tile, a number a thread, and writes it."""
    outputs = stage.tile_outputs
    with w.when(thread < plan.rows * outputs):
        row, output = thread // outputs, thread % outputs
        # Where `totals` of this row and output lie, and those of output + 8.
        lane, register = (output & 7) * 4 + (row >> 1 & 3), (output >> 3) * 2 + (row & 1)
        at = sums + ((row >> 3) * (TILE * ROWS) + lane * 4 + register) * 4
        total = lambda at: w.total([w.load_shared(at + k * plan.tile_bytes, 1, "f")[0] for k in range(WARPS)])
        found = total(at)
        if stage.gated:
            gate, up = w.round_bf16(found), w.round_bf16(total(at + 8))
            found = w.round_bf16(gate / (w.exp2(gate * -LOG2_E) + 1.0)) * up
        place = w.i64(part * plan.rows + row) * stage.width + w.i64(tile * outputs + output)
        if plan.slices == 1:
            w.store_global_bf16(y + place * 2, found)
        else:
            w.store_global(y + place * 4, found)
