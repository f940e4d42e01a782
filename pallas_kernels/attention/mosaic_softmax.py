"""A warp's softmax, which groups and chunks of full-precision rows share, and the arithmetic of the full-precision rows."""

import functools
import math
import operator
from collections.abc import Callable

from pallas_kernels.attention.mosaic_plan import ROWS, Plan
from pallas_kernels.gpu import fragments, numerics, ptx

# Softmax weights are 2^HEADROOM times exp(logit - maximum), for few to fall below what float16 has; times scales they stay below 2^15.
HEADROOM = 8


class SoftmaxTile:
    """A warp's part of attention, and what its team shares.

    Lane 4 g + t holds logits and results of queries 2 t and 2 t + 1 of the 8 queries of tile n. The warps of a team divide the tokens of a
    step for the logits, and the channels for the weighted values; between, they share the maximum and the weights.

    The state is a dict: out[n][i] are weighted values of channels 16 i + g and 16 i + g + 8 of this warp's channels, without offset[n],
    which is the sum of weights times zeros of this lane's tokens and the same for all channels; top[n] is the running maximum (base 2);
    total[n] is the sum of weights of this lane's tokens. Sums over this lane's tokens are pairs for two queries, one for each of the warp's
    slices (`Plan.slices`).
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
        self.slices = plan.slices // self.team  # of this warp
        self.first_slice = part if self.slices == 1 else part * self.slices
        self.meet = functools.partial(ptx.synchronize, barrier, self.team)
        # A code is read as 1024 more, and the lower plane is stored plus 8; its unit is a sixteenth of the scale.
        self.excess, self.unit = (1024.0, 1.0) if plan.planes == 1 else (1032.0, 1 / 16)

    def empty(self) -> dict:
        f = ptx.f32
        channels = range(self.plan.head_dim // 16 // self.team)
        numbers = {"top": (-1e30, 1), "total": (0.0, self.slices)} | ({} if self.plan.planes is None else {"offset": (0.0, self.slices)})
        state = {name: [[f(x)] * (2 * pairs) for _ in self.tiles] for name, (x, pairs) in numbers.items()}
        return {"out": [[(f(0.0),) * 4 for _ in channels] for _ in self.tiles], **state}

    def _numbers_at(self, array):
        """The address of this lane's part of a per-query array that the team shares: two numbers per tile."""
        return self.numbers + array * self.plan.numbers_bytes + self.t * (self.plan.numbers_bytes // 4)

    def _sliced(self, items: list) -> list[list]:
        """What a warp has of a step, by slices."""
        size = len(items) // self.slices
        return [items[i : i + size] for i in range(0, len(items), size)]

    def _arrays_of_slices(self, first: int, sums: list) -> list[tuple]:
        """For each of this warp's slices its array, from array `first` on, and its numbers [n] of sums over slices."""
        return [(first + i, [pairs[2 * i : 2 * i + 2] for pairs in sums]) for i in range(self.slices)]

    def _added(self, sums: list) -> list:
        """Sums over slices [n], added in their order."""
        return [[numerics.total(pairs[c::2]) for c in (0, 1)] for pairs in sums]

    def _share_numbers(self, first: int, values: list) -> None:
        """Writes numbers [n] of a slice of this warp to its array; that of the team's first such slice is `first`."""
        at = self._numbers_at(first + self.first_slice)
        flat = [x for pair in values for x in pair]
        with ptx.when(self.g == 0):
            for i in range(0, len(flat), 4):
                ptx.store_shared(at + 4 * i, *flat[i : i + 4])

    def _share_over_rows(self, first: int, own, values: list, combine: Callable) -> None:
        """Combines numbers [n] over the lanes of a column, and writes them as `_share_numbers` does."""
        flat = [x for pair in values for x in pair]
        flat, index = fragments.scatter_rows(flat, self.g, combine)
        at = self._numbers_at(first + own) + index * 4
        for i, x in enumerate(flat):
            ptx.store_shared(at + 4 * i, x)

    def _shared_numbers(self, first: int, arrays: int, combine: Callable) -> list:
        """Numbers [n] for this lane's queries, combined over `arrays` arrays from array `first` on."""
        count = 2 * len(self.tiles)
        loaded = (ptx.load_shared(self._numbers_at(ptx.i32(first + i)), count, "f") for i in range(arrays))
        flat = [functools.reduce(combine, xs) for xs in zip(*loaded)]
        return [flat[2 * n : 2 * n + 2] for n in self.tiles]

    def _softmax(self, state: dict, logits: list, units: list, start: list | None, refill: Callable) -> tuple[dict, list, list, list]:
        """Brings all of the state but `out` up to date; returns it, the factors [n] that `out` is to be multiplied by, weights
        [n][tile], and their sums over this lane's tokens [n].

        logits: [n][tile]. units, start: numbers [n] for two queries; start is added to each logit before its unit multiplies it.
        """
        base = math.log2(math.e) / math.sqrt(self.plan.head_dim)
        units = [[x * base for x in pair] for pair in units]
        added = start and [[x * unit for x, unit in zip(*pairs)] for pairs in zip(start, units)]

        def more(n, c, x):
            return x if added is None else x + added[n][c]

        def peak(tiles, c):
            return functools.reduce(ptx.maximum, [x for s in tiles for x in s[c::2]])

        peaks = [[more(n, c, peak(tiles, c) * units[n][c]) for c in (0, 1)] for n, tiles in enumerate(logits)]
        if self.team > 1:
            self._share_over_rows(1, self.part, peaks, ptx.maximum)
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
            sums.append([numerics.total([x for s in tokens for x in s[c::2]]) for tokens in self._sliced(p) for c in (0, 1)])
            new["top"].append(top)
            new["total"].append([numerics.fma(old, a, x) for old, a, x in zip(state["total"][n], alpha * self.slices, sums[n])])
            if "offset" in state:
                new["offset"].append([old * a for old, a in zip(state["offset"][n], alpha * self.slices)])
            alphas.append(alpha)
            weights.append(p)
        return new, alphas, weights, sums

    def _operand(self, p: tuple, kind: str) -> tuple:
        """Softmax weights of a tile of tokens as an operand."""
        return fragments.transpose(numerics.pair(p[0], p[1], kind)), fragments.transpose(numerics.pair(p[2], p[3], kind))

    # The full-precision rows, 16 tokens or channels a step.

    def causal_mask(self, first_row, length) -> Callable:
        """A function (n, c, token): whether query c of this lane's two of tile n sees that token of the cache.

        The only place that knows: which of the last tokens a query of a tree sees would be looked up here.
        """
        plan = self.plan

        def row(n, c):
            return first_row + (self.t * 2 + (n * ROWS + c))

        def limit(n, c):
            return length - (plan.tokens - 1) + row(n, c) // plan.heads_per_kv_head

        limits = [[ptx.minimum(limit(n, c), length) for c in (0, 1)] for n in self.tiles]
        return lambda n, c, token: token < limits[n][c]

    def full_queries(self) -> Callable:
        """The queries as operands (n, step); a warp with few tiles keeps them."""
        start = self.queries + self.g * self.plan.query_pitch + self.t * 4

        def word(n, channel):
            return ptx.load_shared(start + (n * ROWS * self.plan.query_pitch + 2 * channel), 1)[0]

        def load(n, b):
            return (word(n, 16 * b), word(n, 16 * b + 8))

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

        def operand(n, a):
            return weights[n][a]

        if self.team > 1:
            for n in self.tiles:
                for a, words in enumerate(weights[n]):
                    ptx.store_shared(self._full_operand_at(n, self.part * mine + a, steps), *words)
            self.meet()

            def operand(n, a):
                return ptx.load_shared(self._full_operand_at(n, a, steps), 2)

        load = self._matrices(slot, (self.lane & 7) + (self.lane >> 4) * 8, (self.lane >> 3) & 1, transposed=True)
        for a in range(steps):
            operands = [operand(n, a) for n in self.tiles]
            for i in range(channels):
                fragment = load(ptx.i32(a), self.part * channels + i)
                for n in self.tiles:
                    state["out"][n][i] = fragments.mma(state["out"][n][i], fragment, operands[n], "bf16")
        return state

    def _full_operand_at(self, n, a, steps: int):
        """The address of this lane's two words of the weights of tile n, step a of `steps`."""
        return self.weights + (n * steps + a) * 256 + self.lane * 8

    def partial(self, state: dict) -> dict:
        """The team's partial result, of which each warp has its channels, once the whole team is done with its part of the ring.

        state: see the class. Returns for each of this lane's queries (n, c) the maximum, the sum of weights, and weighted values.
        """
        sums = {name: state[name] for name in ("total", "offset") if name in state}
        if self.team > 1:
            # They take the place of the maxima and the excess.
            self.meet()
            for i, pairs in enumerate(sums.values()):
                for array, values in self._arrays_of_slices(1 + i * self.plan.slices, pairs):
                    self._share_over_rows(array, self.first_slice, values, operator.add)
            self.meet()
            sums = {name: self._shared_numbers(1 + i * self.plan.slices, self.plan.slices, operator.add) for i, name in enumerate(sums)}
        else:
            sums = {name: [[fragments.all_rows(x, operator.add) for x in pair] for pair in pairs] for name, pairs in sums.items()}
            sums = {name: self._added(pairs) for name, pairs in sums.items()}
            ptx.synchronize(None, 1)

        def of_query(n, c) -> list:
            values = [acc[c + 2 * high] for acc in state["out"][n] for high in (0, 1)]
            if "offset" in sums:
                values = [x + sums["offset"][n][c] for x in values]
            return [state["top"][n][c], sums["total"][n][c], *values]

        return {(n, c): of_query(n, c) for n in self.tiles for c in (0, 1)}

    def nothing(self) -> dict:
        """A partial result for one to take its place."""
        values = self.plan.head_dim // 8 // self.team
        return {(n, c): [ptx.f32(0.0)] * (2 + values) for n in self.tiles for c in (0, 1)}

    def store(self, place: Callable, partial: dict) -> None:
        """Writes a partial result.

        place: (name, row, entry), the address of that entry of "out", or of "top" or "total" with entry 0, for a row of the block.
        """
        for (n, c), (top, total, *values) in partial.items():
            row = self.t * 2 + (n * ROWS + c)
            to = place("out", row, self.g + self.part * (self.plan.head_dim // self.team))
            for i, x in enumerate(values):
                ptx.store_global(to + 4 * (8 * i), x)
            # One lane of the team writes them for all.
            with ptx.when((self.g == 0) & (self.part == 0)):
                for name, x in ("top", top), ("total", total):
                    ptx.store_global(place(name, row, ptx.i32(0)), x)
