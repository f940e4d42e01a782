"""Single tokens of host memory on NVIDIA Hopper in Pallas Mosaic GPU: lanes read them over the bus and write them on the device.

XLA's own kernel writes what it finds to host memory, from where it is copied: three ways over the bus in place of one.

XLA hands a kernel the address of an array in host memory as it is (seen in jax 0.11). What limits it then is address translation: each
token is a page of host memory to be looked up. So a token's key and value lie together, and few warps read at a time, each of them tokens
that follow each other (docs/kernels.md, "Single tokens of host memory").
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
BLOCKS = 32
WARPS = 4  # of a block: a warpgroup
AT_ONCE = 8  # reads that a lane has under way
MOST_PAIRS = 1 << 16  # positions of a KV head times those fetched already that are compared


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
        """Lines that a warp has under way."""
        return AT_ONCE * self.lines_at_a_time

    @property
    def trips(self) -> int:
        """Turns of a warp, each of `together` lines."""
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
    return None


def gather_tokens(store: Float[Array, "B K S 2 H"], positions: Int[Array, "B K n"], fetched: Replaced | None) -> Float[Array, "B K n 2 H"]:
    """See `pallas_kernels.gather.gather_tokens`."""
    (*_, S, _, H), n = store.shape, positions.shape[2]
    m = 0 if fetched is None else fetched.positions.shape[2]
    plan = Plan(positions.size, n, S, 2 * H * store.dtype.itemsize, m if n * m <= MOST_PAIRS else 0)
    if not plan.fetched:
        return run(plan, store, positions)
    same = (positions[..., None] == fetched.positions[:, :, None]) & (fetched.positions >= 0)[:, :, None]
    places = jnp.where(same.any(-1), same.argmax(-1), -1).astype(jnp.int32)
    return run(plan, store, positions, fetched.keys_values, places)


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnums=0)
def run(
    plan: Plan,
    store: Float[Array, "B K S 2 H"],
    positions: Int[Array, "B K n"],
    fetched: Float[Array, "B K m 2 H"] | None = None,
    places: Int[Array, "B K n"] | None = None,
) -> Float[Array, "B K n 2 H"]:
    """The launch. places: of these tokens among those that are fetched already; -1 for others."""
    inputs = {"store": store, "positions": positions} | ({"fetched": fetched, "places": places} if plan.fetched else {})
    outputs = {"tokens": jax.ShapeDtypeStruct((*positions.shape, *store.shape[3:]), store.dtype)}
    # It needs no shared memory, but some there must be.
    found = launch("gather_tokens", functools.partial(emit_block, plan), inputs, outputs, BLOCKS, WARPS // 4, PIECE)
    return found["tokens"]


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block, each warp of which has lines that follow each other."""
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread = ptx.thread_index()
    warp, lane = ptx.block_index() * WARPS + (thread >> 5), thread & 31
    own, piece = lane // plan.lanes, lane % plan.lanes * PIECE
    last = ptx.i32(plan.positions * plan.lines - 1)

    def ends(line) -> tuple:
        """Where this lane's piece of a line is, and where it goes."""
        token, part = line // plan.lines, line % plan.lines * plan.line + piece
        of = lambda name: ptx.load_global(at[name] + ptx.i64(token) * 4)[0]
        within = lambda name, size, index: at[name] + (ptx.i64(token // plan.n) * size + ptx.i64(index)) * plan.token_bytes
        source = within("store", plan.size, ptx.minimum(ptx.maximum(of("positions"), ptx.i32(0)), ptx.i32(plan.size - 1)))
        if plan.fetched:
            place = of("places")
            source = ptx.select(place < 0, source, within("fetched", plan.fetched, ptx.maximum(place, ptx.i32(0))))
        return source + ptx.i64(part), at["tokens"] + ptx.i64(token) * plan.token_bytes + ptx.i64(part)

    def trip(i, _):
        first = (warp * plan.trips + i) * plan.together + own
        # Past the end the last line is copied again, to the same place.
        each = [ends(ptx.minimum(first + plan.lines_at_a_time * j, last)) for j in range(AT_ONCE)]
        for words, (_, goes) in zip([ptx.load_global(source, 4) for source, _ in each], each):
            ptx.store_global_words(goes, *words)
        return ()

    ptx.loop(ptx.i32(0), ptx.i32(plan.trips), (), trip)
