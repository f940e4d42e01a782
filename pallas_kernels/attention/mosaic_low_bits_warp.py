"""The program of a block of the attention over KIVI's format, see mosaic_low_bits.py, and what its warps do for tokens in codes."""

import functools
import math

from pallas_kernels.attention.mosaic_low_bits_plan import CHUNK, KEY_CODE, LARGER, NO_LOGIT, PIECE, STAGES, TILE, VALUE_CODE, ZEROS, Plan
from pallas_kernels.attention.mosaic_low_bits_softmax import LeftOut, SoftmaxWarp
from pallas_kernels.gpu import fragments, numerics, ptx


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block: warps, each with a share of the tokens of one KV head, and a ring of its own."""
    thread = ptx.thread_index()
    warp = ptx.uniform(thread >> 5)
    worker = ptx.block_index() * plan.warps + warp
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    at["shared"] = at["shared"] + warp * plan.warp.total
    Warp(plan, at, thread & 31, worker // plan.splits, worker % plan.splits).emit()


class Warp(SoftmaxWarp):
    """A warp's share of the attention of a KV head, of which it reads first the tokens in codes. Tokens of a tile have numbers, in an order
    of their own (`Plan.token`).

    While codes are read, out and total of the state carry powers of 2, and it has more entries: zero is the product of the weights and the
    values' zero points, of_zeros that of the queries and the keys' zero points of ZEROS tiles, and slots are those of the ring, the next
    first.
    """

    def emit(self) -> None:
        plan, zero = self.plan, ptx.f32(0.0)
        state = {"out": [(zero,) * 4 for _ in plan.products], "top": [ptx.f32(NO_LOGIT)] * 2, "total": [zero] * 2}
        if plan.size:
            state = self._read_codes(state)
        size = 2 * plan.head_dim

        def of_head(name, rows):
            return self.at[name] + ptx.i64(self.head) * (size * rows)

        if plan.replaced is not None:  # a token's key and value lie together
            keys = of_head("replacing", 2 * plan.replaced)
            logits = self.at["replaced_logits"] + ptx.i64(self.head) * (4 * plan.replaced * plan.heads)
            state = self._read_full(keys, keys + size, 2 * size, ptx.i32(plan.replaced), plan.replaced, self._is_replaced, state, logits)
        keys, values = (of_head(name, plan.buffer_rows) for name in ("keys", "values"))
        state = self._read_full(keys, values, size, self.buffered, plan.buffer_rows, self._is_seen, state)
        self._store(state)

    def _below_one(self, queries: list) -> ptx.Value:
        """The power of 2, from 2^-63 to 2^63, that brings all entries of this lane's query row below 1."""
        largest = numerics.largest([ptx.i32(0x7FFF7FFF) & x for words in queries for x in words])
        exponent = ptx.as_bits(fragments.all_columns(largest, ptx.maximum)) >> 23
        # Within these bounds neither it nor its inverse is subnormal or overflows.
        bounded = ptx.minimum(ptx.maximum(ptx.i32(253) - exponent, ptx.i32(127 - 63)), ptx.i32(127 + 63))
        return ptx.as_float(bounded << 23)

    def _halves(self, words: list, factor) -> list:
        """Pairs of bfloat16 times a factor, as pairs of float16."""
        return [numerics.pair(*(x * factor for x in numerics.bf16_entries(word)), "f16") for word in words]

    # Tokens in codes. They come through a ring in shared memory that is the warp's own, with all that belongs to them.

    def _sources(self) -> list:
        """Where this lane's pieces of a KV head's first tile lie: for each 32 pieces of a slot, one."""

        def first(name):
            return self.at[name] + ptx.i64(self.head) * self.plan.head_bytes(name)

        def within(i, name):
            return ptx.i64(self.lane * PIECE) + (PIECE * 32 * i - self.plan.tile.at(name))

        return [self._of_part(i, {name: first(name) + within(i, name) for name in self.plan.parts_of(i)}) for i in self.plan.copies]

    def _of_part(self, i: int, each: dict):
        """Picks, of one value for each part that 32 pieces of a slot reach into, that of the part in which this lane's piece lies."""
        names = list(each)
        value = each[names[0]]
        for name in names[1:]:
            value = ptx.select(self.lane < self.plan.tile.at(name) // PIECE - 32 * i, value, each[name])
        return value

    def _copy(self, tile, last, slot, sources: list) -> None:
        """Starts the copies of a step's tiles, from the first one, to their slots. Slots of tiles from `last` on get bytes of 0."""
        plan = self.plan
        for n in range(plan.together):
            size = ptx.select(tile + n < last, ptx.i32(PIECE), ptx.i32(0))
            for i, source in zip(plan.copies, sources):
                # Parts with the same start need no choice between them.
                starts = {plan.sharing(name): plan.tile_start(name, tile + n) for name in plan.parts_of(i)}
                if len(starts) == 1:
                    (start,) = starts.values()
                else:
                    start = self._of_part(i, {name: starts[plan.sharing(name)] for name in plan.parts_of(i)})
                to = slot + (self.lane * PIECE + (PIECE * 32 * i + n * plan.tile.total))
                copy = functools.partial(ptx.copy_async, to, source + ptx.i64(start), size)
                if PIECE * 32 * (i + 1) <= plan.tile.total:
                    copy()
                else:
                    with ptx.when(self.lane < plan.tile.total // PIECE - 32 * i):
                        copy()
        ptx.commit_copies()

    def _load_codes(self, name: str, slot, *, transposed: bool) -> list:
        """This lane's words [run of 16 bytes][of 8 tokens]: word t of each run of tokens number g, g + 8, g + 16 and g + 24 (`Plan.token`);
        transposed, bytes 2 g and 2 g + 1 of tokens number 2 t and 2 t + 1, and so on."""
        plan = self.plan
        first = slot + (plan.token(self.lane) * plan.token_bytes + plan.tile.at(name))
        return [fragments.load_matrices(first + CHUNK * h, transposed=transposed) for h in range(plan.chunks)]

    def _read_codes(self, state: dict) -> dict:
        plan = self.plan
        first, last = self._share_of_tiles()
        sources = self._sources()
        slots = [self.at["shared"] + stage * (plan.together * plan.tile.total) for stage in range(STAGES)]
        self._copy_zeros(first, last)
        for stage in range(STAGES - 1):
            self._copy(first + stage * plan.together, last, slots[stage], sources)
        queries = self._queries()
        factor = self._below_one(queries)
        self._store_queries_of_zeros(factor)
        queries = [self._halves(words, factor * 2.0 ** -plan.place(s)[1]) for s, words in enumerate(queries)]
        # What turns products with zero points into logits to base 2, for this lane's two queries: they undo `factor`, and scale.
        units = [ptx.f32(self.to_base_2) / ptx.of_lanes(factor, self.t * 8 + 4 * c) for c in (0, 1)]
        positions = self._positions()

        def step(tiles: int, i, state):
            slot, *others = state.pop("slots")
            tile = first + i * plan.together
            ptx.wait_for_copies(STAGES - 2)
            # All copies of the tiles are there, and all lanes are done with the slots that are filled next.
            ptx.synchronize(ptx.i32(0), 1)
            number = i * plan.together % ZEROS
            state["of_zeros"] = ptx.changed_if(number == 0, state["of_zeros"], lambda _: self._zero_products(tile + ZEROS, last))
            self._copy(tile + (STAGES - 1) * plan.together, last, others[-1], sources)
            each = [slot + n * plan.tile.total for n in range(tiles)]
            products = [x for at in each for x in self._key_products(at, queries)]
            offsets = self._of_tiles(number, tiles, state["of_zeros"])
            offsets = [[x * unit for x, unit in zip(both, units)] for both in offsets]
            of_codes = [unit * 2.0**-KEY_CODE for unit in units]
            weights, state = self._weigh(products, of_codes, offsets, state, LARGER, self._replaced_within(tile, positions))
            if plan.replaced is not None:
                self._store_weights(tile, tiles, weights, state["top"])
            for n, at in enumerate(each):
                of_tile = weights[n * TILE // 8 : (n + 1) * TILE // 8]
                state = self._add_values(at, list(map(fragments.transpose, of_tile)), state)
            return {**state, "slots": [*others, slot]}

        none, steps = (ptx.f32(0.0),) * 4, (last - first) // plan.together
        state = {**state, "zero": none, "of_zeros": none, "slots": slots}
        state = ptx.loop(ptx.i32(0), steps, state, functools.partial(step, plan.together))
        if plan.together > 1:  # the last tile, where their number is odd
            state = ptx.loop(steps, (last - first + 1) // plan.together, state, functools.partial(step, 1))
        ptx.wait_for_copies(0)
        return self._finished(state)

    def _share_of_tiles(self) -> tuple:
        """This warp's first tile of codes, and the one after its last. The first begins a step for which there is room."""
        tiles, together = self.quantized // TILE, self.plan.together
        first, end = self._share((tiles + together - 1) // together)
        return first * together, ptx.minimum(end * together, tiles)

    # The keys' zeros of ZEROS tiles, which are multiplied by the queries at a time.

    def _copy_zeros(self, tile, last) -> None:
        """Starts the copies of the zero points of the tiles from this one on, one row of shared memory for each. Rows of tiles from `last`
        on are filled with bytes of 0."""
        plan = self.plan
        first = self.at["key_zero"] + ptx.i64(self.head) * plan.head_bytes("key_zero")
        pieces = 2 * plan.head_dim // PIECE  # of a row
        for i in range(ZEROS * pieces // 32):
            piece = self.lane + 32 * i
            row = tile + piece // pieces
            size = ptx.select(row < last, ptx.i32(PIECE), ptx.i32(0))
            source = ptx.i64(plan.tile_start("key_zero", row) + piece % pieces * PIECE)
            ptx.copy_async(self.at["shared"] + (self.lane * PIECE + (plan.warp.at("zeros") + 32 * PIECE * i)), first + source, size)

    def _store_queries_of_zeros(self, factor) -> None:
        """Stores, for this lane, the queries that zeros are multiplied by; these take eight neighbouring channels of each 32."""
        at = self.query_row + ptx.i64(self.t * PIECE)
        for u in range(self.plan.head_dim // 32):
            ptx.store_shared(self._query_of_zeros(u), *self._halves(ptx.load_global(at + 64 * u, 4), factor))

    def _query_of_zeros(self, u: int):
        return self.at["shared"] + (self.lane * PIECE + (self.plan.warp.at("zero_queries") + 32 * PIECE * u))

    def _zero_products(self, following, last) -> tuple:
        """The products of queries and the zeros that are there, whose rows are tiles. Starts the copies of the zeros from tile `following`
        on."""
        at = self.at["shared"] + (self.g * (2 * self.plan.head_dim) + self.t * PIECE + self.plan.warp.at("zeros"))
        acc = (ptx.f32(0.0),) * 4
        for u in range(self.plan.head_dim // 32):
            one, other = (ptx.load_shared(at + (64 * u + row * 2 * self.plan.head_dim), 4) for row in (0, 8))
            query = ptx.load_shared(self._query_of_zeros(u), 4)
            for i in (0, 2):
                acc = fragments.mma(acc, (one[i], other[i], one[i + 1], other[i + 1]), query[i : i + 2], "f16")
        ptx.synchronize(ptx.i32(0), 1)
        self._copy_zeros(following, last)
        return acc

    def _of_tiles(self, number, tiles: int, products: tuple) -> list:
        """This lane's two queries' products with the zero points of `tiles` tiles, from `number` of the ZEROS tiles on. They must not cross
        a multiple of 8: two tiles begin with an even number."""
        mine = [ptx.select(number < 8, products[c], products[c + 2]) for c in (0, 1)]
        lane = number % 8 * 4 + self.t
        return [[ptx.of_lanes(x, lane + 4 * n) for x in mine] for n in range(tiles)]

    def _key_products(self, slot, queries: list) -> list:
        """Products [of 16 tokens] of queries and codes times scales, times 2^KEY_CODE."""
        plan = self.plan
        # Bytes as halves of words: of channels 16 s + 4 t and 16 s + 4 t + 1, then of the two after them.
        halves = [list(map(numerics.spread_bytes, words)) for words in self._load_codes("key_codes", slot, transposed=False)]
        start = slot + self.t * 8 + plan.tile.at("key_scale")
        products = [(ptx.f32(0.0),) * 4] * 2
        for s, query in enumerate(queries):
            (h, _), mask = plan.place(s), plan.mask(s)
            scaled = [numerics.multiply_f16(*both) for both in zip(query, ptx.load_shared(start + 2 * CHUNK * s, 2))]
            for m in range(2):
                codes = [halves[h][j][half] & mask for half in (0, 1) for j in (2 * m, 2 * m + 1)]
                products[m] = fragments.mma(products[m], codes, scaled, "f16")
        return products

    def _positions(self) -> list:
        """The positions of the tokens that are replaced: number 32 i + lane for each i."""
        plan = self.plan
        if plan.replaced is None:
            return []
        first = self.at["positions"] + ptx.i64(self.head * plan.replaced) * 4

        def of(i):
            return ptx.load_global(first + ptx.i64(ptx.minimum(self.lane + i, ptx.i32(plan.replaced - 1))) * 4)[0]

        return [ptx.select(self.lane + i < plan.replaced, of(i), ptx.i32(-1)) for i in range(0, plan.replaced, 32)]

    def _replaced_within(self, tile, positions: list) -> LeftOut | None:
        """The tokens that are replaced of a step's tiles from this one on. positions: those that this lane holds. None where the kernel
        replaces none."""
        if not positions:
            return None
        offsets = [position - tile * TILE for position in positions]
        within = [(offset & -self.plan.together * TILE) == 0 for offset in offsets]

        def without(products: list) -> list:
            out = []
            for n in range(len(products) // 2):
                bits = [
                    ptx.select(offset >> int(math.log2(TILE)) == n, ptx.i32(1) << (offset & TILE - 1), ptx.i32(0)) for offset in offsets
                ]
                # Bit i of the sum: token i of the tile. No two positions are the same.
                mine = ptx.sum_lanes(numerics.total(bits)) >> self.plan.token(self.g)
                for m, tile in enumerate(products[2 * n : 2 * n + 2]):
                    left = [(mine & 1 << self.plan.token(16 * m + 8 * row)) != 0 for row in (0, 1)]
                    out.append(tuple(ptx.select(left[c // 2], ptx.f32(-math.inf), x) for c, x in enumerate(tile)))
            return out

        return LeftOut(functools.reduce(lambda a, b: a | b, within), without)

    def _store_weights(self, tile, tiles: int, weights: list, top: list) -> None:
        """Stores the weights of the last token's queries in `tiles` tiles from this one on, and what they are relative to."""
        plan = self.plan
        start = ptx.i64(self.head * (plan.size // TILE) + tile)
        first = self.at["weights"] + start * (2 * TILE * plan.heads)
        # Of token number g and of those that come 8, 16 and 24 later, in each tile.
        offsets = [2 * plan.heads * (TILE * n + plan.token(8 * j)) for n in range(tiles) for j in range(TILE // 8)]
        at = first + ptx.i64(plan.token(self.g) * (2 * plan.heads))

        def store_both(query):
            for offset, pair in zip(offsets, weights):
                ptx.store_global(at + ptx.i64(query * 2) + offset, pair)

        def store(query, c: int):
            for offset, pair in zip(offsets, weights):
                ptx.store_global_half(at + ptx.i64(query * 2) + offset, pair >> 16 * c)

        self._where_last(store_both, store)
        with ptx.when(self.g < tiles):
            self._store_floats(self.at["relative_to"] + (start + ptx.i64(self.g)) * (4 * plan.heads), [x - LARGER for x in top])

    def _add_values(self, slot, weights: list, state: dict) -> dict:
        """The state with the values of a tile. weights: 2^LARGER times as large, as the second operand [of 8 tokens]."""
        plan = self.plan

        each = range(len(weights))
        scales = self._value_scales(slot)
        scaled = [[numerics.multiply_bf16(weights[j], x) for x in scales[j]] for j in each]
        zeros = self._value_zeros(slot)
        both = [[(x, x >> 8) for x in words] for words in self._load_codes("value_codes", slot, transposed=True)]  # even and odd channels
        out, of_zero, none = list(state["out"]), state["zero"], ptx.i32(0)
        for j in each[::2]:
            of_zero = fragments.mma(of_zero, (zeros[j], none, zeros[j + 1], none), weights[j : j + 2], "bf16")
            for s in plan.products:
                (h, _), mask, n = plan.place(s), plan.mask(s), CHUNK * s // plan.value_group
                codes = [x & mask for half in (j, j + 1) for x in both[h][half]]
                out[s] = fragments.mma(out[s], codes, (scaled[j][n], scaled[j + 1][n]), "bf16")
        return {**state, "out": out, "zero": of_zero}

    def _place_in_rows(self, j: int) -> tuple[int, ptx.Value | int]:
        """Where the values' parameters of tokens number 8 j + 2 t and 8 j + 2 t + 1 are: which 8 rows of 16 bytes have them, in their rows
        2 t and 2 t + 1, and as which token of the row."""
        rows = self.plan.tile_rows
        return 8 * j % rows // 8, 8 * j // rows if rows >= 8 else self.t * 2 // rows + 8 * j // rows

    def _row_number(self, number):
        """The row of 16 bytes of the values' parameters that comes as this one; where there are few they repeat."""
        return number % self.plan.tile_rows

    def _value_scales(self, slot) -> list:
        """For each 8 tokens, of each group of channels the pair of scales of tokens number 8 j + 2 t and 8 j + 2 t + 1."""
        plan = self.plan
        first = slot + plan.tile.at("value_scale")
        of_rows = []
        for i in range(max(1, plan.tile_rows // 8)):
            rows = [ptx.load_shared(first + self._row_number(self.t * 2 + (8 * i + n)) * PIECE, 4) for n in (0, 1)]
            # Those of the first token's groups come first.
            of_rows.append([x for both in zip(*rows) for x in numerics.transpose_pairs(*both)])

        def of(j: int) -> list:
            i, token = self._place_in_rows(j)

            def of_token(n):
                return of_rows[i][n * plan.value_groups : (n + 1) * plan.value_groups]

            if isinstance(token, int):
                return of_token(token)
            # One group, and two tokens that only some lanes have.
            here = of_token(8 * j // plan.tile_rows), of_token(8 * j // plan.tile_rows + 1)
            return [ptx.select(self.t < 2, *both) for both in zip(*here)]

        return list(map(of, range(TILE // 8)))

    def _value_zeros(self, slot) -> list:
        """For each 8 tokens this lane's word of a first operand: row g has the zeros of tokens number 8 j to 8 j + 7 if they are token
        number g / groups of their rows, of group g % groups; else 0."""
        plan = self.plan
        at = slot + (self._row_number(self.lane) * PIECE + plan.tile.at("value_zero"))
        words = fragments.load_matrices(at, transposed=True)

        def of(j: int):
            i, token = self._place_in_rows(j)
            return words[i] if plan.row_tokens == 1 else ptx.select(self.g // plan.value_groups == token, words[i], ptx.i32(0))

        return list(map(of, range(TILE // 8)))

    def _finished(self, state: dict) -> dict:
        """The state without its powers of 2, and with what the values' zero points add."""
        plan = self.plan
        of_zero = state["zero"][:2]

        def added(n: int) -> list:
            mine = [ptx.select(self.g % plan.value_groups == n, x, ptx.f32(0.0)) for x in of_zero]
            return [fragments.all_rows(x, numerics.add) * 2.0**-LARGER for x in mine]

        added = [added(n) for n in range(plan.value_groups)]

        def unit(s):
            return ptx.f32(2.0 ** -(VALUE_CODE + plan.place(s)[1] + LARGER))

        def more(s):
            return added[CHUNK * s // plan.value_group]

        out = [tuple(numerics.fma(x, unit(s), more(s)[c % 2]) for c, x in enumerate(acc)) for s, acc in enumerate(state["out"])]
        return {"out": out, "top": state["top"], "total": [x * 2.0**-LARGER for x in state["total"]]}

    def _is_replaced(self, tokens: list) -> tuple[list, list]:
        first = self.at["positions"] + ptx.i64(self.head * self.plan.replaced) * 4
        last = ptx.i32(self.plan.replaced - 1)
        positions = [ptx.load_global(first + ptx.i64(ptx.minimum(token, last)) * 4)[0] for token in tokens]
        there = [(token < self.plan.replaced) & (ptx.i32(-1) < position) for token, position in zip(tokens, positions)]
        return there, [x for x in there for _ in (0, 1)]
