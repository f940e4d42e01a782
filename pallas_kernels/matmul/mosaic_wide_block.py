"""The program of a block of the Mosaic GPU matmul with INT4 weights of many rows, or nested ones.

A ring holds steps of some groups of inputs: two warps copy the tile's codes as they are, two the activations of all rows in the order in
which the tensor cores take them. A math warp makes weights of its 16 outputs' codes, in bfloat16, in the registers from which the
tensor cores multiply them by the activations in shared memory; what it unpacks next is unpacked meanwhile. Scales and zeros come through a
ring of their own, those of several steps at once. The blocks of a cluster leave their sums in shared memory, where the others read them.

A slot holds codes [plane][output][16 bytes], of which those of row r change places by r % 8, so that a column of them lies in different
banks, and activations as `fragments.start_products` reads them. docs/kernels/matmul.md has more ("INT4 matmul of many rows").
"""

from pallas_kernels.gpu import fragments, numerics, ptx
from pallas_kernels.gpu.ring import Ring, arrive_for_warp
from pallas_kernels.matmul.mosaic_wide_plan import (
    CODE_BYTES,
    CODE_WARPS,
    COLUMN_BYTES,
    COLUMNS,
    GROUP_SIZE,
    MMA_BYTES,
    PARAMETER_GROUPS,
    PARAMETER_SLOTS,
    PIECES_AT_ONCE,
    STEP_GROUPS,
    WARP_OUTPUTS,
    X_BYTES,
    X_WARPS,
    Plan,
)
from pallas_kernels.matmul.support import PLANES
from pallas_kernels.matmul.tiles import ClusterShare, add_clusters, row_of, sums_of_cluster

CODE_LANES = 32 * CODE_WARPS
PIECE_BYTES = 16  # that a lane copies at once
SUMS_BYTES = 16  # of a lane's sums of a tile of rows
ONES = 0x3F803F80  # a pair of bfloat16


