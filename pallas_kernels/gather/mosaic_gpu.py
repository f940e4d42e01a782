"""Single tokens of host memory on NVIDIA Hopper in Pallas Mosaic GPU: lanes read them over the bus and write them on the device.

XLA's own kernel writes what it finds to host memory, from where it is copied: three ways over the bus in place of one.

XLA hands a kernel the address of an array in host memory as it is (seen in jax 0.11). What limits it then is address translation: for each
token an address has to be looked up, which is quicker if others close to it are looked up at the same time. So a token's key and value lie
together, and in each trip of the warps' loop they all read tokens that follow each other (docs/kernels.md, "Single tokens of host memory").
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import no_mosaic_gpu
from pallas_kernels.formats.token_codes import Replaced
from pallas_kernels.gpu import ptx
from pallas_kernels.gpu.launch import launch

PIECE = 16  # bytes that a lane reads at a time
LINE = 32 * PIECE  # bytes that a warp reads at a time, at most
BLOCKS = 64
WARPS = 4  # of a block: a warpgroup
AT_ONCE = 4  # reads that a lane has under way
MOST_FETCHED = 512  # tokens of a KV head that each position is compared with


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel does, by shapes alone. positions: in all. n: of each KV head of a row. size: tokens that a KV head has in the store.
    token_bytes: of a key and a value. fetched: tokens of a KV head that are on the device already."""

    positions: int
    n: int
    size: int
    token_bytes: int
    fetched: int

    @property
    def line(self) -> int:
        """Bytes of a token that are read together: all of it, or LINE."""
        return min(LINE, self.token_bytes)

    @property
    def lanes(self) -> int:
        return self.line // PIECE

    @property
    def lines(self) -> int:
        """Lines of a token."""
        return self.token_bytes // self.line

    @property
    def lines_at_a_time(self) -> int:
        """Lines that a warp reads at a time."""
        return LINE // self.line

    @property
    def together(self) -> int:
        """Lines that a warp reads in a trip."""
        return AT_ONCE * self.lines_at_a_time

    @property
    def trips(self) -> int:
        """Trips of each warp. In trip i all warps read the lines that follow those of trip i - 1, `together` each."""
        return math.ceil(self.positions * self.lines / (BLOCKS * WARPS * self.together))


def unsupported(store: Array, positions: Array, fetched: Replaced | None) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if reason := no_mosaic_gpu():
        return reason
    if jax.typeof(store).memory_space != jax.memory.Space.Host:
        return "is made for tokens in host memory"
    size = 2 * store.shape[4] * store.dtype.itemsize
    if size % PIECE or (size % LINE if size > LINE else LINE % size):
        return f"supports tokens of a power of two bytes from {PIECE} on, or of a multiple of {LINE}, not of {size}"
    if not store.shape[2] or not positions.size or positions.dtype != jnp.int32:
        return "needs tokens, and positions in int32"
    if fetched is not None and fetched.keys_values.dtype != store.dtype:
        return f"needs tokens in {store.dtype.name} where they are fetched already, not in {fetched.keys_values.dtype.name}"
    if fetched is not None and fetched.positions.dtype != jnp.int32:
        return f"needs positions of what is fetched already in int32, not in {fetched.positions.dtype.name}"
    return None


def gather_tokens(store: Float[Array, "B K S 2 H"], positions: Int[Array, "B K n"], fetched: Replaced | None) -> Float[Array, "B K n 2 H"]:
    """See `pallas_kernels.gather.gather_tokens`."""
    (*_, S, _, H), n = store.shape, positions.shape[2]
    plan = Plan(positions.size, n, S, 2 * H * store.dtype.itemsize, 0 if fetched is None else fetched.positions.shape[2])
    if not 0 < plan.fetched <= MOST_FETCHED:
        return run(dataclasses.replace(plan, fetched=0), store, positions)
    return run(plan, store, positions, fetched.keys_values, fetched.positions)


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnums=0)
def run(
    plan: Plan,
    store: Float[Array, "B K S 2 H"],
    positions: Int[Array, "B K n"],
    fetched: Float[Array, "B K m 2 H"] | None = None,
    fetched_positions: Int[Array, "B K m"] | None = None,
) -> Float[Array, "B K n 2 H"]:
    """The launch."""
    there = {"fetched": fetched, "fetched_positions": fetched_positions} if plan.fetched else {}
    inputs = {"store": store, "positions": positions} | there
    outputs = {"tokens": jax.ShapeDtypeStruct((*positions.shape, *store.shape[3:]), store.dtype)}
    # It needs no shared memory, but some there must be.
    found = launch("gather_tokens", functools.partial(emit_block, plan), inputs, outputs, BLOCKS, WARPS // 4, PIECE)
    return found["tokens"]


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block: the trips of its warps."""
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread = ptx.thread_index()
    warp, lane = ptx.block_index() * WARPS + (thread >> 5), thread & 31
    own, piece = lane // plan.lanes, lane % plan.lanes * PIECE
    last = ptx.i32(plan.positions * plan.lines - 1)

    within = lambda name, size, head, index: at[name] + (ptx.i64(head) * size + ptx.i64(index)) * plan.token_bytes

    def places(heads, positions) -> list:
        """Where each token is among those of its KV head that are fetched already; -1 if it is not."""
        words = 4 if plan.fetched % 4 == 0 else 1
        # A position of -1 stands for no token.
        positions = [ptx.select(position < 0, ptx.i32(-2), position) for position in positions]

        def compare(i, found):
            first = i * words
            for number, (head, position) in enumerate(zip(heads, positions)):
                others = ptx.load_global(at["fetched_positions"] + (ptx.i64(head) * plan.fetched + ptx.i64(first)) * 4, words)
                for j, other in enumerate(others):
                    found[number] = ptx.select(other == position, first + j, found[number])
            return found

        return ptx.loop(ptx.i32(0), ptx.i32(plan.fetched // words), [ptx.i32(-1)] * len(heads), compare)

    def trip(i, _):
        first = (i * (BLOCKS * WARPS) + warp) * plan.together + own
        # Past the end the last line is copied again, to the same place.
        lines = [ptx.minimum(first + plan.lines_at_a_time * j, last) for j in range(AT_ONCE)]
        tokens = [line // plan.lines for line in lines]
        parts = [ptx.i64(line % plan.lines * plan.line + piece) for line in lines]
        heads = [token // plan.n for token in tokens]
        positions = [ptx.load_global(at["positions"] + ptx.i64(token) * 4)[0] for token in tokens]
        clipped = [ptx.minimum(ptx.maximum(position, ptx.i32(0)), ptx.i32(plan.size - 1)) for position in positions]
        sources = [within("store", plan.size, head, index) for head, index in zip(heads, clipped)]
        if plan.fetched:
            there = places(heads, positions)
            known = [within("fetched", plan.fetched, head, ptx.maximum(place, ptx.i32(0))) for head, place in zip(heads, there)]
            sources = [ptx.select(place < 0, source, other) for place, source, other in zip(there, sources, known)]
        loaded = [ptx.load_global(source + part, 4) for source, part in zip(sources, parts)]
        for token, part, words in zip(tokens, parts, loaded):
            ptx.store_global_words(at["tokens"] + ptx.i64(token) * plan.token_bytes + part, *words)
        return ()

    ptx.loop(ptx.i32(0), ptx.i32(plan.trips), (), trip)
