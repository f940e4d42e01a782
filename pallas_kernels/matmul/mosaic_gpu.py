"""INT4 matmul on NVIDIA Hopper in Pallas Mosaic GPU, for few rows: the weights are read once, at the speed of the memory.

A block keeps the activations in shared memory. Its teams of warps own tiles of 16 outputs each, and their warps divide the groups of
inputs among them. Codes stream through a ring in shared memory, a line of the memory at a time, and become the first operand of the
tensor cores, where activations, 8 rows a tile, are the second. The warps' sums meet in shared memory, once a tile. Where there are
more activations than a block can keep, several blocks share the outputs, and XLA adds what they found.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import multiprocessors, no_mosaic_gpu
from pallas_kernels.launch import SHARED_BYTES, launch
from pallas_kernels.matmul import support
from pallas_kernels.matmul.support import GROUP_SIZE
from pallas_kernels.weight_format import Int4Weight

TILE = support.OUTPUTS
ROWS = 8  # of activations in a tile
TEAM, TEAMS = 8, 2  # warps, of a block: one computes while the other meets
CODE_BYTES = GROUP_SIZE // 2  # of a group of one output
# Of a warp's ring: fewer leave the memory idle, and more are of no use.
LEAST_SLOTS, MOST_SLOTS = 3, 6
MAX_PASSES = 8  # pairs of groups of a warp, whose sums of activations it keeps in registers


def unsupported(x: Array, weights: Sequence[Int4Weight]) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if reason := no_mosaic_gpu():
        return reason
    if reason := support.unsupported(x, weights):
        return reason
    if (groups := weights[0].codes.shape[1]) % 2:
        return f"supports inputs in an even number of groups of {GROUP_SIZE}, not {groups}"
    return None


def int4_matmul(x: Float[Array, "*rows in"], weights: Sequence[Int4Weight]) -> Float[Array, "*rows out"]:
    """See `pallas_kernels.matmul.int4_matmul`."""
    rows = x.reshape(-1, x.shape[-1])
    outputs = tuple(weight.shape[0] for weight in weights)
    y = run(plan_for(rows.shape[0], weights[0].codes.shape[1], outputs), rows, weights)
    return y.reshape(*x.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """groups: of the inputs. outputs: of each weight. slices: parts of the inputs, each with blocks of its own."""

    rows: int
    groups: int
    outputs: tuple[int, ...]
    slices: int
    blocks: int

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.rows / ROWS)

    @property
    def slice_groups(self) -> int:
        return 2 * math.ceil(self.groups / self.slices / 2)

    @property
    def passes(self) -> int:
        """Pairs of groups of a slice that a warp takes, one after the other."""
        return math.ceil(self.slice_groups / 2 / TEAM)

    @property
    def room(self) -> int:
        """For as many groups there is place in shared memory."""
        return self.passes * 2 * TEAM

    @property
    def tiles(self) -> int:
        return sum(self.outputs) // TILE

    @property
    def x_pitch(self) -> int:
        """Bytes from one row of activations to the next in shared memory: rows g and g + 1 lie in different banks."""
        return 2 * GROUP_SIZE * self.room + 16

    @property
    def x_bytes(self) -> int:
        return self.rows * self.x_pitch

    @property
    def parameter_pitch(self) -> int:
        """Bytes from the scales, or zeros, of one output to those of the next: those of eight lie in different banks."""
        return 2 * self.room + 4

    @property
    def parameter_bytes(self) -> int:
        """Of the scales and zeros of a tile."""
        return 2 * TILE * self.parameter_pitch

    @property
    def tiles_ahead(self) -> int:
        """Tiles whose scales and zeros there is place for: the one at work, and those that the ring reaches."""
        return self._tiles_ahead(self.slots)

    def _tiles_ahead(self, slots: int) -> int:
        return (self.passes - 1 + slots - 1) // self.passes + 1

    @property
    def slot_bytes(self) -> int:
        """Of a warp's ring: the codes of a tile in two groups."""
        return 2 * TILE * CODE_BYTES

    @property
    def sum_bytes(self) -> int:
        """Of a team's sums of a tile."""
        return TEAM * self.row_tiles * TILE * ROWS * 4

    @property
    def slots(self) -> int:
        """As many as there is place for; 2 even if there is not."""
        fits = lambda slots: self.x_bytes + TEAMS * self._team_bytes(slots) <= SHARED_BYTES - 2048
        return max(filter(fits, range(2, MOST_SLOTS + 1)), default=2)

    @property
    def team_bytes(self) -> int:
        """Of what a team has: sums of two tiles, parameters and rings."""
        return self._team_bytes(self.slots)

    def _team_bytes(self, slots: int) -> int:
        return 2 * self.sum_bytes + self._tiles_ahead(slots) * self.parameter_bytes + TEAM * slots * self.slot_bytes

    @property
    def shared_bytes(self) -> int:
        return self.x_bytes + TEAMS * self.team_bytes


def plan_for(rows: int, groups: int, outputs: tuple[int, ...]) -> Plan:
    """As few slices as leave enough slots, and a block for each multiprocessor."""
    for slices in range(1, groups + 1):
        plan = Plan(rows, groups, outputs, slices, blocks=max(1, multiprocessors() // slices))
        if plan.passes <= MAX_PASSES and plan.slots >= LEAST_SLOTS:
            break
    return plan


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnums=0)
def run(plan: Plan, x: Float[Array, "M in"], weights: Sequence[Int4Weight]) -> Float[Array, "M out"]:
    """The weights' outputs one after the other."""
    from pallas_kernels.matmul import mosaic_block

    inputs = {"x": x}
    for i, weight in enumerate(weights):
        inputs |= {f"codes{i}": weight.codes, f"scale{i}": weight.scale, f"zero{i}": weight.zero}
    shape, dtype = (plan.rows, sum(plan.outputs)), x.dtype
    if plan.slices > 1:
        shape, dtype = (plan.slices, *shape), jnp.float32
    outputs = {"y": jax.ShapeDtypeStruct(shape, dtype)}
    emit = functools.partial(mosaic_block.emit_block, plan)
    y = launch("int4_matmul", emit, inputs, outputs, plan.slices * plan.blocks, TEAM * TEAMS // 4, plan.shared_bytes)["y"]
    return y if plan.slices == 1 else y.sum(0).astype(x.dtype)
