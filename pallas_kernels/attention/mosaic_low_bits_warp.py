"""What a warp of the attention over KIVI's format does, see mosaic_low_bits.py: logits, softmax and weighted values in registers."""

import functools
import math
from collections.abc import Callable

from pallas_kernels.attention.mosaic_low_bits import CHUNK, CODE, FULL_TILE, SMALLER, STAGES, TILE, WARPS, Plan
from pallas_kernels.gpu import fragments, numerics, ptx

NO_LOGIT = -1e30


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block: four warps, each with a share of the tokens of one KV head, and a ring of its own."""
    thread = ptx.thread_index()
    warp = ptx.uniform(thread >> 5)
    worker = ptx.block_index() * WARPS + warp
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    at["shared"] = at["shared"] + warp * (STAGES * plan.tile_bytes)
    Warp(plan, at, thread & 31, worker // plan.splits, worker % plan.splits).emit()


class Warp:
    """A warp's share of the attention of a KV head.

    Lane 4 g + t works for query rows 2 t and 2 t + 1, and brings in the queries' row g. state: out[s][i] are the weighted values of product
    s, as `fragments.mma` has them: of channels 16 s + 2 g (in the first two registers) and 16 s + 2 g + 1; top is the running maximum (base
    2), and total the sum of the weights of this lane's tokens.
    """

    def __init__(self, plan: Plan, at: dict, lane, head, split):
        self.plan, self.at, self.head, self.split = plan, at, head, split
        self.lane, self.g, self.t, self.ring = lane, lane >> 2, lane & 3, at["shared"]
        batch = head // plan.kv_heads
        self.quantized, self.buffered = (
            ptx.uniform(ptx.load_global(at[name] + ptx.i64(batch) * 4)[0]) for name in ("quantized", "buffered")
        )
        row = ptx.minimum(self.g, ptx.i32(plan.rows - 1))
        query_head = head % plan.kv_heads * plan.heads + row % plan.heads
        place = (batch * plan.tokens + row // plan.heads) * (plan.kv_heads * plan.heads) + query_head
        source = at["q"] + ptx.i64(place) * (2 * plan.head_dim) + ptx.i64(self.t * 8)
        self.queries = [ptx.load_global(source + 2 * CHUNK * s, 2) for s in plan.products]
        self.to_base_2 = math.log2(math.e) / math.sqrt(plan.head_dim)

    def emit(self) -> None:
        plan, zero = self.plan, ptx.f32(0.0)
        state = {"out": [(zero,) * 4 for _ in plan.products], "top": [ptx.f32(NO_LOGIT)] * 2, "total": [zero] * 2}
        if plan.size:
            state = self._codes(state)
        if plan.replaced:
            state = self._full("replacing_", ptx.i32(plan.replaced), plan.replaced, self._is_replaced, state)
        # What the last query sees.
        state = self._full("", self.buffered, plan.buffer_rows, self._is_seen, state)
        self._store(state)

    def _share(self, tiles) -> tuple:
        """This warp's first tile, and the one behind its last."""
        return self.split * tiles // self.plan.splits, (self.split + 1) * tiles // self.plan.splits

    # Tokens in codes. They come through a ring in shared memory that is the warp's own, with all that belongs to them.

    def _copy(self, tile) -> None:
        """Starts the copies of a tile to its slot."""
        for name, (start, size) in self.plan.parts.items():
            source = self.at[name] + ptx.i64(self.head) * self.plan.head_bytes(name) + ptx.i64(self.plan.tile_start(name, tile))
            for piece in range(0, size // 16, 32):
                with ptx.when(self.lane + piece < size // 16):
                    ptx.copy_async(self._slot(tile) + start + (self.lane + piece) * 16, source + ptx.i64((self.lane + piece) * 16))
        ptx.commit_copies()

    def _slot(self, tile):
        return self.ring + tile % STAGES * self.plan.tile_bytes

    def _load_codes(self, name: str, slot) -> list:
        """This lane's words [of 8 tokens][run of 16 bytes]: word t of each run of tokens g, g + 8, g + 16 and g + 24."""
        plan = self.plan
        first = slot + plan.parts[name][0] + self.g * plan.token_bytes + self.t * 4
        each = range(plan.chunks)
        return [[ptx.load_shared(first + 8 * j * plan.token_bytes + CHUNK * h, 1)[0] for h in each] for j in range(TILE // 8)]

    def _codes(self, state: dict) -> dict:
        first, last = self._share(self.quantized // TILE)

        def copy(tile) -> None:
            with ptx.when(tile < last):
                self._copy(tile)
            with ptx.when(last - 1 < tile):
                ptx.commit_copies()

        for stage in range(STAGES - 1):
            copy(first + stage)

        def step(i, state):
            ptx.wait_for_copies(STAGES - 2)
            # All copies of the tile are there, and all lanes are done with the slot that is filled next.
            ptx.synchronize(ptx.i32(0), 1)
            copy(i + (STAGES - 1))
            slot = self._slot(i)
            logits = [[x * (self.to_base_2 * 2.0**-SMALLER) for x in tile] for tile in self._key_logits(slot)]
            if self.plan.replaced is not None:
                logits = self._left_out(i, logits)
            weights, state = self._weigh(logits, state, -SMALLER)
            return self._add_values(slot, weights, state)

        state = ptx.loop(first, last, {**state, "zero": (ptx.f32(0.0),) * 4}, step)
        ptx.wait_for_copies(0)
        return self._finished(state)

    def _key_logits(self, slot) -> list:
        """Products [of 16 tokens] of queries and keys, times 2^SMALLER."""
        # Bytes as halves of words: of channels 16 s + 4 t and 16 s + 4 t + 1, then of the two after them.
        halves = [[numerics.spread_bytes(x) for x in words] for words in self._load_codes("key_codes", slot)]
        of = lambda name, s: ptx.load_shared(slot + self.plan.parts[name][0] + self.t * 8 + 2 * CHUNK * s, 2)
        logits = [(ptx.f32(0.0),) * 4 for _ in halves[::2]]
        for s, query in enumerate(self.queries):
            (h, bit), mask = self.plan.place(s), self.plan.mask(s)
            factors = [numerics.times_power(x, SMALLER - CODE - bit) for x in of("key_scale", s)]
            starts = [numerics.times_power(x, SMALLER) for x in of("key_zero", s)]
            for m, both in enumerate(zip(halves[::2], halves[1::2])):
                pairs = zip(zip(*(words[h] for words in both)), factors, starts)
                keys = [numerics.fma_bf16(x & mask, factor, start) for of_half, factor, start in pairs for x in of_half]
                logits[m] = fragments.mma(logits[m], keys, query, "bf16")
        return logits

    def _left_out(self, tile, logits: list) -> list:
        """Stores the logits of the last token's queries, and then leaves out tokens that are replaced."""
        plan = self.plan
        word = ptx.load_global(self.at["left_out"] + ptx.i64(self.head * (plan.size // TILE) + tile) * 4)[0]
        at = self.at["logits"] + ptx.i64(self.head) * (4 * plan.size * plan.heads)
        kept = []
        for m, tile_logits in enumerate(logits):
            rows = []
            for row in (0, 1):
                within = self.g + (16 * m + 8 * row)
                self._store_logits(at, tile * TILE + within, tile_logits[2 * row : 2 * row + 2])
                out = (word >> within & 1) == 1
                rows += [ptx.select(out, ptx.f32(-math.inf), x) for x in tile_logits[2 * row : 2 * row + 2]]
            kept.append(rows)
        return kept

    def _store_logits(self, at, token, logits: list) -> None:
        """Stores a token's logits with this lane's queries, where they are of the last token."""
        plan = self.plan
        first = plan.rows - plan.heads
        place = lambda query: at + ptx.i64(token * (4 * plan.heads)) + ptx.i64((query - first) * 4)
        query = self.t * 2
        if plan.heads % 2 == 0:  # so that both are of the last token, or none
            with ptx.when((ptx.i32(first - 1) < query) & (query < plan.rows)):
                ptx.store_global_words(place(query), *map(ptx.as_bits, logits))
            return
        for i, logit in enumerate(logits):
            with ptx.when((ptx.i32(first - 1) < query + i) & (query + i < plan.rows)):
                ptx.store_global(place(query + i), logit)

    def _weigh(self, logits: list, state: dict, power: int) -> tuple[list, dict]:
        """Softmax weights of tokens as the second operand [of 8 tokens], and the state that goes by the new maximum. power: the weights are
        2^power times as large."""
        mine = [[x for tile in logits for x in (tile[c], tile[c + 2])] for c in (0, 1)]
        highest = [fragments.all_rows(functools.reduce(ptx.maximum, xs), ptx.maximum) for xs in mine]
        top = [ptx.maximum(old, new) for old, new in zip(state["top"], highest)]
        decay = [numerics.exp2(old - new) for old, new in zip(state["top"], top)]
        weights = [[numerics.exp2(x - (top[c % 2] - power)) for c, x in enumerate(tile)] for tile in logits]
        added = [numerics.total([x for tile in weights for x in (tile[c], tile[c + 2])]) for c in (0, 1)]
        total = [numerics.fma(old, by, new) for old, by, new in zip(state["total"], decay, added)]
        smaller = lambda acc: tuple(x * decay[c % 2] for c, x in enumerate(acc))
        state = {**state, "top": top, "total": total, "out": [smaller(acc) for acc in state["out"]]}
        if "zero" in state:
            state["zero"] = smaller(state["zero"])
        turned = [fragments.transpose(numerics.pair(*tile[2 * row : 2 * row + 2], "bf16")) for tile in weights for row in (0, 1)]
        return turned, state

    def _add_values(self, slot, weights: list, state: dict) -> dict:
        """The state with the values of a tile. weights: times 2^-SMALLER."""
        plan = self.plan

        def pairs(name: str, j: int) -> list:
            """Those of tokens 8 j + 2 t and 8 j + 2 t + 1, for each group of channels."""
            at = slot + plan.parts[name][0] + (self.t * 2 + 8 * j) * (2 * plan.value_groups)
            return _of_two_tokens(ptx.load_shared(at, plan.value_groups), plan.value_groups)

        each = range(len(weights))
        scaled = [[numerics.multiply_bf16(weights[j], x) for x in pairs("value_scale", j)] for j in each]
        # Row n of the zero points' product is of group n of the channels.
        own = lambda words: functools.reduce(lambda x, n: ptx.select(self.g == n[0], n[1], x), enumerate(words), ptx.i32(0))
        mine = [own(pairs("value_zero", j)) for j in each]
        turned = [[fragments.transpose(x) for x in words] for words in self._load_codes("value_codes", slot)]
        both = [[(x, x >> 8) for x in words] for words in turned]  # even and odd channels
        out, of_zero, none = list(state["out"]), state["zero"], ptx.i32(0)
        for j in each[::2]:
            of_zero = fragments.mma(of_zero, (mine[j], none, mine[j + 1], none), weights[j : j + 2], "bf16")
            for s in plan.products:
                (h, bit), mask, n = plan.place(s), plan.mask(s), CHUNK * s // plan.value_group
                a = [numerics.times_power(x & mask, SMALLER - CODE - bit) for half in (j, j + 1) for x in both[half][h]]
                out[s] = fragments.mma(out[s], a, (scaled[j][n], scaled[j + 1][n]), "bf16")
        return {**state, "out": out, "zero": of_zero}

    def _finished(self, state: dict) -> dict:
        """The state in its own unit, with what the values' zero points add."""
        plan = self.plan
        of_zero = state.pop("zero")[:2]

        def added(n: int) -> list:
            mine = [ptx.select(self.g == n, x, ptx.f32(0.0)) for x in of_zero]
            return [fragments.all_rows(x, numerics.add) * 2.0**SMALLER for x in mine]

        added = [added(n) for n in range(plan.value_groups)]
        more = lambda s: added[CHUNK * s // plan.value_group]
        out = [tuple(x + more(s)[c % 2] for c, x in enumerate(acc)) for s, acc in enumerate(state["out"])]
        return {**state, "out": out, "total": [x * 2.0**SMALLER for x in state["total"]]}

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

    def _full(self, prefix: str, count, room: int, sees: Callable, state: dict) -> dict:
        """The state with this warp's share of `count` tokens, of arrays with room for so many. sees: of two tokens, whether there are such,
        and whether each of this lane's two queries sees the first, and the second."""
        plan = self.plan
        base = ptx.i64(self.head) * (2 * plan.head_dim * room) + ptx.i64(self.t * 8)
        keys, values = (self.at[f"{prefix}{name}"] + base for name in ("keys", "values"))

        def step(i, state):
            tokens = [i * FULL_TILE + self.g, i * FULL_TILE + self.g + 8]
            places = [ptx.i64(ptx.minimum(token, ptx.i32(room - 1))) * (2 * plan.head_dim) for token in tokens]
            load = lambda base, s: [ptx.load_global(base + place + 2 * CHUNK * s, 2) for place in places]
            acc = (ptx.f32(0.0),) * 4
            for s in plan.products:
                one, other = load(keys, s)
                acc = fragments.mma(acc, (one[0], other[0], one[1], other[1]), self.queries[s], "bf16")
            logits = [x * self.to_base_2 for x in acc]
            if prefix:
                at = self.at["replaced_logits"] + ptx.i64(self.head) * (4 * room * plan.heads)
                for row, token in enumerate(tokens):
                    with ptx.when(token < room):
                        self._store_logits(at, token, logits[2 * row : 2 * row + 2])
            there, seen = sees(tokens)
            logits = [ptx.select(x, logit, ptx.f32(-math.inf)) for x, logit in zip(seen, logits)]
            weights, state = self._weigh([logits], state, 0)
            out = list(state["out"])
            for s in plan.products:
                # Where there is no token may lie what is no number, and that is not to be multiplied by 0.
                loaded = [[ptx.select(present, x, ptx.i32(0)) for x in words] for present, words in zip(there, load(values, s))]
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
