"""The program of a block of the Mosaic GPU matmul of few rows, stage after stage.

Codes enter the tensor cores as bytes: a mask takes the low nibbles of a word, another 16 times the high ones; of nested weights both planes
make bytes. Activations enter as integers of 16 bits, with a scale for each row and group of inputs: two columns of bytes, whose products
are exact. What is lost is no more than 1/64,000 of the largest of a group, a small part of what bfloat16 loses of it. Then
y = scale (sum x code) + zero (sum x), group by group in float32.

Producer warps copy, math warps multiply, and epilogue warps add what those found: none waits for another longer than the rings between
them are deep. A math warp has groups of inputs of its own, and places the activations that it alone reads.
A stage's inputs are all outputs of the stage before, of all blocks. No flag says that they are there: global memory holds NaNs of a kind
that no stage writes, put there by the launch before, and a thread that needs a number reads until it is another. Producers do not wait for
it: weights of the next stage are on their way already.

Tickets, drawn from a counter in the order of the stages, say which outputs a block works on. So whatever a block waits for belongs to a
block that runs already, or to another device's launch: the launch comes to its end however few of its blocks fit on the device at once,
beside other launches or not.
A slot of the ring of codes holds a pass of a tile: codes [plane][output][group][64 bytes], then scales and zeros: [output][two groups], a
word of scales and one of zeros for these, or where groups have fewer than 128 inputs [array][output][group].
One of the ring of sums holds a tile's [warp][row tile][lane][2 outputs], see `add_group`. One of the ring of tickets holds a ticket.
Rings, barriers and the handoff buffer are drawn in docs/kernels/matmul.md.
"""

import functools
from collections.abc import Callable

from pallas_kernels.gpu import fragments, numerics, ptx
from pallas_kernels.gpu.ring import Ring
from pallas_kernels.matmul.mosaic_activations import Activations, outputs_of
from pallas_kernels.matmul.mosaic_exchange import Exchange
from pallas_kernels.matmul.mosaic_plan import (
    CODE_BYTES,
    CODE_PITCH,
    EPILOGUE_WARPS,
    MATH_WARPS,
    PASS,
    PRODUCER_WARPS,
    ROWS,
    STEPS,
    SUMS_SLOTS,
    TICKET_SLOTS,
    TILE,
    Plan,
    Stage,
    passes_at_once,
)
from pallas_kernels.matmul.mosaic_tickets import OwnShare, Share, Tickets
from pallas_kernels.matmul.support import PLANES
from pallas_kernels.matmul.tiles import row_of

