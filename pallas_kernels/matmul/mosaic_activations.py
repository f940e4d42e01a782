"""The inputs of a stage of the Mosaic GPU matmul of few rows: how math warps place them, and their norm, in shared memory."""

import functools
from typing import NamedTuple

from pallas_kernels.gpu import fragments, numerics, ptx
from pallas_kernels.matmul.mosaic_exchange import Exchange
from pallas_kernels.matmul.mosaic_plan import (
    COUNTER_WORDS,
    GROUP_SIZE,
    MATH_WARPS,
    PASS,
    PIECES_AT_ONCE,
    ROWS,
    STEPS,
    VALUES_PER_PIECE,
    Plan,
    Stage,
    passes_at_once,
)
from pallas_kernels.matmul.mosaic_tickets import Share

LARGEST = 127.0 * 256  # of activations as integers: their upper bytes are at most 127
MIN_SCALED = 2.0**-110  # activations no larger count as this large, or the inverse would be infinite; none may exceed 2^126
INTEGERS = 1.5 * 2**23  # added to a float32, leaves an integer in its last bits
PIECES = GROUP_SIZE // VALUES_PER_PIECE  # of a group of activations: half a warp's


def outputs_of(plan: Plan, at: dict, number: int):
    """The address of a stage's outputs in the handoff buffer; the last stage has none there."""
    return at["handoff"] + 4 * (COUNTER_WORDS + plan.words_before(number))


