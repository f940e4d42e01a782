"""What a warp of the attention over KIVI's format does whatever the format of the tokens: queries, softmax, and results; and the tokens in
full precision. See mosaic_low_bits_warp.py for those in codes."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels.attention.mosaic_low_bits_plan import CHUNK, FULL_TILE, RISE, Plan
from pallas_kernels.gpu import fragments, numerics, ptx


class LeftOut(NamedTuple):
    """Tokens of a step's tiles whose codes are left out, since they are read in full precision. The positions of all such tokens of a KV
    head are divided among the lanes of a warp (`Warp._positions`), so that a lane knows only some of them.

    Attributes:
        known: whether a position held by this lane lies in the tiles.
        without: a function that takes this lane's products with the tiles' tokens, and makes those with left-out tokens minus infinity,
            whichever lane holds their positions. All lanes must call it together, as they add up what they hold.
    """

    known: ptx.Value
    without: Callable


class SoftmaxWarp:
    """A warp's share of the attention of a KV head: its queries, and a softmax over all tokens that it reads.

    Lane 4 g + t works for query rows 2 t and 2 t + 1, and brings in the queries' row g. The state of the softmax is a dict: out[s][i] are
    the weighted values of product s, as `fragments.mma` has them: of channels 16 s + 2 g (in the first two registers) and 16 s + 2 g + 1;
    top is what logits (base 2) are taken relative to, at most RISE below the largest so far; total is the sum of the weights of this lane's
    tokens.
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

    def _queries(self) -> list:
        """This lane's words of each product's queries."""
        at = self.query_row + ptx.i64(self.t * 8)
        return [ptx.load_global(at + 2 * CHUNK * s, 2) for s in self.plan.products]

    def _share(self, tiles) -> tuple:
        """This warp's first tile, and the one after its last."""
        return self.split * tiles // self.plan.splits, (self.split + 1) * tiles // self.plan.splits

    def _weigh(
        self, products: list, units: list, offsets: list, state: dict, power: int, left_out: LeftOut | None = None
    ) -> tuple[list, dict]:
        """Softmax weights of this lane's two queries, as pairs in bfloat16 [of 8 tokens], and the state. A weight is
        2^(logit - top + power), and 0 for a token that is left out. A logit, to base 2, is a product [of 16 tokens] times units, plus the
        offset of its tile. Where one is more than RISE above the top, the state comes back relative to the new top."""
        each = len(products) // len(offsets)

        def in_tiles(products):
            return [products[i : i + each] for i in range(0, len(products), each)]

        def highest(products: list) -> list:

            def mine(tile, c):
                return functools.reduce(ptx.maximum, [x for some in tile for x in some[c::2]])

            def logit(tile, offset, c):
                return numerics.fma(mine(tile, c), units[c], offset[c])

            return [functools.reduce(ptx.maximum, [logit(*both, c) for both in zip(in_tiles(products), offsets)]) for c in (0, 1)]

        def changed(carry: tuple) -> tuple:
            products, held = carry
            if left_out is not None:
                products = left_out.without(products)
            top = [ptx.maximum(old, fragments.all_rows(new, ptx.maximum)) for old, new in zip(held["top"], highest(products))]
            decay = [numerics.exp2(old - new) for old, new in zip(held["top"], top)]
            # Leaves alternate between this lane's two queries: the lists of the state have an even number of entries.
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
        starts = [[offset - top + power for offset, top in zip(both, state["top"])] for both in offsets]

        def weight(x, start, c):
            return numerics.exp2(numerics.fma(x, units[c % 2], start[c % 2]))

        weights = [[weight(x, start, c) for c, x in enumerate(some)] for tile, start in zip(in_tiles(products), starts) for some in tile]
        added = [numerics.total([x for tile in weights for x in tile[c::2]]) for c in (0, 1)]
        state["total"] = [old + new for old, new in zip(state["total"], added)]
        return [numerics.pair(*tile[2 * row : 2 * row + 2], "bf16") for tile in weights for row in (0, 1)], state

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

    def _read_full(self, keys, values, pitch: int, count, room: int, sees: Callable, state: dict, logits_at=None) -> dict:
        """The state with this warp's share of `count` tokens.

        Args:
            keys, values: addresses of those of the first token.
            pitch: bytes from one token to the next.
            room: tokens that there is room for.
            sees: of two tokens, whether each is there, and whether each of this lane's two queries sees the first, and the second.
            logits_at: where the last token's queries' logits with the first token are stored; None: nowhere.
        """
        plan, queries = self.plan, self._queries()

        def step(i, state):
            tokens = [i * FULL_TILE + self.g, i * FULL_TILE + self.g + 8]
            places = [ptx.i64(ptx.minimum(token, ptx.i32(room - 1))) * pitch + ptx.i64(self.t * 8) for token in tokens]

            def load(base):
                return [[ptx.load_global(base + place + 2 * CHUNK * s, 2) for place in places] for s in plan.products]

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
            weights, state = self._weigh([products], [ptx.f32(self.to_base_2)] * 2, [[ptx.f32(0.0)] * 2], state, 0)
            weights = list(map(fragments.transpose, weights))
            out = list(state["out"])
            for s, both in enumerate(of_values):
                # Where there is no token there may be NaN, which must not be multiplied by 0.
                loaded = [[ptx.select(present, x, ptx.i32(0)) for x in words] for present, words in zip(there, both)]
                turned = [fragments.transpose(x) for words in loaded for x in numerics.transpose_pairs(*words)]
                out[s] = fragments.mma(out[s], turned, weights, "bf16")
            return {**state, "out": out}

        return ptx.loop(*self._share((count + FULL_TILE - 1) // FULL_TILE), state, step)

    def _is_seen(self, tokens: list) -> tuple[list, list]:
        plan = self.plan
        seen = [self.buffered - plan.tokens + 1 + (self.t * 2 + c) // plan.heads for c in (0, 1)]
        there = [token < self.buffered for token in tokens]
        return there, [(token < x) & present for token, present in zip(tokens, there) for x in seen]

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
