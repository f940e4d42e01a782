"""How the Mosaic GPU matmul with INT8 weights divides its work, and where everything lies in shared memory."""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.gpu.launch import MAX_CLUSTER, clusters_at_once
from pallas_kernels.gpu.layout import ROOM, Layout

TILE = 8  # outputs that a block works on at once: the columns of a tile of the tensor cores
UNIT = 256  # inputs: what a math warp takes of an output in a pass. Of weights they are as many bytes.
X_BYTES = 2  # of an activation
MATH_WARPS = 8  # they multiply
PRODUCER_WARPS = 2  # they copy: each has rows of a tile of its own
EPILOGUE_WARPS = 2  # they add what the math warps found of a tile; each lane has two neighbouring outputs of a row
WARPS = MATH_WARPS + PRODUCER_WARPS + EPILOGUE_WARPS
PASS = MATH_WARPS * UNIT  # inputs, and bytes of an output's weights, that a block takes at once
ROWS = 8  # of activations in half of the tensor cores' operand of 16 rows
MAX_ROWS = 2 * ROWS
# Bytes from one output to the next in a slot of the ring: neighbours lie in different banks.
PITCH = PASS + 64
SLOT_BYTES = TILE * PITCH  # the weights of a pass of a tile
# Of the ring of weights. 2 to 3 slots are under way by Little's law (4.5 TB/s, about 1 us, 132 multiprocessors), and one is read.
ENOUGH_SLOTS, MAX_SLOTS = 5, 12
SUMS_SLOTS = 2  # tiles whose sums there is place for
PAIR_BYTES = 8  # of two neighbouring outputs, float32


@dataclasses.dataclass(frozen=True)
class Plan:
    """One launch of `clusters` clusters of `cluster` blocks. Each cluster has tiles of its own, and its blocks divide their inputs.

    float32_out: whether the outputs are float32, not bfloat16.
    """

    rows: int
    inputs: int
    outputs: tuple[int, ...]
    cluster: int
    clusters: int
    float32_out: bool = False

    @classmethod
    def fitting(
        cls, rows: int, inputs: int, outputs: tuple[int, ...], multiprocessors: int, float32_out: bool = False, alike: int = 0
    ) -> "Plan | None":
        """The plan with the smallest clusters whose blocks have room for their inputs of all rows, and in clusters for their sums of all
        tiles; None where even the largest have not.

        Args:
            rows, inputs, outputs, float32_out: see the class.
            multiprocessors: of the device.
            alike: a number of rows that has the same clusters, as has any other up to the next multiple of 8. So a row's outputs do not
                depend on how many others there are.
        """
        tiles, sizes = sum(outputs) // TILE, [2**i for i in range(MAX_CLUSTER.bit_length())]

        def most(size):
            return max(1, min(tiles, clusters_at_once(size, multiprocessors)))

        plans = [cls(rows, inputs, outputs, size, most(size), float32_out) for size in sizes]
        full = math.ceil(max(rows, alike) / ROWS) * ROWS
        return next((plan for plan in plans if dataclasses.replace(plan, rows=full).slots >= ENOUGH_SLOTS), None)

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float32 if self.float32_out else jnp.bfloat16

    @property
    def blocks(self) -> int:
        return self.cluster * self.clusters

    @property
    def tiles(self) -> int:
        return self.width // TILE

    @property
    def width(self) -> int:
        return sum(self.outputs)

    @property
    def units(self) -> int:
        return self.inputs // UNIT

    @property
    def max_units(self) -> int:
        """The most units of inputs that a block has."""
        return math.ceil(self.units / self.cluster)

    @property
    def passes(self) -> int:
        """Passes over a block's inputs of a tile."""
        return math.ceil(self.max_units / MATH_WARPS)

    @property
    def whole(self) -> bool:
        """Whether every math warp has inputs in every pass."""
        return self.units == self.passes * MATH_WARPS * self.cluster

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.rows / ROWS)

    @property
    def pairs(self) -> int:
        """Pairs of outputs of a tile."""
        return self.rows * TILE // 2

    @property
    def x_pitch(self) -> int:
        """Bytes from one row of activations to the next in shared memory: neighbours lie in different banks.

        Four lanes load 16 bytes of a row at once, with room between them for as many of the next row.
        """
        return X_BYTES * UNIT * self.max_units + 16

    @property
    def tile_bytes(self) -> int:
        """Bytes of a warp's sums of a tile."""
        return self.row_tiles * ROWS * (TILE // 2) * PAIR_BYTES

    def _layout(self, slots: int) -> Layout:
        partials = math.ceil(self.tiles / self.clusters) * self.pairs * PAIR_BYTES if self.cluster > 1 else 0
        sizes = {
            "ring": slots * SLOT_BYTES,  # weights
            "x": self.rows * self.x_pitch,
            "sums": SUMS_SLOTS * MATH_WARPS * self.tile_bytes,  # the ring of the warps' sums of tiles
            "partials": partials,  # the block's sums of all its tiles, where other blocks have other inputs
            "barriers": 8 * (2 * slots + 2 * SUMS_SLOTS + 1),  # mbarriers of the rings and of the activations
        }
        return Layout(sizes)

    @property
    def layout(self) -> Layout:
        """The parts of shared memory."""
        return self._layout(self.slots)

    @property
    def slots(self) -> int:
        """Slots of the ring of weights, limited by the room in shared memory."""
        others = self._layout(0).total + 2 * 8 * MAX_SLOTS
        return max(0, min(MAX_SLOTS, (ROOM - others) // SLOT_BYTES))