# Passes on their way at once. While a stage may still wait for its inputs there are fewer: what blocks hand over would wait for them.
COPIES, COPIES_AHEAD = 4, 2
WORDS_AT_ONCE = 4  # that a thread fills
HIGH = 16  # as many times as a code its nibble is, where it is the high one of a byte
LOG2_E = 1.4426950408889634


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block: its rings, and the program of each kind of warp."""
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread, block = ptx.thread_index(), ptx.block_index()
    warp, lane = ptx.uniform(thread >> 5), thread & 31

    def in_shared(part):
        return at["shared"] + plan.layout.at(part)

    ring = Ring(plan.slots, in_shared("codes"), plan.slot_bytes, in_shared("barriers"))
    sums = Ring(SUMS_SLOTS, in_shared("sums"), MATH_WARPS * plan.tile_bytes, ring.barriers_end)
    tickets = Ring(TICKET_SLOTS, in_shared("tickets"), 4, sums.barriers_end)
    warps = MATH_WARPS + PRODUCER_WARPS + EPILOGUE_WARPS
    hands_over = "handoff" in at
    exchange = Exchange(plan, at["exchange_table"], in_shared("exchange")) if plan.num_devices > 1 else None
    with ptx.when(thread == 0):
        # Every lane of a producer warp arrives once its own copies are there, and one more time the lane that announces bytes.
        ring.start(33 * PRODUCER_WARPS, MATH_WARPS)
        sums.start(MATH_WARPS, EPILOGUE_WARPS)
        if hands_over:
            tickets.start(1, warps)
    if hands_over:
        fill_absent(plan, at["next_handoff"], plan.handoff_words, block, thread, with_counter=True)
    if exchange:
        buffer = exchange.begin(thread)
        fill_absent(plan, buffer, plan.buffer_words, block, thread, with_counter=False)
    ptx.synchronize(ptx.i32(0), warps)

    # The first lane of the producer warps draws tickets for all warps.
    def drawn(counter=None):
        return Tickets(plan, tickets, thread, counter) if hands_over else OwnShare(plan, block)

    with ptx.when(warp < MATH_WARPS):
        do_math(plan, at, drawn(), ring, sums, exchange, warp, thread)
        if exchange:
            with ptx.when(thread == 0):
                exchange.count()
    with ptx.when((ptx.i32(MATH_WARPS - 1) < warp) & (warp < MATH_WARPS + PRODUCER_WARPS)):
        produce(plan, at, drawn(at.get("handoff")), ring, warp - MATH_WARPS, lane)
    with ptx.when(ptx.i32(MATH_WARPS + PRODUCER_WARPS - 1) < warp):
        write_outputs(plan, at, drawn(), sums, exchange, thread - 32 * (MATH_WARPS + PRODUCER_WARPS))


def fill_absent(plan: Plan, start, words: int, block, thread, *, with_counter: bool) -> None:
    """Fills words of global memory with `ABSENT`, for a later launch. with_counter: the first four become 0, as in a handoff buffer, from
    which no ticket is drawn yet."""
    threads = 32 * (MATH_WARPS + PRODUCER_WARPS + EPILOGUE_WARPS)
    pieces = words // WORDS_AT_ONCE
    for first in range(0, pieces, threads * plan.blocks):
        piece = block * threads + thread + first
        absent = ptx.i32(-1)  # `ABSENT`
        word = ptx.select(piece == 0, ptx.i32(0), absent) if with_counter else absent
        with ptx.when(piece < pieces):
            ptx.store_global_words(start + ptx.i64(piece) * (4 * WORDS_AT_ONCE), *[word] * WORDS_AT_ONCE)


# Producer warps --------------------------------------------------------------------------------------------------------


def produce(plan: Plan, at: dict, shares: OwnShare | Tickets, ring: Ring, warp, lane) -> None:
    """Fills the ring, with all passes of all stages."""
    earlier = [(ptx.i32(max(0, plan.slots - copies)), ptx.i32(1)) for copies in (COPIES, COPIES_AHEAD)]
    carry = (ptx.i32(0), ptx.i32(1)), *earlier
    for number in range(len(plan.stages)):

        def work(share, carry, number=number):
            return produce_stage(plan, number, at, share, ring, warp, lane, carry)

        carry = shares.of_stage(number, carry, work)


def produce_stage(plan: Plan, number: int, at: dict, share: Share, ring: Ring, warp, lane, carry: tuple) -> tuple:
    """Fills the ring with the share's passes of a stage.

    carry: the slot of the ring and its parity, and those of the earlier pass that must be there before this one is sent: of the one COPIES
    passes ago, and of the one COPIES_AHEAD ago.
    """
    stage = plan.stages[number]
    lower, upper = share.tiles(stage)
    together = plan.together(stage)

    def one_turn(turn, carry):
        def one_pass(number_of_pass, carry):
            for which in range(together):
                (slot, parity), *earlier = carry
                awaited = earlier[0]
                if number > 0:  # as many passes as there are slots may be sent before the stage has its inputs
                    sent = (turn * stage.passes + number_of_pass) * together + which
                    awaited = [ptx.select(sent < plan.slots, near, far) for far, near in zip(*earlier)]
                ptx.wait_for_arrivals(ring.filled_barrier(awaited[0]), awaited[1])
                ptx.wait_for_arrivals(ring.emptied_barrier(slot), parity)
                left = ptx.minimum(ptx.i32(stage.groups) - number_of_pass * PASS, ptx.i32(PASS))
                tile = lower + turn * together + which
                if together > 1:  # a tile that is not the block's has no groups
                    left = ptx.select(tile < upper, left, ptx.i32(0))
                    tile = ptx.minimum(tile, upper - 1)

                def source(name, output, tile=tile):
                    return weight_row(stage, number, at, name, tile, output)

                copy_pass(plan, stage, number_of_pass * PASS, left, source, ring.slot(slot), ring.filled_barrier(slot), warp, lane)
                carry = tuple(ring.following(*each) for each in carry)
            return carry

        return ptx.loop(ptx.i32(0), ptx.i32(stage.passes), carry, one_pass)

    return ptx.loop(ptx.i32(0), share.turns(stage), carry, one_turn)


def copy_pass(plan: Plan, stage: Stage, first, left, source, slot, barrier, warp, lane) -> None:
    """Copies a producer warp's rows of a tile in a pass, `left` groups from group `first` on; scales and zeros of others become 0."""
    rows, words = TILE // PRODUCER_WARPS, PASS // 2  # words of scales hold two groups each
    row_bytes = left * CODE_BYTES
    with ptx.when(lane == 0):
        ptx.arrive_with(barrier, row_bytes * (rows * plan.parameters.planes))
    for i, plane in enumerate(PLANES[: plan.parameters.planes]):
        with ptx.when((lane < rows) & (ptx.i32(0) < left)):
            output = warp * rows + lane
            array, row = source(plane, output)
            place = ptx.i64(row) * stage.groups + ptx.i64(first)
            ptx.copy_bulk(slot + (i * TILE + output) * CODE_PITCH, array + place * CODE_BYTES, row_bytes, barrier)
    output, word = warp * rows + lane // words, lane % words
    for i, name in enumerate(("scale", "zero")):
        array, row = source(name, output)
        if (subgroups := plan.parameters.subgroups) > 1:  # a row has an even number of entries
            start = array + (ptx.i64(row) * stage.groups + ptx.i64(first)) * (2 * subgroups)
            for more in range(subgroups):
                to = slot + plan.code_bytes + (output + i * TILE) * plan.parameter_pitch
                copy_word(to, start, word + more * words, left * subgroups)
            continue
        leading = leading_entries(stage, row)
        start = array + (ptx.i64(row) * stage.groups + ptx.i64(first) - ptx.i64(leading)) * 2
        to = slot + plan.code_bytes + output * (2 * plan.parameter_pitch) + 4 * i  # a word of zeros after each of scales
        copy_word(to, start, word, left + leading, step=8)
        if stage.groups % 2:  # a row that begins in the middle of a word has one word more
            with ptx.when(word == 0):
                copy_word(to, start, ptx.i32(words), left + leading, step=8)
    ptx.arrive_after_copies(barrier)


