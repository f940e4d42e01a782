"""What a block of the Mosaic GPU INT4 matmul does.

Codes enter the tensor cores as 128 + code in bfloat16, which costs no arithmetic. What is too much is 128 times the sum of the
activations, and goes with the zero: y = scale (sum x (128 + code)) + (zero - 128 scale) sum x, group by group.
"""

from pallas_kernels import warp as w
from pallas_kernels.matmul.mosaic_gpu import GROUP_SIZE, ROWS, TILE, WARPS, Plan

EXCESS = 128.0
ONES = 0x3F803F80  # a pair of bfloat16
CODE_BYTES = GROUP_SIZE // 2  # of a group of one output
STEPS = GROUP_SIZE // 32  # words of a lane in a group


def emit_block(plan: Plan, refs: dict) -> None:
    """Its tiles of outputs, over its slice of the inputs."""
    at = {name: w.address(ref) for name, ref in refs.items()}
    thread, block = w.thread_index(), w.block_index()
    lane, warp = thread & 31, w.uniform(thread >> 5)
    part, block = block // plan.blocks, block % plan.blocks
    lower, upper = (block * plan.tiles // plan.blocks, (block + 1) * plan.tiles // plan.blocks)
    end = w.minimum((part + 1) * plan.slice_groups, w.i32(plan.groups))
    first = part * plan.slice_groups + warp * plan.kept
    ring = Ring(plan, at, lane, first, end, at["shared"] + 2 * plan.sum_bytes + warp * (plan.slots * plan.slot_bytes), upper)
    for i in range(plan.slots - 1):
        ring.issue(lower + i, w.i32(i))
    x = activations(plan, at["x"], lane, first)
    sums = [[group_sums(tile) for tile in group] for group in x]
    mask, _ = w.nibble_masks(lower >> 31)
    advance = lambda slot: w.select(slot == plan.slots - 1, w.i32(0), slot + 1)

    def step(tile, carry):
        slot, buffer = carry
        w.wait_for_copies(plan.slots - 2)
        w.synchronize(None, 1)
        before = w.select(slot == 0, w.i32(plan.slots - 1), slot - 1)
        ring.issue(tile + (plan.slots - 1), before)
        totals = tile_sums(plan, ring.at(slot), lane, x, sums, mask)
        mine = at["shared"] + buffer * plan.sum_bytes
        for n, total in enumerate(totals):
            w.store_shared(mine + (warp * plan.row_tiles + n) * (TILE * ROWS * 4) + lane * 16, *total)
        # Once all have met here, all are done with the other buffer.
        w.synchronize(w.i32(0), WARPS)
        finish_tile(plan, mine, at["y"], thread, tile, part)
        return advance(slot), buffer ^ 1

    w.loop(lower, upper, (w.i32(0), w.i32(0)), step)


class Ring:
    """A warp's groups of the tiles to come: codes [group][output][64 bytes], scales and zeros [output][group]."""

    def __init__(self, plan: Plan, at: dict, lane, first, end, start, upper):
        self.plan, self.arrays, self.lane, self.first, self.start, self.upper = plan, at, lane, first, start, upper
        # An even number of groups: what is beyond the end has no codes, and scale and zero 0.
        self.count = w.minimum(w.maximum(end - first, w.i32(0)), w.i32(plan.kept))

    def at(self, slot):
        return self.start + slot * self.plan.slot_bytes

    def issue(self, tile, slot) -> None:
        """Copies a tile in the background, if the block has it."""
        plan, lane = self.plan, self.lane
        with w.when(tile < self.upper):
            to = self.at(slot)
            arrays, tile = self._of_tile(tile)
            output = w.i64(tile * TILE + (lane >> 2))
            source = arrays["codes"] + (output * plan.groups + w.i64(self.first)) * CODE_BYTES + w.i64((lane & 3) * 16)
            eight = 8 * plan.groups * CODE_BYTES
            for group in range(plan.kept):
                with w.when(w.i32(group) < self.count):
                    here = to + group * (TILE * CODE_BYTES) + lane * 16
                    w.copy_async(here, source + group * CODE_BYTES)
                    w.copy_async(here + 8 * CODE_BYTES, source + (eight + group * CODE_BYTES))
            is_scale = lane < TILE
            source = w.select(is_scale, arrays["scale"], arrays["zero"])
            output = w.i64(tile * TILE + (lane & (TILE - 1)))
            to = to + TILE * plan.kept * CODE_BYTES + lane * (2 * plan.kept)
            for pair in range(0, plan.kept, 2):
                there = w.i32(pair) < self.count
                group = self.first + w.select(there, w.i32(pair), w.i32(0))
                group = w.minimum(group, w.i32(plan.groups - 2))
                at = source + (output * plan.groups + w.i64(group)) * 2
                w.copy_async(to + 2 * pair, at, w.select(there, w.i32(4), w.i32(0)), width=4)
        w.commit_copies()

    def _of_tile(self, tile) -> tuple[dict, w.Value]:
        """The arrays of the weight that a tile of all outputs belongs to, and its number there."""
        arrays = {name: self.arrays[f"{name}0"] for name in ("codes", "scale", "zero")}
        before, number = 0, tile
        for i, outputs in enumerate(self.plan.outputs[:-1]):
            before += outputs // TILE
            beyond = w.i32(before - 1) < tile
            arrays = {name: w.select(beyond, self.arrays[f"{name}{i + 1}"], array) for name, array in arrays.items()}
            number = w.select(beyond, tile - before, number)
        return arrays, number


def activations(plan: Plan, x, lane, first) -> list:
    """This lane's operands [group][row tile][half][step] of its warp's groups: a pair of words for each word of codes.

    Word s of a lane holds inputs 4 (STEPS t + s) .. + 3 of a group's first half in the low nibbles, of its second half in the high ones.
    Rows and groups that are not there repeat the last.
    """
    g, t = lane >> 2, lane & 3
    inputs = plan.groups * GROUP_SIZE

    def operands(group, n) -> list:
        row = w.minimum(g + n * ROWS, w.i32(plan.rows - 1))
        start = x + w.i64(row) * (2 * inputs) + w.i64(group * (2 * GROUP_SIZE) + t * (8 * STEPS))
        halves = []
        for half in (0, 1):
            words = [word for i in range(0, 2 * STEPS, 4) for word in w.load_global(start + half * GROUP_SIZE + 4 * i, 4)]
            halves.append([w.swap_neighbours(*words[2 * s : 2 * s + 2]) for s in range(STEPS)])
        return halves

    groups = [w.minimum(first + i, w.i32(plan.groups - 1)) for i in range(plan.kept)]
    return [[operands(group, n) for n in range(plan.row_tiles)] for group in groups]


def group_sums(operands: list) -> tuple:
    """Sums of rows 2 t and 2 t + 1 over a group."""
    acc, ones = (w.f32(0.0),) * 4, (w.i32(ONES),) * 4
    for half in operands:
        for x in half:
            acc = w.mma(acc, ones, x, "bf16")
    return acc[:2]


def tile_sums(plan: Plan, slot, lane, x: list, sums: list, mask) -> list:
    """This warp's part of a tile [row tile][c]: outputs g and g + 8, rows 2 t and 2 t + 1."""
    g, t = lane >> 2, lane & 3
    parameters = slot + TILE * plan.kept * CODE_BYTES
    pairs = plan.kept // 2
    together = pairs & -pairs  # as many as are aligned
    words = lambda at: [word for i in range(0, pairs, together) for word in w.load_shared(at + 4 * i, together)]
    load = lambda row: [y for word in words(parameters + row * (2 * plan.kept)) for y in w.bf16_entries(word)]
    scales, zeros = ([load(g + (8 * i + TILE * zero)) for i in (0, 1)] for zero in (0, 1))
    totals = [[w.f32(0.0)] * 4 for _ in range(plan.row_tiles)]
    for group in range(plan.kept):
        at = slot + group * (TILE * CODE_BYTES) + g * CODE_BYTES + t * (4 * STEPS)
        codes = [w.load_shared(at + i * (8 * CODE_BYTES), STEPS) for i in (0, 1)]
        acc = [(w.f32(0.0),) * 4 for _ in totals]
        for s in range(STEPS):
            a, b = (w.unpack_bf16(row[s], mask) for row in codes)
            for half in (0, 1):
                fragment = (a[half][0], b[half][0], a[half][1], b[half][1])
                acc = [w.mma(acc[n], fragment, x[group][n][half][s], "bf16") for n in range(len(acc))]
        for i in (0, 1):
            scale = scales[i][group]
            zero = zeros[i][group] - scale * EXCESS
            for n, total in enumerate(totals):
                for c in (0, 1):
                    y = w.fma(sums[group][n][c], zero, total[2 * i + c])
                    total[2 * i + c] = w.fma(acc[n][2 * i + c], scale, y)
    return totals


def finish_tile(plan: Plan, sums, y, thread, tile, part) -> None:
    """Adds what the warps found of a tile, a number a thread, and writes it."""
    size = TILE * ROWS
    for start in range(0, plan.row_tiles * size, 32 * WARPS):
        i = thread + start
        with w.when(i < plan.row_tiles * size):
            values = [w.load_shared(sums + (k * plan.row_tiles * size) * 4 + i * 4, 1, "f")[0] for k in range(WARPS)]
            total = w.total(values)
            lane, c = i % size >> 2, i & 3
            row = i // size * ROWS + (lane & 3) * 2 + (c & 1)
            output = tile * TILE + (lane >> 2) + (c >> 1) * 8
            with w.when(row < plan.rows):
                if plan.slices == 1:
                    w.store_global_bf16(y + (w.i64(row) * sum(plan.outputs) + w.i64(output)) * 2, total)
                else:
                    place = (w.i64(part * plan.rows + row) * sum(plan.outputs) + w.i64(output)) * 4
                    w.store_global(y + place, total)
