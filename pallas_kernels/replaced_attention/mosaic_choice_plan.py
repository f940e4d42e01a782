"""How the choice of the largest shares is laid out: tiles, lanes, and what a block keeps in shared memory."""

import dataclasses
import functools
import math

from pallas_kernels.attention.mosaic_low_bits_plan import TILE
from pallas_kernels.gpu.layout import Layout

MAX_HEADS = 8  # query heads of a KV head
MAX_ENTRIES = 1 << 15  # tiles, or tokens of the tiles that are read again: two counts of them share a word
# Words of weights that a lane has loading at once, by warpgroups of a block. Small blocks share a multiprocessor and its registers, and so
# take fewer.
WORDS_AT_ONCE = {1: 8, 2: 8, 4: 32}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel for one set of shapes.

    Attributes:
        size: tokens in codes that there is room for.
        heads: query heads of a KV head.
        rows: query rows of a KV head, of which the last `heads` are the last token's.
        splits: partial sums of weights of each query row.
        replaced: tokens of a KV head, at most, that are read in full precision.
        k: tokens that are chosen.
    """

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
        return MAX_HEADS % self.heads == 0

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
        """How many such reads a warp has under way, where the block reads up to `tiles` tiles."""
        room = WORDS_AT_ONCE[self.warpgroups] // (len(self.loads) * self.chunk_words)
        return max(1, min(room, math.ceil(tiles / (self.together * self.warps))))

    def padded(self, entries: int) -> int:
        """The number of entries, rounded up to a multiple of the block's threads."""
        return math.ceil(entries / (32 * self.warps)) * 32 * self.warps

    @functools.cached_property
    def shared(self) -> Layout:
        """The parts of shared memory. counts: two words of each warp, three times. largest: of each tile, and once tiles are chosen its
        place among them. chosen_tiles: their numbers. shares: of their tokens."""
        words = {"counts": 3 * 2 * self.warps}
        if not self.all_tiles:
            words |= {"largest": self.padded(self.tiles), "chosen_tiles": self.k}
        words["shares"] = self.padded(self.candidates)
        return Layout({name: 4 * count for name, count in words.items()})
