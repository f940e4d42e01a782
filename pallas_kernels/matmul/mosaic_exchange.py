"""Sums over devices within launches of the fused layer, one on each device.

Every device has memory that all of them write to (gpu/exchange.py): counters, and places for parts of sums. A device writes its parts to
all devices, also to itself, and adds up those that it finds in its own memory, device by device: all come to the same bits. As between the
blocks of a launch no flag says that a number is there; who needs it reads until it is no longer the NaN that was there before.

A launch uses one of three places in turn. Launch n uses place n % 3, and empties place (n + 2) % 3 on its own device:

* Nobody reads there any more: it was read in launch n - 1, which has ended here.
* Nobody has written there yet: others do in their launch n + 2. They begin it once their launch n + 1 has ended, which needs parts that
  this device sends in its launch n + 1, and so after launch n has ended here.

So a device may be one launch ahead of another, never two. Launches are counted in the memory itself, by their blocks.
"""

from pallas_kernels.gpu import ptx
from pallas_kernels.matmul.mosaic_plan import COUNTER_WORDS, TURNS, Plan


class Exchange:
    """The exchange as a block sees it.

    table: the address of [1 + devices, 2] words in global memory: this device's number, then the addresses, lower half first. notes: where
    four words of shared memory keep, for the whole launch, the address of this device's memory, which place it is the turn of, and the
    device's number. In registers they would be in the way of everything else.
    """

    def __init__(self, plan: Plan, table: ptx.Value, notes: ptx.Value):
        self.plan, self.table, self.notes = plan, table, notes

    def begin(self, thread: ptx.Value) -> ptx.Value:
        """Takes the notes, for all warps of the block once they have met; returns the address of the place that this launch empties."""
        number = ptx.load_global(self.table)[0]
        own = ptx.load_global(self._entry(number), 2)
        launches = ptx.load_global(_joined(*own))[0]
        with ptx.when(thread == 0):
            ptx.store_shared(self.notes, *own, launches % TURNS, number)
        return self._place(_joined(*own), (launches + 2) % TURNS)

    def received(self, number: int) -> list:
        """The addresses, in this device's memory, of all devices' parts of what a stage gives."""
        lower, upper, turn, _ = ptx.load_shared(self.notes, 4)
        return [self._part(_joined(lower, upper), turn, ptx.i32(device), number) for device in range(self.plan.devices)]

    def destinations(self, number: int) -> list:
        """The addresses, in all devices' memory, of this device's part of what a stage gives."""
        _, _, turn, own = ptx.load_shared(self.notes, 4)
        bases = [_joined(*ptx.load_global(self._entry(ptx.i32(device)), 2)) for device in range(self.plan.devices)]
        return [self._part(base, turn, own, number) for base in bases]

    def count(self) -> None:
        """Counts, in one thread of each block, that the block has read what it needs; the last one counts the launch."""
        own = _joined(*ptx.load_shared(self.notes, 4)[:2])
        launches = ptx.load_global(own)[0]
        before = ptx.take_ticket(own + 4, ptx.i32(1))
        with ptx.when(before == self.plan.blocks - 1):
            ptx.store_global(own + 4, ptx.i32(0))
            ptx.store_global(own, launches + 1)

    def _entry(self, device: ptx.Value) -> ptx.Value:
        return self.table + ptx.i64(device + 1) * 8

    def _place(self, base: ptx.Value, turn: ptx.Value) -> ptx.Value:
        return base + ptx.i64(turn * self.plan.place_words + COUNTER_WORDS) * 4

    def _part(self, base: ptx.Value, turn: ptx.Value, device: ptx.Value, number: int) -> ptx.Value:
        return self._place(base, turn) + ptx.i64(device * self.plan.part_words + self.plan.words_before(number)) * 4


def _joined(lower: ptx.Value, upper: ptx.Value) -> ptx.Value:
    return ptx.i64(lower) | (ptx.i64(upper) << 32)
