"""The arithmetic of a warp, in fragments of the tensor cores: logits, softmax and weighted values of a group or chunk in shared memory.

Codes enter as 1024 + code in float16, which costs no arithmetic (docs/kernels/formats.md, "Unpacking"). The excess is a multiple of the sum
of the other operand as rounded, and is taken off every product. Queries and scales are brought to a common size by powers of two:
float16 then has 2^20 from the largest scale of a group to the smallest (2^16 for high nibbles in one plane). The keys' zeros are a
product of their own in bfloat16, the values' a number for all channels.
"""

import functools
import operator
from collections.abc import Callable

from pallas_kernels.attention.mosaic_plan import ROWS
from pallas_kernels.attention.mosaic_softmax import SoftmaxTile
from pallas_kernels.gpu import fragments, numerics, ptx

ONES = 0x3C003C00  # a pair of float16
SIGNS = 0x80008000
EXPONENTS = 0x00800080  # 1 in the place of the exponents of a pair of bfloat16
# Queries and scales in float16: their largest lies at 2^SIZE, unless that takes a factor of more than 2^(SIZE - MIN_SIZE).
SIZE, MIN_SIZE = 6, -40
STEP_BYTES = 512  # of an operand that a team shares: four words a lane


class Tile(SoftmaxTile):
    """A warp's part of attention over whatever lies in its team's slots: groups of codes, besides the rows of `SoftmaxTile`. The warps of a
    team also share the queries times the keys' scales."""

    def _shared_pair(self, first: int, n: int, combine: Callable) -> list:
        """Those of tile n, combined over the arrays of the team's slices, from array `first` on."""
        loaded = (ptx.load_shared(self._numbers_at(ptx.i32(first + i)) + 8 * n, 2, "f") for i in range(self.plan.slices))
        return [functools.reduce(combine, xs) for xs in zip(*loaded)]

    # The quantized region. A lane reads the same words of every row: word k of row r holds entries e = 4 (words t + k) .. e + 3 of the
    # row's first half in the low nibbles, of its second half in the high ones. Products contract them in that order, a word a step,
    # as pairs (e, e + 2) and (e + 1, e + 3).

    def _pairs(self, at, entries: int, words: int) -> list:
        """This lane's pairs of an array of 16-bit floats [word][half], from `at` on."""
        halves = [ptx.load_shared(at + self.t * (entries // 4) + half * entries, 2 * words) for half in (0, 1)]
        return [[half[2 * k : 2 * k + 2] for half in halves] for k in range(words)]

    def _each(self, function: Callable, *operands: list) -> list:
        """Applies a function to corresponding pairs of operands [word][half]."""
        return [[tuple(map(function, *half)) for half in zip(*word)] for word in zip(*operands)]

    def _half(self, operand: list, factor) -> list:
        """Pairs of neighbours in bfloat16, times a factor, as the pairs that a product in float16 contracts."""

        def half(pairs: tuple) -> tuple:
            a, b = ([entry * factor for entry in numerics.bf16_entries(x)] for x in pairs)
            return tuple(numerics.pair(*both, "f16") for both in zip(a, b))

        return [list(map(half, word)) for word in operand]

    def _half_scales(self, scale: list, factor) -> list:
        """Scales as `_half` gives operands, times a power of two; with one plane, those for high nibbles also over 16."""
        exponent = ptx.i32(254 << 7) - (ptx.as_bits(factor) >> 16)
        exponent = (exponent << 16 | exponent) - 15 * EXPONENTS  # float16's bias is 112 less than bfloat16's 127
        biases = exponent, exponent + (4 * EXPONENTS if self.plan.planes == 1 else 0)
        return [
            [numerics.transpose_pairs(*(numerics.positive_to_float16(x, bias) for x in half)) for half, bias in zip(word, biases)]
            for word in scale
        ]

    def _normalized(self, scale: list) -> tuple:
        """A power of two that brings the scales of a row of lanes to a common size, and its inverse: NaN if one of the scales is."""
        largest = fragments.all_columns(numerics.largest_positive_bits([x for word in scale for half in word for x in half]), ptx.maximum)
        factor, inverse = numerics.powers_of_two(ptx.as_float(largest), SIZE, MIN_SIZE)
        # In float16 a NaN would be lost.
        return factor, numerics.fma(ptx.as_float(largest), ptx.f32(0.0), inverse)

    def queries_to_float16(self, n) -> None:
        """Writes the queries of tile n in float16, what they were multiplied by, and the inverse."""
        plan = self.plan
        row = self.g + n * ROWS
        plain = self._pairs(self.queries + row * plan.query_pitch, plan.head_dim, plan.head_dim // 32)
        largest = numerics.largest([x & ~SIGNS for word in plain for half in word for x in half])
        factor, inverse = numerics.powers_of_two(fragments.all_columns(largest, ptx.maximum), SIZE, MIN_SIZE)
        for k, word in enumerate(self._half(plain, factor)):
            for half, pairs in enumerate(word):
                at = self.halves + row * plan.query_pitch + self.t * (plan.head_dim // 4) + half * plan.head_dim
                ptx.store_shared(at + 8 * k, *pairs)
        ptx.store_shared(self.factors + row * 8, factor, inverse)

    def _sums(self, operand: list, weights: list, kind: str) -> tuple:
        """Sums of operand times weights over [word][half], for queries 2 t and 2 t + 1."""
        # Two chains, for each product waits for the one before it.
        acc = [(ptx.f32(0.0),) * 4] * 2
        for word in zip(operand, weights):
            for half, (x, weight) in enumerate(zip(*word)):
                acc[half] = fragments.mma(acc[half], (weight[0], weight[0], weight[1], weight[1]), x, kind)
        return tuple(a + b for a, b in zip(*acc))[:2]

    def _scaled(self, operand: list, scale: list, slices: int = 1) -> tuple[list, tuple]:
        """The operand times the scales, and the excess of each of its slices: the sum times what the codes are read too large by."""
        scaled = self._each(numerics.multiply_f16, operand, scale)
        ones = self._each(lambda _: ptx.i32(ONES), scaled)
        size = len(scaled) // slices
        sums = [x for i in range(0, len(scaled), size) for x in self._sums(scaled[i : i + size], ones[i : i + size], "f16")]
        return scaled, tuple(x * self.excess for x in sums)

    def _contract(self, at: list, row_bytes: int, plane_bytes: int, operand: Callable) -> list:
        """Products [m][n] of the codes of tile m, whose rows g and g + 8 are at at[m], with operand(n, k), summed over all words k."""
        steps = row_bytes // 16
        words = [[[ptx.load_shared(row + p * plane_bytes, steps) for p in range(self.plan.planes)] for row in rows] for rows in at]

        def code_fragments(m: int, k: int) -> list:
            a, b = (numerics.unpack(planes[0][k], planes[1][k] if len(planes) == 2 else None, self.masks) for planes in words[m])
            return [(a[half][0], b[half][0], a[half][1], b[half][1]) for half in (0, 1)]

        if self.plan.whole_warpgroup:
            all_fragments = ([x for k in range(steps) for x in code_fragments(m, k)] for m in range(len(at)))
            return [fragments.mma_warpgroup(x, operand(0, 0), len(self.tiles), steps * STEP_BYTES) for x in all_fragments]
        acc = [[(ptx.f32(0.0),) * 4 for _ in self.tiles] for _ in at]
        for k in range(steps):
            operands = [operand(n, k) for n in self.tiles]
            codes = [code_fragments(m, k) for m in range(len(at))]
            for half in (0, 1):
                for n in self.tiles:
                    for m, fragment in enumerate(codes):
                        acc[m][n] = fragments.mma(acc[m][n], fragment[half], operands[n][half], "f16")
        return acc

    def _share_operand(self, shared, n, first, steps: int, operand: list) -> None:
        """Writes this lane's words of operand n, from step `first` of `steps` on."""
        for k, halves in enumerate(operand):
            at = shared + (n * steps + first + k) * STEP_BYTES
            words = [x for half in halves for x in half]
            if self.plan.whole_warpgroup:
                for i, word in enumerate(words):
                    ptx.store_shared(at + i * (STEP_BYTES // 4) + self.lane * 4, word)
            else:
                ptx.store_shared(at + self.lane * 16, *words)

    def _publish(self) -> None:
        if self.plan.whole_warpgroup:
            fragments.publish()

    def _shared_operand(self, shared, steps: int) -> Callable:
        """The operand that `_contract` takes: this lane's words, or for a whole warpgroup the address of those of all lanes."""

        def operand(n: int, k: int) -> tuple:
            words = ptx.load_shared(shared + (n * steps + k) * STEP_BYTES + self.lane * 16, 4)
            return words[:2], words[2:]

        return (lambda n, k: shared + (n * steps + k) * STEP_BYTES) if self.plan.whole_warpgroup else operand

    def quantized_keys(self, slot, group, refill: Callable) -> tuple[list, list, list]:
        """Logits [n][tile] of this warp's tokens, their units [n], and what is to be added to them [n], in these units.

        Tokens are in the order of the values' rows: word k of the first half, then of the second.
        """
        plan = self.plan
        G, H = plan.group_size, plan.head_dim
        row_bytes, steps, words = H // 2, H // 32, G // 32
        parameters = slot + plan.planes * G * row_bytes
        scale, zero = self._pairs(parameters, H, steps), self._pairs(parameters + 2 * H, H, steps)
        factor, inverse = self._normalized(scale)
        scale = self._half_scales(scale, factor)

        def prepared(n) -> tuple[list, list]:
            """Operand n, and where its logits start."""
            at = (self.g + n * ROWS) * plan.query_pitch
            plain, half = self._pairs(self.queries + at, H, steps), self._pairs(self.halves + at, H, steps)
            scaled, excess = self._scaled(half, scale)
            sums, unit = self._sums(plain, zero, "bf16"), factor * (1 / self.unit)
            return scaled, [x * (factors[0] * unit) - e for x, factors, e in zip(sums, self._factors(n), excess)]

        if self.team == 1:
            refill()
            scaled, start = zip(*(prepared(ptx.i32(n)) for n in self.tiles))

            def operand(n, k):
                return scaled[n][k]

        else:
            for n in range(0, len(self.tiles), self.team):
                n = self.part + n
                with ptx.when(n < len(self.tiles)):
                    scaled, start = prepared(n)
                    self._share_operand(self.shared, n, 0, steps, scaled)
                    with ptx.when(self.g == 0):
                        ptx.store_shared(self._numbers_at(ptx.i32(0)) + n * 8, *start)
            self._publish()
            refill()
            start = self._shared_numbers(0, 1, operator.add)
            operand = self._shared_operand(self.shared, steps)
        mine = words // self.team
        first = slot + (((self.g >> 1) * words + self.part * mine) * 4 + (self.g & 1)) * row_bytes + self.t * (H // 8)
        logits = [[] for _ in self.tiles]
        for k in range(mine):
            rows = [first + (4 * k + half * (G // 2)) * row_bytes for half in (0, 1)]
            acc = self._contract([(row, row + 2 * row_bytes) for row in rows], row_bytes, G * row_bytes, operand)
            for n in self.tiles:
                logits[n] += [acc[0][n], acc[1][n]]
        units = [[factors[1] * (inverse * self.unit) for factors in self._factors(ptx.i32(n))] for n in self.tiles]
        return logits, units, start

    def _factors(self, n) -> tuple:
        """The factors that queries 2 t and 2 t + 1 were multiplied by, and their inverses."""
        words = ptx.load_shared(self.factors + (self.t * 2 + n * ROWS) * 8, 4, "f")
        return words[:2], words[2:]

    def quantized_values(self, slot, group, state: dict, logits: tuple[list, list, list], refill: Callable) -> dict:
        """The state after this group."""
        plan = self.plan
        G, H = plan.group_size, plan.head_dim
        row_bytes, words = G // 2, G // 32
        mine = words // self.team
        parameters = slot + plan.planes * H * row_bytes
        scale = self._pairs(parameters, G, words)
        factor, inverse = self._normalized(scale)
        if self.team > 1:
            scale = self._pairs(parameters + self.part * (8 * mine), G, mine)
        scale = self._half_scales(scale, factor)
        zeros = self._zeros_of_tokens(parameters + 2 * G, mine)
        state, alphas, weights, sums = self._softmax(state, *logits, refill)
        state["offset"] = [
            [
                numerics.dot(tokens, rows, c, old[2 * i + c])
                for i, (tokens, rows) in enumerate(zip(*map(self._sliced, (p, zeros))))
                for c in (0, 1)
            ]
            for p, old in zip(weights, state["offset"])
        ]
        scaled, excess = zip(*(self._scaled(self._weights_of_words(p, mine), scale, self.slices) for p in weights))

        def operand(n, k):
            return scaled[n][k]

        if self.team > 1:
            for n in self.tiles:
                self._share_operand(self.weights, n, self.part * mine, words, scaled[n])
            for array, values in self._arrays_of_slices(1 + plan.slices, excess):
                self._share_numbers(array, values)
            if plan.observe:
                for array, values in self._arrays_of_slices(1 + 2 * plan.slices, sums):
                    self._share_over_rows(array, self.first_slice, values, operator.add)
            self._publish()
            self.meet()
            excess = self._shared_numbers(1 + plan.slices, plan.slices, operator.add)
            operand = self._shared_operand(self.weights, words)
        else:
            excess = self._added(excess)
        if plan.observe:
            self._store_observed(group, state["top"], sums)
        unit = inverse * self.unit
        for n in self.tiles:
            below = [x * (unit * -1.0) for x in excess[n]]
            state["out"][n] = [tuple(numerics.fma(x, alphas[n][c % 2], below[c % 2]) for c, x in enumerate(acc)) for acc in state["out"][n]]
        channels = range(H // 16 // self.team)
        first = slot + (self.part * (16 * len(channels)) + self.g) * row_bytes + self.t * (G // 8)
        for i in channels[::2]:
            both = channels[i : i + 2]
            rows = [first + 16 * m * row_bytes for m in both]
            acc = self._contract([(row, row + 8 * row_bytes) for row in rows], row_bytes, H * row_bytes, operand)
            for n in self.tiles:
                for m, tiles in zip(both, acc):
                    state["out"][n][m] = tuple(numerics.fma(x, unit, old) for x, old in zip(tiles[n], state["out"][n][m]))
        return state

    def _store_observed(self, group, tops: list, sums: list) -> None:
        """Writes the logarithm (base 2) of each query's sum of exponentials over a group, -inf where they are all too small. As all weights
        are here, they are larger by 2^HEADROOM, which is in the row's logarithm too (mosaic_blocks.py).

        tops: the maxima [n] that the sums are relative to. sums: those of this lane's tokens [n]; the warps of a team have shared them, and
        divide the tiles among them.
        """
        to = self.observed + ptx.i64(group) * (4 * self.plan.padded_rows) + ptx.i64(self.t * 8)
        if self.team == 1:
            whole = self._added([[fragments.all_rows(x, operator.add) for x in pair] for pair in sums])
        for n, pair in enumerate(tops):
            # The first row of lanes of one warp.
            with ptx.when((self.part == n % self.team) & (self.g == 0)):
                found = self._shared_pair(1 + 2 * self.plan.slices, n, operator.add) if self.team > 1 else whole[n]
                logarithms = [top + numerics.log2(x) for top, x in zip(pair, found)]
                ptx.store_global_words(to + n * (4 * ROWS), *map(ptx.as_bits, logarithms))
        # Products follow, which all lanes run together.
        ptx.synchronize(None, 1)

    def _zeros_of_tokens(self, at, mine: int) -> list:
        """The values' zeros of this lane's tokens [tile][row], from the array at `at`."""
        words = self.plan.group_size // 32
        token = ((self.g >> 1) * words + self.part * mine) * 4 + (self.g & 1) * 2

        def load(k, half):
            return ptx.load_shared(at + token * 2 + (8 * k + half * self.plan.group_size), 1)[0]

        return [numerics.bf16_entries(load(k, half)) for k in range(mine) for half in (0, 1)]

    def _weights_of_words(self, p: list, words: int) -> list:
        """Softmax weights [tile] as an operand [word][half]."""
        return [[self._operand(x, "f16") for x in p[2 * k : 2 * k + 2]] for k in range(words)]
