"""The arithmetic of a warp, in fragments of the tensor cores: logits, softmax and weighted values of a group or chunk in shared memory.

Codes enter as 1024 + code in float16, which costs no arithmetic (docs/kernels/formats.md, "Unpacking"). The excess is a multiple of the sum
of the other operand as rounded, and is taken off every product. Queries and scales are brought to a common size by powers of two:
float16 then has 2^20 from the largest scale of a group to the smallest (2^16 for high nibbles in one plane). The keys' zeros are a
product of their own in bfloat16, the values' a number for all channels.
"""

import functools
import math
import operator
from collections.abc import Callable

from pallas_kernels.attention.mosaic_plan import ROWS, Plan
from pallas_kernels.gpu import fragments, numerics, ptx

ONES = 0x3C003C00  # a pair of float16
SIGNS = 0x80008000
EXPONENTS = 0x00800080  # 1 in the place of the exponents of a pair of bfloat16
# Queries and scales in float16: their largest lies at 2^SIZE, unless that takes a factor of more than 2^(SIZE - LEAST).
SIZE, LEAST = 6, -40
STEP_BYTES = 512  # of an operand that a team shares: four words a lane
# Softmax weights are 2^HEADROOM times exp(logit - maximum), for few to fall below what float16 has; times scales they stay below 2^15.
HEADROOM = 8


