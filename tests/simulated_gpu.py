"""A GPU for kernels whose bodies place every register themselves (pallas_kernels/gpu/ptx.py): every warp a thread, its lanes arrays.

Alignment and bounds of every access are checked, and waits that nobody ends fail. Nothing is told of speed, of registers, or of what the
memory model allows. What the warps do is in simulated_ptx.py.
"""

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

LANES = np.arange(32)
PATIENCE_S, STEP_S = 20.0, 0.02  # until waiting fails, while no warp runs an instruction
LAUNCH_S = 300.0  # of a launch at most
SHARED_START = 1024
GUARD = 256  # bytes between arrays, which nobody may touch


class Here(threading.local):
    """Where a thread is: its block, its warp, the lanes that run, and groups of copies under way, of which the last is not committed."""

    block: "Block"
    warp: int
    mask: np.ndarray
    copies: list[list[tuple]]


here = Here()


@dataclasses.dataclass(frozen=True)
class Lanes:
    """As `ptx.Value`, one number for each lane."""

    raw: np.ndarray

    @property
    def is_float(self) -> bool:
        return self.raw.dtype == np.float32

    def like(self, other) -> np.ndarray:
        if isinstance(other, Lanes):
            assert other.raw.dtype == self.raw.dtype, (other.raw.dtype, self.raw.dtype)
            return other.raw
        return constant(other, self.raw.dtype)

    def binary(self, other, function: Callable) -> "Lanes":
        with np.errstate(all="ignore"):
            return Lanes(function(self.raw, self.like(other)).astype(self.raw.dtype))

    def unsigned(self, other, function: Callable) -> "Lanes":
        kind = np.uint64 if self.raw.dtype == np.int64 else np.uint32
        return Lanes(function(self.raw.view(kind), self.like(other).view(kind)).astype(kind).view(self.raw.dtype))

    __add__ = __radd__ = lambda self, other: self.binary(other, np.add)
    __mul__ = __rmul__ = lambda self, other: self.binary(other, np.multiply)
    __sub__ = lambda self, other: self.binary(other, np.subtract)
    __truediv__ = lambda self, other: self.binary(other, np.divide)
    __floordiv__ = lambda self, other: self.unsigned(other, np.floor_divide)
    __mod__ = lambda self, other: self.unsigned(other, np.remainder)
    __rshift__ = lambda self, other: self.unsigned(other, np.right_shift)
    __lshift__ = lambda self, other: self.unsigned(other, np.left_shift)
    __and__ = lambda self, other: self.binary(other, np.bitwise_and)
    __or__ = lambda self, other: self.binary(other, np.bitwise_or)
    __xor__ = lambda self, other: self.binary(other, np.bitwise_xor)
    __lt__ = lambda self, other: Lanes(self.raw < self.like(other))
    __eq__ = lambda self, other: Lanes(self.raw == self.like(other))
    __ne__ = lambda self, other: Lanes(self.raw != self.like(other))
    __hash__ = object.__hash__


def constant(x, dtype) -> np.ndarray:
    if np.issubdtype(dtype, np.integer):
        return np.full(32, int(x) & (2 ** (8 * np.dtype(dtype).itemsize) - 1), np.dtype(f"u{np.dtype(dtype).itemsize}")).view(dtype)
    return np.full(32, x, dtype)


def scalar(x: Lanes) -> int:
    """The one value that all lanes that run agree on."""
    values = x.raw[here.mask]
    assert (values == values[0]).all(), f"lanes do not agree: {values}"
    return int(values[0])


# Control ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def when(condition: Lanes):
    before = here.mask
    here.mask = before & condition.raw
    try:
        yield
    finally:
        here.mask = before


def loop(lower: Lanes, upper: Lanes, carry, body: Callable):
    """Not at all where no lane runs: a branch that is not taken is emitted all the same."""
    if here.mask.any():
        for i in range(scalar(lower), scalar(upper)):
            carry = body(Lanes(constant(i, np.int32)), carry)
    return carry


def while_loop(condition: Callable, carry, body: Callable):
    """Not at all where no lane runs, as `loop`."""
    while here.mask.any() and scalar(condition(carry)):
        carry = body(carry)
    return carry


# Memory ------------------------------------------------------------------------------------------------------------------


class Memory:
    """Bytes from an address on, of which some may be touched."""

    def __init__(self, start: int, size: int):
        self.start, self.bytes, self.allowed = start, np.zeros(size, np.uint8), np.zeros(size, bool)

    def places(self, at: np.ndarray, size: int) -> np.ndarray:
        """Indices of so many bytes from each address of the lanes that run, all of which must be allowed and aligned."""
        at = at[here.mask].astype(np.int64)
        assert not (at % size).any(), f"addresses {at} are no multiples of {size}"
        places = (at - self.start)[:, None] + np.arange(size)
        assert places.size == 0 or (places.min() >= 0 and places.max() < len(self.bytes)), f"addresses {at} are nowhere"
        assert self.allowed[places].all(), f"addresses {at} are of no array"
        return places

    def load(self, at: np.ndarray, words: int, dtype) -> tuple[Lanes, ...]:
        out = np.zeros((32, words), np.int32)
        out[here.mask] = self.bytes[self.places(at, 4 * words)].view(np.int32)
        return tuple(Lanes(np.ascontiguousarray(column).view(dtype)) for column in out.T)

    def store(self, at: np.ndarray, values: np.ndarray) -> None:
        """values: [lane, any]"""
        data = np.ascontiguousarray(values).view(np.uint8)
        self.bytes[self.places(at, data.shape[1])] = data[here.mask]


