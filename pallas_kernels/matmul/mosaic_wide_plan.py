"""How the Mosaic GPU matmul of many rows by INT4 weights, or by nested ones, divides its work, and where all lies in shared memory."""

import dataclasses
import functools
import math

from pallas_kernels.gpu.launch import MAX_CLUSTER, clusters_at_once
from pallas_kernels.gpu.layout import ROOM, Layout
from pallas_kernels.matmul.support import DEFAULT_PARAMETERS, GROUP_SIZE, Parameters

WARP_OUTPUTS = 16  # of a tile
WARPGROUP_OUTPUTS = 4 * WARP_OUTPUTS  # that a math warpgroup multiplies at once
MAX_TILE = 256
COLUMNS = 8  # of activations in a tile of the tensor cores, a row each
MAX_ROWS = 64
CODE_WARPS = 2  # they copy codes, scales and zeros
X_WARPS = 2  # they copy activations
COLUMN_BYTES = 64  # of 32 inputs of a row of activations, which a warp copies at once
PIECES_AT_ONCE = 16  # of activations that a lane has in registers
CODE_BYTES = GROUP_SIZE // 2  # of a group of one output
X_BYTES = 2  # of an activation
MMA_INPUTS = 16  # that a product of the tensor cores contracts
MMA_BYTES = MMA_INPUTS * X_BYTES * COLUMNS  # of the activations of one such product, of eight rows
PARAMETER_GROUPS = 8  # whose scales and zeros are copied at once: those of one step are a few bytes of each output
PARAMETER_SLOTS = 2
MIN_SLOTS, MAX_SLOTS = 2, 8
MAX_MATH_WARPS = 16  # with which a thread may have 96 registers
MAX_RUNS = 4  # of a tile; a lane that copies has an address of each, in each array
STEP_GROUPS = 2  # groups of inputs that a block takes at once
# What beginning, adding up sums, and ending takes the blocks of a cluster, in bytes that each could copy meanwhile.
CLUSTER_BYTES = 96 * 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided. With the same cluster and split a row has the same sums in the same order.

    Attributes:
        tile: outputs that a block works on at once, a multiple of 16.
        cluster: blocks that divide the inputs of a tile among them.
        split: parts of the inputs of a step, each multiplied by warpgroups of its own; 1, or in a cluster 2.
    """

    tile: int
    cluster: int
    split: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """One launch.

    Alone, a block takes tiles one after the other, each over all inputs. The blocks of a cluster take one tile, each over some of its
    inputs, and add their sums.

    Attributes:
        rows: of activations.
        groups: groups of inputs.
        outputs: the number of each weight's outputs.
        multiprocessors: of the device.
        config: how the work is divided.
        parameters: of the weights.
    """

    rows: int
    groups: int
    outputs: tuple[int, ...]
    multiprocessors: int
    config: Config
    parameters: Parameters = DEFAULT_PARAMETERS

    @classmethod
    def fitting(
        cls,
        rows: int,
        groups: int,
        outputs: tuple[int, ...],
        multiprocessors: int,
        parameters: Parameters = DEFAULT_PARAMETERS,
    ) -> "Plan":
        """The plan whose busiest multiprocessor copies the least.

        It has the same configuration for any number of rows, and with it each row the same sums in the same order.
        """
        return cls(rows, groups, outputs, multiprocessors, config_of(groups, outputs, multiprocessors, parameters), parameters)

    @property
    def fits(self) -> bool:
        """Whether there is room for it, and work for each of its blocks."""
        whole = self.groups % STEP_GROUPS == 0
        divided = self.config.split == 1 or (self.config.split == 2 and self.config.cluster > 1)
        addressed = self.tile <= MAX_RUNS * self.run
        room = self.math_warps <= MAX_MATH_WARPS and self.slots >= MIN_SLOTS
        return whole and divided and addressed and room and self.config.cluster <= self.steps

    @property
    def cost(self) -> int:
        """Bytes that the busiest multiprocessor copies, about."""
        cluster = self.config.cluster
        most = clusters_at_once(cluster, self.multiprocessors)
        each = math.ceil(self.steps / cluster) * (self.slot_bytes + self.tile * 4 * STEP_GROUPS)
        return math.ceil(self.tiles / max(1, most)) * (each + (CLUSTER_BYTES if cluster > 1 else 0))

    @property
    def max_weights(self) -> int:
        """Weights that the busiest block multiplies, those of a last tile that is not full among them."""
        turns, steps = math.ceil(self.tiles / self.clusters), math.ceil(self.steps / self.config.cluster)
        return turns * self.tile * steps * STEP_GROUPS * GROUP_SIZE

    @property
    def width(self) -> int:
        return sum(self.outputs)

    @property
    def tile(self) -> int:
        return self.config.tile

    @property
    def tiles(self) -> int:
        return math.ceil(self.width / self.tile)

    @property
    def run(self) -> int:
        """Outputs of a tile that are surely of one weight, and all there or all beyond the last: a tile is of several runs."""
        return math.gcd(self.tile, *self.outputs)

    @property
    def clusters(self) -> int:
        return min(self.tiles, self.multiprocessors) if self.config.cluster == 1 else self.tiles

    @property
    def blocks(self) -> int:
        return self.clusters * self.config.cluster

    @property
    def tile_warps(self) -> int:
        """Math warps for the outputs of a tile, whole warpgroups of them: the last may have nothing to do."""
        return 4 * math.ceil(self.tile / WARPGROUP_OUTPUTS)

    @property
    def math_warps(self) -> int:
        return self.tile_warps * self.config.split

    @property
    def warps(self) -> int:
        return self.math_warps + CODE_WARPS + X_WARPS

    @property
    def steps(self) -> int:
        """Steps over all inputs, which the blocks of a cluster divide."""
        return self.groups // STEP_GROUPS

    @property
    def row_tiles(self) -> int:
        """Tiles of eight rows of activations."""
        return math.ceil(self.rows / COLUMNS)

    @property
    def pieces(self) -> int:
        """Pieces of the activations of a step that a lane of the warps that copy them has, of 8 inputs each."""
        return self.row_tiles * (STEP_GROUPS * GROUP_SIZE * X_BYTES // (COLUMN_BYTES * X_WARPS))

    @property
    def steps_ahead(self) -> int:
        """Steps whose activations are loaded before their slot is free: 16 pieces are 64 registers, of 96 beside the most math warps."""
        return max(1, (PIECES_AT_ONCE if self.math_warps < MAX_MATH_WARPS else PIECES_AT_ONCE - 4) // self.pieces)

    @property
    def code_pitch(self) -> int:
        """Bytes from one output's codes to the next in a slot."""
        return CODE_BYTES * STEP_GROUPS

    @property
    def plane_bytes(self) -> int:
        """Bytes of a plane of the codes of a step."""
        return self.tile * self.code_pitch

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a step."""
        return self.parameters.planes * self.plane_bytes

    @property
    def x_tile_bytes(self) -> int:
        """Bytes of the activations of a step, of a tile of rows."""
        return GROUP_SIZE * STEP_GROUPS // MMA_INPUTS * MMA_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.code_bytes + self.row_tiles * self.x_tile_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a slot of scales and zeros."""
        return 2 * self.tile * self.parameter_pitch

    @property
    def parameter_pitch(self) -> int:
        """Bytes from one output to the next in a slot of scales and zeros: neighbours lie in different banks."""
        return 2 * PARAMETER_GROUPS * self.parameters.subgroups + 4

    def _layout(self, slots: int) -> Layout:
        # At the end the blocks of a cluster keep their sums in the place of the ring.
        sizes = {
            "ring": slots * self.slot_bytes,  # codes and activations
            "parameters": PARAMETER_SLOTS * self.parameter_bytes,
            "barriers": 2 * 8 * (slots + PARAMETER_SLOTS),  # mbarriers of both rings
        }
        return Layout(sizes)

    @property
    def layout(self) -> Layout:
        """The parts of shared memory."""
        return self._layout(self.slots)

    @property
    def slots(self) -> int:
        """Slots of the ring of codes and activations, limited by the room in shared memory."""
        others = self._layout(0).total + 2 * 8 * MAX_SLOTS
        return max(0, min(MAX_SLOTS, (ROOM - others) // self.slot_bytes))


@functools.cache
def config_of(groups: int, outputs: tuple[int, ...], multiprocessors: int, parameters: Parameters) -> Config:
    """The configuration with which the busiest multiprocessor copies the least, with as many rows as there may be.

    Candidates are tiles of whole warpgroups without a split, which were measured. Others divide the work more evenly and were not: 28672
    outputs in tiles of 224 keep 128 multiprocessors of 132 busy, in tiles of 256 112.
    """
    sizes = range(1, MAX_CLUSTER + 1)
    shapes = [Config(tile, size) for tile in range(MAX_TILE, 0, -WARPGROUP_OUTPUTS) for size in sizes]
    plans = [Plan(MAX_ROWS, groups, outputs, multiprocessors, config, parameters) for config in shapes]
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.cost).config
