"""What a warp of the attention over KIVI's format does, see mosaic_low_bits.py: logits, softmax and weighted values in registers."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels.attention.mosaic_low_bits import CHUNK, CODE, FULL_TILE, LARGER, NO_LOGIT, PIECE, RISE, STAGES, TILE, Plan
from pallas_kernels.gpu import fragments, numerics, ptx


class LeftOut(NamedTuple):
    """Tokens of a tile whose codes are left out, since they are read in full precision. The positions of all such tokens of a KV head are
    divided among the lanes of a warp (`Warp._positions`), so that a lane knows only some of them.

    known: whether a position held by this lane lies in the tile. without: a function that is given this lane's products with the tile's
    tokens, and makes those with left-out tokens minus infinity, with all of these, whichever lane holds their positions. All lanes have to
    call it together, as they add up what they hold.
    """

    known: ptx.Value
    without: Callable


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block: warps, each with a share of the tokens of one KV head, and a ring of its own."""
    thread = ptx.thread_index()
    warp = ptx.uniform(thread >> 5)
    worker = ptx.block_index() * plan.warps + warp
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    at["shared"] = at["shared"] + warp * (STAGES * plan.tile_bytes)
    Warp(plan, at, thread & 31, worker // plan.splits, worker % plan.splits).emit()


class Warp:
    """A warp's share of the attention of a KV head.

    Lane 4 g + t works for query rows 2 t and 2 t + 1, and brings in the queries' row g. state: out[s][i] are the weighted values of product
    s, as `fragments.mma` has them: of channels 16 s + 2 g (in the first two registers) and 16 s + 2 g + 1; top is what logits (base 2) are
    taken relative to, at most RISE below the largest so far, and total the sum of the weights of this lane's tokens. While codes are read,
    out and total carry powers of 2; zero is the product of the weights and the values' zero points, and slots the ring's, the next first.
    """

    def __init__(self, plan: Plan, at: dict, lane, head, split):
        self.plan, self.at, self.head, self.split = plan, at, head, split
        self.lane, self.g, self.t = lane, lane >> 2, lane & 3
        batch = head // plan.kv_heads
        self.quantized, self.buffered = (
            ptx.uniform(ptx.load_global(at[name] + ptx.i64(batch) * 4)[0]) for name in ("quantized", "buffered")
        )
        row = ptx.minimum(self.g, ptx.i32(plan.rows - 1))
        query_head = head % plan.kv_heads * plan.heads + row % plan.heads
        place = (batch * plan.tokens + row // plan.heads) * (plan.kv_heads * plan.heads) + query_head
        self.query_row = at["q"] + ptx.i64(place) * (2 * plan.head_dim)
        self.to_base_2 = math.log2(math.e) / math.sqrt(plan.head_dim)

    def emit(self) -> None:
        plan, zero = self.plan, ptx.f32(0.0)
        state = {"out": [(zero,) * 4 for _ in plan.products], "top": [ptx.f32(NO_LOGIT)] * 2, "total": [zero] * 2}
        if plan.size:
            state = self._read_codes(state)
        size = 2 * plan.head_dim
        of_head = lambda name, rows: self.at[name] + ptx.i64(self.head) * (size * rows)
        if plan.replaced is not None:  # a token's key and value lie together
            keys = of_head("replacing", 2 * plan.replaced)
            logits = self.at["replaced_logits"] + ptx.i64(self.head) * (4 * plan.replaced * plan.heads)
            state = self._read_full(keys, keys + size, 2 * size, ptx.i32(plan.replaced), plan.replaced, self._is_replaced, state, logits)
        keys, values = (of_head(name, plan.buffer_rows) for name in ("keys", "values"))
        state = self._read_full(keys, values, size, self.buffered, plan.buffer_rows, self._is_seen, state)
        self._store(state)

    def _queries(self) -> list:
        """This lane's words of each product's queries."""
        at = self.query_row + ptx.i64(self.t * 8)
        return [ptx.load_global(at + 2 * CHUNK * s, 2) for s in self.plan.products]

    def _queries_of_zeros(self) -> list:
        """The second operands of the products with keys' zeros: for each 32 channels two."""
        at = self.query_row + ptx.i64(self.t * 16)
        words = [ptx.load_global(at + 64 * u, 4) for u in range(self.plan.head_dim // 32)]
        return [[[numerics.times_power(x, LARGER + CODE) for x in each[i::2]] for i in (0, 1)] for each in words]

    def _share(self, tiles) -> tuple:
        """This warp's first tile, and the one behind its last."""
        return self.split * tiles // self.plan.splits, (self.split + 1) * tiles // self.plan.splits

    # Tokens in codes. They come through a ring in shared memory that is the warp's own, with all that belongs to them.

    def _sources(self) -> list:
        """Where this lane's pieces of a KV head's first tile lie: for each 32 pieces of a slot, one."""
        first = lambda name: self.at[name] + ptx.i64(self.head) * self.plan.head_bytes(name)
        within = lambda i, name: ptx.i64(self.lane * PIECE) + (PIECE * 32 * i - self.plan.parts[name][0])
        return [self._of_part(i, {name: first(name) + within(i, name) for name in self.plan.parts_of(i)}) for i in self.plan.copies]

    def _of_part(self, i: int, each: dict):
        """Picks, of one value for each part that 32 pieces of a slot reach into, that of the part in which this lane's piece lies."""
        names = list(each)
        value = each[names[0]]
        for name in names[1:]:
            value = ptx.select(self.lane < self.plan.parts[name][0] // PIECE - 32 * i, value, each[name])
        return value

    def _copy(self, tile, last, slot, sources: list) -> None:
        """Starts the copies of a tile to a slot; zeros arrive there if the tile does not come before `last`."""
        plan = self.plan
        size = ptx.select(tile < last, ptx.i32(PIECE), ptx.i32(0))
        for i, source in zip(plan.copies, sources):
            # Parts with the same start need no choice between them.
            starts = {plan.step(name): plan.tile_start(name, tile) for name in plan.parts_of(i)}
            if len(starts) == 1:
                (start,) = starts.values()
            else:
                start = self._of_part(i, {name: starts[plan.step(name)] for name in plan.parts_of(i)})
            copy = functools.partial(ptx.copy_async, slot + (self.lane * PIECE + PIECE * 32 * i), source + ptx.i64(start), size)
            if PIECE * 32 * (i + 1) <= plan.tile_bytes:
                copy()
            else:
                with ptx.when(self.lane < plan.tile_bytes // PIECE - 32 * i):
                    copy()
        ptx.commit_copies()

    def _load_codes(self, name: str, slot, *, transposed: bool) -> list:
        """This lane's words [run of 16 bytes][of 8 tokens]: word t of each run of tokens g, g + 8, g + 16 and g + 24; transposed, bytes 2 g
        and 2 g + 1 of tokens 2 t and 2 t + 1, and so on."""
        plan = self.plan
        first = slot + (self.lane * plan.token_bytes + plan.parts[name][0])
        return [fragments.load_matrices(first + CHUNK * h, transposed=transposed) for h in range(plan.chunks)]

    def _read_codes(self, state: dict) -> dict:
        plan = self.plan
        first, last = self._share(self.quantized // TILE)
        sources = self._sources()
        slots = [self.at["shared"] + stage * plan.tile_bytes for stage in range(STAGES)]
        for stage in range(STAGES - 1):
            self._copy(first + stage, last, slots[stage], sources)
        queries = [[numerics.times_power(x, LARGER - plan.place(s)[1]) for x in query] for s, query in enumerate(self._queries())]
        of_zeros = self._queries_of_zeros()
        positions = self._positions()

        def step(i, state):
            slot, *others = state.pop("slots")
            ptx.wait_for_copies(STAGES - 2)
            # All copies of the tile are there, and all lanes are done with the slot that is filled next.
            ptx.synchronize(ptx.i32(0), 1)
            self._copy(i + (STAGES - 1), last, others[-1], sources)
            products, zero = self._key_products(slot, queries, of_zeros)
            unit = self.to_base_2 * 2.0 ** -(CODE + LARGER)
            weights, state = self._weigh(products, unit, [x * unit for x in zero], state, LARGER, self._replaced_within(i, positions))
            if plan.replaced is not None:
                self._store_weights(i, weights, state["top"])
            state = self._add_values(slot, list(map(fragments.transpose, weights)), state)
            return {**state, "slots": [*others, slot]}

        state = ptx.loop(first, last, {**state, "zero": (ptx.f32(0.0),) * 4, "slots": slots}, step)
        ptx.wait_for_copies(0)
        return self._finished(state)

    def _key_products(self, slot, queries: list, of_zeros: list) -> tuple[list, list]:
        """Products [of 16 tokens] of queries and codes times scales, and those of queries and zeros for this lane's two queries; all times
        2^(CODE + LARGER)."""
        plan, none = self.plan, (ptx.f32(0.0),) * 4
        # Bytes as halves of words: of channels 16 s + 4 t and 16 s + 4 t + 1, then of the two after them.
        halves = [list(map(numerics.spread_bytes, words)) for words in self._load_codes("key_codes", slot, transposed=False)]
        start = slot + self.t * 8 + plan.parts["key_scale"][0]
        # Those of `scaled` and of `rest`, which do not wait for each other.
        products = [[none, none], [none, none]]
        for s, query in enumerate(queries):
            (h, _), mask = plan.place(s), plan.mask(s)
            scales = ptx.load_shared(start + 2 * CHUNK * s, 2)
            scaled = [numerics.multiply_bf16(*both) for both in zip(query, scales)]
            # What rounding has taken off: products of two bfloat16 have twice the digits.
            rest = [numerics.fms_bf16(x, scale, y) for x, scale, y in zip(query, scales, scaled)]
            for m in range(2):
                codes = [halves[h][j][half] & mask for half in (0, 1) for j in (2 * m, 2 * m + 1)]
                for both, second in zip(products, (scaled, rest)):
                    both[m] = fragments.mma(both[m], codes, second, "bf16")
        products = [tuple(x + y for x, y in zip(*both)) for both in zip(*products)]
        # Rows 0 to 7 and 8 to 15 of the first operand are two words apart, and so go with other queries: of each product one half is used.
        first, second = none, none
        start = slot + self.t * 16 + plan.parts["key_zero"][0]
        for u, (low, high) in enumerate(of_zeros):
            zeros = ptx.load_shared(start + 64 * u, 4)
            first, second = fragments.mma(first, zeros, low, "bf16"), fragments.mma(second, zeros, high, "bf16")
        return products, [first[c] + second[c + 2] for c in (0, 1)]

    def _positions(self) -> list:
        """The positions of the tokens that are replaced: number 32 i + lane for each i."""
        plan = self.plan
        if plan.replaced is None:
            return []
        first = self.at["positions"] + ptx.i64(self.head * plan.replaced) * 4
        of = lambda i: ptx.load_global(first + ptx.i64(ptx.minimum(self.lane + i, ptx.i32(plan.replaced - 1))) * 4)[0]
        return [ptx.select(self.lane + i < plan.replaced, of(i), ptx.i32(-1)) for i in range(0, plan.replaced, 32)]

    def _replaced_within(self, tile, positions: list) -> LeftOut | None:
        """The tokens of a tile that are replaced. positions: those that this lane holds. None where the kernel replaces none."""
        if not positions:
            return None
        offsets = [position - tile * TILE for position in positions]
        within = [(offset & -TILE) == 0 for offset in offsets]

        def without(products: list) -> list:
            bits = [ptx.select(there, ptx.i32(1) << (offset & TILE - 1), ptx.i32(0)) for there, offset in zip(within, offsets)]
            mine = ptx.sum_lanes(numerics.total(bits)) >> self.g  # bit i of the sum: token i of the tile. No two positions are the same
            out = lambda m, c: (mine & 1 << 16 * m + 8 * (c // 2)) != 0
            return [tuple(ptx.select(out(m, c), ptx.f32(-math.inf), x) for c, x in enumerate(tile)) for m, tile in enumerate(products)]

        return LeftOut(functools.reduce(lambda a, b: a | b, within), without)

    def _weigh(
        self, products: list, unit: float, offsets: list, state: dict, power: int, left_out: LeftOut | None = None
    ) -> tuple[list, dict]:
        """Pairs of softmax weights of this lane's two queries [of 8 tokens], and the state relative to the same top. The logits, to base 2,
        are products times unit, plus offsets. power: the weights are 2^power times as large, those of tokens that are left out 0."""
        logit = lambda x, c: numerics.fma(x, ptx.f32(unit), offsets[c])

        def highest(products: list) -> list:
            mine = [functools.reduce(ptx.maximum, [x for tile in products for x in tile[c::2]]) for c in (0, 1)]
            return [logit(x, c) for c, x in enumerate(mine)]

        def changed(carry: tuple) -> tuple:
            products, held = carry
            if left_out is not None:
                products = left_out.without(products)
            top = [ptx.maximum(old, fragments.all_rows(new, ptx.maximum)) for old, new in zip(held["top"], highest(products))]
            decay = [numerics.exp2(old - new) for old, new in zip(held["top"], top)]
            # Leaves alternate between this lane's two queries.
            leaves, structure = jax.tree.flatten({name: x for name, x in held.items() if name != "top"})
            return products, {**jax.tree.unflatten(structure, [x * decay[i % 2] for i, x in enumerate(leaves)]), "top": top}

        # Few tiles have tokens to leave out, few raise the top: one branch for both. In floating point, weights up to 2^RISE are as exact
        # as those up to 1.
        rises = [(x, top + RISE) for x, top in zip(highest(products), state["top"])]
        known = [] if left_out is None else [(ptx.select(left_out.known, ptx.f32(1.0), ptx.f32(0.0)), ptx.f32(0.0))]
        rare = ptx.any_greater([*rises, *known])
        held = {name: state[name] for name in ("out", "top", "total", "zero") if name in state}
        products, held = ptx.changed_if(rare == 1, (products, held), changed)
        state = {**state, **held}
        starts = [offset - top + power for offset, top in zip(offsets, state["top"])]
        weights = [[numerics.exp2(numerics.fma(x, ptx.f32(unit), starts[c % 2])) for c, x in enumerate(tile)] for tile in products]
        added = [numerics.total([x for tile in weights for x in tile[c::2]]) for c in (0, 1)]
        state["total"] = [old + new for old, new in zip(state["total"], added)]
        return [numerics.pair(*tile[2 * row : 2 * row + 2], "bf16") for tile in weights for row in (0, 1)], state

    def _store_weights(self, tile, weights: list, top: list) -> None:
        """Stores the weights of the last token's queries, and what they are relative to."""
        plan = self.plan
        start = ptx.i64(self.head * (plan.size // TILE) + tile)
        at = self.at["weights"] + start * (2 * TILE * plan.heads)
        for j, pair in enumerate(weights):
            self._store_pair(at + ptx.i64((self.g + 8 * j) * (2 * plan.heads)), pair)
        with ptx.when(self.g == 0):
            self._store_floats(self.at["relative_to"] + start * (4 * plan.heads), [x - LARGER for x in top])

    def _store_pair(self, at, pair) -> None:
        """Stores a bfloat16 of each of this lane's two queries where they are the last token's."""
        self._where_last(
            lambda query: ptx.store_global(at + ptx.i64(query * 2), pair),
            lambda query, c: ptx.store_global_half(at + ptx.i64(query * 2), pair >> 16 * c),
        )

    def _store_floats(self, at, both: list) -> None:
        """Stores a float32 of each of this lane's two queries where they are the last token's."""
        self._where_last(
            lambda query: ptx.store_global_words(at + ptx.i64(query * 4), *map(ptx.as_bits, both)),
            lambda query, c: ptx.store_global(at + ptx.i64(query * 4), both[c]),
        )

    def _where_last(self, store_both: Callable, store: Callable) -> None:
        """Emits store_both(number of the first) where this lane's two queries are of the last token, whose first is number 0; or, where a
        token has an odd number of them, store(number, which of the two) for each that is."""
        plan = self.plan
        first = plan.rows - plan.heads
        query = self.t * 2
        if plan.heads % 2 == 0:
            with ptx.when((ptx.i32(first - 1) < query) & (query < plan.rows)):
                store_both(query - first)
            return
        for c in (0, 1):
            with ptx.when((ptx.i32(first - 1) < query + c) & (query + c < plan.rows)):
                store(query + (c - first), c)

    def _add_values(self, slot, weights: list, state: dict) -> dict:
        """The state with the values of a tile. weights: 2^LARGER times as large, as the second operand [of 8 tokens]."""
        plan = self.plan

        def pairs(name: str, j: int) -> list:
            """Those of tokens 8 j + 2 t and 8 j + 2 t + 1, for each group of channels."""
            at = slot + (self.t * (4 * plan.value_groups) + (plan.parts[name][0] + 16 * j * plan.value_groups))
            return _of_two_tokens(ptx.load_shared(at, plan.value_groups), plan.value_groups)

        each = range(len(weights))
        scaled = [[numerics.multiply_bf16(weights[j], x) for x in pairs("value_scale", j)] for j in each]
        # Row n of the zero points' product is of group n of the channels.
        own = lambda words: functools.reduce(lambda x, n: ptx.select(self.g == n[0], n[1], x), enumerate(words), ptx.i32(0))
        mine = [own(pairs("value_zero", j)) for j in each]
        both = [[(x, x >> 8) for x in words] for words in self._load_codes("value_codes", slot, transposed=True)]  # even and odd channels
        out, of_zero, none = list(state["out"]), state["zero"], ptx.i32(0)
        for j in each[::2]:
            of_zero = fragments.mma(of_zero, (mine[j], none, mine[j + 1], none), weights[j : j + 2], "bf16")
            for s in plan.products:
                (h, _), mask, n = plan.place(s), plan.mask(s), CHUNK * s // plan.value_group
                codes = [x & mask for half in (j, j + 1) for x in both[h][half]]
                out[s] = fragments.mma(out[s], codes, (scaled[j][n], scaled[j + 1][n]), "bf16")
        return {**state, "out": out, "zero": of_zero}

    def _finished(self, state: dict) -> dict:
        """The state without its powers of 2, and with what the values' zero points add."""
        plan = self.plan
        of_zero = state["zero"][:2]

        def added(n: int) -> list:
            mine = [ptx.select(self.g == n, x, ptx.f32(0.0)) for x in of_zero]
            return [fragments.all_rows(x, numerics.add) * 2.0**-LARGER for x in mine]

        added = [added(n) for n in range(plan.value_groups)]
        unit = lambda s: ptx.f32(2.0 ** -(CODE + plan.place(s)[1] + LARGER))
        more = lambda s: added[CHUNK * s // plan.value_group]
        out = [tuple(numerics.fma(x, unit(s), more(s)[c % 2]) for c, x in enumerate(acc)) for s, acc in enumerate(state["out"])]
        return {"out": out, "top": state["top"], "total": [x * 2.0**-LARGER for x in state["total"]]}

    # Tokens in full precision.

    def _is_replaced(self, tokens: list) -> tuple[list, list]:
        first = self.at["positions"] + ptx.i64(self.head * self.plan.replaced) * 4
        last = ptx.i32(self.plan.replaced - 1)
        positions = [ptx.load_global(first + ptx.i64(ptx.minimum(token, last)) * 4)[0] for token in tokens]
        there = [(token < self.plan.replaced) & (ptx.i32(-1) < position) for token, position in zip(tokens, positions)]
        return there, [x for x in there for _ in (0, 1)]

    def _is_seen(self, tokens: list) -> tuple[list, list]:
        plan = self.plan
        seen = [self.buffered - plan.tokens + 1 + (self.t * 2 + c) // plan.heads for c in (0, 1)]
        there = [token < self.buffered for token in tokens]
        return there, [(token < x) & present for token, present in zip(tokens, there) for x in seen]

    def _read_full(self, keys, values, pitch: int, count, room: int, sees: Callable, state: dict, logits_at=None) -> dict:
        """The state with this warp's share of `count` tokens, of which there is room for so many.

        keys, values: where those of the first token begin; pitch: bytes from one token to the next. sees: of two tokens, whether there are
        such, and whether each of this lane's two queries sees the first, and the second. logits_at: where the last token's queries' logits
        with the first token are stored; None: nowhere.
        """
        plan, queries = self.plan, self._queries()

        def step(i, state):
            tokens = [i * FULL_TILE + self.g, i * FULL_TILE + self.g + 8]
            places = [ptx.i64(ptx.minimum(token, ptx.i32(room - 1))) * pitch + ptx.i64(self.t * 8) for token in tokens]
            load = lambda base: [[ptx.load_global(base + place + 2 * CHUNK * s, 2) for place in places] for s in plan.products]
            # All at once: each waits for memory.
            of_keys, of_values = load(keys), load(values)
            acc = (ptx.f32(0.0),) * 4
            for (one, other), query in zip(of_keys, queries):
                acc = fragments.mma(acc, (one[0], other[0], one[1], other[1]), query, "bf16")
            if logits_at is not None:
                for row, token in enumerate(tokens):
                    with ptx.when(token < room):
                        logits = [x * self.to_base_2 for x in acc[2 * row : 2 * row + 2]]
                        self._store_floats(logits_at + ptx.i64(token * (4 * plan.heads)), logits)
            there, seen = sees(tokens)
            products = [ptx.select(x, product, ptx.f32(-math.inf)) for x, product in zip(seen, acc)]
            weights, state = self._weigh([products], self.to_base_2, [ptx.f32(0.0)] * 2, state, 0)
            weights = list(map(fragments.transpose, weights))
            out = list(state["out"])
            for s, both in enumerate(of_values):
                # Where there is no token may lie what is no number, and that is not to be multiplied by 0.
                loaded = [[ptx.select(present, x, ptx.i32(0)) for x in words] for present, words in zip(there, both)]
                turned = [fragments.transpose(x) for words in loaded for x in numerics.swap_neighbours(*words)]
                out[s] = fragments.mma(out[s], turned, weights, "bf16")
            return {**state, "out": out}

        return ptx.loop(*self._share((count + FULL_TILE - 1) // FULL_TILE), state, step)

    def _store(self, state: dict) -> None:
        plan = self.plan
        total = [fragments.all_rows(x, numerics.add) for x in state["total"]]
        for c in (0, 1):
            query = self.t * 2 + c
            row = (self.head * plan.splits + self.split) * plan.rows + query
            with ptx.when(query < plan.rows):
                at = self.at["out"] + ptx.i64(row) * (4 * plan.head_dim) + ptx.i64(self.g * 8)
                for s, acc in enumerate(state["out"]):
                    ptx.store_global_words(at + 4 * CHUNK * s, ptx.as_bits(acc[c]), ptx.as_bits(acc[c + 2]))
                with ptx.when(self.g == 0):
                    ptx.store_global(self.at["top"] + ptx.i64(row) * 4, state["top"][c])
                    ptx.store_global(self.at["total"] + ptx.i64(row) * 4, total[c])


def _of_two_tokens(words: list, groups: int) -> list:
    """For each group of channels the pair of two tokens' numbers, which lie one token after the other."""
    if groups == 1:
        return words
    return [x for both in zip(words[: groups // 2], words[groups // 2 :]) for x in numerics.swap_neighbours(*both)]
