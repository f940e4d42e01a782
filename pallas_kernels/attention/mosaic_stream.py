"""The ring in shared memory through which the cache streams, and the sources that fill it."""

import functools
from collections.abc import Callable

from pallas_kernels.attention.mosaic_plan import Plan
from pallas_kernels.gpu import ptx


class Pipeline:
    """Streams the keys and values of steps lower to upper - 1 through the ring, in turn, up to slots - 1 half steps ahead."""

    def __init__(self, plan: Plan, ring, meet: Callable, source, lower, upper):
        self.plan, self.ring, self.meet = plan, ring, meet
        self.source, self.lower, self.upper = source, lower, upper

    def prefetch(self) -> None:
        """Fills the ring but for one slot."""
        units = range(self.plan.slots - 1)
        # Where groups are listed, the numbers of all of them are on their way before one is waited for.
        places = {ahead: self.source.place(self.lower + ahead) for ahead in sorted({unit // 2 for unit in units})}
        for unit in units:
            self._issue(unit, self.lower, places[unit // 2], ptx.i32(unit))

    def run(self, keys: Callable, values: Callable, state):
        """Runs all steps and returns the state, see `run_part`."""
        return self.run_part(self.lower, self.upper, keys, values, ptx.i32(0), state)[1]

    def run_part(self, lower, upper, keys: Callable, values: Callable, slot, state) -> tuple:
        """Runs steps lower to upper - 1, logits = keys(address, step, refill) and state = values(address, step, state, logits, refill).

        What a warp copied itself is there when these begin. The rest is there once they call `refill`, which waits for the whole team.

        Args:
            lower, upper: a part of the steps, which follows the parts that were run before.
            slot: the slot of the first step.

        Returns:
            The slot of the step that follows, and the state.
        """
        last = self.plan.slots - 1

        def advance(slot):
            return ptx.select(slot == last, ptx.i32(0), slot + 1)

        def step(i, carry):
            slot, state = carry
            # Loaded before the copies of this step are waited for, so that both waits are one.
            units = self.plan.slots - 1, self.plan.slots
            places = {ahead: self.source.place(i + ahead) for ahead in sorted({unit // 2 for unit in units})}
            logits = keys(self._arrived(slot), i, functools.partial(self._refill, units[0], i, places[units[0] // 2], slot))
            slot = advance(slot)
            state = values(self._arrived(slot), i, state, logits, functools.partial(self._refill, units[1], i, places[units[1] // 2], slot))
            return advance(slot), state

        return ptx.loop(lower, upper, (slot, state), step)

    def _issue(self, unit: int, step, place, slot) -> None:
        # The unit-th half step from here, if it is within the run; `place` says where it lies.
        with ptx.when(step + unit // 2 < self.upper):
            copy = self.source.copy_values if unit % 2 else self.source.copy_keys
            copy(self.ring + slot * self.plan.slot_bytes, place)
        ptx.commit_copies()

    def _arrived(self, slot):
        ptx.wait_for_copies(self.plan.slots - 2)
        ptx.synchronize(None, 1)
        return self.ring + slot * self.plan.slot_bytes

    def _refill(self, unit: int, step, place, slot) -> None:
        if self.plan.config.team > 1:
            self.meet()
        # All warps are done with the slot before this one: it takes the half step that is slots - 1 ahead.
        self._issue(unit, step, place, ptx.select(slot == 0, ptx.i32(self.plan.slots - 1), slot - 1))


class QuantizedSource:
    """Copies the keys or values of a group to shared memory: the planes, then scales and zeros.

    head: the number of the KV head among those of all rows of the batch. listed: what `load_list` gave for it.
    """

    def __init__(self, plan: Plan, at: dict, head, lane, part, listed: list):
        self.plan, self.at, self.head = plan, at, head
        self.lane, self.thread = lane, part * 32 + lane
        self.listed = [self._place(word) for word in listed]  # where the groups of the list lie

    @staticmethod
    def load_list(plan: Plan, at: dict, head, lane) -> list:
        """Starts the loads of this lane's words of the list of groups, for the whole warp to have it; none where the list is too long."""
        columns = [ptx.minimum(lane + 32 * i, ptx.i32(plan.list_width - 1)) for i in range(plan.list_words)]
        return [ptx.load_global(at["listed"] + ptx.i64(head * plan.list_width + column) * 4)[0] for column in columns]

    def place(self, step):
        """Where the group of a step lies in the cache, as a number among the groups of all KV heads; of any step, also beyond the last."""
        plan = self.plan
        if plan.list_width is None:
            return self._place(step)
        column = ptx.minimum(step, ptx.i32(plan.list_width - 1))
        if not self.listed:
            return self._place(ptx.load_global(self.at["listed"] + ptx.i64(self.head * plan.list_width + column) * 4)[0])
        word = self.listed[0]
        for i, other in enumerate(self.listed[1:], 1):
            word = ptx.select(column < 32 * i, word, other)
        return ptx.of_lane(word, column & 31)

    def _place(self, group):
        """Where a group of the row lies."""
        plan = self.plan
        if plan.list_width is not None or plan.paged:
            # Whatever is in a list, only groups of this KV head are read. Steps beyond the last, whose places are looked up ahead, stay
            # within the table of pages.
            group = ptx.minimum(ptx.maximum(group, ptx.i32(0)), ptx.i32(plan.groups - 1))
        if not plan.paged:
            return self.head * plan.groups + group
        row, kv_head = self.head // plan.kv_heads, self.head % plan.kv_heads
        (page,) = ptx.load_global(self.at["pages"] + ptx.i64(row * plan.groups + group) * 4)
        return page * plan.kv_heads + kv_head

    def copy_keys(self, shared, place) -> None:
        self._copy("key", self.plan.head_dim, shared, place)

    def copy_values(self, shared, place) -> None:
        self._copy("value", self.plan.group_size, shared, place)

    def _copy(self, name: str, parameters: int, shared, place) -> None:
        plan = self.plan
        index = ptx.i64(place)
        size = plan.group_size * plan.head_dim // 2
        to = self.thread * 16
        if name == "key":
            # The middle two of four rows change places: a tile reads rows 0 and 2, and 1 and 3, which are to lie in different banks.
            row_bytes = plan.head_dim // 2
            row = self.thread // (row_bytes // 16)
            to = to + (((row & 1) << 1 | (row >> 1) & 1) - (row & 3)) * row_bytes
        for plane in ("upper", "lower")[: plan.planes]:
            source = self.at[f"{name}_{plane}"] + index * size + ptx.i64(self.thread * 16)
            for offset in range(0, size, 512 * plan.config.team):
                ptx.copy_async(shared + to, source, offset=offset)
            shared += size
        # Every warp of a team copies these few, the same bytes to the same place, for it reads them before the team has met.
        chunk = self.lane % min(32, parameters // 4)
        for first in range(0, parameters // 4, 32):
            i = chunk + first
            is_zero = i < parameters // 8
            array = ptx.select(is_zero, self.at[f"{name}_scale"], self.at[f"{name}_zero"])
            within = ptx.select(is_zero, i, i - parameters // 8)
            ptx.copy_async(shared + i * 16, array + index * (2 * parameters) + ptx.i64(within * 16))


class FullSource:
    """Copies a chunk of full-precision rows to shared memory, zeros for those beyond the length.

    The 16-byte pieces of row r change places by r % 8, so that a column of pieces lies in different banks. Where the kernel appends, the
    last T rows are not yet in the buffer, but the block has them in shared memory at `new`.
    """

    def __init__(self, plan: Plan, at: dict, head, lane, part, length, new):
        self.plan, self.at, self.head, self.length, self.new = plan, at, head, length, new
        self.thread = part * 32 + lane
        self.held = length - plan.tokens if plan.appends else length  # rows of the buffer itself

    def place(self, step):
        """The chunk of a step: they lie one after the other."""
        return step

    def copy_keys(self, shared, chunk) -> None:
        self._copy("keys", shared, chunk)

    def copy_values(self, shared, chunk) -> None:
        self._copy("values", shared, chunk)

    def _copy(self, name: str, shared, chunk) -> None:
        plan = self.plan
        for token, piece, at in self._pieces(shared, chunk):
            size = ptx.select(token < self.held, ptx.i32(16), ptx.i32(0))
            place = self.head * plan.buffer_rows + ptx.minimum(token, ptx.i32(plan.buffer_rows - 1))
            source = self.at[name] + ptx.i64(place) * (2 * plan.head_dim) + ptx.i64(piece * 16)
            ptx.copy_async(at, source, size)

    def _pieces(self, shared, chunk) -> list[tuple]:
        """This lane's pieces of a chunk: their token, number in its row, and address."""
        plan = self.plan
        pieces, threads = plan.head_dim // 8, 32 * plan.config.team
        piece = self.thread % pieces
        rows = [self.thread // pieces + first // pieces for first in range(0, plan.chunk * pieces, threads)]
        return [(chunk * plan.chunk + row, piece, shared + row * (2 * plan.head_dim) + (piece ^ (row & 7)) * 16) for row in rows]

    def add_new(self, shared, chunk, first: int) -> None:
        """Puts the new rows of a chunk, those from row `first` of `new` on, where this lane's copies left zeros, and lets the warp meet."""
        plan = self.plan
        if not plan.appends:
            return
        with ptx.when(self.held < (chunk + 1) * plan.chunk):
            for token, piece, at in self._pieces(shared, chunk):
                with ptx.when((self.held - 1 < token) & (token < self.length)):
                    source = self.new + (token - self.held + first) * (2 * plan.head_dim) + piece * 16
                    ptx.store_shared(at, *ptx.load_shared(source, 4))
        ptx.synchronize(None, 1)