class Tile:
    """A warp's part of attention over whatever lies in its team's slots.

    Lane 4 g + t holds logits and results of queries 2 t and 2 t + 1 of the 8 queries of tile n. The warps of a team divide the tokens of a
    step for the logits, and the channels for the weighted values; between, they share the queries times the keys' scales, the maximum, and
    the weights.
    state: out[n][i] are weighted values of channels 16 i + g and 16 i + g + 8 of this warp's channels, without offset[n], which is the sum
    of weights times zeros of this lane's tokens and the same for all channels; top[n] is the running maximum (base 2); total[n] is the
    sum of weights of this lane's tokens.
    """

    def __init__(self, plan: Plan, at, lane, part, barrier, length):
        self.plan = plan
        self.masks = numerics.nibble_masks(length >> 31)  # no length is negative
        self.g, self.t, self.lane, self.part = lane >> 2, lane & 3, lane, part
        self.queries, self.shared, self.observed = at
        self.weights, self.numbers = (self.shared + plan.of_team.at(part) for part in ("weights", "numbers"))
        if plan.planes is not None:
            self.halves, self.factors = (self.queries + plan.of_block.at(part) for part in ("halves", "factors"))
        self.tiles = range(plan.block_tiles)
        self.team = plan.config.team
        self.meet = functools.partial(ptx.synchronize, barrier, self.team)
        # A code is read as 1024 more, and the lower plane is stored plus 8; its unit is a sixteenth of the scale.
        self.excess, self.unit = (1024.0, 1.0) if plan.planes == 1 else (1032.0, 1 / 16)

    def empty(self) -> dict:
        f = ptx.f32
        channels = range(self.plan.head_dim // 16 // self.team)
        numbers = {"top": -1e30, "total": 0.0} | ({} if self.plan.planes is None else {"offset": 0.0})
        state = {name: [[f(x)] * 2 for _ in self.tiles] for name, x in numbers.items()}
        return {"out": [[(f(0.0),) * 4 for _ in channels] for _ in self.tiles], **state}

    def _full_operand_at(self, n, a, steps: int):
        """The address of this lane's two words of the weights of tile n, step a of `steps`."""
        return self.weights + (n * steps + a) * 256 + self.lane * 8

    def _numbers_at(self, array):
        """The address of this lane's part of a per-query array that the team shares: two numbers per tile."""
        return self.numbers + array * self.plan.numbers_bytes + self.t * (self.plan.numbers_bytes // 4)

    def _share_numbers(self, first: int, values: list) -> None:
        """Writes this warp's numbers [n] to its array, from array `first` on."""
        at = self._numbers_at(first + self.part)
        flat = [x for pair in values for x in pair]
        with ptx.when(self.g == 0):
            for i in range(0, len(flat), 4):
                ptx.store_shared(at + 4 * i, *flat[i : i + 4])

    def _share_over_rows(self, first: int, values: list, combine: Callable) -> None:
        """Combines numbers [n] over the lanes of a column, and writes them as `_share_numbers` does."""
        flat = [x for pair in values for x in pair]
        flat, index = fragments.scatter_rows(flat, self.g, combine)
        at = self._numbers_at(first + self.part) + index * 4
        for i, x in enumerate(flat):
            ptx.store_shared(at + 4 * i, x)

    def _shared_numbers(self, first: int, arrays: int, combine: Callable) -> list:
        """Numbers [n] for this lane's queries, combined over `arrays` arrays from array `first` on."""
        count = 2 * len(self.tiles)
        loaded = (ptx.load_shared(self._numbers_at(ptx.i32(first + i)), count, "f") for i in range(arrays))
        flat = [functools.reduce(combine, xs) for xs in zip(*loaded)]
        return [flat[2 * n : 2 * n + 2] for n in self.tiles]

    def _shared_pair(self, first: int, n: int, combine: Callable) -> list:
        """Those of tile n, combined over the team's arrays from array `first` on."""
        loaded = (ptx.load_shared(self._numbers_at(ptx.i32(first + i)) + 8 * n, 2, "f") for i in range(self.team))
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
            [numerics.swap_neighbours(*(numerics.positive_to_float16(x, bias) for x in half)) for half, bias in zip(word, biases)]
            for word in scale
        ]

    def _normalized(self, scale: list) -> tuple:
        """A power of two that brings the scales of a row of lanes to a common size, and its inverse: NaN if one of the scales is."""
        largest = fragments.all_columns(numerics.largest_positive([x for word in scale for half in word for x in half]), ptx.maximum)
        factor, inverse = numerics.powers_of_two(ptx.as_float(largest), SIZE, LEAST)
        # In float16 a NaN would be lost.
        return factor, numerics.fma(ptx.as_float(largest), ptx.f32(0.0), inverse)

    def queries_to_float16(self, n) -> None:
        """Writes the queries of tile n in float16, what they were multiplied by, and the inverse."""
        plan = self.plan
        row = self.g + n * ROWS
        plain = self._pairs(self.queries + row * plan.query_pitch, plan.head_dim, plan.head_dim // 32)
        largest = numerics.largest([x & ~SIGNS for word in plain for half in word for x in half])
        factor, inverse = numerics.powers_of_two(fragments.all_columns(largest, ptx.maximum), SIZE, LEAST)
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

    def _scaled(self, operand: list, scale: list) -> tuple[list, tuple]:
        """The operand times the scales, and its excess: the sum times what the codes are read too large by."""
        scaled = self._each(numerics.multiply_pairs, operand, scale)
        ones = self._each(lambda _: ptx.i32(ONES), scaled)
        return scaled, tuple(x * self.excess for x in self._sums(scaled, ones, "f16"))

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
            operand = lambda n, k: scaled[n][k]
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
        state["offset"] = [[numerics.dot(p, zeros, c, old) for c, old in enumerate(pair)] for p, pair in zip(weights, state["offset"])]
        scaled, excess = zip(*(self._scaled(self._weights_of_words(p, mine), scale) for p in weights))
        operand = lambda n, k: scaled[n][k]
        if self.team > 1:
            for n in self.tiles:
                self._share_operand(self.weights, n, self.part * mine, words, scaled[n])
            self._share_numbers(1 + self.team, excess)
            if plan.observe:
                self._share_over_rows(1 + 2 * self.team, sums, operator.add)
            self._publish()
            self.meet()
            excess = self._shared_numbers(1 + self.team, self.team, operator.add)
            operand = self._shared_operand(self.weights, words)
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
            whole = [[fragments.all_rows(x, operator.add) for x in pair] for pair in sums]
        for n, pair in enumerate(tops):
            # The first row of lanes of one warp.
            with ptx.when((self.part == n % self.team) & (self.g == 0)):
                found = self._shared_pair(1 + 2 * self.team, n, operator.add) if self.team > 1 else whole[n]
                logarithms = [top + numerics.log2(x) for top, x in zip(pair, found)]
                ptx.store_global_words(to + n * (4 * ROWS), *map(ptx.as_bits, logarithms))
        # Products follow, which all lanes run together.
        ptx.synchronize(None, 1)

    def _zeros_of_tokens(self, at, mine: int) -> list:
        """The values' zeros of this lane's tokens [tile][row], from the array at `at`."""
        words = self.plan.group_size // 32
        token = ((self.g >> 1) * words + self.part * mine) * 4 + (self.g & 1) * 2
        load = lambda k, half: ptx.load_shared(at + token * 2 + (8 * k + half * self.plan.group_size), 1)[0]
        return [numerics.bf16_entries(load(k, half)) for k in range(mine) for half in (0, 1)]

    def _operand(self, p: tuple, kind: str) -> tuple:
        """Softmax weights of a tile of tokens as an operand."""
        return fragments.transpose(numerics.pair(p[0], p[1], kind)), fragments.transpose(numerics.pair(p[2], p[3], kind))

    def _weights_of_words(self, p: list, words: int) -> list:
        """Softmax weights [tile] as an operand [word][half]."""
        return [[self._operand(x, "f16") for x in p[2 * k : 2 * k + 2]] for k in range(words)]

    def _softmax(self, state: dict, logits: list, units: list, start: list | None, refill: Callable) -> tuple[dict, list, list, list]:
        """Brings all of the state but `out` up to date; returns it, the factors [n] that `out` is to be multiplied by, weights
        [n][tile], and their sums over this lane's tokens [n].

        logits: [n][tile]. units, start: numbers [n] for two queries; start is added to each logit before its unit multiplies it.
        """
        base = math.log2(math.e) / math.sqrt(self.plan.head_dim)
        units = [[x * base for x in pair] for pair in units]
        added = start and [[x * unit for x, unit in zip(*pairs)] for pairs in zip(start, units)]
        more = lambda n, c, x: x if added is None else x + added[n][c]
        peak = lambda tiles, c: functools.reduce(ptx.maximum, [x for s in tiles for x in s[c::2]])
        peaks = [[more(n, c, peak(tiles, c) * units[n][c]) for c in (0, 1)] for n, tiles in enumerate(logits)]
        if self.team > 1:
            self._share_over_rows(1, peaks, ptx.maximum)
            refill()
            peaks = self._shared_numbers(1, self.team, ptx.maximum)
        else:
            refill()
            peaks = [[fragments.all_rows(x, ptx.maximum) for x in pair] for pair in peaks]
        new = {name: [] for name in state} | {"out": list(state["out"])}
        alphas, weights, sums = [], [], []
        for n, tiles in enumerate(logits):
            top = [ptx.maximum(old, x) for old, x in zip(state["top"][n], peaks[n])]
            alpha = [numerics.exp2(old - x) for old, x in zip(state["top"][n], top)]
            down = [more(n, c, ptx.f32(float(HEADROOM)) - x) for c, x in enumerate(top)]
            p = [tuple(numerics.exp2(numerics.fma(x, units[n][c % 2], down[c % 2])) for c, x in enumerate(s)) for s in tiles]
            sums.append([numerics.total([x for s in p for x in s[c::2]]) for c in (0, 1)])
            new["top"].append(top)
            new["total"].append([numerics.fma(old, a, x) for old, a, x in zip(state["total"][n], alpha, sums[n])])
            if "offset" in state:
                new["offset"].append([old * a for old, a in zip(state["offset"][n], alpha)])
            alphas.append(alpha)
            weights.append(p)
        return new, alphas, weights, sums

    # The full-precision rows, 16 tokens or channels a step.

    def causal_mask(self, first_row, length) -> Callable:
        """A function (n, c, token): whether query c of this lane's two of tile n sees that token of the cache.

        The only place that knows: which of the last tokens a query of a tree sees would be looked up here.
        """
        plan = self.plan
        row = lambda n, c: first_row + (self.t * 2 + (n * ROWS + c))
        limit = lambda n, c: length - (plan.tokens - 1) + row(n, c) // plan.heads_per_kv_head
        limits = [[ptx.minimum(limit(n, c), length) for c in (0, 1)] for n in self.tiles]
        return lambda n, c, token: token < limits[n][c]

    def full_queries(self) -> Callable:
        """The queries as operands (n, step); a warp with few tiles keeps them."""
        start = self.queries + self.g * self.plan.query_pitch + self.t * 4
        word = lambda n, channel: ptx.load_shared(start + (n * ROWS * self.plan.query_pitch + 2 * channel), 1)[0]
        load = lambda n, b: (word(n, 16 * b), word(n, 16 * b + 8))
        if self.team > 1:
            return load
        kept = [[load(n, b) for b in range(self.plan.head_dim // 16)] for n in self.tiles]
        return lambda n, b: kept[n][b]

    def _matrices(self, slot, row, piece, *, transposed: bool) -> Callable:
        """Loads the fragment whose rows start at 16 a and pieces at 2 b, as function (a, b)."""
        H = self.plan.head_dim
        start, swizzled = slot + row * (2 * H), (piece ^ (self.lane & 7)) * 16
        return lambda a, b: fragments.load_matrices(start + a * (32 * H) + (swizzled ^ (b * 32)), transposed=transposed)

    def full_keys(self, slot, chunk, queries: Callable, sees: Callable, refill: Callable) -> tuple[list, list, None]:
        """Logits [n][tile] of this warp's tokens of a chunk, -inf for those that a query does not see; and their units [n]."""
        refill()
        plan = self.plan
        mine = plan.chunk // 16 // self.team
        load = self._matrices(slot, self.lane & 15, self.lane >> 4, transposed=False)
        logits = [[] for _ in self.tiles]
        for a in range(mine):
            a = self.part * mine + a
            acc = [(ptx.f32(0.0),) * 4 for _ in self.tiles]
            for b in range(plan.head_dim // 16):
                fragment = load(a, ptx.i32(b))
                acc = [fragments.mma(acc[n], fragment, queries(n, b), "bf16") for n in self.tiles]
            token = chunk * plan.chunk + self.g + a * 16
            hidden = ptx.f32(-math.inf)
            for n in self.tiles:
                logits[n].append(tuple(ptx.select(sees(n, c % 2, token + 8 * (c // 2)), x, hidden) for c, x in enumerate(acc[n])))
        return logits, [[ptx.f32(1.0)] * 2 for _ in self.tiles], None

    def full_values(self, slot, chunk, state: dict, logits: tuple[list, list, None], refill: Callable) -> dict:
        """The state after this chunk."""
        plan = self.plan
        steps = plan.chunk // 16
        mine, channels = steps // self.team, plan.head_dim // 16 // self.team
        state, alphas, weights, _ = self._softmax(state, *logits, refill)
        state["out"] = [[tuple(x * alpha[c % 2] for c, x in enumerate(acc)) for acc in out] for out, alpha in zip(state["out"], alphas)]
        weights = [[self._operand(p, "bf16") for p in tiles] for tiles in weights]
        operand = lambda n, a: weights[n][a]
        if self.team > 1:
            for n in self.tiles:
                for a, words in enumerate(weights[n]):
                    ptx.store_shared(self._full_operand_at(n, self.part * mine + a, steps), *words)
            self.meet()
            operand = lambda n, a: ptx.load_shared(self._full_operand_at(n, a, steps), 2)
        load = self._matrices(slot, (self.lane & 7) + (self.lane >> 4) * 8, (self.lane >> 3) & 1, transposed=True)
        for a in range(steps):
            operands = [operand(n, a) for n in self.tiles]
            for i in range(channels):
                fragment = load(ptx.i32(a), self.part * channels + i)
                for n in self.tiles:
                    state["out"][n][i] = fragments.mma(state["out"][n][i], fragment, operands[n], "bf16")
        return state

    def store(self, place: Callable, state: dict) -> None:
        """Writes the team's partial results: each warp those of its channels, once the whole team is done with its part of the ring.

        place(name, row, entry): the address of that entry of "out", or of "top" or "total" with entry 0, for a query row of the block.
        """
        H = self.plan.head_dim
        sums = {name: state[name] for name in ("total", "offset") if name in state}
        if self.team > 1:
            # They take the place of the maxima and the excess.
            self.meet()
            for i, pairs in enumerate(sums.values()):
                self._share_over_rows(1 + i * self.team, pairs, operator.add)
            self.meet()
            sums = {name: self._shared_numbers(1 + i * self.team, self.team, operator.add) for i, name in enumerate(sums)}
        else:
            sums = {name: [[fragments.all_rows(x, operator.add) for x in pair] for pair in pairs] for name, pairs in sums.items()}
            ptx.synchronize(None, 1)
        for n in self.tiles:
            for c in (0, 1):
                row = self.t * 2 + (n * ROWS + c)
                to = place("out", row, self.g + self.part * (H // self.team))
                for i, acc in enumerate(state["out"][n]):
                    for high in (0, 1):
                        x = acc[c + 2 * high]
                        ptx.store_global(to + 4 * (16 * i + 8 * high), x + sums["offset"][n][c] if "offset" in sums else x)
                with ptx.when((self.g == 0) & (self.part == 0)):
                    ptx.store_global(place("top", row, ptx.i32(0)), state["top"][n][c])
                    ptx.store_global(place("total", row, ptx.i32(0)), sums["total"][n][c])
