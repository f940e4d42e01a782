"""How the Mosaic GPU INT4 matmul divides its work: stages, each a matmul, one after the other in one launch."""

import dataclasses
import math

from pallas_kernels.launch import SHARED_BYTES
from pallas_kernels.matmul import support
from pallas_kernels.matmul.support import GROUP_SIZE

TILE = support.OUTPUTS
ROWS = 4  # of activations in a tile of the tensor cores: two columns each
WARPS = 16  # that compute: each takes a group of a pass
COPIERS = 4  # more warps, which copy: each rows of a tile of its own
FINISHERS = 4  # more warps, which add what the others found of a tile
PASS = WARPS  # groups that a block takes at once
CODE_BYTES = GROUP_SIZE // 2  # of a group of one output
# From one output to the next in shared memory: neighbours lie in different banks.
CODE_PITCH = PASS * CODE_BYTES + 64
PARAMETER_PITCH = 2 * PASS + 4
SLOT_BYTES = TILE * (CODE_PITCH + 2 * PARAMETER_PITCH)  # codes, scales and zeros of a pass
# Of the ring: fewer leave the memory idle, and more are of no use.
LEAST_SLOTS, MOST_SLOTS = 4, 12
SUMS_SLOTS = 2  # tiles whose sums there is place for
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
class Slice:
    """Groups of a stage's inputs."""

    first: int
    count: int

    @property
    def passes(self) -> int:
        """For a tile."""
        return math.ceil(self.count / PASS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """room: groups whose activations there is place for in a block, a multiple of PASS. eps: of norms."""

    rows: int
    stages: tuple[Stage, ...]
    blocks: int
    room: int
    eps: float = 0.0

    @classmethod
    def fitting(cls, rows: int, stages: tuple[Stage, ...], blocks: int, eps: float = 0.0) -> "Plan":
        """As few slices of the inputs as leave enough slots. Of a stage with a norm or a gate there is one."""
        whole = max(stage.groups for stage in stages)
        least = max([PASS, *(stage.groups for stage in stages if stage.normed or stage.gated)])
        for slices in range(1, math.ceil(whole / PASS) + 1):
            room = PASS * math.ceil(max(whole / slices, least) / PASS)
            plan = cls(rows, stages, blocks, room, eps)
            if plan.slots >= LEAST_SLOTS:
                break
        return plan

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.rows / ROWS)

    def slices(self, stage: Stage) -> list[Slice]:
        """Of the stage's inputs: a block takes one after the other, each for all of its tiles."""
        return [Slice(first, min(self.room, stage.groups - first)) for first in range(0, stage.groups, self.room)]

    @property
    def x_pitch(self) -> int:
        """Bytes from one column of activations to the next in shared memory: neighbours lie in different banks."""
        return GROUP_SIZE * self.room + 64

    @property
    def handed_over(self) -> int:
        """Numbers that stages hand to those after them."""
        return self.rows * sum(stage.width for stage in self.stages[:-1])

    # In shared memory lie: activations, their sums and scales, the warps' sums of squares of rows, what slices before the last gave of the
    # block's tiles, the ring of the warps' sums of tiles, who has arrived at the two rings, and the ring of codes.

    @property
    def x_bytes(self) -> int:
        return 2 * self.rows * self.x_pitch

    @property
    def group_pitch(self) -> int:
        """Bytes from the sums and scales of activations of one group to those of the next."""
        return 8 * ROWS * self.row_tiles

    @property
    def tile_bytes(self) -> int:
        """Of a warp's sums of a tile."""
        return 4 * TILE * ROWS * self.row_tiles

    @property
    def kept_start(self) -> int:
        squares = 4 * WARPS * self.rows
        return self.x_bytes + self.room * self.group_pitch + squares

    @property
    def sums_start(self) -> int:
        kept = [math.ceil(stage.tiles / self.blocks) for stage in self.stages if len(self.slices(stage)) > 1]
        return self.kept_start + 4 * TILE * self.rows * max(kept, default=0)

    @property
    def arrivals_start(self) -> int:
        return self.sums_start + SUMS_SLOTS * WARPS * self.tile_bytes

    @property
    def ring_start(self) -> int:
        return self.arrivals_start + 2 * 8 * (MOST_SLOTS + SUMS_SLOTS)

    @property
    def slots(self) -> int:
        """Of the ring of codes, as many as there is place for."""
        return max(0, min(MOST_SLOTS, (SHARED_BYTES - 2048 - self.ring_start) // SLOT_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.ring_start + self.slots * SLOT_BYTES