def read_all(addresses: list) -> list:
    return [ptx.load_global(at, VALUES_PER_PIECE // 2) for at in addresses]


def math_warps_meet() -> None:
    """Waits for all math warps."""
    ptx.synchronize(ptx.i32(1), MATH_WARPS)


class Piece(NamedTuple):
    """Values of a row of activations that a thread moves at once: the row, and the number of the piece among the row's.

    there: whether the row has such a piece; None: it has.
    """

    row: int
    number: ptx.Value
    there: ptx.Value | None


class Activations:
    """A stage's inputs in shared memory.

    They are there for some passes as bytes [row][upper or lower byte][input], and [group][row] has sums over subgroups and a scale; 0 for
    groups that are not there.
    """

    def __init__(self, plan: Plan, at: dict, exchange: Exchange | None, warp, thread):
        self.plan, self.at, self.exchange, self.warp, self.lane = plan, at, exchange, warp, thread & 31
        self.x = at["shared"]
        self.sums = self.x + plan.layout.at("group_sums")
        self.squares = self.x + plan.layout.at("squares")

    def pieces(self, stage: Stage, first, passes: int) -> list[Piece]:
        """This thread's pieces, row by row: those of its warp's groups in `passes` passes of a stage from `first` on.

        `first` is a multiple of `passes`. Half a warp takes one of two passes, the other half the other.
        """
        half, within = self.lane // PIECES, self.lane % PIECES
        start = ((first + half) * PASS + self.warp) * PIECES + within
        # Otherwise the last passes have fewer groups, or none.
        whole = passes % 2 == 0 and stage.groups % (passes * PASS) == 0

        def piece(row, number):
            return Piece(row, number, None if whole else number < stage.groups * PIECES)

        return [piece(row, start + i * (PASS * PIECES)) for row in range(self.plan.rows) for i in range(0, passes, 2)]

    def load(self, array, stage: Stage, pieces: list[Piece], read) -> list:
        """Reads pieces of rows of an array, 0 where there are none."""

        def place(piece):
            number = piece.number if piece.there is None else ptx.select(piece.there, piece.number, ptx.i32(0))
            return array + ptx.i64(number) * (2 * VALUES_PER_PIECE) + piece.row * (2 * GROUP_SIZE * stage.groups)

        def kept(piece, words):
            return list(words) if piece.there is None else [ptx.select(piece.there, word, ptx.i32(0)) for word in words]

        return [kept(piece, words) for piece, words in zip(pieces, read([place(piece) for piece in pieces]))]

    def inputs(self, number: int, pieces: list) -> list:
        """Pieces of a stage's inputs before any norm, for which other blocks, and devices, may have to be waited for."""
        stage = self.plan.stages[number]
        if number == 0:
            return self.load(self.at["x"], stage, pieces, read_all)
        # Also a block of this device may wait for another device, and be waited for.
        wait = functools.partial(ptx.spin_wait, across_devices=self.exchange is not None)
        partial = self.plan.stages[number - 1].partial
        arrays = self.exchange.received(number - 1) if partial else [outputs_of(self.plan, self.at, number - 1)]
        return functools.reduce(self.sums_of, (self.load(array, stage, pieces, wait) for array in arrays))

    def place(self, number: int, first) -> None:
        """Places a stage's inputs of some passes from `first` on."""
        stage = self.plan.stages[number]
        pieces = self.pieces(stage, first, min(passes_at_once(self.plan.rows), stage.passes))
        for start in range(0, len(pieces), PIECES_AT_ONCE):
            some = pieces[start : start + PIECES_AT_ONCE]
            for piece, words in zip(some, self.inputs(number, some)):
                self.put(piece.row, piece.number - (0 if self.plan.resident(stage) else first * (PASS * PIECES)), words)
        ptx.synchronize(None, 1)

    def put(self, row: int, piece, words: list) -> None:
        """Writes a piece as integers, and its group's sum and scale; the lanes of a half warp hold the pieces of a group."""
        numbers = [x for word in words for x in numerics.bf16_entries(word)]
        total, most = numerics.total(numbers), numerics.largest([word & 0x7FFF7FFF for word in words])
        subgroups = self.plan.parameters.subgroups
        for bit in (1, 2, 4, 8):
            total = total + ptx.shuffle("bfly", total, bit) if bit < PIECES // subgroups else total
            most = ptx.maximum(most, ptx.shuffle("bfly", most, bit))
        most = ptx.maximum(most, ptx.f32(MIN_SCALED))
        factor = numerics.reciprocal(most) * LARGEST
        # 128 more: the upper byte rounds to the nearest, and the lower is 128 more than what is left.
        integers = [ptx.as_bits(numerics.fma(x, factor, ptx.f32(INTEGERS + 128))) for x in numbers]
        lower, upper = zip(*(numerics.lower_bytes(integers[i : i + 4]) for i in range(0, VALUES_PER_PIECE, 4)))
        with ptx.when(piece < self.plan.room * (PASS * PIECES)):
            to = self.x + 2 * row * self.plan.x_pitch + piece * VALUES_PER_PIECE
            ptx.store_shared(to, *upper)
            ptx.store_shared(to + self.plan.x_pitch, *(x ^ 0x80808080 for x in lower))
            with ptx.when((self.lane & (PIECES - 1)) == 0):
                # The products of high nibbles are 16 times as large, and those of low ones are made so.
                scale = most * (1 / (16 * LARGEST))
                at = self.sums + piece // PIECES * self.plan.group_pitch + row * self.plan.row_pitch
                ptx.store_shared(at, total, scale) if subgroups == 1 else ptx.store_shared(at + 4 * subgroups, scale)
            if subgroups > 1:
                each = PIECES // subgroups
                with ptx.when((self.lane & (each - 1)) == 0):
                    at = self.sums + piece // PIECES * self.plan.group_pitch + row * self.plan.row_pitch
                    ptx.store_shared(at + (self.lane & (PIECES - 1)) // each * 4, total)

    def fetch_residual(self, number: int, pieces: list) -> list:
        """The residual stream before the stage, and the norm's weight, in these pieces."""
        stage = self.plan.stages[number]
        earlier = [i for i in range(number) if self.plan.stages[i].normed]
        residual = self.load(self.at["residual"], stage, pieces, read_all)
        for before in earlier:
            residual = self.sums_of(residual, self.inputs(before, pieces))
        of_row = pieces[: len(pieces) // self.plan.rows]
        weight = self.load(self.at[f"norm{len(earlier)}"], stage, of_row, read_all)
        return list(zip(residual, weight * self.plan.rows))

    def sums_of(self, residual: list, added: list) -> list:
        return [[numerics.add_bf16(*both) for both in zip(*words)] for words in zip(residual, added)]

    def place_normed(self, number: int, share: Share) -> None:
        """Places the norm of the residual stream plus what the stage before gave.

        The share with number 0 of the last stage with a norm also writes the stream.
        """
        plan, stage = self.plan, self.plan.stages[number]
        pieces, width = self.pieces(stage, ptx.i32(0), stage.passes), stage.groups * GROUP_SIZE
        residual = self.fetch_residual(number, pieces)
        totals = self.sums_of([x for x, _ in residual], self.inputs(number, pieces))
        squares = [ptx.f32(0.0)] * plan.rows
        for (row, piece, there), words in zip(pieces, totals):
            if not any(later.normed for later in plan.stages[number + 1 :]):
                writes = share.number == 0
                with ptx.when(writes if there is None else writes & there):
                    ptx.store_global_words(self.at["residual_out"] + ptx.i64(piece * (2 * VALUES_PER_PIECE)) + row * (2 * width), *words)
            squares[row] = numerics.total([squares[row], *(x * x for word in words for x in numerics.bf16_entries(word))])
        math_warps_meet()  # has read the squares before
        for row, square in enumerate(squares):
            square = fragments.all_rows(fragments.all_columns(square, numerics.add), numerics.add)
            with ptx.when(self.lane == 0):
                ptx.store_shared(self.squares + row * (4 * MATH_WARPS) + self.warp * 4, square)
        math_warps_meet()
        means = [
            numerics.total(ptx.load_shared(self.squares + row * (4 * MATH_WARPS), MATH_WARPS, "f")) * (1 / width)
            for row in range(plan.rows)
        ]
        scales = [numerics.rsqrt(mean + plan.eps) for mean in means]
        for (row, piece, _), words, (_, weights) in zip(pieces, totals, residual):
            rounded = [numerics.pair(*(x * scales[row] for x in numerics.bf16_entries(word)), "bf16") for word in words]
            self.put(row, piece, [numerics.multiply_bf16(x, weight) for x, weight in zip(rounded, weights)])
        ptx.synchronize(None, 1)

    def operands(self, place, n: int) -> tuple:
        """The second operand of the warp's group in the pass at this place, for row tile n, and the sums and the scale of row t.

        It is [half of a subgroup][step], a word of bytes for each word of codes. Columns that are not there repeat the last.
        """
        g, t = self.lane >> 2, self.lane & 3
        group = place * PASS + self.warp
        column = ptx.minimum(g + 2 * ROWS * n, ptx.i32(2 * self.plan.rows - 1))
        size, subgroups = self.plan.parameters.group_size, self.plan.parameters.subgroups
        at = self.x + column * self.plan.x_pitch + group * GROUP_SIZE + t * (4 * STEPS // subgroups)
        starts = [at, *(at + first * size for first in range(1, subgroups))]
        halves = [[x for start in starts for x in ptx.load_shared(start + half * (size // 2), STEPS // subgroups)] for half in (0, 1)]
        sums_at = self.sums + group * self.plan.group_pitch + (n * ROWS + t) * self.plan.row_pitch
        if subgroups == 1:
            total, scale = ptx.load_shared(sums_at, 2, "f")
            return halves, ([total], scale)
        return halves, (ptx.load_shared(sums_at, subgroups, "f"), ptx.load_shared(sums_at + 4 * subgroups, 1, "f")[0])
