"""A ring of slots in shared memory, through which some warps of a block hand work to others: the one side works ahead of the other."""

from pallas_kernels.gpu import ptx


class Ring:
    """Slots in shared memory that some warps fill and others empty, one after the other.

    first: the address of slot 0. size: bytes of a slot. arrivals: the address of their mbarriers, two of 8 bytes for each slot: those that
    say that a slot is filled, then those that say that it is emptied. The parity to begin with is 0 for those that empty, and 1 for those
    that fill, whose first wait for each slot returns at once.
    """

    def __init__(self, slots: int, first, size: int, arrivals):
        self.slots, self.first, self.size, self.arrivals = slots, first, size, arrivals

    def start(self, fillers: int, emptiers: int) -> None:
        """Makes the barriers of all slots. One thread calls it; the block is synchronized before anyone uses the ring.

        fillers, emptiers: how many arrivals fill a slot, and how many empty it.
        """
        for slot in range(self.slots):
            ptx.arrivals_init(self.filled(ptx.i32(slot)), fillers)
            ptx.arrivals_init(self.emptied(ptx.i32(slot)), emptiers)

    def slot(self, slot):
        """The address of a slot."""
        return self.first + slot * self.size

    def filled(self, slot):
        """The address of the mbarrier that completes when a slot is full."""
        return self.arrivals + 8 * slot

    def emptied(self, slot):
        """The address of the mbarrier that completes when a slot may be filled again."""
        return self.arrivals + 8 * (slot + self.slots)

    @property
    def arrivals_end(self):
        """The address after the barriers of all slots."""
        return self.arrivals + 2 * 8 * self.slots

    def following(self, slot, parity) -> tuple:
        """The next slot, and its parity."""
        last = slot == self.slots - 1
        return ptx.select(last, ptx.i32(0), slot + 1), ptx.select(last, parity ^ 1, parity)


def arrive_for_warp(arrival, lane) -> None:
    """Waits for all lanes of the warp; then lane 0 arrives at the barrier whose address is `arrival`."""
    ptx.synchronize(None, 1)
    with ptx.when(lane == 0):
        ptx.arrive(arrival)
