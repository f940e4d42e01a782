"""INT4 matmul on NVIDIA Hopper in Pallas Mosaic GPU, for few rows: the weights are read once, at the speed of the memory.

A block owns tiles of 16 outputs; its warps divide the inputs among them and keep those of the activations in registers. Codes
stream through a ring in shared memory and become the first operand of the tensor cores, where activations, 8 rows a tile, are the
second. The warps' sums meet in shared memory, once a tile. Where there are more inputs than a block can keep, several blocks
share the outputs, and XLA adds what they found.
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
from pallas_kernels.weight_format import Int4Weight

GROUP_SIZE = 128
TILE = 16  # outputs
ROWS = 8  # of activations in a tile
MAX_ROWS = 16
WARPS = 8
MAX_GROUPS = 8  # of one tile of rows that a warp can keep
SLOTS = 6


def unsupported(x: Array, weights: Sequence[Int4Weight]) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if reason := no_mosaic_gpu():
        return reason
    if others := {a.dtype.name for a in (x, *(p for w in weights for p in (w.scale, w.zero)))} - {"bfloat16"}:
        return f"needs activations, scales and zeros in bfloat16, not {', '.join(sorted(others))}"
    rows = math.prod(x.shape[:-1])
    if not 1 <= rows <= MAX_ROWS:
        return f"supports up to {MAX_ROWS} rows, not {rows}"
    for weight in weights:
        out, groups, half = weight.codes.shape
        if 2 * half != GROUP_SIZE or groups % 2 or groups * GROUP_SIZE != weight.in_features:
            return f"supports inputs in an even number of groups of {GROUP_SIZE}, not {weight.in_features} in groups of {2 * half}"
        if out % TILE:
            return f"supports outputs in multiples of {TILE}, not {out}"
    return None


def int4_matmul(x: Float[Array, "*rows in"], weights: Sequence[Int4Weight]) -> tuple[Float[Array, "*rows _"], ...]:
    """See `pallas_kernels.matmul.int4_matmul`."""
    rows = x.reshape(-1, x.shape[-1])
    outputs = tuple(weight.shape[0] for weight in weights)
    y = run(plan_for(rows.shape[0], weights[0].codes.shape[1], outputs), rows, weights)
    ends = [sum(outputs[: i + 1]) for i in range(len(outputs))]
    return tuple(y[:, end - out : end].reshape(*x.shape[:-1], out) for out, end in zip(outputs, ends))


@dataclasses.dataclass(frozen=True)
class Plan:
    """groups: of the inputs. outputs: of each weight. slices: parts of the inputs, each with blocks of its own.

    kept: groups that a warp keeps, an even number.
    """

    rows: int
    groups: int
    outputs: tuple[int, ...]
    slices: int
    kept: int
    blocks: int

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.rows / ROWS)

    @property
    def slice_groups(self) -> int:
        return 2 * math.ceil(self.groups / self.slices / 2)

    @property
    def tiles(self) -> int:
        return sum(self.outputs) // TILE

    @property
    def slot_bytes(self) -> int:
        """Codes of a tile in the groups of a warp, then scales, then zeros."""
        return TILE * self.kept * (GROUP_SIZE // 2 + 2 + 2)

    @property
    def sum_bytes(self) -> int:
        """Of the warps' sums of a tile."""
        return WARPS * self.row_tiles * TILE * ROWS * 4

    @property
    def slots(self) -> int:
        return min(SLOTS, (SHARED_BYTES - 2048 - 2 * self.sum_bytes) // (WARPS * self.slot_bytes))

    @property
    def shared_bytes(self) -> int:
        return 2 * self.sum_bytes + WARPS * self.slots * self.slot_bytes


def plan_for(rows: int, groups: int, outputs: tuple[int, ...]) -> Plan:
    """As few slices as registers allow, and a block for each multiprocessor."""
    most = MAX_GROUPS // math.ceil(rows / ROWS)
    slices = math.ceil(groups / (WARPS * most))
    kept = 2 * math.ceil(groups / slices / WARPS / 2)
    return Plan(rows, groups, outputs, slices, kept, blocks=max(1, multiprocessors() // slices))


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
    y = launch("int4_matmul", emit, inputs, outputs, plan.slices * plan.blocks, WARPS // 4, plan.shared_bytes)["y"]
    return y if plan.slices == 1 else y.sum(0).astype(x.dtype)