def copy_word(to, start, number, entries, step: int = 4) -> None:
    """Copies the word of that number of a row of 16-bit entries; entries from number `entries` on become 0.

    step: bytes from one word to the next where they are copied to.
    """
    count = ptx.minimum(ptx.maximum(entries - number * 2, ptx.i32(0)), ptx.i32(2))
    source = start + ptx.i64(ptx.select(ptx.i32(0) < count, number, ptx.i32(0))) * 4
    ptx.copy_async(to + number * step, source, count * 2, width=4)


def leading_entries(stage: Stage, row):
    """How many entries of the row before are in the first word of a row of scales: one where the row begins in the middle of the word."""
    return row & 1 if stage.groups % 2 else ptx.i32(0)


def weight_row(stage: Stage, number: int, at: dict, name: str, tile, output) -> tuple:
    """The array of the stage's weight that an output of a tile belongs to, and its row there."""
    arrays = [at[f"{name}{number}_{i}"] for i in range(len(stage.outputs))]
    if stage.gated:  # half a tile of each
        half = TILE // 2
        return ptx.select(output < half, *arrays), tile * half + (output & (half - 1))
    return row_of(arrays, stage.outputs, tile * TILE + output)


# Math warps -----------------------------------------------------------------------------------------------------


def do_math(plan: Plan, at: dict, shares: OwnShare | Tickets, ring: Ring, sums: Ring, exchange: Exchange | None, warp, thread) -> None:
    """Multiplies the tiles of all stages, and puts the warp's sums of them in the ring of sums."""
    x = Activations(plan, at, exchange, warp, thread)

    def work(number: int, share: Share, carry: tuple) -> tuple:
        if plan.stages[number].normed:
            x.place_normed(number, share)
        return multiply(plan, number, share, ring, sums, x, carry)

    carry = (ptx.i32(0), ptx.i32(0), ptx.i32(0), ptx.i32(1))
    for number in range(len(plan.stages)):
        carry = shares.of_stage(number, carry, functools.partial(work, number))


