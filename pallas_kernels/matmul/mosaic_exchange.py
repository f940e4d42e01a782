"""Sums over devices within launches of the fused layer, one launch on each device at the same time.

Every device has exchange memory, which all of them write to (gpu/exchange.py): counters, and buffers for partial sums. A device writes its
partial sums to all devices, itself among them, and adds up those that it finds in its own memory, in the order of the devices: all come to
the same bits. As between the blocks of a launch no flag says that a number is there; who needs it reads until it is no longer the NaN that
was there before.

Launches take turns with three buffers. Launch n uses buffer n % 3, and fills buffer (n + 2) % 3 of its own device with that NaN:

* It is not read any more: it was read in the launch before, which has ended here.
* It has not been written to yet: other devices do in their launch n + 2. They begin it once their launch n + 1 has ended, which needs
  partial sums of this device's launch n + 1; and that one begins after launch n has ended here.

So a device may be one launch ahead of another, never two. This holds as long as all devices run the launches that share the memory in the
same order, as the devices of one program do.
"""

from pallas_kernels.gpu import ptx
from pallas_kernels.matmul.mosaic_plan import BUFFERS, COUNTER_WORDS, Plan


class Exchange:
    """The exchange as a block sees it.

    table: the address of [1 + devices, 2] words in global memory: this device's number, then the addresses of all exchange memory, lower
    half first. state: the address of four words of shared memory, for the whole launch: the address of this device's memory, the number of
    the buffer, and the device's number. They would occupy registers otherwise.
    """

    def __init__(self, plan: Plan, table: ptx.Value, state: ptx.Value):
        self.plan, self.table, self.state = plan, table, state

    def begin(self, thread: ptx.Value) -> ptx.Value:
        """Stores the state, which other warps may read after the block's next barrier; returns the address of the buffer to fill."""
        device = ptx.load_global(self.table)[0]
        memory = ptx.load_global(self._entry(device), 2)
        buffer = ptx.load_global(_joined(*memory))[0]
        with ptx.when(thread == 0):
            ptx.store_shared(self.state, *memory, buffer, device)
        return self._buffer(_joined(*memory), (buffer + 2) % BUFFERS)

    def received(self, stage: int) -> list:
        """The addresses, in this device's memory, of all devices' partial sums of a stage."""
        lower, upper, buffer, _ = ptx.load_shared(self.state, 4)
        start = self._buffer(_joined(lower, upper), buffer)
        return [self._partial(start, ptx.i32(device), stage) for device in range(self.plan.num_devices)]

    def destinations(self, stage: int) -> list:
        """The addresses, in all devices' memory, of this device's partial sums of a stage."""
        _, _, buffer, own = ptx.load_shared(self.state, 4)
        memories = [_joined(*ptx.load_global(self._entry(ptx.i32(device)), 2)) for device in range(self.plan.num_devices)]
        return [self._partial(self._buffer(memory, buffer), own, stage) for memory in memories]

    def count(self) -> None:
        """Counts the block, in one of its threads. The last block says which buffer is the next: all blocks have read by then which one is
        this launch's."""
        lower, upper, buffer, _ = ptx.load_shared(self.state, 4)
        memory = _joined(lower, upper)
        blocks = ptx.take_ticket(memory + 4, ptx.i32(1))
        with ptx.when(blocks == self.plan.blocks - 1):
            ptx.store_global(memory + 4, ptx.i32(0))
            ptx.store_global(memory, (buffer + 1) % BUFFERS)

    def _entry(self, device: ptx.Value) -> ptx.Value:
        return self.table + ptx.i64(device + 1) * 8

    def _buffer(self, memory: ptx.Value, number: ptx.Value) -> ptx.Value:
        return memory + ptx.i64(number * self.plan.buffer_words + COUNTER_WORDS) * 4

    def _partial(self, buffer: ptx.Value, device: ptx.Value, stage: int) -> ptx.Value:
        return buffer + ptx.i64(device * self.plan.partial_words + self.plan.words_before(stage)) * 4


def _joined(lower: ptx.Value, upper: ptx.Value) -> ptx.Value:
    """The address of these halves."""
    return ptx.i64(lower) | (ptx.i64(upper) << 32)
