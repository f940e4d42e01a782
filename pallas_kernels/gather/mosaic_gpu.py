"""Single tokens of host memory on NVIDIA Hopper in Pallas Mosaic GPU: lanes read them over the bus and write them on the device.

XLA's own kernel for a gather writes what it read to host memory, from where it is then copied to the device: each token goes over the bus
three times instead of once. XLA gives a kernel the address of an array in host memory (seen in jax 0.11), so that this one can read it.

On some machines address translation limits reading: the address of each token has to be translated, probably by the machine's IOMMU,
which looks up its page. The lookup is faster when outstanding reads fall in a narrow region. So a token's key
and value are adjacent in memory, and the warps interleave. Tokens are divided into lines, of up to 512 bytes. All warps go through one list
of lines, in the order of `positions`: in each trip of its loop a warp reads a few lines, the next warp those after them, and the next trip
of the first warp begins after the last warp's.

Other kernels run at the same time. A block of attention or of a matrix product needs nearly all registers of a multiprocessor, and cannot
begin where a block of this kernel is. Therefore all its warps are on a few multiprocessors, and attention has as many blocks as fit the
others (docs/kernels/host-memory.md).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import multiprocessors, no_mosaic_gpu
from pallas_kernels.formats.token_codes import FullTokens
from pallas_kernels.gpu import ptx
from pallas_kernels.gpu.launch import launch, lowered_once

PIECE = 16  # bytes that a lane reads at a time
LINE = 32 * PIECE  # bytes of a line, at most: what the lanes of a warp read with one load each
MULTIPROCESSORS_PER_BLOCK = 32  # one of them runs a block of this kernel, which leaves no registers there for other kernels
WARPS = 32  # of a block: the most that there can be
AT_ONCE = 2  # loads that a lane has under way at the same time, all of one trip
# The largest number of tokens of a KV head that are compared with those already on the device; with more, all are read from the store,
# because comparing would take longer, by an estimate.
MAX_FETCHED = 128


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel does, by shapes and the device alone.

    Attributes:
        blocks: the number of blocks launched.
        positions: the number of all positions, B K n.
        n: the number of positions of each KV head of a row.
        store_tokens: the number of tokens that a KV head has in the store.
        token_bytes: bytes of a key and a value.
        num_fetched: tokens of a KV head that are on the device already.
    """

    blocks: int
    positions: int
    n: int
    store_tokens: int
    token_bytes: int
    num_fetched: int

    @property
    def line(self) -> int:
        """Bytes of a line: a whole token, or LINE if that is smaller."""
        return min(LINE, self.token_bytes)

    @property
    def lanes(self) -> int:
        """Lanes that share a line, each with a piece of it."""
        return self.line // PIECE

    @property
    def lines_per_token(self) -> int:
        """Lines of a token."""
        return self.token_bytes // self.line

    @property
    def lines_per_load(self) -> int:
        """Lines that the lanes of a warp read with one load each."""
        return LINE // self.line

    @property
    def lines_per_trip(self) -> int:
        """Lines that a warp reads in a trip."""
        return AT_ONCE * self.lines_per_load

    @property
    def trips(self) -> int:
        """Trips of each warp's loop. In trip i warp w, of W warps in all, reads n lines from number (i W + w) n, n = lines_per_trip.
        So in each trip the warps together read one run of the list of lines."""
        return math.ceil(self.positions * self.lines_per_token / (self.blocks * WARPS * self.lines_per_trip))