def multiply(plan: Plan, number: int, share: Share, ring: Ring, sums: Ring, x: Activations, carry: tuple) -> tuple:
    """Multiplies the share's tiles of a stage. carry: slots of the rings of codes and of sums, each with its parity."""
    stage, lane, warp = plan.stages[number], x.lane, x.warp
    resident, at_once = plan.resident(stage), passes_at_once(plan.rows)
    g, t = lane >> 2, lane & 3
    subgroups = plan.parameters.subgroups
    codes_at = g * CODE_PITCH + warp * CODE_BYTES + t * (16 // subgroups)
    # Rows g and g + 8 of a tile have the parity of their rows in the weight: tiles start at even rows.
    entry = warp + leading_entries(stage, g)
    if subgroups == 1:
        parameters_at = plan.code_bytes + g * (2 * plan.parameter_pitch) + (entry >> 1) * 8
    else:
        parameters_at = plan.code_bytes + g * plan.parameter_pitch + warp * (2 * subgroups)
    shift = ((entry & 1) ^ 1) << 4  # a word holds two groups: to the upper half

    def take(slot):
        """The codes [plane][row][word], and the scales and zeros of each subgroup, of the warp's group."""
        start = ring.slot(slot)
        planes = range(0, plan.parameters.planes * TILE, TILE)
        codes = [[words_of_row(start + codes_at + (plane + more) * CODE_PITCH) for more in (0, 8)] for plane in planes]

        def entries(row, subgroup):
            """The scale and the zero of a row, each in the upper half of a word."""
            if subgroups == 1:
                return (word << shift for word in ptx.load_shared(start + parameters_at + row * (2 * plan.parameter_pitch), 2))
            at = start + parameters_at + row * plan.parameter_pitch + subgroup // 2 * 4
            words = (ptx.load_shared(at + zeros, 1)[0] for zeros in (0, TILE * plan.parameter_pitch))
            return (word << (0 if subgroup % 2 else 16) for word in words)

        def scale_and_zero(row, subgroup):
            scale, zero = entries(row, subgroup)
            scale = scale_of(plan, scale)
            return of_planes(plan, scale, zero_of(plan, zero, scale))

        return codes, [[scale_and_zero(row, subgroup) for row in (0, 8)] for subgroup in range(subgroups)]

    def words_of_row(at):
        each = STEPS // subgroups
        starts = [at, *(at + i * (CODE_BYTES // subgroups) for i in range(1, subgroups))]
        return [word for start in starts for word in ptx.load_shared(start, each)]

    def one_turn(turn, carry):
        slot, parity, sums_slot, sums_parity = carry

        def one_pass(number_of_pass, carry):
            slot, parity, totals = carry
            if not stage.normed:
                due = number_of_pass % at_once == 0
                with ptx.when(due & (turn == 0) if resident else due):
                    x.place(number, number_of_pass)
            place = number_of_pass if resident else number_of_pass % at_once
            operands = [x.operands(place, n) for n in range(plan.row_tiles)]
            new = []
            for total in totals:
                ptx.wait_for_arrivals(ring.filled_barrier(slot), parity)
                codes, parameters = take(slot)
                new.append(add_group(plan, total, codes, parameters, *zip(*operands)))
                # Words of codes of a subgroup are loaded at once: it is enough to wait for one of them.
                loaded = [word for plane in codes for row in plane for word in row[:: STEPS // subgroups]]
                loaded += [ptx.as_bits(x) for of_rows in parameters for pair in of_rows for x in pair]
                emptied = ptx.once_loaded(ring.emptied_barrier(slot), loaded)
                ptx.synchronize(None, 1)
                with ptx.when(lane == 0):
                    ptx.arrive(emptied)
                slot, parity = ring.following(slot, parity)
            return slot, parity, new

        totals = [[[ptx.f32(0.0)] * 2 for _ in range(plan.row_tiles)] for _ in range(plan.together(stage))]
        slot, parity, totals = ptx.loop(ptx.i32(0), ptx.i32(stage.passes), (slot, parity, totals), one_pass)
        for total in totals:
            ptx.wait_for_arrivals(sums.emptied_barrier(sums_slot), sums_parity)
            for n, pair in enumerate(total):
                ptx.store_shared(sums.slot(sums_slot) + warp * plan.tile_bytes + n * (4 * TILE * ROWS) + lane * 8, *pair)
            ptx.synchronize(None, 1)
            with ptx.when(lane == 0):
                ptx.arrive(sums.filled_barrier(sums_slot))
            sums_slot, sums_parity = sums.following(sums_slot, sums_parity)
        return slot, parity, sums_slot, sums_parity

    return ptx.loop(ptx.i32(0), share.turns(stage), carry, one_turn)


def scale_of(plan: Plan, word):
    """The scale in the upper half of a word, in float32."""
    return ptx.as_float(word & 0xFFFF0000) if plan.parameters.scale == "bfloat16" else numerics.f16_entries(word)[1]


def zero_of(plan: Plan, word, scale):
    """The zero in the upper half of a word, in float32; of a zero point it is minus the product with the scale, exactly."""
    if plan.parameters.zero == "bfloat16":
        return ptx.as_float(word & 0xFFFF0000)
    return numerics.to_float(word & 0xFFFF0000) * -(2.0**-16) * scale


def of_planes(plan: Plan, scale, zero):
    """What the sum of products with codes, times `HIGH` in INT4, and the sum of activations are multiplied by.

    A nested weight is (code - 8) * scale / steps + zero, see `NestedWeight`; the scale of activations holds 1 / HIGH.
    """
    if (steps := plan.parameters.lower_steps) is None:
        return scale, zero
    return (scale if steps == HIGH else scale * (HIGH / steps)), numerics.fma(scale, ptx.f32(-8.0 / steps), zero)


def add_group(plan: Plan, totals: list, codes: list, parameters: list, x: list, sums: list) -> list:
    """Adds the products of one more group to totals [row tile][i] of output g + 8 i and row t.

    codes: [plane][row][word]. parameters: of each subgroup, the scale and zero of both outputs. sums: of each row tile, those of
    subgroups, and the scale.
    """
    each = STEPS // len(parameters)
    if len(codes) == 1:
        multiplied = functools.partial(products, codes[0], x)
    else:
        multiplied = functools.partial(products_of_planes, *codes, plan.parameters.lower_steps, x)
    of_subgroups = [multiplied(range(first, first + each)) for first in range(0, STEPS, each)]
    new = []
    for n, (total, (sums_x, scale_x)) in enumerate(zip(totals, sums)):
        for of_rows, found, sum_x in zip(parameters, of_subgroups, sums_x):
            both = found[n]  # of the upper bytes of activations and of the lower ones
            total = [
                numerics.fma(numerics.to_float(both[2 * i] * 256 + both[2 * i + 1]), scale * scale_x, numerics.fma(sum_x, zero, total[i]))
                for i, (scale, zero) in enumerate(of_rows)
            ]
        new.append(total)
    return new


def products(codes: list, x: list, steps: range) -> list:
    """`HIGH` times the products of these words of codes [row][word] with the bytes of activations, for each row tile."""
    if len(steps) == 1:  # low nibbles are one half of the inputs of an instruction, high ones the other
        (s,) = steps
        fragment = [*(row[s] & 0x0F0F0F0F for row in codes), *((row[s] >> 4) & 0x0F0F0F0F for row in codes)]
        found = (fragments.mma_bytes((ptx.i32(0),) * 4, fragment, [half[s] for half in halves]) for halves in x)
        return [[low * HIGH for low in each] for each in found]
    masks = 0x0F0F0F0F, 0xF0F0F0F0
    acc = [[(ptx.i32(0),) * 4 for _ in x] for _ in masks]
    for s in steps[::2]:
        for half, mask in enumerate(masks):
            fragment = [row[s + k] & mask for k in (0, 1) for row in codes]
            acc[half] = [fragments.mma_bytes(old, fragment, x[n][half][s : s + 2]) for n, old in enumerate(acc[half])]
    return [[low * HIGH + high for low, high in zip(*of_halves)] for of_halves in zip(*acc)]


def products_of_planes(upper: list, lower: list, lower_steps: int, x: list, steps: range) -> list:
    """The products of codes of two planes, [row][word] each, with the bytes of activations, for each row tile."""

    def of_nibbles(row: int, s: int) -> tuple:
        """Codes of the low nibbles of a word of both planes, and of the high ones."""
        return numerics.nested_bytes(upper[row][s], lower[row][s], lower_steps)

    acc = [(ptx.i32(0),) * 4 for _ in x]
    if len(steps) == 1:
        (s,) = steps
        (low, high), (low8, high8) = (of_nibbles(row, s) for row in (0, 1))
        return [fragments.mma_bytes(acc[n], [low, low8, high, high8], [half[s] for half in halves]) for n, halves in enumerate(x)]
    for s in steps[::2]:
        words = [of_nibbles(row, s + k) for k in (0, 1) for row in (0, 1)]
        for half in (0, 1):
            acc = [fragments.mma_bytes(old, [word[half] for word in words], x[n][half][s : s + 2]) for n, old in enumerate(acc)]
    return acc


# Epilogue warps ------------------------------------------------------------------------------------------------


def write_outputs(plan: Plan, at: dict, shares: OwnShare | Tickets, sums: Ring, exchange: Exchange | None, thread) -> None:
    """Writes the outputs of all tiles of all stages."""
    carry = (ptx.i32(0), ptx.i32(0))
    for number, stage in enumerate(plan.stages):
        if number + 1 == len(plan.stages):
            arrays, store = [at["y"]], ptx.store_global
        elif stage.partial:
            arrays, store = exchange.destinations(number), functools.partial(ptx.store_relaxed, across_devices=True)
        else:
            arrays, store = [outputs_of(plan, at, number)], ptx.store_relaxed
        work = functools.partial(write_stage, plan, number, arrays, store, sums, thread)
        carry = shares.of_stage(number, carry, work)


def write_stage(plan: Plan, number: int, arrays: list, store: Callable, sums: Ring, thread, share: Share, carry: tuple) -> tuple:
    """Writes the share's outputs of a stage, each word by `store` to all of these arrays.

    carry: slot of the ring of sums, and its parity.
    """
    stage, lane = plan.stages[number], thread & 31
    lower, upper = share.tiles(stage)
    size = plan.rows * stage.tile_outputs

    def step(tile, carry):
        slot, parity = carry
        ptx.wait_for_arrivals(sums.filled_barrier(slot), parity)
        for first in range(0, size, 32 * EPILOGUE_WARPS):
            which = thread + first
            with ptx.when((which - lane < size) & (tile < upper)):  # whole warps, whose lanes exchange outputs
                write_output(plan, number, arrays, store, sums.slot(slot), which, tile)
        ptx.synchronize(None, 1)
        with ptx.when(lane == 0):
            ptx.arrive(sums.emptied_barrier(slot))
        return sums.following(slot, parity)

    return ptx.loop(lower, lower + share.turns(stage) * plan.together(stage), carry, step)


def write_output(plan: Plan, number: int, arrays: list, store: Callable, sums, which, tile) -> None:
    """Adds the math warps' sums for one of the tile's rows and outputs, and writes the result in a word with its neighbour's."""
    stage = plan.stages[number]
    outputs = stage.tile_outputs
    size = plan.rows * outputs
    there = (which < size) & ((which & 1) == 0)
    which = ptx.minimum(which, ptx.i32(size - 1))
    row, output = which // outputs, which % outputs
    # The place of `totals` of this row and output, followed by that of output + 8.
    lane = (output & 7) * 4 + row % ROWS
    start = sums + ((row // ROWS) * (TILE * ROWS) + lane * 2 + (output >> 3)) * 4

    def total(at):
        return numerics.total([ptx.load_shared(at + k * plan.tile_bytes, 1, "f")[0] for k in range(MATH_WARPS)])

    found = total(start)
    if stage.gated:
        gate, up = numerics.round_bf16(found), numerics.round_bf16(total(start + 4))
        found = numerics.round_bf16(gate / (numerics.exp2(gate * -LOG2_E) + 1.0)) * up
    word = numerics.pair(found, ptx.shuffle("bfly", found, 1), "bf16")
    place = (ptx.i64(row) * stage.width + ptx.i64(tile * outputs + output)) * 2
    with ptx.when(there):
        for array in arrays:
            store(array + place, word)
