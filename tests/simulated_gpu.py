"""A GPU for kernels whose bodies place every register themselves (pallas_kernels/gpu/ptx.py): every warp a greenlet, its lanes arrays.

Alignment and bounds of every access are checked, and waits that do not end fail. So does an access to shared memory that nothing orders
with another one to the same word, though the numbers may come out right in the order in which warps run here. Within a warp the order of
the program is taken for granted: that a barrier waits for the loads before it (`ptx.once_loaded`) only a GPU can show. Nothing is told of
speed or of registers. What the warps do is in simulated_ptx.py.
"""

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable

import greenlet
import jax.numpy as jnp
import numpy as np
from simulated_races import LANES, SEVERAL, SHARED_START, Past, Touched, here

GUARD = 256  # bytes between arrays, which must not be touched


@dataclasses.dataclass(slots=True)
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
        out = function(self.raw, self.like(other))
        return Lanes(out if out.dtype is self.raw.dtype else out.astype(self.raw.dtype, copy=False))

    def unsigned(self, other, function: Callable) -> "Lanes":
        kind = np.uint64 if self.raw.dtype == np.int64 else np.uint32
        return Lanes(function(self.raw.view(kind), self.like(other).view(kind)).astype(kind, copy=False).view(self.raw.dtype))

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
    return whole(int(x), dtype) if np.dtype(dtype).kind in "iu" else np.full(32, x, dtype)


@functools.lru_cache(1 << 14)
def whole(x: int, dtype) -> np.ndarray:
    """Made once of each number, as half of what the warps compute is with one; nobody can write to it."""
    size = np.dtype(dtype).itemsize
    out = np.full(32, x & (2 ** (8 * size) - 1), f"u{size}").view(dtype)
    out.flags.writeable = False
    return out


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


def changed_if(condition: Lanes, carry, body: Callable):
    return body(carry) if here.mask.any() and scalar(condition) else carry


# Memory ------------------------------------------------------------------------------------------------------------------