class Arrivals:
    """A barrier that a number of arrivals and of bytes completes, again and again."""

    def __init__(self, expected: int):
        self.expected = self.pending = expected
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def change(self, arrivals: int = 0, size: int = 0) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0, "more arrivals than were announced"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.expected
                self.changed.notify_all()

    def wait(self, done: Callable[["Arrivals"], bool], device: "Device", what: str) -> None:
        with self.changed:
            for _ in device.patience(what):
                if self.changed.wait_for(lambda: done(self), STEP_S):
                    return


class Block:
    """What the warps of a block share."""

    def __init__(self, index: int, shared_bytes: int, device: "Device"):
        self.index, self.device = index, device
        self.shared = Memory(SHARED_START, shared_bytes)
        self.shared.bytes[:] = np.random.default_rng(index).integers(0, 256, shared_bytes, np.uint8)  # nobody has cleared it
        self.shared.allowed[:] = True
        self.arrivals: dict[int, Arrivals] = {}
        self.barriers: dict[int, Arrivals] = {}

    def meet(self, barrier: int, warps: int) -> None:
        found = self.barriers.setdefault(barrier, Arrivals(warps))
        assert found.expected == warps, f"barrier {barrier} is of {found.expected} warps and of {warps}"
        phase = found.phase
        found.change(arrivals=1)
        found.wait(lambda found: found.phase > phase, self.device, f"barrier {barrier}")


@dataclasses.dataclass
class Device:
    """Global memory, who may change a number in it at once, what failed, and how many instructions have run."""

    memory: Memory
    atomic: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    failed: list = dataclasses.field(default_factory=list)
    instructions: int = 0

    def patience(self, what: str) -> Iterator[None]:
        """For as long as it makes sense to wait."""
        seen, since = -1, 0.0
        while not self.failed:
            if seen != self.instructions:
                seen, since = self.instructions, time.monotonic()
            if time.monotonic() - since > PATIENCE_S:
                raise TimeoutError(f"block {here.block.index}, warp {here.warp} waits for {what} in vain")
            yield
        raise RuntimeError("another warp failed")


# Launching ----------------------------------------------------------------------------------------------------------------


def launch(
    name: str,
    emit: Callable,
    inputs: dict,
    outputs: dict,
    blocks: int,
    warpgroups: int,
    shared_bytes: int,
    updated: dict | None = None,
    *,
    resident: int | None = None,
) -> dict:
    """Does what `pallas_kernels.gpu.launch.launch` does.

    resident: blocks that fit on the device at once, all by default; others begin when those end.
    """
    arrays = {name: np.asarray(array) for name, array in (inputs | (updated or {})).items()}
    unwritten = lambda dtype: np.nan if jnp.issubdtype(dtype, jnp.floating) else 0
    arrays |= {name: np.full(shape.shape, unwritten(shape.dtype), shape.dtype) for name, shape in outputs.items()}
    memory = Memory(1 << 40, sum(-(-array.nbytes // GUARD) * GUARD + GUARD for array in arrays.values()))
    refs, end = {"shared": SHARED_START}, 0
    for key, array in arrays.items():
        memory.bytes[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory.allowed[end : end + array.nbytes] = True
        refs[key] = memory.start + end
        end += -(-array.nbytes // GUARD) * GUARD + GUARD
    device = Device(memory)
    everyone = [Block(i, shared_bytes, device) for i in range(blocks)]

    places = threading.Semaphore(resident or blocks)

    def run_block(block: Block) -> None:
        with places:
            if not device.failed:
                _run_all([threading.Thread(target=run, args=(block, warp), daemon=True) for warp in range(4 * warpgroups)], blocks)

    def run(block: Block, warp: int) -> None:
        here.block, here.warp, here.mask, here.copies = block, warp, np.ones(32, bool), [[]]
        try:
            emit(dict(refs))
        except BaseException as error:
            device.failed.append(error)

    before = sys.getswitchinterval()
    # A warp runs until it waits, for to switch between hundreds takes longer than what they do; so the first is not always the first.
    sys.setswitchinterval(1.0)
    try:
        _run_all([threading.Thread(target=run_block, args=(block,), daemon=True) for block in everyone], blocks)
    finally:
        sys.setswitchinterval(before)
    if device.failed:
        raise device.failed[0]
    found = {}
    for key in [*outputs, *(updated or {})]:
        start = refs[key] - memory.start
        found[key] = jnp.asarray(memory.bytes[start : start + arrays[key].nbytes].view(arrays[key].dtype).reshape(arrays[key].shape))
    return found


def _run_all(threads: list[threading.Thread], seed: int) -> None:
    """In any order, but the same in every run."""
    for i in np.random.default_rng(seed).permutation(len(threads)):
        threads[i].start()
    for thread in threads:
        thread.join(LAUNCH_S)
        assert not thread.is_alive(), f"a simulated launch takes longer than {LAUNCH_S} s"
