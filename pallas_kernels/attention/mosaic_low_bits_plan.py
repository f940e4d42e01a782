"""How attention over KIVI's format is laid out: tiles, and what each warp keeps in shared memory."""

import dataclasses
import functools
import math

from jaxtyping import Array

from pallas_kernels.dispatch import multiprocessors
from pallas_kernels.formats.token_codes import TokenCodesLayer
from pallas_kernels.gpu.layout import ROOM, Layout

ROWS = 8  # query rows of a product
TILE = 32  # tokens in codes that lie together in shared memory, no more than a word has bits
ZEROS = 16  # tiles whose keys' zeros are multiplied at a time
CHUNK = 16  # a product takes 16 bytes of each token's codes: one code of each byte, so 16 channels
FULL_TILE = 16  # tokens in full precision

WARPGROUPS = {64: 3, 128: 3, 256: 2}  # of a block, by head_dim: the most that a multiprocessor has registers for
WAVES = 6  # of blocks, at most, that `_splits` tries
NO_LOGIT = -1e30  # less than any logit
TOGETHER = 2  # tiles that are taken in at a time, where there is room for them
STAGES = 2  # steps whose tiles a warp has room for in shared memory

PIECE = 16  # bytes that a lane copies at a time
RISE = 8.0  # how far a logit (base 2) may rise above the logit that weights are relative to before they are rescaled

# Powers of 2. KEY_CODE, VALUE_CODE: a code of 1 in the lowest bit, read as float16 or as bfloat16. LARGER: the factor of weights, with
# which their products with codes are normal numbers. A query must stay below 2^63, and a value's scale below 2^(63 - RISE).
KEY_CODE, VALUE_CODE, LARGER = -24, -133, 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel for one set of shapes.

    Attributes:
        tokens: of each row's queries, T.
        heads: query heads of a KV head.
        size: tokens in codes that there is room for.
        key_group: tokens that share a key's scale.
        value_group: channels that share a value's scale.
        buffer_rows: tokens that the buffer has room for.
        replaced: tokens of a KV head, at most, that are read in full precision; None where attention is plain.
        splits: warps that share the tokens of a KV head.
    """

    batch: int
    kv_heads: int
    tokens: int
    heads: int
    head_dim: int
    bits: int
    size: int
    key_group: int
    value_group: int
    buffer_rows: int
    replaced: int | None
    splits: int

    @classmethod
    def of(cls, q: Array, layer: TokenCodesLayer, replaced: int | None = None, occupied: int = 0) -> "Plan":
        """occupied: multiprocessors that have no room for this kernel's blocks, as another kernel runs there at the same time."""
        B, T, N, H = q.shape
        K, rows = layer.buffer.keys.shape[1:3]
        size = layer.keys.tokens
        splits = _splits(B * K, 4 * WARPGROUPS[H], max(1, multiprocessors() - occupied))
        groups = (layer.keys.group_tokens, H // layer.values.scale.shape[3]) if size else (TILE, H)
        return cls(B, K, T, N // K, H, layer.keys.bits, size, *groups, rows, replaced, splits)

    @property
    def rows(self) -> int:
        return self.tokens * self.heads

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return 4 * WARPGROUPS[self.head_dim]

    @property
    def token_bytes(self) -> int:
        """Bytes of the codes of a token's key, and of its value."""
        return self.head_dim * self.bits // 8

    @property
    def chunks(self) -> int:
        """Runs of 16 bytes of a token's codes."""
        return self.token_bytes // CHUNK

    @property
    def products(self) -> range:
        """Products of 16 channels each: product s is of channels 16 s to 16 s + 15."""
        return range(self.head_dim // CHUNK)

    @property
    def value_groups(self) -> int:
        return self.head_dim // self.value_group

    @functools.cached_property
    def tile(self) -> Layout:
        """The parts of a tile in a slot of the ring."""
        sizes = {f"{name}_codes": TILE * self.token_bytes for name in ("key", "value")}
        return Layout(sizes | {"key_scale": 2 * self.head_dim} | dict.fromkeys(("value_scale", "value_zero"), 2 * TILE * self.value_groups))

    @functools.cached_property
    def together(self) -> int:
        """Tiles that are taken in at a time, which is a step."""
        return TOGETHER if self.warps * self._warp_layout(TOGETHER).total <= ROOM else 1

    @functools.cached_property
    def warp(self) -> Layout:
        """A warp's shared memory: the slots of its ring, the keys' zeros of ZEROS tiles, and the queries that they are multiplied by."""
        return self._warp_layout(self.together)

    def _warp_layout(self, together: int) -> Layout:
        row = 2 * self.head_dim
        return Layout({"ring": STAGES * together * self.tile.total, "zeros": ZEROS * row, "zero_queries": ROWS * row})

    @property
    def copies(self) -> range:
        """The copies of a slot, of 32 pieces each, one for each lane; the last may have fewer."""
        return range(math.ceil(self.tile.total / (32 * PIECE)))

    def parts_of(self, copy: int) -> list[str]:
        """The parts that a copy's pieces lie in, in their order."""
        first, end = 32 * PIECE * copy, 32 * PIECE * (copy + 1)
        return [name for name, size in self.tile.sizes.items() if self.tile.at(name) < end and first < self.tile.at(name) + size]

    def sharing(self, name: str) -> tuple[int, int]:
        """How many consecutive tiles share one part of this array, and its bytes. Parts with equal results have the same `tile_start`."""
        if name in ("key_scale", "key_zero"):
            return self.key_group // TILE, 2 * self.head_dim
        return 1, self.tile.sizes[name]

    def head_bytes(self, name: str) -> int:
        """Bytes that an array has for a KV head, where its tiles' parts lie one after the other."""
        tiles, size = self.sharing(name)
        return self.size // TILE // tiles * size

    def tile_start(self, name: str, tile):
        """The byte at which the part of a tile begins, within those of its KV head."""
        tiles, size = self.sharing(name)
        return tile // tiles * size

    # A row is 16 bytes of a tile's value scales, or of its value zeros. Products take a tile's tokens in this order: first the first tokens
    # of all rows, then the second ones, and so on. So a transposed load has the zeros of tokens that come one after the other.

    @property
    def row_tokens(self) -> int:
        """Tokens that a row has the parameters of."""
        return ROWS // self.value_groups

    @property
    def tile_rows(self) -> int:
        return TILE // self.row_tokens

    def token(self, number):
        """The token of a tile that has this number in that order."""
        return number % self.tile_rows * self.row_tokens + number // self.tile_rows

    def place(self, s: int) -> tuple[int, int]:
        """Which 16 bytes of a token hold the codes of product s, and the lowest bit of those codes in each byte."""
        return s % self.chunks, self.bits * (s // self.chunks)

    def mask(self, s: int) -> int:
        """The bits of product s in both halves of a word."""
        return ((1 << self.bits) - 1 << self.place(s)[1]) * 0x00010001


def _splits(heads: int, warps: int, places: int) -> int:
    """The number of splits of each KV head, a warp for each: the smallest with which all blocks are full and multiprocessors are as busy as
    with any number, within 5 %.

    Args:
        heads: KV heads of all rows of the batch.
        warps: of a block.
        places: blocks that run at the same time, which are called a wave.
    """
    step = warps // math.gcd(heads, warps)

    def busy(splits: int) -> float:
        blocks = heads * splits // warps
        return blocks / places / math.ceil(blocks / places)

    candidates = range(step, max(step, WAVES * places * warps // heads) + 1, step)
    busiest = max(map(busy, candidates))
    return next(splits for splits in candidates if busy(splits) >= 0.95 * busiest)
