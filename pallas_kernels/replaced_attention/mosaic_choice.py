"""Which tokens of each KV head have the largest shares of attention, on NVIDIA Hopper: one block for each KV head.

Shares are positive, so that their bits order them as integers. The block first takes the largest share of each tile of 32 tokens, reading
all weights once. The k largest shares are in the k tiles whose own largest come first, and only these tiles are read again. In both steps
the k-th largest is found two bits at a time: all warps count how many numbers reach a bound, until exactly k do. Of equal shares the first
are taken.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.attention.mosaic_low_bits import TILE
from pallas_kernels.dispatch import no_mosaic_gpu
from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES, launch

MOST_HEADS = 8  # query heads of a KV head
MOST_ENTRIES = 1 << 15  # tiles, or tokens of the tiles that are read again: two counts of them share a word
# Words of weights that a lane has loading at once, by warpgroups of a block. Small blocks share a multiprocessor and its registers, and so
# take fewer.
WORDS_AT_ONCE = {1: 8, 2: 8, 4: 32}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel does, by shapes alone. size: tokens that there is room for in codes. heads: query heads of a KV head. rows: query
    rows of a KV head, of which the last `heads` are the last token's. splits: partial sums of weights that each query row has. replaced:
    how many tokens of a KV head may be read in full precision. k: how many are chosen."""

    batch: int
    kv_heads: int
    size: int
    heads: int
    rows: int
    splits: int
    replaced: int
    k: int

    @property
    def tiles(self) -> int:
        return self.size // TILE

    @property
    def all_tiles(self) -> bool:
        """Whether there are so few tiles that all of them are read for their tokens, and none need be chosen."""
        return self.tiles <= self.k

    @property
    def candidates(self) -> int:
        """Tokens, at most, among which the k are."""
        return min(self.k, self.tiles) * TILE

    @property
    def warpgroups(self) -> int:
        """More for longer caches: a warp takes in several tiles at a time, and does so a few times."""
        return 1 if self.tiles <= 32 else 2 if self.tiles <= 256 else 4

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    # A lane loads a chunk: 16 bytes where these hold whole tokens, otherwise two tokens word by word.

    @property
    def wide(self) -> bool:
        return MOST_HEADS % self.heads == 0

    @property
    def chunk_words(self) -> int:
        return 4 if self.wide else self.heads

    @property
    def chunk_tokens(self) -> int:
        return 2 * self.chunk_words // self.heads

    @property
    def lanes(self) -> int:
        """Lanes that share a tile: with 16 bytes each they read whole lines."""
        return min(8, TILE // self.chunk_tokens)

    @property
    def loads(self) -> range:
        """Chunks of a lane: number j is the tile's chunk `lanes` j plus the lane's number among those that share the tile."""
        return range(TILE // self.chunk_tokens // self.lanes)

    @property
    def together(self) -> int:
        """Tiles that the lanes of a warp read at the same time."""
        return 32 // self.lanes

    def unroll(self, tiles: int) -> int:
        """How many such reads a warp has under way, where the block reads up to so many tiles."""
        room = WORDS_AT_ONCE[self.warpgroups] // (len(self.loads) * self.chunk_words)
        return max(1, min(room, math.ceil(tiles / (self.together * self.warps))))

    def padded(self, entries: int) -> int:
        """So many entries, rounded up to a multiple of the block's threads."""
        return math.ceil(entries / (32 * self.warps)) * 32 * self.warps

    @functools.cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """What shared memory holds: where each part lies, and its bytes. counts: two words of each warp, three times. largest: of each
        tile, and once tiles are chosen its place among them. chosen_tiles: their numbers. shares: of their tokens."""
        words = {"counts": 3 * 2 * self.warps}
        if not self.all_tiles:
            words |= {"largest": self.padded(self.tiles), "chosen_tiles": self.k}
        words["shares"] = self.padded(self.candidates)
        starts = itertools.accumulate(words.values(), initial=0)
        return {name: (4 * start, 4 * size) for (name, size), start in zip(words.items(), starts)}

    @property
    def shared_bytes(self) -> int:
        return sum(size for _, size in self.parts.values())


def unsupported(size: int, heads: int, replaced: int, k: int) -> str | None:
    """Why this kernel cannot run on such shapes here, or None. See `Plan`."""
    if reason := no_mosaic_gpu():
        return reason
    if not 1 <= heads <= MOST_HEADS:
        return f"supports 1 to {MOST_HEADS} query heads of a KV head, not {heads}"
    if size == 0 or size % TILE:
        return f"supports tokens in codes by tiles of {TILE}, not {size} tokens"
    if not replaced or not k:
        return "needs room for a replaced token, and at least one to choose"
    plan = Plan(1, 1, size, heads, heads, 1, replaced, k)
    if max(plan.tiles, plan.candidates) > MOST_ENTRIES:
        return f"supports up to {MOST_ENTRIES} tiles of {TILE} tokens, and tokens of k tiles, not {plan.tiles} and {plan.candidates}"
    if (needed := plan.shared_bytes + RESERVED_BYTES) > SHARED_BYTES:
        return f"supports what fits in {SHARED_BYTES} bytes of shared memory, not {needed}"
    return None


def chosen(found: dict[str, Array], positions: Int[Array, "B K n"], quantized: Int[Array, "B"], k: int) -> Int[Array, "B K k"]:
    """The positions of the k tokens of each KV head that have the largest shares of the last token's attention, each once, in the order of
    positions; -1 behind them where a row has fewer tokens. Of equal shares the first are taken.

    found: of `mosaic_low_bits.run`. positions: of tokens that are replaced, all before `quantized`; -1 stands for none. What is found for
    tokens from `quantized`, a multiple of 32, on does not matter.

    A token's share is the sum over heads of its part of all weights. Each part counts as at least 2^LEAST (partials.py), and NaN as just
    that.
    """
    (B, K, S, N), (splits, rows) = found["weights"].shape, found["top"].shape[1:]
    inputs = {name: found[name] for name in ("weights", "relative_to", "top", "total", "replaced_logits")}
    return run(Plan(B, K, S, N, rows, splits, positions.shape[2], k), inputs, positions, quantized)


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnums=0)
def run(plan: Plan, found: dict[str, Array], positions: Int[Array, "B K n"], quantized: Int[Array, "B"]) -> Int[Array, "B K k"]:
    """The launch of `chosen`."""
    from pallas_kernels.replaced_attention.mosaic_choice_block import emit_block

    inputs = {**found, "positions": positions, "quantized": quantized}
    outputs = {"chosen": jax.ShapeDtypeStruct((plan.batch, plan.kv_heads, plan.k), jnp.int32)}
    emit = functools.partial(emit_block, plan)
    return launch("largest_shares", emit, inputs, outputs, plan.batch * plan.kv_heads, plan.warpgroups, plan.shared_bytes)["chosen"]
