"""How the Mosaic GPU matmul with plain weights divides its work."""

import dataclasses
import functools
import itertools
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES

PRODUCT_ROWS = 64  # that one product of the tensor cores takes (wgmma's M)
MAX_ROWS = 2 * PRODUCT_ROWS
INPUT_MULTIPLE = 128  # inputs come in multiples of these
# Inputs that a block multiplies at once: the more that enough slots have room for, as runs of memory are read faster.
STEP_SIZES = 256, 128, 64
TILE = 8  # rows and outputs come in multiples of these
MAX_OUTPUTS = 224  # of a block: float32 accumulators of 64 rows fit in a warpgroup's registers, and three slots in shared memory
# Tensor cores cut off what they add to an accumulator, and there is one for all inputs: of more of them bfloat16 alone is exact enough.
MAX_EXACT_INPUTS = 14336
ITEM_BYTES = 2
ENOUGH_SLOTS = 3
RESIDENT, FEWEST = 2, 1.5  # blocks on a multiprocessor where weights come first: how many have room, and how many there should be
# Shared memory that is left to a block of another kernel, where that leaves enough slots. In a CUDA graph whose kernels run at the same
# time (`SpeCache.compiler_options`) blocks of `mosaic_choice` may be there already; one that finds no room beside them waits for their end.
OTHERS_BYTES = 20 * 1024


@dataclasses.dataclass(frozen=True)
class Product:
    """What a launch computes.

    Attributes:
        rows: of activations.
        inputs: of each weight.
        outputs: the number of each weight's outputs.
        at_once: blocks that run at the same time, one on each multiprocessor.
        float32_out: whether the outputs are float32, not bfloat16.
        gated: whether there are two weights, of whose outputs only silu(first) * second is written.
    """

    rows: int
    inputs: int
    outputs: tuple[int, ...]
    at_once: int
    float32_out: bool = False
    gated: bool = False

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float32 if self.float32_out else jnp.bfloat16

    @property
    def written(self) -> tuple[int, ...]:
        """Outputs that are written, one after the other."""
        return self.outputs[:1] if self.gated else self.outputs

    @property
    def tiled_rows(self) -> int:
        """Rows of activations that are copied: `rows`, rounded up to whole tiles of the tensor cores."""
        return TILE * math.ceil(self.rows / TILE)


@dataclasses.dataclass(frozen=True)
class Plan(Product):
    """One launch whose blocks have all rows, and each a part of the outputs."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the array that the launch writes. Where weights come first, outputs are transposed on their way, and after that jax
        0.12 lowers copies of whole tiles of rows only."""
        return self.tiled_rows if self.weights_first else self.rows, sum(self.written)

    @functools.cached_property
    def weights_first(self) -> bool:
        """Whether weights are the first operand of products, so that few rows take little of the tensor cores' time. Then a block has
        `PRODUCT_ROWS` outputs of each weight, and two are resident on a multiprocessor: for a gated pair whose blocks fill most of
        these places, and need no more."""
        blocks = math.ceil(self.outputs[0] / PRODUCT_ROWS)
        fits = ENOUGH_SLOTS * (self.tiled_rows + 2 * PRODUCT_ROWS) * INPUT_MULTIPLE * ITEM_BYTES <= SHARED_BYTES // 2 - RESERVED_BYTES
        return self.gated and fits and self.outputs[0] >= PRODUCT_ROWS and FEWEST * self.at_once <= blocks <= RESIDENT * self.at_once

    @functools.cached_property
    def shares(self) -> tuple[int, ...]:
        """Outputs of each weight for a block. There are as few times `at_once` blocks as keep a block's outputs within `MAX_OUTPUTS`."""
        if self.weights_first:
            return (PRODUCT_ROWS,) * len(self.outputs)

        def of(blocks):
            return tuple(TILE * math.ceil(outputs / blocks / TILE) for outputs in self.outputs)

        return next(shares for times in itertools.count(1) if sum(shares := of(times * self.at_once)) <= MAX_OUTPUTS)

    @property
    def blocks(self) -> int:
        return max(math.ceil(outputs / share) for outputs, share in zip(self.outputs, self.shares))

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block; each multiplies up to `PRODUCT_ROWS` rows."""
        return math.ceil(self.rows / PRODUCT_ROWS)

    @property
    def product_rows(self) -> int:
        """Rows of all products of a block, which a slot may have fewer of."""
        return self.tiled_rows if self.weights_first else self.warpgroups * PRODUCT_ROWS

    @functools.cached_property
    def step(self) -> int:
        """Inputs that a block multiplies at once."""
        if self.weights_first:
            return INPUT_MULTIPLE
        fitting = (
            step for step in STEP_SIZES if self.inputs % step == 0 and self._slots(step, SHARED_BYTES - OTHERS_BYTES) >= ENOUGH_SLOTS
        )
        return next(fitting, INPUT_MULTIPLE)

    @property
    def steps(self) -> int:
        return self.inputs // self.step

    @property
    def slots(self) -> int:
        """Steps that are in shared memory or on their way there: the most that leave `OTHERS_BYTES` free, or, where these are too few, the
        most that fit."""
        if self.weights_first:
            return min(self.steps, self._slots(INPUT_MULTIPLE, SHARED_BYTES // 2))
        slots = self._slots(self.step, SHARED_BYTES - OTHERS_BYTES)
        return min(self.steps, slots if slots >= ENOUGH_SLOTS else self._slots(self.step, SHARED_BYTES))

    def _slots(self, step: int, room: int) -> int:
        """Slots of `step` inputs that `room` bytes of shared memory hold."""
        row_bytes = step * ITEM_BYTES
        return (room - RESERVED_BYTES - (self.product_rows - self.tiled_rows) * row_bytes) // (
            (self.tiled_rows + sum(self.shares)) * row_bytes
        )
