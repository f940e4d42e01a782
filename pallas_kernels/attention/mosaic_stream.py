"""The ring in shared memory through which the cache streams, and what fills it."""

import functools
from collections.abc import Callable

from pallas_kernels.attention.mosaic_plan import Plan
from pallas_kernels.gpu import ptx


class Pipeline:
    """Streams the keys and values of steps lower..upper through the ring, in turn, as many ahead as it has slots for."""

    def __init__(self, plan: Plan, ring, meet: Callable, source, lower, upper):
        self.plan, self.ring, self.meet = plan, ring, meet
        self.source, self.lower, self.upper = source, lower, upper

    def prefetch(self) -> None:
        """Fills the ring but for one slot."""
        for unit in range(self.plan.slots - 1):
            self._issue(unit, self.lower, ptx.i32(unit))

    def run(self, keys: Callable, values: Callable, state):
        """Runs all steps, logits = keys(address, step, refill) and state = values(address, state, logits, refill), and returns the state.

        What a warp copied itself is there when these begin. The rest is there once they call `refill`, which waits for the whole team.
        """
        last = self.plan.slots - 1
        advance = lambda slot: ptx.select(slot == last, ptx.i32(0), slot + 1)

        def step(i, carry):
            slot, state = carry
            logits = keys(self._arrived(slot), i, functools.partial(self._refill, 0, i, slot))
            slot = advance(slot)
            state = values(self._arrived(slot), state, logits, functools.partial(self._refill, 1, i, slot))
            return advance(slot), state

        return ptx.loop(self.lower, self.upper, (ptx.i32(0), state), step)[1]

    def _issue(self, unit: int, step, slot) -> None:
        # The unit-th half step from here, if it is within the run.
        ahead = step + unit // 2
        with ptx.when(ahead < self.upper):
            copy = self.source.copy_values if unit % 2 else self.source.copy_keys
            copy(self.ring + slot * self.plan.slot_bytes, ahead)
        ptx.commit_copies()

    def _arrived(self, slot):
        ptx.wait_for_copies(self.plan.slots - 2)
        ptx.synchronize(None, 1)
        return self.ring + slot * self.plan.slot_bytes

    def _refill(self, unit: int, step, slot) -> None:
        slots = self.plan.slots
        if self.plan.config.team > 1:
            self.meet()
        # Everyone is done with the slot before this one: it takes the half step that is slots - 1 ahead.
        self._issue(unit + slots - 1, step, ptx.select(slot == 0, ptx.i32(slots - 1), slot - 1))


class QuantizedSource:
    """Copies the keys or values of a group to shared memory: the planes, then scales and zeros."""

    def __init__(self, plan: Plan, at: dict, head, lane, part):
        self.plan, self.at, self.head = plan, at, head
        self.lane, self.thread = lane, part * 32 + lane

    def copy_keys(self, shared, group) -> None:
        self._copy("key", self.plan.head_dim, shared, group)

    def copy_values(self, shared, group) -> None:
        self._copy("value", self.plan.group_size, shared, group)

    def _copy(self, name: str, parameters: int, shared, group) -> None:
        plan = self.plan
        index = ptx.i64(self.head * plan.groups + group)
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

    The 16-byte pieces of row r change places by r % 8, so that a column of pieces lies in different banks.
    """

    def __init__(self, plan: Plan, at: dict, head, lane, part, length):
        self.plan, self.at, self.head, self.length = plan, at, head, length
        self.thread = part * 32 + lane

    def copy_keys(self, shared, chunk) -> None:
        self._copy("keys", shared, chunk)

    def copy_values(self, shared, chunk) -> None:
        self._copy("values", shared, chunk)

    def _copy(self, name: str, shared, chunk) -> None:
        plan = self.plan
        pieces, threads = plan.head_dim // 8, 32 * plan.config.team
        piece = self.thread % pieces
        for first in range(0, plan.chunk * pieces, threads):
            row = self.thread // pieces + first // pieces
            token = chunk * plan.chunk + row
            size = ptx.select(token < self.length, ptx.i32(16), ptx.i32(0))
            place = self.head * plan.buffer_rows + ptx.minimum(token, ptx.i32(plan.buffer_rows - 1))
            source = self.at[name] + ptx.i64(place) * (2 * plan.head_dim) + ptx.i64(piece * 16)
            ptx.copy_async(shared + row * (2 * plan.head_dim) + (piece ^ (row & 7)) * 16, source, size)
