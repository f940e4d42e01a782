"""A ring of slots in shared memory, through which some warps of a block hand work to others: the one side works ahead of the other."""

from pallas_kernels.gpu import ptx


class Ring:
    """Slots in shared memory that some warps fill and others empty, one after the other.

    A warp goes through the slots with `following`, from slot 0 on. It begins with the parity, for `ptx.wait_for_arrivals`, 0 if it empties
    slots, and 1 if it fills them: then its first wait for each slot returns at once.

    Args:
        slots: the number of slots.
        first: the address of slot 0.
        size: bytes of a slot.
        barriers: the address of the mbarriers, 8 bytes each: first every slot's filled barrier, then every slot's emptied barrier.
    """

    def __init__(self, slots: int, first, size: int, barriers):
        self.slots, self.first, self.size, self.barriers = slots, first, size, barriers

    def start(self, fillers: int, emptiers: int) -> None:
        """Makes the barriers of all slots. Called by one thread; synchronize the block before anyone uses the ring.

        fillers, emptiers: how many arrivals complete a slot's filled barrier, and how many its emptied barrier.
        """
        for slot in range(self.slots):
            ptx.barrier_init(self.filled_barrier(ptx.i32(slot)), fillers)
            ptx.barrier_init(self.emptied_barrier(ptx.i32(slot)), emptiers)

    def slot(self, slot):
        """The address of a slot."""
        return self.first + slot * self.size

    def filled_barrier(self, slot):
        """The address of the mbarrier that completes when a slot is full."""
        return self.barriers + 8 * slot

    def emptied_barrier(self, slot):
        """The address of the mbarrier that completes when a slot may be filled again."""
        return self.barriers + 8 * (slot + self.slots)

    @property
    def barriers_end(self):
        """The address after the barriers of all slots."""
        return self.barriers + 2 * 8 * self.slots

    def following(self, slot, parity) -> tuple:
        """The next slot, and its parity: the same until the warp begins again with slot 0."""
        last = slot == self.slots - 1
        return ptx.select(last, ptx.i32(0), slot + 1), ptx.select(last, parity ^ 1, parity)


def arrive_for_warp(barrier, lane) -> None:
    """Waits for all lanes of the warp; then lane 0 arrives at the mbarrier at this address."""
    ptx.synchronize(None, 1)
    with ptx.when(lane == 0):
        ptx.arrive(barrier)
