"""The program of a block of mosaic_choice.py: the shares of a KV head's tokens, and the choice of the largest."""

import functools
import math
from collections.abc import Callable

from pallas_kernels.attention.mosaic_low_bits_plan import LARGER, NO_LOGIT, TILE
from pallas_kernels.attention.partials import MIN_LOG_SHARE
from pallas_kernels.gpu import fragments, numerics, ptx
from pallas_kernels.replaced_attention.mosaic_choice_plan import Plan

SPLIT_WORDS = 16  # maxima of splits, and the same number of sums, that a lane loads at a time
# Shares are 2^LARGER times as large here, as weights are; otherwise the logits that they are relative to would be lost at the lower end of
# float32. The logarithm of the smallest, to base 2:
MIN_SHARE = MIN_LOG_SHARE + LARGER
# A share is found by its bits, which lie from FLOOR to CEILING, a range of SEARCHED bits. 0: there is no token. Numbers too large for a
# share count as CEILING.
FLOOR, SEARCHED = 127 + MIN_SHARE - 1 << 23, 30
CEILING = FLOOR + (1 << SEARCHED) - 1
HALF = 0xFFFF
HELD_ROWS = 16  # rows of 32 numbers that a warp keeps in registers while it compares them


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block, which chooses for the KV head of its number."""
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    Block(plan, at, ptx.thread_index(), ptx.block_index()).emit()


class Block:
    """The choice for a KV head.

    A tile is read by `plan.lanes` lanes, of which this one is number `part`; `within` is where its first token is in the tile.
    """

    def __init__(self, plan: Plan, at: dict, thread, head):
        self.plan, self.at, self.thread, self.head = plan, at, thread, head
        self.warp, self.lane = ptx.uniform(thread >> 5), thread & 31
        self.part = thread & (plan.lanes - 1)
        self.within = self.part * plan.chunk_tokens
        self.shared = {name: at["shared"] + plan.shared.at(name) for name in plan.shared.sizes}
        self.quantized = ptx.uniform(ptx.load_global(at["quantized"] + ptx.i64(head // plan.kv_heads) * 4)[0])

    def emit(self) -> None:
        plan, tiles = self.plan, self.quantized // TILE
        loaded = self._load_replaced()
        self.wholes = self._wholes()

        def of_all(logits):
            return [numerics.exp2(x - whole) for x, whole in zip(logits, self.wholes)]

        replaced = [(there, position, self._share_of(of_all(logits))) for there, position, logits in loaded]
        if not plan.all_tiles:
            self._store_largest(tiles)
            self._meet()
            for there, position, share in replaced:
                with ptx.when(there):
                    ptx.raise_shared(self._word("largest", position >> 5), ptx.as_bits(share))
            self._meet()
            self._choose("largest", plan.tiles, tiles, self._keep_tile)
            self._meet()
        tiles = ptx.minimum(tiles, ptx.i32(plan.k))
        self._store_shares(tiles)
        self._meet()
        for there, position, share in replaced:
            with ptx.when(there):
                self._store_replaced(position, share)
        self._meet()
        found = self._choose("shares", plan.candidates, tiles * TILE, self._keep_token)
        for first in range(0, plan.k, 32 * plan.warps):
            place = self.thread + first
            with ptx.when((found - 1 < place) & (place < plan.k)):
                ptx.store_global(self._result(place), ptx.i32(-1))

    def _meet(self) -> None:
        ptx.synchronize(ptx.i32(0), self.plan.warps)

    def _word(self, part: str, index):
        """The address of a word of a part of shared memory."""
        return self.shared[part] + index * 4

    def _of_head(self, name: str, words: int):
        """The address of this KV head's part of an array with `words` words for each KV head."""
        return self.at[name] + ptx.i64(self.head) * (4 * words)

    def _result(self, place):
        return self._of_head("chosen", self.plan.k) + ptx.i64(place * 4)

    # Shares.

    def _wholes(self) -> list:
        """The logarithm, base 2, of the sum of all weights with each query head, less LARGER. Every warp computes it, a split a lane."""
        plan = self.plan
        at_once = min(math.ceil(plan.splits / 32), SPLIT_WORDS // plan.heads)
        tops, totals = (self._of_head(name, plan.splits * plan.rows) + 4 * (plan.rows - plan.heads) for name in ("top", "total"))

        def step(i, state):
            splits = [(i * at_once + j) * 32 + self.lane for j in range(at_once)]
            places = [ptx.i64(ptx.minimum(split, ptx.i32(plan.splits - 1)) * (4 * plan.rows)) for split in splits]

            def load(base):
                return [[ptx.load_global(base + place + 4 * h, 1, "f")[0] for place in places] for h in range(plan.heads)]

            out = []
            for (old, whole), top, total in zip(state, load(tops), load(totals)):
                new = functools.reduce(ptx.maximum, top, old)
                whole = whole * numerics.exp2(old - new)
                for split, x, part in zip(splits, top, total):
                    whole = whole + ptx.select(split < plan.splits, part * numerics.exp2(x - new), ptx.f32(0.0))
                out.append((new, whole))
            return out

        state = [(ptx.f32(NO_LOGIT), ptx.f32(0.0)) for _ in range(plan.heads)]
        state = ptx.loop(ptx.i32(0), ptx.i32(math.ceil(plan.splits / (32 * at_once))), state, step)

        def of_all(x, combine):
            return fragments.all_rows(fragments.all_columns(x, combine), combine)

        tops = [of_all(top, ptx.maximum) for top, _ in state]
        parts = [total * numerics.exp2(top - new) for (top, total), new in zip(state, tops)]
        return [new + numerics.log2(of_all(part, numerics.add)) - LARGER for new, part in zip(tops, parts)]

    def _share_of(self, parts: list):
        """A token's share, of its part of all weights with each query head."""
        return numerics.total([ptx.maximum(x, ptx.f32(2.0**MIN_SHARE)) for x in parts])

    def _load_replaced(self) -> list:
        """This thread's replaced tokens: whether there is one, where, and its logits."""
        plan, out = self.plan, []
        for first in range(0, plan.replaced, 32 * plan.warps):
            index = self.thread + first
            place = ptx.minimum(index, ptx.i32(plan.replaced - 1))
            (position,) = ptx.load_global(self._of_head("positions", plan.replaced) + ptx.i64(place * 4))
            at = self._of_head("replaced_logits", plan.replaced * plan.heads) + ptx.i64(place * (4 * plan.heads))
            logits = [ptx.load_global(at + 4 * h, 1, "f")[0] for h in range(plan.heads)]
            out.append(((index < plan.replaced) & (ptx.i32(-1) < position) & (position < self.quantized), position, logits))
        return out

    def _of_tiles(self, tiles: list) -> list:
        """The shares of this lane's tokens in each of these tiles, each with the distance of its token from `within`. Tokens that are
        replaced have weights of 0, and so the smallest share."""
        plan, N = self.plan, self.plan.heads
        weights = self._of_head("weights", plan.size * N // 2) + ptx.i64(self.part * (4 * plan.chunk_words))

        def chunk(at):
            return self._load(at, plan.chunk_words, "r", wide=plan.wide)

        # All is loaded before anything is computed: each load waits for memory.
        each = [
            (
                [chunk(weights + ptx.i64(tile * (2 * TILE * N)) + 4 * plan.chunk_words * plan.lanes * j) for j in plan.loads],
                self._load(self._of_head("relative_to", plan.tiles * N) + ptx.i64(tile * (4 * N)), N, "f", wide=plan.wide),
            )
            for tile in tiles
        ]
        return [self._shares(*loaded) for loaded in each]

    def _load(self, at, words: int, result: str, *, wide: bool) -> list:
        """Loads words from global memory: a vector, or two, where they lie for that."""
        n = min(words, 4) if wide else 1
        return [x for i in range(0, words, n) for x in ptx.load_global(at + 4 * i, n, result)]

    def _shares(self, chunks: list, relative_to: list) -> list:
        plan, N = self.plan, self.plan.heads
        factors = [numerics.exp2(x - whole) for x, whole in zip(relative_to, self.wholes)]
        out = []
        for j, chunk in zip(plan.loads, chunks):
            entries = [x for word in chunk for x in numerics.bf16_entries(word)]
            for i in range(plan.chunk_tokens):
                share = self._share_of([x * factor for x, factor in zip(entries[i * N : (i + 1) * N], factors)])
                out.append((j * plan.lanes * plan.chunk_tokens + i, share))
        return out

    def _each_tile(self, max_tiles: int, tiles, body: Callable) -> None:
        """Emits body(numbers) for all numbers from 0 to tiles - 1; the last numbers may be larger. The lanes that share a tile get the same
        number. max_tiles: an upper bound of `tiles`."""
        plan = self.plan
        unroll = plan.unroll(max_tiles)
        width = unroll * plan.together

        def step(i, _):
            first = (i * plan.warps + self.warp) * width + self.lane // plan.lanes
            body([first + u * plan.together for u in range(unroll)])
            return ()

        ptx.loop(ptx.i32(0), (tiles + (width * plan.warps - 1)) // (width * plan.warps), (), step)

    def _store_largest(self, tiles) -> None:
        """Stores the largest share of each tile's tokens in codes."""
        plan = self.plan

        def body(numbers: list) -> None:
            found = self._of_tiles([ptx.minimum(tile, tiles - 1) for tile in numbers])
            for tile, shares in zip(numbers, found):
                largest = functools.reduce(ptx.maximum, [share for _, share in shares])
                for bit in range(plan.lanes.bit_length() - 1):
                    largest = ptx.maximum(largest, ptx.shuffle("bfly", largest, 1 << bit))
                with ptx.when((self.part == 0) & (tile < tiles)):
                    ptx.store_shared(self._word("largest", tile), largest)

        self._each_tile(plan.tiles, tiles, body)

    def _tile(self, place):
        """The tile that was chosen as number `place`."""
        return place if self.plan.all_tiles else ptx.load_shared(self._word("chosen_tiles", place), 1)[0]

    def _store_shares(self, tiles) -> None:
        """Stores the shares of tokens in codes in the tiles that were chosen."""

        def body(places: list) -> None:
            found = self._of_tiles([self._tile(ptx.minimum(place, tiles - 1)) for place in places])
            for place, shares in zip(places, found):
                first = self._word("shares", place * TILE + self.within)
                with ptx.when(place < tiles):
                    for offset, share in shares:
                        ptx.store_shared(first + 4 * offset, share)

        self._each_tile(self.plan.candidates // TILE, tiles, body)

    def _store_replaced(self, position, share) -> None:
        """Stores a replaced token's share instead of that of its codes, where its tile was chosen."""
        place = position >> 5 if self.plan.all_tiles else ptx.load_shared(self._word("largest", position >> 5), 1)[0]
        with ptx.when(ptx.i32(-1) < place):
            ptx.store_shared(self._word("shares", place * TILE + (position & 31)), share)

    # The k largest.

    def _choose(self, part: str, max_entries: int, entries, keep: Callable):
        """Chooses the k largest entries of a part of shared memory, or all, and returns their number. max_entries: a bound of `entries`.

        Emits keep(entry, whether it is chosen, its place among those that are) for each of this lane's entries. A warp has successive rows
        of 32, so that warps, rows and lanes are in the order of entries.
        """
        plan = self.plan
        rows = plan.padded(max_entries) // (32 * plan.warps)

        def number(row) -> tuple:
            entry = (self.warp * rows + row) * 32 + self.lane
            x = ptx.minimum(ptx.load_shared(self._word(part, entry), 1)[0], ptx.i32(CEILING))
            return entry, ptx.select(entry < entries, x, ptx.i32(0))

        held = [number(row) for row in range(rows)] if rows <= HELD_ROWS else None

        def over(carry, body: Callable):
            """Runs carry = body(entry, its bits, carry) for each row, and returns the carry."""
            if held is None:
                return ptx.loop(ptx.i32(0), ptx.i32(rows), carry, lambda row, carry: body(*number(row), carry))
            return functools.reduce(lambda carry, each: body(*each, carry), held, carry)

        bound = self._bound(over, entries)

        def where(yes, number: int):
            return ptx.select(yes, ptx.i32(number), ptx.i32(0))

        counts = over(ptx.i32(0), lambda _, x, count: count + where(bound < x, 1) + where(x == bound, HALF + 1))
        (counts,) = self._counts(ptx.i32(2), [counts])
        everyone, before = ptx.sum_lanes(counts), ptx.sum_lanes(ptx.select(self.lane < self.warp, counts, ptx.i32(0)))
        room = ptx.i32(plan.k) - (everyone & HALF)  # for those that equal the bound
        lower = (ptx.i32(1) << self.lane) - 1

        def kept(entry, x, before):
            above, equal = bound < x, x == bound
            of_above, of_equal = ptx.ballot(above), ptx.ballot(equal)
            rank = before[1] + ptx.count_bits(of_equal & lower)
            place = before[0] + ptx.count_bits(of_above & lower) + ptx.minimum(rank, room)
            keep(entry, above | (equal & (rank < room)), place)
            return before[0] + ptx.count_bits(of_above), before[1] + ptx.count_bits(of_equal)

        over((before & HALF, before >> 16), kept)
        return (everyone & HALF) + ptx.minimum(everyone >> 16, room)

    def _bound(self, over: Callable, entries):
        """The k-th largest of all warps' numbers, as bits, or a smaller bound that exactly k reach; FLOOR where there are at most k.
        over: see `_choose`."""
        k = self.plan.k

        def narrow(state):
            bound, shift, count = state
            bounds = [bound + (ptx.i32(digit) << shift) for digit in (1, 2, 3)]

            def reaches(x, i, number):
                return ptx.select(bounds[i] - 1 < x, ptx.i32(number), ptx.i32(0))

            def more(_, x, counts):
                return (counts[0] + reaches(x, 0, 1) + reaches(x, 1, HALF + 1), counts[1] + reaches(x, 2, 1))

            both, third = map(ptx.sum_lanes, self._counts((shift >> 1) & 1, list(over((ptx.i32(0), ptx.i32(0)), more))))
            for higher, of_all in zip(bounds, (both & HALF, both >> 16, third)):
                enough = ptx.i32(k - 1) < of_all
                bound, count = ptx.select(enough, higher, bound), ptx.select(enough, of_all, count)
            return bound, shift - 2, count

        def unsettled(state):
            return (ptx.i32(k) < state[2]) & (ptx.i32(-1) < state[1])

        return ptx.while_loop(unsettled, (ptx.i32(FLOOR), ptx.i32(SEARCHED - 2), entries), narrow)[0]

    def _counts(self, slot, counts: list) -> list:
        """Sums of one or two counts over the lanes of each warp: lane i gets those of warp i, or 0 where there is none.

        The warps meet once. A slot may be used again when they have met once more after that.
        """
        plan = self.plan
        at = self.shared["counts"] + slot * (8 * plan.warps)
        sums = [ptx.sum_lanes(x) for x in counts]
        with ptx.when(self.lane == 0):
            ptx.store_shared(at + self.warp * 8, *sums)
        self._meet()
        loaded = ptx.load_shared(at + ptx.minimum(self.lane, ptx.i32(plan.warps - 1)) * 8, len(sums))
        return [ptx.select(self.lane < plan.warps, x, ptx.i32(0)) for x in loaded]

    def _keep_tile(self, tile, is_chosen, place) -> None:
        """Lists a chosen tile, and keeps every tile's place among the chosen ones; -1 if it is not chosen."""
        with ptx.when(is_chosen):
            ptx.store_shared(self._word("chosen_tiles", place), tile)
        ptx.store_shared(self._word("largest", tile), ptx.select(is_chosen, place, ptx.i32(-1)))

    def _keep_token(self, entry, is_chosen, place) -> None:
        """Stores the position of a token that is chosen."""
        with ptx.when(is_chosen):
            ptx.store_global(self._result(place), self._tile(entry >> 5) * TILE + (entry & 31))
