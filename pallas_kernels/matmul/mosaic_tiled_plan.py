"""How the Mosaic GPU matmul with plain weights divides its work where there are more rows than a block has room for: into tiles of outputs
and rows."""

import dataclasses
import functools
import itertools
import math

from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES, clusters_at_once
from pallas_kernels.matmul.mosaic_plain_plan import ENOUGH_SLOTS, ITEM_BYTES, TILE, Product

WARPGROUPS = 2
STEP = 64  # inputs that a block multiplies at once
WGMMA_M, MAX_WGMMA_N = 64, 256  # outputs of one product of the tensor cores, and the most rows: weights are its first operand
ACCUMULATORS = 160  # registers of a thread that hold sums: with more of them they have no place
# What a launch's time is estimated by: copies from the L2 to all blocks, and products of a block, a second, and what of the shorter of both
# is not hidden. Fitted to 56 launches of an H200 with 320 and 512 rows (2026-11-30, off by 12 % on average).
L2_BYTES, PRODUCTS, NOT_HIDDEN = 8e12, 2048 * 1.7e9, 0.5


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided. It has no effect on a row's sums, which are of all inputs in their order.

    Attributes:
        divides: what a block's warpgroups divide: "rows", or "outputs", of which it then has twice as many.
        row_tiles: blocks that divide the rows.
        cluster: neighbouring blocks that copy what they have in common once.
        common: what that is: "rows" or "outputs".
    """

    divides: str
    row_tiles: int
    cluster: int = 1
    common: str = "rows"

    @property
    def tile(self) -> int:
        """Outputs of a block, of each weight of a gated pair."""
        return WGMMA_M * (WARPGROUPS if self.divides == "outputs" else 1)


@dataclasses.dataclass(frozen=True)
class TiledPlan(Product):
    """One launch whose blocks have tiles of outputs and rows.

    Attributes:
        config: how the work is divided.
    """

    config: Config = dataclasses.field(kw_only=True)

    @property
    def weights_at_once(self) -> int:
        """The weights that a block multiplies by."""
        return 2 if self.gated else 1

    @property
    def by_rows(self) -> bool:
        """Whether the warpgroups of a block divide its rows, not its outputs."""
        return self.config.divides == "rows"

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block."""
        return WARPGROUPS

    @property
    def row_tile(self) -> int:
        """Rows of a block."""
        unit = WARPGROUPS * TILE if self.by_rows else TILE
        return unit * math.ceil(self.rows / self.config.row_tiles / unit)

    @property
    def product(self) -> tuple[int, int]:
        """Outputs of a weight and rows of a warpgroup."""
        return (self.config.tile, self.row_tile // WARPGROUPS) if self.by_rows else (self.config.tile // WARPGROUPS, self.row_tile)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of each weight's outputs."""
        return tuple(math.ceil(outputs / self.config.tile) for outputs in self.written)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the array that the launch writes: [rows, outputs], or [outputs, rows] in float32, for which nothing is transposed.
        Rows come in whole tiles."""
        return (sum(self.written), self.tiled_rows) if self.float32_out else (self.tiled_rows, sum(self.written))

    @property
    def grid(self) -> tuple[int, int]:
        """Clusters: along the outputs, and along the rows."""
        tiles, row_tiles, cluster = sum(self.tiles), self.config.row_tiles, self.config.cluster
        return (math.ceil(tiles / cluster), row_tiles) if self.config.common == "rows" else (tiles, row_tiles // cluster)

    @property
    def steps(self) -> int:
        return self.inputs // STEP

    @property
    def slots(self) -> int:
        """Steps that are in shared memory or on their way there."""
        return min(self.steps, (SHARED_BYTES - RESERVED_BYTES) // self._slot_bytes)

    @property
    def _slot_bytes(self) -> int:
        return (self.weights_at_once * self.config.tile + self.row_tile) * STEP * ITEM_BYTES

    @property
    def fits(self) -> bool:
        """Whether a block has room, every tile has its outputs and rows, and the blocks of a cluster can divide their copies."""
        outputs, rows = self.product
        common = self.row_tile if self.config.common == "rows" else self.config.tile
        divided = self.config.common == "rows" or self.config.row_tiles % self.config.cluster == 0
        return (
            self.config.tile <= min(self.outputs)
            and self.row_tile <= min(self.tiled_rows, WARPGROUPS * MAX_WGMMA_N if self.by_rows else MAX_WGMMA_N)
            and self.weights_at_once * outputs * rows <= ACCUMULATORS * 128
            and self.slots >= min(self.steps, ENOUGH_SLOTS)
            and common // TILE % self.config.cluster == 0
            and divided
        )

    @property
    def seconds(self) -> float:
        """An estimate of the launch's time."""
        cluster, rows, outputs = self.config.cluster, self.row_tile, self.weights_at_once * self.config.tile
        shared_rows = self.config.common == "rows"
        copied = (rows / (cluster if shared_rows else 1) + outputs / (1 if shared_rows else cluster)) * self.inputs * ITEM_BYTES
        products = rows * outputs * self.inputs / PRODUCTS

        def turn(blocks: int) -> float:
            copies = copied * blocks / L2_BYTES
            return max(copies, products) + NOT_HIDDEN * min(copies, products) if blocks else 0

        resident = clusters_at_once(cluster, self.at_once) * cluster
        turns, rest = divmod(math.prod(self.grid) * cluster, resident)
        return turns * turn(resident) + turn(rest)


def configs(rows: int) -> list[Config]:
    """The divisions of which the fastest is taken."""
    every = itertools.product(("rows", "outputs"), range(1, 2 + math.ceil(rows / WGMMA_M)), (1, 2, 4), ("rows", "outputs"))
    return [Config(*each) for each in every if each[2] > 1 or each[3] == "rows"]


@functools.cache
def tiled_plan(
    rows: int, inputs: int, outputs: tuple[int, ...], at_once: int, float32_out: bool = False, gated: bool = False
) -> TiledPlan | None:
    """The launch that should be the fastest; None if none fits. Arguments as of `Product`."""
    plans = [TiledPlan(rows, inputs, outputs, at_once, float32_out, gated, config=config) for config in configs(rows)]
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.seconds, default=None)
