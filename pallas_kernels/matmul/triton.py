"""Matmul with INT4 or nested weights through jax-triton, for NVIDIA GPUs from Ampere on, for few rows: the weights are read once.

A program keeps the activations that it has room for, and goes through tiles of outputs of all weights, whose codes, scales and
zeros are copied some tiles ahead. Where there are more inputs than a program can keep, others have the next slice of them, and XLA
adds what they found, always in the same order. Groups divide among the warps.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import multiprocessors, no_triton, shared_memory
from pallas_kernels.formats.weights import CodedWeight, NestedWeight, upper_plane
from pallas_kernels.matmul import support
from pallas_kernels.matmul.support import GROUP_SIZE, GROUP_SIZES, OUTPUTS

MAX_WEIGHTS = 3  # of a launch: queries, keys and values
RESIDENT_WARPS = 12  # of a multiprocessor, at most: more would lack registers


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    groups: groups of inputs that a program keeps at most, a power of two. tile: outputs of a tile. num_stages: tiles in work or on their
    way.
    """

    groups: int
    tile: int
    num_warps: int
    num_stages: int


def unsupported(x: Array, weights: Sequence[CodedWeight]) -> str | None:
    if reason := no_triton():
        return reason
    if len(weights) > MAX_WEIGHTS:
        return f"supports up to {MAX_WEIGHTS} weights at once, not {len(weights)}"
    return support.unsupported(x, weights, group_sizes=GROUP_SIZES)


def coded_matmul(x: Float[Array, "*rows in"], weights: Sequence[CodedWeight], *, config: Config | None = None) -> Float[Array, "*rows out"]:
    import jax_triton

    from pallas_kernels.matmul import triton_kernel

    plan = Plan.of(x, weights).configured(config)
    # Where there are fewer weights than places, the last one is in the others too, which have no tiles.
    places = [weights[min(i, len(weights) - 1)] for i in range(MAX_WEIGHTS)]
    ends = [sum(plan.outputs[: i + 1]) // plan.config.tile for i in range(MAX_WEIGHTS)]
    y = jax_triton.triton_call(
        x.reshape(plan.rows, -1),
        *[array for weight in places for array in _arrays(weight)],
        kernel=triton_kernel.multiply,
        name="int4_matmul",
        out_shape=jax.ShapeDtypeStruct((plan.slices, plan.rows, sum(plan.outputs)), x.dtype if plan.slices == 1 else jnp.float32),
        grid=(plan.programs, plan.slices),
        num_warps=plan.config.num_warps,
        M=plan.rows,
        ROWS=plan.block_rows,
        GROUPS=plan.groups,
        G=plan.group_size,
        SLICE=plan.slice_groups,
        BATCH=plan.config.groups,
        END0=ends[0],
        END1=ends[1],
        TILES=ends[2],
        TILE=plan.config.tile,
        STAGES=plan.config.num_stages,
        ZERO_POINTS=upper_plane(weights[0]).has_zero_points,
        STEPS=plan.lower_steps or 0,
    )
    y = y[0] if plan.slices == 1 else y.sum(0).astype(x.dtype)
    return y.reshape(*x.shape[:-1], -1)


def _arrays(weight: CodedWeight) -> tuple[Array, Array, Array, Array]:
    upper = upper_plane(weight)
    return upper.codes, upper.scale, upper.zero, weight.lower if isinstance(weight, NestedWeight) else upper.codes


def max_warps(groups: int, tile: int) -> int:
    """Warps that have two scales a thread to copy, at most: one is too few bytes for a copy in the background."""
    return groups * tile // 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel for one set of shapes.

    Attributes:
        rows: of activations.
        groups: groups of inputs.
        outputs: the number of each weight's outputs.
        config: how the work is divided.
        group_size: inputs of a group.
        lower_steps: see `support.Parameters`.
    """

    rows: int
    groups: int
    outputs: tuple[int, ...]
    config: Config = Config(2, OUTPUTS, num_warps=1, num_stages=3)
    group_size: int = GROUP_SIZE
    lower_steps: int | None = None

    @classmethod
    def of(cls, x: Array, weights: Sequence[CodedWeight]) -> "Plan":
        groups, kind = upper_plane(weights[0]).codes.shape[1], support.parameters_of(weights[0])
        shape = math.prod(x.shape[:-1]), groups, tuple(weight.shape[0] for weight in weights)
        return cls(*shape, group_size=kind.group_size, lower_steps=kind.lower_steps)

    def configured(self, config: Config | None) -> "Plan":
        """The plan with this configuration, or the default."""
        if config is None:
            config = self.default()
        return dataclasses.replace(self, config=config)

    def default(self) -> Config:
        """The configuration with as many groups as there is room for, and the eight warps that their scales and zeros are enough for."""
        sizes = [groups for groups in (32, 16, 8, 4, 2) if groups < 2 * self.groups] or [2]
        configs = [
            Config(groups, tile, max(1, max_warps(groups, tile)), num_stages)
            for groups in sizes
            for tile in self.possible_tiles
            for num_stages in (4, 3)
            if max_warps(groups, tile) <= 8
        ]
        return next(config for config in configs if self.configured(config).fits)

    def candidates(self) -> list[Config]:
        """Configurations that may do well, the default first."""
        largest = self.default().groups
        configs = [
            Config(groups, tile, num_warps, num_stages)
            for groups in (largest, largest // 2, largest // 4)
            for tile in self.possible_tiles
            for num_warps in (max_warps(groups, tile), max_warps(groups, tile) // 2)
            for num_stages in (3, 4, 5)
            if num_warps
        ]
        return list(dict.fromkeys([self.default(), *(config for config in configs if self.configured(config).fits)]))

    @property
    def possible_tiles(self) -> list[int]:
        return [tile for tile in (2 * OUTPUTS, OUTPUTS) if not any(out % tile for out in self.outputs)]

    @property
    def block_rows(self) -> int:
        return 8 if self.rows <= 8 else 16

    @property
    def slices(self) -> int:
        return math.ceil(self.groups / self.config.groups)

    @property
    def slice_groups(self) -> int:
        """Groups of a slice: an even number, for scales in pairs."""
        return 2 * math.ceil(self.groups / self.slices / 2)

    @property
    def tiles(self) -> int:
        return sum(self.outputs) // self.config.tile

    @property
    def programs(self) -> int:
        """Programs of a slice."""
        resident = max(1, min(shared_memory() // self.shared_bytes, RESIDENT_WARPS // self.config.num_warps))
        return min(self.tiles, max(1, multiprocessors() * resident // self.slices))

    @property
    def shared_bytes(self) -> int:
        """The activations, what is on its way of tiles (a half-byte code of each input in each plane; scales and zeros), and the warps'
        sums."""
        activations = self.config.groups * self.block_rows * self.group_size * 2
        planes = 1 if self.lower_steps is None else 2
        codes = self.config.groups * self.config.tile * (planes * self.group_size // 2 + 2 + 2)
        return activations + (self.config.num_stages - 1) * codes + self.config.num_warps * self.config.tile * self.block_rows * 4

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= shared_memory()
