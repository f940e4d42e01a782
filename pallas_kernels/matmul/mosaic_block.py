"""What a block of the Mosaic GPU INT4 matmul does.

Codes enter the tensor cores as 128 + code in bfloat16, which costs no arithmetic. What is too much is 128 times the sum of the
activations, and goes with the zero: y = scale (sum x (128 + code)) + (zero - 128 scale) sum x, group by group.
"""

from pallas_kernels import warp as w
from pallas_kernels.matmul.mosaic_gpu import CODE_BYTES, GROUP_SIZE, ROWS, TEAM, TEAMS, TILE, Plan

EXCESS = 128.0
ONES = 0x3F803F80  # a pair of bfloat16
STEPS = GROUP_SIZE // 32  # words of a lane in a group


def emit_block(plan: Plan, refs: dict) -> None:
    """The tiles of its teams, over its slice of the inputs."""
    at = {name: w.address(ref) for name, ref in refs.items()}
    thread, block = w.thread_index(), w.block_index()
    part, block = block // plan.blocks, block % plan.blocks
    first = part * plan.slice_groups
    count = w.minimum(w.i32(plan.groups) - first, w.i32(plan.slice_groups))
    me = Place(plan, thread, at["shared"])
    team, teams = block * TEAMS + me.team, plan.blocks * TEAMS
    lower, upper = (team * plan.tiles // teams, (team + 1) * plan.tiles // teams)
    parameters = Parameters(plan, at, me, first, count, upper)
    ring = Ring(plan, at, me, first, count, upper)

    def issue(tile, unit: int, slot, parameter_slot) -> None:
        """Copies the unit-th pass from a tile's first on in the background; parameter_slot: of the tile that it belongs to."""
        ahead, number = divmod(unit, plan.passes)
        if number == 0:
            parameters.issue(tile + ahead, parameter_slot)
        ring.issue(tile + ahead, number, slot)
        w.commit_copies()

    for unit in range(plan.slots - 1):
        issue(lower, unit, w.i32(unit), w.i32(unit // plan.passes))
    place_activations(plan, at["x"], at["shared"], thread, first, count)
    w.wait_for_copies(plan.slots - 2)
    w.synchronize(w.i32(0), TEAM * TEAMS)
    operands = Operands(plan, at["shared"], me)
    sums = [[group_sums(operands.of(i, n)) for n in range(plan.row_tiles)] for i in range(2 * plan.passes)]
    mask, _ = w.nibble_masks(lower >> 31)
    after = lambda slot, slots: w.select(slot == slots - 1, w.i32(0), slot + 1)

    def step(tile, carry):
        slot, parameter_slot, buffer = carry
        totals = [[w.f32(0.0)] * 4 for _ in range(plan.row_tiles)]
        for p in range(plan.passes):
            w.wait_for_copies(plan.slots - 2)
            w.synchronize(None, 1)
            ahead, number = divmod(p + plan.slots - 1, plan.passes)
            before = w.select(slot == 0, w.i32(plan.slots - 1), slot - 1)
            issue(tile, p + plan.slots - 1, before, (parameter_slot + ahead) % plan.tiles_ahead if number == 0 else None)
            scales = parameters.load(parameter_slot, p)
            for i in (0, 1):
                x = [operands.of(2 * p + i, n) for n in range(plan.row_tiles)]
                totals = add_group(totals, ring.load(slot, i), scales[i], x, sums[2 * p + i], mask)
            slot = after(slot, plan.slots)
        mine = me.sums + buffer * plan.sum_bytes
        for n, total in enumerate(totals):
            w.store_shared(mine + (me.warp * plan.row_tiles + n) * (TILE * ROWS * 4) + me.lane * 16, *total)
        # Parameters of the next tile are there for all, once all have met here; and all are done with the other buffer.
        w.wait_for_copies(plan.slots - 2)
        w.synchronize(me.team + 1, TEAM)
        finish_tile(plan, mine, at["y"], me.thread, tile, part)
        return slot, after(parameter_slot, plan.tiles_ahead), buffer ^ 1

    w.loop(lower, upper, (w.i32(0), w.i32(0), w.i32(0)), step)


class Place:
    """Where a thread is in its team, and where in shared memory the team has its sums, parameters and rings, behind all activations."""

    def __init__(self, plan: Plan, thread, shared):
        warp = w.uniform(thread >> 5)
        self.team, self.warp, self.lane = warp // TEAM, warp % TEAM, thread & 31
        self.thread = self.warp * 32 + self.lane
        self.sums = shared + plan.x_bytes + self.team * plan.team_bytes
        self.parameters = self.sums + 2 * plan.sum_bytes
        self.ring = self.parameters + plan.tiles_ahead * plan.parameter_bytes + self.warp * (plan.slots * plan.slot_bytes)


def arrays_of_tile(plan: Plan, at: dict, tile) -> tuple[dict, w.Value]:
    """The arrays of the weight that a tile of all outputs belongs to, and its number there."""
    names = "codes", "scale", "zero"
    arrays = {name: at[f"{name}0"] for name in names}
    before, number = 0, tile
    for i, outputs in enumerate(plan.outputs[:-1]):
        before += outputs // TILE
        beyond = w.i32(before - 1) < tile
        arrays = {name: w.select(beyond, at[f"{name}{i + 1}"], array) for name, array in arrays.items()}
        number = w.select(beyond, tile - before, number)
    return arrays, number


class Ring:
    """A warp's codes of the passes to come, two groups of a tile each: [output][128 bytes], whole lines of the memory.

    Of odd outputs the groups change places, so that a group of two outputs lies in different banks.
    """

    def __init__(self, plan: Plan, at: dict, me: Place, first, count, upper):
        self.plan, self.at, self.lane, self.start, self.upper = plan, at, me.lane, me.ring, upper
        self.first, self.left = first + me.warp * 2, count - me.warp * 2

    def issue(self, tile, number: int, slot) -> None:
        """The warp's groups of pass `number`, if the team has the tile and the slice the groups."""
        plan, piece = self.plan, self.lane & 7
        with w.when((tile < self.upper) & (w.i32(number * 2 * TEAM) < self.left)):
            arrays, tile = arrays_of_tile(plan, self.at, tile)
            output = self.lane >> 3
            group = w.i64(self.first + number * (2 * TEAM))
            source = arrays["codes"] + (w.i64(tile * TILE + output) * plan.groups + group) * CODE_BYTES + w.i64(piece * 16)
            to = self.start + slot * plan.slot_bytes + output * (2 * CODE_BYTES) + (piece ^ (output & 1) * 4) * 16
            for more in range(0, TILE, 4):
                w.copy_async(to + more * (2 * CODE_BYTES), source + more * plan.groups * CODE_BYTES)

    def load(self, slot, i: int) -> list:
        """This lane's words of outputs g and g + 8 of one of the groups."""
        g, t = self.lane >> 2, self.lane & 3
        at = self.start + slot * self.plan.slot_bytes + g * (2 * CODE_BYTES) + ((g & 1) ^ i) * CODE_BYTES + t * 16
        return [w.load_shared(at + more * (2 * CODE_BYTES), STEPS) for more in (0, 8)]


class Parameters:
    """Scales and zeros of the tiles to come [array][output][group], which the team copies: 0 for groups that are not there."""

    def __init__(self, plan: Plan, at: dict, me: Place, first, count, upper):
        self.plan, self.at, self.me, self.upper = plan, at, me, upper
        self.first, self.count = first, count

    def issue(self, tile, slot) -> None:
        """Copies those of a tile, if the team has it."""
        plan = self.plan
        words = plan.room // 2  # of an output, two groups each
        with w.when(tile < self.upper):
            arrays, tile = arrays_of_tile(plan, self.at, tile)
            for start in range(0, 2 * TILE * words, 32 * TEAM):
                i = self.me.thread + start
                row, pair = i // words, i % words * 2
                with w.when(row < 2 * TILE):
                    there = pair < self.count
                    group = w.select(there, self.first + pair, self.first)
                    array = w.select(row < TILE, arrays["scale"], arrays["zero"])
                    output = w.i64(tile * TILE + (row & (TILE - 1)))
                    to = self.me.parameters + slot * plan.parameter_bytes + row * plan.parameter_pitch + pair * 2
                    size = w.select(there, w.i32(4), w.i32(0))
                    w.copy_async(to, array + (output * plan.groups + w.i64(group)) * 2, size, width=4)

    def load(self, slot, number: int) -> list:
        """For both groups of the warp's pass `number`: (scale, zero) of outputs g and g + 8."""
        plan = self.plan
        pair = self.me.warp + number * TEAM
        at = self.me.parameters + slot * plan.parameter_bytes + (self.me.lane >> 2) * plan.parameter_pitch + pair * 4
        word = lambda row: w.bf16_entries(w.load_shared(at + row * plan.parameter_pitch, 1)[0])
        both = [(word(row), word(TILE + row)) for row in (0, 8)]
        return [[(scales[i], zeros[i]) for scales, zeros in both] for i in (0, 1)]


def place_activations(plan: Plan, x, shared, thread, first, count) -> None:
    """Copies the slice's activations to shared memory, in pairs (0, 2) and (1, 3) of every four; zeros for groups that are not there."""
    pieces = plan.room * GROUP_SIZE // 8
    for start in range(0, plan.rows * pieces, 32 * TEAM * TEAMS):
        i = thread + start
        row, piece = i // pieces, i % pieces
        with w.when(row < plan.rows):
            there = piece < count * (GROUP_SIZE // 8)
            piece_there = w.select(there, piece, w.i32(0))
            source = x + w.i64(row) * (2 * GROUP_SIZE * plan.groups) + w.i64(first * (2 * GROUP_SIZE) + piece_there * 16)
            words = [w.select(there, word, w.i32(0)) for word in w.load_global(source, 4)]
            w.store_shared(shared + row * plan.x_pitch + piece * 16, *w.swap_neighbours(*words[:2]), *w.swap_neighbours(*words[2:]))


class Operands:
    """Activations as operands: word s of a lane's codes holds inputs 4 (STEPS t + s) .. + 3 of a group's first half in the low nibbles, of
    its second half in the high ones."""

    def __init__(self, plan: Plan, x, me: Place):
        self.plan, self.g = plan, me.lane >> 2
        self.start = x + me.warp * (4 * GROUP_SIZE) + (me.lane & 3) * (8 * STEPS)

    def of(self, number: int, n: int) -> list:
        """[half][step] of the warp's group `number`, row tile n: a pair of words for each word of codes. Rows that are not there repeat
        the last."""
        row = w.minimum(self.g + n * ROWS, w.i32(self.plan.rows - 1))
        at = self.start + row * self.plan.x_pitch + (number // 2 * 2 * TEAM + number % 2) * (2 * GROUP_SIZE)
        halves = [w.load_shared(at + half * GROUP_SIZE, 2 * STEPS) for half in (0, 1)]
        return [[words[2 * s : 2 * s + 2] for s in range(STEPS)] for words in halves]


def group_sums(operands: list) -> tuple:
    """Sums of rows 2 t and 2 t + 1 over a group."""
    acc, ones = (w.f32(0.0),) * 4, (w.i32(ONES),) * 4
    for half in operands:
        for x in half:
            acc = w.mma(acc, ones, x, "bf16")
    return acc[:2]


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


def finish_tile(plan: Plan, sums, y, thread, tile, part) -> None:
    """Adds what the warps found of a tile, a number a thread, and writes it."""
    numbers = plan.row_tiles * TILE * ROWS
    for start in range(0, plan.rows * TILE, 32 * TEAM):
        i = thread + start
        with w.when(i < plan.rows * TILE):
            row, output = i // TILE, i % TILE
            # Where `totals` of this row and output lie.
            lane, register = (output & 7) * 4 + (row >> 1 & 3), (output >> 3) * 2 + (row & 1)
            at = sums + ((row >> 3) * (TILE * ROWS) + lane * 4 + register) * 4
            total = w.total([w.load_shared(at + k * (4 * numbers), 1, "f")[0] for k in range(TEAM)])
            output = w.i64(tile * TILE + output)
            if plan.slices == 1:
                w.store_global_bf16(y + (w.i64(row) * sum(plan.outputs) + output) * 2, total)
            else:
                w.store_global(y + (w.i64(part * plan.rows + row) * sum(plan.outputs) + output) * 4, total)