class Memory:
    """Bytes from an address on, of which some may be touched. touched: notes who does, for shared memory."""

    def __init__(self, start: int, size: int, touched: "Touched | None" = None):
        self.start, self.bytes, self.allowed, self.touched = start, np.zeros(size, np.uint8), np.zeros(size, bool), touched
        self.words = self.bytes.view(np.int32)

    def places(self, at: np.ndarray, size: int) -> np.ndarray:
        """Indices of the words of so many bytes from each address of the lanes that run, all of which must be allowed and aligned."""
        at = at[here.mask].astype(np.int64)
        assert not (at % size).any(), f"addresses {at} are no multiples of {size}"
        first = at - self.start
        assert not at.size or (first.min() >= 0 and first.max() + size <= len(self.bytes)), f"addresses {at} are nowhere"
        # Nothing that may be touched ends and begins again in so few bytes.
        assert size <= GUARD and self.allowed[first].all() and self.allowed[first + (size - 1)].all(), f"addresses {at} are of no array"
        return (first >> 2)[:, None] + np.arange(size // 4)

    def load(self, at: np.ndarray, words: int, dtype) -> tuple[Lanes, ...]:
        out, places = np.zeros((32, words), np.int32), self.places(at, 4 * words)
        if self.touched:
            self.touched.reads(places, LANES[here.mask])
        out[here.mask] = self.words[places]
        return tuple(Lanes(np.ascontiguousarray(column).view(dtype)) for column in out.T)

    def store(self, at: np.ndarray, values: np.ndarray) -> None:
        """values: [lane, any]"""
        data = np.ascontiguousarray(values).view(np.int32)
        places = self.places(at, 4 * data.shape[1])
        if self.touched:
            self.touched.writes(places, LANES[here.mask])
        self.words[places] = data[here.mask]

    def store_halves(self, at: np.ndarray, values: np.ndarray) -> None:
        """Stores the lower 16 bits of each value."""
        assert not self.touched, "words of shared memory are not shared by lanes"
        assert not (at[here.mask] % 2).any(), f"addresses {at} are no multiples of 2"
        self.places(at & ~3, 4)
        self.bytes.view(np.int16)[(at[here.mask].astype(np.int64) - self.start) >> 1] = values[here.mask].astype(np.int16)

    def raise_to(self, at: np.ndarray, values: np.ndarray) -> None:
        """Makes words the larger of themselves and these values, lane after lane."""
        places = self.places(at, 4)
        self.touched.raises(places, LANES[here.mask])
        np.maximum.at(self.words, places[:, 0], values[here.mask])


class Arrivals:
    """A barrier that a number of arrivals and of bytes completes, again and again. Who waits for it hears what those know who arrived."""

    def __init__(self, expected: int, device: "Device"):
        self.expected = self.pending = expected
        self.bytes = self.phase = 0
        self.device = device
        self.told: list[tuple[np.ndarray, np.ndarray]] = []
        self.heard: tuple[np.ndarray, np.ndarray] | None = None

    def change(self, told: tuple[np.ndarray, np.ndarray], arrivals: int = 0, size: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += size
        self.told.append(told)
        assert self.pending >= 0, "more arrivals than were announced"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.expected
            lanes, copies = zip(*self.told)
            self.told, self.heard = [], (np.maximum.reduce(lanes), np.maximum.reduce(copies))

    def wait(self, done: Callable[["Arrivals"], bool], what: str) -> None:
        self.device.wait(lambda: done(self), what)
        if self.heard:
            here.past.hear(self.heard)


class Cluster:
    """What the blocks of a cluster share: a barrier of all their warps, and the numbers by which `Past` and `Touched` know these."""

    def __init__(self, size: int, warps: int, device: "Device"):
        self.blocks: list[Block] = []
        self.warps = size * warps  # of all blocks
        self.barrier = Arrivals(self.warps, device)

    def meet(self) -> None:
        _meet(self.barrier, "the cluster")


def _meet(barrier: Arrivals, what: str) -> None:
    phase = barrier.phase
    here.past.meet()
    barrier.change(here.past.tell(here.mask), arrivals=1)
    barrier.wait(lambda barrier: barrier.phase > phase, what)
    here.past.meet()


class Block:
    """What the warps of a block share. ended: whether all of them are done, and its shared memory is another's."""

    def __init__(self, index: int, shared_bytes: int, cluster: Cluster, device: "Device"):
        self.index, self.device, self.cluster, self.ended = index, device, cluster, False
        cluster.blocks.append(self)
        self.shared = Memory(SHARED_START, shared_bytes, Touched(-(-shared_bytes // 4), cluster.warps))
        self.shared.bytes[:] = np.random.default_rng(index).integers(0, 256, shared_bytes, np.uint8)  # not cleared
        self.shared.allowed[:] = True
        self.arrivals: dict[int, Arrivals] = {}
        self.barriers: dict[int, Arrivals] = {}

    def meet(self, barrier: int, warps: int) -> None:
        found = self.barriers.setdefault(barrier, Arrivals(warps, self.device))
        assert found.expected == warps, f"barrier {barrier} is of {found.expected} warps and of {warps}"
        _meet(found, f"barrier {barrier}")

    def end(self, pasts: list[Past]) -> None:
        """Ends, as its warps have, with these pasts: no word may have been read by another block that they have not heard of."""
        known = functools.reduce(np.maximum, [past.lanes for past in pasts])
        touched, own = self.shared.touched, [past.warp for past in pasts]
        self.ended = True
        reader = touched.reader
        heard = np.where(reader == SEVERAL, known.min(1), known[np.arange(len(known)), np.maximum(reader, 0)])
        late = touched.read > heard
        late[:, own] = False
        assert not late.any(), f"a race: block {self.index} ends, and nothing orders that with what others read of its shared memory"


class Device:
    """Global memory, and the warps that take turns: each runs until it has to wait for what another one does."""

    def __init__(self, memory: Memory):
        self.memory, self.scheduler = memory, greenlet.getcurrent()
        self.ready: deque[Warp] = deque()
        self.waiting: list[Warp] = []

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Lets others run until the condition holds; it may read memory as the warp that waits."""
        if done():
            return
        warp = greenlet.getcurrent()
        warp.done, warp.what, warp.state = done, what, dict(vars(here))
        self.waiting.append(warp)
        self.scheduler.switch()

    def run(self) -> None:
        """Runs all warps to their ends. Fails where all that are left wait."""
        while self.ready or self.waiting:
            while self.ready:
                self.ready.popleft().resume()
            waiting, self.waiting = self.waiting, []
            for warp in waiting:
                (self.ready if warp.may_go_on() else self.waiting).append(warp)
            if self.waiting and not self.ready:
                warp = self.waiting[0]
                block, number = warp.state["block"], warp.state["warp"]
                raise TimeoutError(f"block {block.index}, warp {number} waits for {warp.what} in vain")

    def stop(self) -> None:
        """Ends the warps that wait."""
        for warp in (*self.waiting, *self.ready):
            warp.throw()


class Warp(greenlet.greenlet):
    """A warp, and while it waits: for what, by which condition, and the fields of `here`."""

    state: dict
    done: Callable[[], bool]
    what: str

    def resume(self) -> None:
        vars(here).update(self.state)
        self.switch()

    def may_go_on(self) -> bool:
        vars(here).update(self.state)
        return self.done()


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
    cluster: int = 1,
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
    assert blocks % cluster == 0, f"{blocks} blocks are no clusters of {cluster}"
    warps = 4 * warpgroups
    clusters = [Cluster(cluster, warps, device) for _ in range(blocks // cluster)]
    everyone = [Block(i, shared_bytes, clusters[i // cluster], device) for i in range(blocks)]

    rng = np.random.default_rng(blocks)
    starting = deque(everyone[i] for i in rng.permutation(blocks))

    def start_block() -> None:
        if not starting:
            return
        block = starting.popleft()
        pasts = [Past(block.index % cluster * warps + warp, cluster * warps) for warp in range(warps)]
        left = set(range(warps))

        def run(warp: int) -> None:
            # Lanes that do not run compute too, with whatever they have.
            with np.errstate(all="ignore"):
                emit(dict(refs))
                assert not here.products, "products that nobody waits for"
            left.remove(warp)
            if not left:
                block.end(pasts)
                start_block()

        for warp in rng.permutation(warps):
            made = Warp(functools.partial(run, int(warp)), device.scheduler)
            made.state = dict(block=block, warp=int(warp), mask=np.ones(32, bool), copies=[[]], products=[], past=pasts[warp])
            device.ready.append(made)

    for _ in range(min(resident or blocks, blocks)):
        start_block()
    try:
        device.run()
    finally:
        device.stop()
    found = {}
    for key in [*outputs, *(updated or {})]:
        start = refs[key] - memory.start
        found[key] = jnp.asarray(memory.bytes[start : start + arrays[key].nbytes].view(arrays[key].dtype).reshape(arrays[key].shape))
    return found