def share_of(plan: Plan, block) -> ClusterShare:
    """The tiles that a block works on, and the steps of them."""
    return ClusterShare.of_block(block, cluster=plan.config.cluster, clusters=plan.clusters, tiles=plan.tiles, parts=plan.steps)


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block: its rings, and the program of each kind of warp."""
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread, block = ptx.thread_index(), ptx.block_index()
    warp, lane = ptx.uniform(thread >> 5), thread & 31
    shared = at["shared"]
    ring = Ring(plan.slots, shared, plan.slot_bytes, shared + plan.layout.at("barriers"))
    parameters = Ring(PARAMETER_SLOTS, shared + plan.layout.at("parameters"), plan.parameter_bytes, ring.barriers_end)
    share = share_of(plan, block)
    with ptx.when(thread == 0):
        # Every lane that copies codes arrives once its own are there, and one of a warp that stores activations.
        ring.start(CODE_LANES + X_WARPS, plan.math_warps)
        parameters.start(CODE_LANES, plan.math_warps)
    ptx.synchronize(ptx.i32(0), plan.warps)
    for part in range(plan.config.split):
        first = part * plan.tile_warps
        with ptx.when((ptx.i32(first - 1) < warp) & (warp < first + plan.tile_warps)):
            multiply(plan, at, share, ring, parameters, part, warp - first, lane)
    with ptx.when((ptx.i32(plan.math_warps - 1) < warp) & (warp < plan.math_warps + CODE_WARPS)):
        produce_codes(plan, at, share, ring, parameters, thread - 32 * plan.math_warps)
    with ptx.when(ptx.i32(plan.math_warps + CODE_WARPS - 1) < warp):
        produce_activations(plan, at["x"], share, ring, warp - (plan.math_warps + CODE_WARPS), lane)
    if plan.config.cluster > 1:
        add_clusters(lambda: add_blocks(plan, at, share, warp, lane))


def over_steps(plan: Plan, share: ClusterShare, carry, some):
    """Runs carry = some(first, last, carry) for the steps whose scales and zeros are one slot's, lot after lot, and returns the carry."""
    together = PARAMETER_GROUPS // STEP_GROUPS

    def one_lot(lot, carry):
        first = lot * together
        return some(first, ptx.minimum(share.count, first + together), carry)

    return ptx.loop(ptx.i32(0), (share.count + (together - 1)) // together, carry, one_lot)


# Warps that copy codes, scales and zeros ---------------------------------------------------------------------------------


def produce_codes(plan: Plan, at: dict, share: ClusterShare, ring: Ring, parameters: Ring, thread) -> None:
    """Fills slots with codes, and those of scales and zeros, for all steps of all tiles. thread: 0 to CODE_LANES - 1."""

    def one_tile(tile, carry):
        scales, zeros, *planes = (
            sources(plan, at, share, name, tile, thread) for name in ("scale", "zero", *PLANES[: plan.parameters.planes])
        )

        def some(first, last, carry):
            slot, parity, *carry = carry
            ptx.wait_for_arrivals(parameters.emptied_barrier(slot), parity)
            for i, array in enumerate((scales, zeros)):
                to = parameters.slot(slot) + i * (plan.tile * plan.parameter_pitch)
                copy_parameters(plan, array, share, first, to, thread)
            ptx.arrive_after_copies(parameters.filled_barrier(slot))
            return *parameters.following(slot, parity), *ptx.loop(first, last, carry, step)

        def step(number, carry):
            slot, parity = carry
            ptx.wait_for_arrivals(ring.emptied_barrier(slot), parity)
            for i, codes in enumerate(planes):
                copy_codes(plan, codes, number, ring.slot(slot) + i * plan.plane_bytes, thread)
            ptx.arrive_after_copies(ring.filled_barrier(slot))
            return ring.following(slot, parity)

        return over_steps(plan, share, carry, some)

    empty = ptx.i32(0), ptx.i32(1)
    ptx.loop(share.lower, share.upper, (*empty, *empty), one_tile)


def sources(plan: Plan, at: dict, share: ClusterShare, name: str, tile, thread) -> list:
    """Where the first output of each run of a tile has its numbers of an array, those from the block's first step on."""
    group_bytes = CODE_BYTES if name in PLANES else 2 * plan.parameters.subgroups
    within = ptx.i64(share.first) * (STEP_GROUPS * group_bytes)
    arrays, found = [at[f"{name}0_{i}"] for i in range(len(plan.outputs))], []
    for first in range(0, plan.tile, plan.run):
        # What is beyond the last output repeats the last.
        array, row = row_of(arrays, plan.outputs, ptx.minimum(tile * plan.tile + first, ptx.i32(plan.width - plan.run)))
        found.append(array + ptx.i64(row) * (plan.groups * group_bytes) + within)
    return found


def copy_codes(plan: Plan, codes: list, number, slot, thread) -> None:
    """Starts this lane's copies of the codes of a step. codes: see `sources`."""
    pieces, row_bytes = plan.code_pitch // PIECE_BYTES, plan.groups * CODE_BYTES
    output, piece = thread // pieces, thread % pieces
    within = ptx.i64(number) * plan.code_pitch + ptx.i64(output * row_bytes + piece * PIECE_BYTES)
    for first in range(0, plan.tile, CODE_LANES // pieces):
        to = slot + output * plan.code_pitch + (piece ^ ((output + first % 8) & 7)) * PIECE_BYTES
        source = codes[first // plan.run] + within + first % plan.run * row_bytes
        ptx.copy_async(to + first * plan.code_pitch, source)


def copy_parameters(plan: Plan, array: list, share: ClusterShare, first, to, thread) -> None:
    """Starts this lane's copies of scales or zeros, from step `first` on. array: see `sources`."""
    output, subgroups = thread >> 2, plan.parameters.subgroups
    row_bytes = plan.groups * (2 * subgroups)
    first_word = thread & 3
    for word in [first_word, *(first_word + 4 * i for i in range(1, subgroups))]:
        there = first * (STEP_GROUPS * subgroups) + word * 2 < share.count * (STEP_GROUPS * subgroups)
        within = ptx.i64(output * row_bytes + ptx.select(there, first * (2 * STEP_GROUPS * subgroups) + word * 4, ptx.i32(0)))
        size = ptx.select(there, ptx.i32(4), ptx.i32(0))
        at = to + output * plan.parameter_pitch + word * 4
        for more in range(0, plan.tile, CODE_LANES // 4):
            ptx.copy_async(at + more * plan.parameter_pitch, array[more // plan.run] + within + more % plan.run * row_bytes, size, width=4)


# Warps that copy activations ---------------------------------------------------------------------------------------------


def produce_activations(plan: Plan, x, share: ClusterShare, ring: Ring, warp, lane) -> None:
    """Fills slots with activations, for all steps of all tiles. x: their address. warp: 0 to X_WARPS - 1."""
    x = Activations(plan, x, share, warp, lane)
    first, *others = x.lots()

    def following(number):
        """After the last step comes the next tile's first."""
        return ptx.select(number + 1 < share.count, number + 1, ptx.i32(0))

    def one_tile(tile, carry):
        def step(number, carry):
            slot, parity, ahead, words, *later = carry
            ptx.wait_for_arrivals(ring.emptied_barrier(slot), parity)
            to = ring.slot(slot) + plan.code_bytes
            x.store(to, first, words)
            for lot in others:
                x.store(to, lot, x.load(number, lot))
            fragments.publish()
            arrive_for_warp(ring.filled_barrier(slot), lane)
            # Those of the next steps are on their way while a slot is waited for.
            return *ring.following(slot, parity), following(ahead), *later, x.load(ahead, first)

        return ptx.loop(ptx.i32(0), share.count, carry, step)

    ahead, words = ptx.i32(0), []
    for _ in range(plan.steps_ahead):
        words.append(x.load(ahead, first))
        ahead = following(ahead)
    ptx.loop(share.lower, share.upper, (ptx.i32(0), ptx.i32(1), ahead, *words), one_tile)


class Activations:
    """A lane's pieces of the activations of a step: 8 neighbouring inputs of a row each.

    A warp has 32 inputs of eight rows at a time, in columns that the warps take in turn. Half of it stores 128 bytes one after the other.
    """

    def __init__(self, plan: Plan, x, share: ClusterShare, warp, lane):
        self.plan = plan
        row, piece = (lane >> 1) & 7, lane >> 4 << 1 | lane & 1
        row_bytes = plan.groups * GROUP_SIZE * X_BYTES
        self.step_bytes = STEP_GROUPS * GROUP_SIZE * X_BYTES  # of a row
        start = x + ptx.i64(share.first) * self.step_bytes + ptx.i64(warp * COLUMN_BYTES + piece * PIECE_BYTES)
        # Rows that are not there repeat the last.
        rows = row, ptx.minimum(row + COLUMNS * (plan.row_tiles - 1), ptx.i32(plan.rows - 1))
        self.whole, self.last = (start + ptx.i64(row) * row_bytes for row in rows)
        self.tile_bytes = COLUMNS * row_bytes
        # Inputs of an even number lie in front of the others, in each 16 inputs of all rows.
        self.to = (warp * 2 + (piece >> 1)) * MMA_BYTES + row * PIECE_BYTES + (piece & 1) * 8

    def lots(self) -> list[list[tuple[int, int]]]:
        """Lists of pieces that registers hold at once: the tile of rows of each, and which of the warp's columns."""
        columns = range(self.step_bytes // (COLUMN_BYTES * X_WARPS))
        pieces = [(tile, column) for tile in range(self.plan.row_tiles) for column in columns]
        return [pieces[i : i + PIECES_AT_ONCE] for i in range(0, len(pieces), PIECES_AT_ONCE)]

    def load(self, number, lot: list) -> list:
        """Starts loads of a lot of pieces of a step."""
        within, last = ptx.i64(number) * self.step_bytes, self.plan.row_tiles - 1

        def tile_at(tile):
            return self.last if tile == last else self.whole + tile * self.tile_bytes

        return [ptx.load_global(tile_at(tile) + within + column * (COLUMN_BYTES * X_WARPS), 4) for tile, column in lot]

    def store(self, to, lot: list, loaded: list) -> None:
        """Stores a lot of pieces of a step from address `to` on."""
        for (tile, column), words in zip(lot, loaded):
            at = to + self.to + tile * self.plan.x_tile_bytes + column * (2 * X_WARPS * MMA_BYTES)
            for half, pair in enumerate(zip(*(numerics.transpose_pairs(*words[i : i + 2]) for i in (0, 2)))):
                ptx.store_shared(at + half * (MMA_BYTES // 2), *pair)


# Math warps -----------------------------------------------------------------------------------------------------


def multiply(plan: Plan, at: dict, share: ClusterShare, ring: Ring, parameters: Ring, part: int, warp, lane) -> None:
    """Multiplies all tiles, and writes the warp's outputs; in a cluster it leaves its sums in shared memory.

    part: which of the `config.split` parts of the inputs of each step. warp: among those of the part.
    """
    # A warp without outputs does as the last that has some, for products are of whole warpgroups.
    output = ptx.minimum(warp * WARP_OUTPUTS, ptx.i32(plan.tile - WARP_OUTPUTS))
    # Where a lane's row of codes is for `load_matrices`, whose matrices are two of rows and two columns of 16 bytes.
    codes_at = (output + (lane & 15)) * plan.code_pitch
    moved = ((lane >> 4) ^ (lane & 7)) * PIECE_BYTES
    parameters_at = (output + (lane >> 2)) * plan.parameter_pitch

    def one_tile(tile, carry):
        def some(first, last, carry):
            parameter_slot, parameter_parity, *carry = carry
            ptx.wait_for_arrivals(parameters.filled_barrier(parameter_slot), parameter_parity)
            scales_at = parameters.slot(parameter_slot) + parameters_at

            def step(number, carry):
                slot, parity, acc = carry
                ptx.wait_for_arrivals(ring.filled_barrier(slot), parity)
                scales = scales_at + (number - first) * (2 * STEP_GROUPS * plan.parameters.subgroups)
                acc = add_step(plan, part, acc, ring.slot(slot), codes_at, moved, scales)
                arrive_for_warp(ring.emptied_barrier(slot), lane)
                return *ring.following(slot, parity), acc

            carry = ptx.loop(first, last, carry, step)
            arrive_for_warp(parameters.emptied_barrier(parameter_slot), lane)
            return *parameters.following(parameter_slot, parameter_parity), *carry

        nothing = [ptx.f32(0.0)] * (4 * plan.row_tiles)
        *carry, acc = over_steps(plan, share, (*carry, nothing), some)
        tiles = [acc[i : i + 4] for i in range(0, len(acc), 4)]
        if plan.config.cluster == 1:
            for i, sums in enumerate(tiles):
                write_outputs(plan, at["y"], tile, warp, ptx.i32(i), sums, lane)
        else:
            ptx.synchronize(ptx.i32(1), plan.math_warps)  # no warp reads the ring any more
            for i, sums in enumerate(tiles):
                ptx.store_shared(sums_at(plan, at["shared"], part, warp, ptx.i32(i), lane), *sums)
        return tuple(carry)

    empty = ptx.i32(0), ptx.i32(0)
    ptx.loop(share.lower, share.upper, (*empty, *empty), one_tile)


def add_step(plan: Plan, part: int, acc: list, slot, codes_at, moved, scales_at) -> list:
    """Adds the products of a part of a step, which are done when it returns."""
    # A word has the scales or zeros of two subgroups.
    subgroups, columns = plan.parameters.subgroups, CODE_BYTES // PIECE_BYTES
    at = [scales_at + array * (plan.tile * plan.parameter_pitch) for array in (0, 1)]
    words = [[[ptx.load_shared(x + (row * plan.parameter_pitch + 4 * i), 1)[0] for x in at] for row in (0, 8)] for i in range(subgroups)]
    each = STEP_GROUPS // plan.config.split
    for group in range(part * each, (part + 1) * each):
        numbers = [group * subgroups + i for i in range(subgroups)]
        # [subgroup][row]
        rows = [[Unpacked(plan, *(in_both_halves(x, number % 2) for x in pair)) for pair in words[number // 2]] for number in numbers]
        for first in (0, 2):  # of four columns of 16 bytes
            column = (group * columns + first) * PIECE_BYTES
            at_planes = [slot + i * plan.plane_bytes + codes_at for i in range(plan.parameters.planes)]
            # Words of each plane.
            codes = [*zip(*(fragments.load_matrices(at_plane + (moved ^ column), transposed=False) for at_plane in at_planes))]
            # [row][half of the subgroup], each of the column and of the next.
            which = [(first + i) * subgroups // columns for i in (0, 1)]
            weights = [[rows[which[i]][j].weights(*codes[2 * i + j]) for j in (0, 1)] for i in (0, 1)]
            a = [[pairs[half][k] for k in (0, 1) for pairs in both] for both in weights for half in (0, 1)]
            steps = [group * (GROUP_SIZE // 16) + place_of_column(first + i, half, columns // subgroups) for i in (0, 1) for half in (0, 1)]
            x = slot + plan.code_bytes
            acc = fragments.start_products(acc, a, x, [step * MMA_BYTES for step in steps], plan.x_tile_bytes)
            # Those before are done, and what was unpacked for them may be replaced.
            fragments.wait_for_products(1)
    return fragments.products_done(acc)


def in_both_halves(word, half: int):
    """A 16-bit half of a word, in both halves of another."""
    return ptx.pure(f"prmt.b32 $0, $1, $2, {('0x1010', '0x3232')[half]};", word, word)


def place_of_column(column: int, half: int, each: int) -> int:
    """Which 16 inputs of a group the low or the high nibbles of a column of codes multiply. each: columns of a subgroup."""
    return column // each * (2 * each) + column % each + half * each


class Unpacked:
    """Weights of a row of a group, divided by NIBBLES_DIVISOR and rounded once to bfloat16.

    With minima a product and a sum in bfloat16 make them, also of both planes. With zero points these make code - zero point, exactly, and
    float32 the product with the scale.
    """

    def __init__(self, plan: Plan, scale, zero):
        """scale, zero: duplicated in both halves of a word."""
        self.scale = None
        if plan.parameters.zero == "bfloat16":
            steps = self.steps = plan.parameters.lower_steps
            self.factors = numerics.nibble_factors(scale, zero) if steps is None else numerics.nested_factors(scale, zero, steps)
            return
        entries = numerics.f16_entries if plan.parameters.scale == "float16" else numerics.bf16_entries
        self.scale = entries(scale)[1]
        zero_point = numerics.to_float(zero & 0xFFFF0000) * -(2.0**-16)
        self.factors = numerics.nibble_factors(ptx.i32(ONES), numerics.pair(zero_point, zero_point, "bf16"))

    def weights(self, codes, lower=None) -> tuple:
        """See `numerics.nibbles_to_bf16`, and with a lower plane `numerics.nested_to_bf16`."""
        if lower is not None:
            return numerics.nested_to_bf16(codes, lower, self.factors, self.steps)
        found = numerics.nibbles_to_bf16(codes, self.factors)
        return found if self.scale is None else tuple(tuple(self._scaled(pair) for pair in half) for half in found)

    def _scaled(self, pair):
        return numerics.pair(*(x * self.scale for x in numerics.bf16_entries(pair)), "bf16")


def write_outputs(plan: Plan, y, tile, warp, row_tile, sums: list, lane) -> None:
    """Writes the warp's outputs of a tile for eight rows: lane 4 g + t holds rows 2 t and 2 t + 1 of output g, then of output g + 8."""
    sums = [x * numerics.NIBBLES_DIVISOR for x in sums]
    output, row = tile * plan.tile + warp * WARP_OUTPUTS, row_tile * COLUMNS + (lane >> 2)
    # Two neighbouring outputs of row g.
    words = [fragments.transpose(numerics.pair(*sums[i : i + 2], "bf16")) for i in (0, 2)]
    with ptx.when((row < plan.rows) & (output < plan.width) & (warp * WARP_OUTPUTS < plan.tile)):
        place = (ptx.i64(row) * plan.width + ptx.i64(output + (lane & 3) * 2)) * X_BYTES
        for i, word in enumerate(words):
            ptx.store_global(y + place + i * (8 * X_BYTES), word)


# Adding the sums of a cluster --------------------------------------------------------------------------------------


def sums_at(plan: Plan, shared, part: int, warp, row_tile, lane):
    """The address of a lane's sums of a tile of rows. warp: among those of the part."""
    return shared + (((warp + part * plan.tile_warps) * plan.row_tiles + row_tile) * 32 + lane) * SUMS_BYTES


def add_blocks(plan: Plan, at: dict, share: ClusterShare, warp, lane) -> None:
    """Adds the sums of the cluster's blocks and of their parts, in this order, and writes outputs; each block takes some tiles of rows."""
    cluster = plan.config.cluster
    with ptx.when(warp < plan.tile_warps):
        for first in range(0, plan.row_tiles, cluster):
            row_tile = share.rank + first
            with ptx.when(row_tile < plan.row_tiles):
                addresses = [sums_at(plan, at["shared"], part, warp, row_tile, lane) for part in range(plan.config.split)]
                sums = sums_of_cluster(addresses, 4, cluster)
                write_outputs(plan, at["y"], share.lower, warp, row_tile, sums, lane)