def occupied() -> int:
    """Multiprocessors on which there is no room for another kernel's blocks while this one runs: one for each of its blocks."""
    return max(1, multiprocessors() // MULTIPROCESSORS_PER_BLOCK)


def unsupported(store: Array, positions: Array, fetched: FullTokens | None) -> str | None:
    if reason := no_mosaic_gpu():
        return reason
    if jax.typeof(store).memory_space != jax.memory.Space.Host:
        return "is made for tokens in host memory"
    token_bytes = 2 * store.shape[4] * store.dtype.itemsize
    if token_bytes % PIECE or (token_bytes % LINE if token_bytes > LINE else LINE % token_bytes):
        return f"supports tokens of a power of two bytes from {PIECE} on, or of a multiple of {LINE}, not of {token_bytes}"
    if not store.shape[2] or not positions.size or positions.dtype != jnp.int32:
        return "needs tokens, and positions in int32"
    if fetched is not None and fetched.keys_values.dtype != store.dtype:
        return f"needs tokens in {store.dtype.name} where they are fetched already, not in {fetched.keys_values.dtype.name}"
    if fetched is not None and fetched.positions.dtype != jnp.int32:
        return f"needs positions of what is fetched already in int32, not in {fetched.positions.dtype.name}"
    return None


def gather_tokens(
    store: Float[Array, "B K S 2 H"], positions: Int[Array, "B K n"], fetched: FullTokens | None
) -> Float[Array, "B K n 2 H"]:
    (*_, S, _, H), n = store.shape, positions.shape[2]
    plan = Plan(occupied(), positions.size, n, S, 2 * H * store.dtype.itemsize, 0 if fetched is None else fetched.positions.shape[2])
    if not 0 < plan.num_fetched <= MAX_FETCHED:
        return run(dataclasses.replace(plan, num_fetched=0), store, positions)
    return run(plan, store, positions, fetched.keys_values, fetched.positions)


@lowered_once
def run(
    plan: Plan,
    store: Float[Array, "B K S 2 H"],
    positions: Int[Array, "B K n"],
    fetched: Float[Array, "B K m 2 H"] | None = None,
    fetched_positions: Int[Array, "B K m"] | None = None,
) -> Float[Array, "B K n 2 H"]:
    """The launch."""
    on_device = {"fetched": fetched, "fetched_positions": fetched_positions} if plan.num_fetched else {}
    inputs = {"store": store, "positions": positions} | on_device
    outputs = {"tokens": jax.ShapeDtypeStruct((*positions.shape, *store.shape[3:]), store.dtype)}
    # The kernel uses no shared memory, but a launch has to ask for some.
    found = launch("gather_tokens", functools.partial(emit_block, plan), inputs, outputs, plan.blocks, WARPS // 4, PIECE)
    return found["tokens"]


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits the program of a block: each of its warps makes `plan.trips` trips."""
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread = ptx.thread_index()
    warp, lane = ptx.block_index() * WARPS + (thread >> 5), thread & 31
    own, piece = lane // plan.lanes, lane % plan.lanes * PIECE
    last = ptx.i32(plan.positions * plan.lines_per_token - 1)

    def within(name, size, head, index):
        return at[name] + (ptx.i64(head) * size + ptx.i64(index)) * plan.token_bytes

    def places(heads, positions) -> list:
        """The place of each token among those of its KV head that are fetched already; -1 if it is not among them."""
        words = 4 if plan.num_fetched % 4 == 0 else 1
        # In `fetched_positions` -1 marks an empty place, which a negative requested position must not match.
        positions = [ptx.select(position < 0, ptx.i32(-2), position) for position in positions]

        def compare(i, found):
            first = i * words
            for number, (head, position) in enumerate(zip(heads, positions)):
                others = ptx.load_global(at["fetched_positions"] + (ptx.i64(head) * plan.num_fetched + ptx.i64(first)) * 4, words)
                for j, other in enumerate(others):
                    found[number] = ptx.select(other == position, first + j, found[number])
            return found

        return ptx.loop(ptx.i32(0), ptx.i32(plan.num_fetched // words), [ptx.i32(-1)] * len(heads), compare)

    def trip(i, _):
        first = (i * (plan.blocks * WARPS) + warp) * plan.lines_per_trip + own
        # A line past the end of the list becomes the last one, which is then copied again, to the same place.
        lines = [ptx.minimum(first + plan.lines_per_load * j, last) for j in range(AT_ONCE)]
        tokens = [line // plan.lines_per_token for line in lines]
        parts = [ptx.i64(line % plan.lines_per_token * plan.line + piece) for line in lines]
        heads = [token // plan.n for token in tokens]
        positions = [ptx.load_global(at["positions"] + ptx.i64(token) * 4)[0] for token in tokens]
        clipped = [ptx.minimum(ptx.maximum(position, ptx.i32(0)), ptx.i32(plan.store_tokens - 1)) for position in positions]
        sources = [within("store", plan.store_tokens, head, index) for head, index in zip(heads, clipped)]
        if plan.num_fetched:
            found = places(heads, positions)
            copies = [within("fetched", plan.num_fetched, head, ptx.maximum(place, ptx.i32(0))) for head, place in zip(heads, found)]
            sources = [ptx.select(place < 0, source, copy) for place, source, copy in zip(found, sources, copies)]
        loaded = [ptx.load_global(source + part, 4) for source, part in zip(sources, parts)]
        for token, part, words in zip(tokens, parts, loaded):
            ptx.store_global_words(at["tokens"] + ptx.i64(token) * plan.token_bytes + part, *words)
        return ()

    ptx.loop(ptx.i32(0), ptx.i32(plan.trips), (), trip)
