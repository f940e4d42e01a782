"""How the Mosaic GPU INT4 matmul divides its work: stages, each a matmul, one after the other in one launch."""

import dataclasses
import math

from pallas_kernels.launch import SHARED_BYTES
from pallas_kernels.matmul import support
from pallas_kernels.matmul.support import GROUP_SIZE

TILE = support.OUTPUTS
ROWS = 8  # of activations in a tile
WARPS = 16  # that compute: each takes a group of a pass
COPIERS = 4  # more warps, which copy: each rows of a tile of its own
PASS = WARPS  # groups that a block takes at once
CODE_BYTES = GROUP_SIZE // 2  # of a group of one output
# From one output to the next in shared memory: neighbours lie in different banks.
CODE_PITCH = PASS * CODE_BYTES + 64
PARAMETER_PITCH = 2 * PASS + 4
SLOT_BYTES = TILE * (CODE_PITCH + 2 * PARAMETER_PITCH)  # codes, scales and zeros of a pass
# Of the ring: fewer leave the memory idle, and more are of no use.
LEAST_SLOTS, MOST_SLOTS = 4, 12
NUMBERS = 8  # of a row of activations that a thread moves at once


@dataclasses.dataclass(frozen=True)
class Stage:
    """A matmul. groups: of the inputs. outputs: of each weight.

    normed: its inputs are the norm of the residual stream, to which is added what the stage before gave. gated: what the first weight
    gives goes through silu and multiplies what the second gives.
    """

    groups: int
    outputs: tuple[int, ...]
    normed: bool = False
    gated: bool = False

    @property
    def tiles(self) -> int:
        return sum(self.outputs) // TILE

    @property
    def tile_outputs(self) -> int:
        return TILE // 2 if self.gated else TILE

    @property
    def width(self) -> int:
        return self.tiles * self.tile_outputs


@dataclasses.dataclass(frozen=True)
class Plan:
    """slices: parts of the inputs, each with blocks of its own; more than one only where there is one stage. eps: of norms."""

    rows: int
    stages: tuple[Stage, ...]
    blocks: int
    slices: int = 1
    eps: float = 0.0

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.rows / ROWS)

    def slice_groups(self, stage: Stage) -> int:
        return 2 * math.ceil(stage.groups / self.slices / 2)

    def passes(self, stage: Stage) -> int:
        """Over a slice of the inputs, for a tile."""
        return math.ceil(self.slice_groups(stage) / PASS)

    @property
    def room(self) -> int:
        """Groups whose activations there is place for."""
        return max(map(self.passes, self.stages)) * PASS

    @property
    def x_pitch(self) -> int:
        """Bytes from one row of activations to the next in shared memory: neighbours lie in different banks."""
        return 2 * GROUP_SIZE * self.room + 16

    # In shared memory lie: activations, their sums over groups, the warps' sums of squares of rows, the warps' sums of two tiles, who has
    # arrived at the ring, and the ring.

    @property
    def x_bytes(self) -> int:
        return self.rows * self.x_pitch

    @property
    def group_pitch(self) -> int:
        """Bytes from the sums of activations over one group to those over the next."""
        return 4 * ROWS * self.row_tiles

    @property
    def tile_bytes(self) -> int:
        """Of a warp's sums of a tile."""
        return 4 * TILE * ROWS * self.row_tiles

    @property
    def sums_start(self) -> int:
        squares = 4 * WARPS * self.rows
        return self.x_bytes + self.room * self.group_pitch + squares

    @property
    def arrivals_start(self) -> int:
        return self.sums_start + 2 * WARPS * self.tile_bytes

    @property
    def ring_start(self) -> int:
        return self.arrivals_start + 2 * 8 * MOST_SLOTS

    @property
    def slots(self) -> int:
        """Of the ring, as many as there is place for."""
        return max(0, min(MOST_SLOTS, (SHARED_BYTES - 2048 - self.ring_start) // SLOT_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.ring_start + self.slots * SLOT_BYTES
