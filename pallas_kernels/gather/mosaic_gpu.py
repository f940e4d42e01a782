"""Single tokens on NVIDIA Hopper in Pallas Mosaic GPU: lanes read them where they lie, also over the bus, and write them on the device.

XLA's own kernel writes what it finds to host memory, from where it is copied: three ways over the bus in place of one.

What limits it are pages of host memory, which the GPU looks up for every token. So a token's key and value lie together, and few warps
read at a time, each of them tokens that follow each other (docs/kernels.md, "Single tokens of host memory").
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
LINE = 32 * PIECE  # that a warp does, at most
BLOCKS, WARPS = 32, 4  # of a block
AT_ONCE = 8  # reads that a lane has under way


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel does, by shapes alone. tokens: of all KV heads and rows together. n: tokens of each. size: tokens that there are of
    each. token_bytes: of a key and a value. held: tokens of each that are on the device already."""

    tokens: int
    n: int
    size: int
    token_bytes: int
    held: int

    @property
    def line(self) -> int:
        """Bytes that some lanes read of a token at a time."""
        return min(LINE, self.token_bytes)

    @property
    def lanes(self) -> int:
        return self.line // PIECE

    @property
    def lines(self) -> int:
        """Of a token."""
        return self.token_bytes // self.line

    @property
    def together(self) -> int:
        """Lines that a warp has under way."""
        return AT_ONCE * LINE // self.line

    @property
    def trips(self) -> int:
        """How often a warp has so many."""
        return math.ceil(self.tokens * self.lines / (BLOCKS * WARPS * self.together))


def unsupported(store: Array, positions: Array, held: Replaced | None) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if reason := no_mosaic_gpu():
        return reason
    size = 2 * store.shape[4] * store.dtype.itemsize
    if size % PIECE or (size % LINE if size > LINE else LINE % size):
        return f"supports tokens of a power of two bytes from {PIECE} on, or of a multiple of {LINE}, not of {size}"
    if not store.shape[2] or not positions.size or positions.dtype != jnp.int32:
        return "needs tokens, and positions in int32"
    if held is not None and held.tokens.dtype != store.dtype:
        return f"needs tokens in {store.dtype.name} where they are held, not in {held.tokens.dtype.name}"
    return None


def gather_tokens(store: Float[Array, "B K S 2 H"], positions: Int[Array, "B K n"], held: Replaced | None) -> Float[Array, "B K n 2 H"]:
    """See `pallas_kernels.gather.gather_tokens`."""
    (*_, S, _, H), n = store.shape, positions.shape[2]
    plan = Plan(positions.size, n, S, 2 * H * store.dtype.itemsize, 0 if held is None else held.positions.shape[2])
    if not plan.held:
        return run(plan, store, positions)
    same = positions[..., None] == held.positions[:, :, None]
    places = jnp.where(same.any(-1), same.argmax(-1), -1).astype(jnp.int32)
    return run(plan, store, positions, held.tokens, places)


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnums=0)
def run(
    plan: Plan,
    store: Float[Array, "B K S 2 H"],
    positions: Int[Array, "B K n"],
    held: Float[Array, "B K m 2 H"] | None = None,
    places: Int[Array, "B K n"] | None = None,
) -> Float[Array, "B K n 2 H"]:
    """The launch. places: of these tokens among those that are held; -1 for others."""
    inputs = {"store": store, "positions": positions} | ({"held": held, "places": places} if plan.held else {})
    outputs = {"tokens": jax.ShapeDtypeStruct((*positions.shape, *store.shape[3:]), store.dtype)}
    return launch("gather_tokens", functools.partial(emit_block, plan), inputs, outputs, BLOCKS, 1, PIECE)["tokens"]


def emit_block(plan: Plan, refs: dict) -> None:
    """Emits a block, each warp of which has lines that follow each other."""
    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread = ptx.thread_index()
    warp, lane = ptx.block_index() * WARPS + (thread >> 5), thread & 31
    own, piece = lane // plan.lanes, lane % plan.lanes * PIECE
    last = ptx.i32(plan.tokens * plan.lines - 1)

    def places(line) -> tuple:
        """Where this lane's piece of a line is, and where it goes."""
        token, part = line // plan.lines, line % plan.lines * plan.line + piece
        of = lambda name: ptx.load_global(at[name] + ptx.i64(token) * 4)[0]
        within = lambda name, size, index: at[name] + (ptx.i64(token // plan.n) * size + ptx.i64(index)) * plan.token_bytes
        source = within("store", plan.size, ptx.minimum(ptx.maximum(of("positions"), ptx.i32(0)), ptx.i32(plan.size - 1)))
        if plan.held:
            place = of("places")
            source = ptx.select(place < 0, source, within("held", plan.held, ptx.maximum(place, ptx.i32(0))))
        return source + ptx.i64(part), at["tokens"] + ptx.i64(token) * plan.token_bytes + ptx.i64(part)

    def trip(i, _):
        first = (warp * plan.trips + i) * plan.together + own
        # Behind the last line that one is read again, and written as it was.
        each = [places(ptx.minimum(first + LINE // plan.line * j, last)) for j in range(AT_ONCE)]
        for words, (_, goes) in zip([ptx.load_global(source, 4) for source, _ in each], each):
            ptx.store_global_words(goes, *words)
        return ()

    ptx.loop(ptx.i32(0), ptx.i32(plan.trips), (), trip)
