"""Decode attention through jax-triton, for NVIDIA GPUs from Ampere on: split over the tokens, partial results merged at the end."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.attention import support
from pallas_kernels.attention.partials import block_rows, merged
from pallas_kernels.dispatch import multiprocessors, no_triton, shared_memory
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Layer, TokenCodesLayer
from pallas_kernels.formats.views import ListedGroups, View

KERNEL = "attention.triton"
WAVES = 64  # programs for each multiprocessor, at most: more only cost memory
MAX_STAGES = 8  # of a loop, likewise
RESIDENT_WARPS = 8  # of a multiprocessor, where each takes all the registers that it can


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        splits: programs that share the tokens of a KV head, at most.
        tile: tokens of the full-precision cache that are read at a time.
    """

    splits: int
    num_warps: int
    num_stages: int = 1
    tile: int = 32

    def __post_init__(self):
        tuning.check_counts(self)
        for name in ("num_warps", "tile"):
            if (value := getattr(self, name)).bit_count() > 1:
                raise ValueError(f"{name} is {value}, should be a power of two")
        if self.num_warps > 32 or self.tile < 16:
            raise ValueError(f"num_warps is {self.num_warps} and tile {self.tile}, should be at most 32 and at least 16")
        if self.num_stages > MAX_STAGES:
            raise ValueError(f"num_stages is {self.num_stages}, should be at most {MAX_STAGES}")


def unsupported(q: Array, layer: Layer, lengths: Lengths, view: View) -> str | None:
    if reason := no_triton():
        return reason
    if isinstance(layer, TokenCodesLayer):
        return "reads groups of tokens, not tokens in KIVI's format or with a scale each"
    if reason := support.unsupported(q, layer, lengths, view):
        return reason
    return "does not yet say what it observes" if view.observed else None


def decode_attention(
    q: Float[Array, "B T N H"], layer: Layer, lengths: Lengths, view: View, *, config: Config | None = None
) -> tuple[Float[Array, "B T N H"], None]:
    import jax_triton

    from pallas_kernels.attention import triton_kernel

    problem = _Problem.of(q, layer, view)
    B, T, N, H = q.shape
    K, capacity = layer.buffer.keys.shape[1:3]
    rows = T * (N // K)
    # q is passed for arrays that are not read.
    quantized = [x for p in (layer.keys, layer.values) for x in (p.upper, p.lower, p.scale, p.zero)] if problem.planes else [q] * 8
    lists = [view.groups, view.count] if problem.list_width else [q] * 2
    paged = bool(problem.planes) and layer.pages is not None
    if config is None:
        config = tuning.tuned(KERNEL, problem.named, lambda found: problem.checked(Config(**found))) or problem.default()
    groups = layer.groups if problem.planes else 0
    splits = min(config.splits, (problem.list_width or groups) + math.ceil(capacity / config.tile))

    partial = jax.ShapeDtypeStruct((B * K, splits, rows), jnp.float32)
    found = jax_triton.triton_call(
        q,
        lengths.quantized,
        lengths.buffered,
        *lists,
        layer.pages if paged else q,
        *quantized,
        layer.buffer.keys,
        layer.buffer.values,
        kernel=triton_kernel.attend,
        name=f"decode_attention_{f'int{4 * problem.planes}' if problem.planes else 'full'}" + "_listed" * bool(problem.list_width),
        out_shape=(jax.ShapeDtypeStruct((*partial.shape, H), jnp.float32), partial, partial),
        grid=(B * K, splits, problem.programs // (B * K)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        TO_BASE_2=math.log2(math.e) / math.sqrt(H),
        T=T,
        K=K,
        PER_HEAD=N // K,
        H=H,
        M=problem.block_rows,
        PLANES=problem.planes,
        GROUPS=groups,
        LIST_WIDTH=problem.list_width or 0,
        PAGED=paged,
        G=problem.group_size,
        CAPACITY=capacity,
        TILE=config.tile,
        SPLITS=splits,
    )
    return merged(*found, q), None


def tunable(q: Array, layer: Layer, lengths: Lengths, view: View) -> tuple[str, dict, list[Config]]:
    """The kernel, the problem, and the configurations to measure, the default first, for `tuning`."""
    problem = _Problem.of(q, layer, view)
    return KERNEL, problem.named, problem.candidates()


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The shapes that the best configuration depends on.

    Attributes:
        planes: 0 where nothing is quantized.
        programs: without splits.
        list_width: columns of the lists of groups to read; None: all groups are read.
    """

    planes: int
    head_dim: int
    group_size: int
    programs: int
    block_rows: int
    list_width: int | None = None

    @classmethod
    def of(cls, q: Array, layer: Layer, view: View) -> "_Problem":
        B, T, N, H = q.shape
        quantized, K = layer.groups > 0, layer.buffer.keys.shape[1]
        rows = T * (N // K)
        in_block = block_rows(rows, H)
        programs = B * K * math.ceil(rows / in_block)
        list_width = view.groups.shape[2] if quantized and isinstance(view, ListedGroups) else None
        return cls(view.planes if quantized else 0, H, layer.group_size if quantized else 0, programs, in_block, list_width)

    @property
    def named(self) -> dict[str, int]:
        """The problem as tuned configurations are kept for it."""
        fields = dataclasses.asdict(self)
        width = fields.pop("list_width")
        return fields | support.listed_problem(width)

    def checked(self, config: Config) -> Config:
        """The configuration. Raises ValueError where it cannot work: its stages do not fit in shared memory, or its grid is too large."""
        codes = self.planes * self.group_size * self.head_dim  # bytes of a group's keys and values
        tile = 4 * config.tile * self.head_dim  # and of a tile's, in 16 bits
        if (needed := config.num_stages * max(codes, tile)) > (there := shared_memory()):
            raise ValueError(f"{config} needs {needed} bytes of shared memory; there are {there}")
        if config.splits > (limit := max(1, WAVES * multiprocessors() // self.programs)):
            raise ValueError(f"splits is {config.splits}, should be at most {limit}")
        return config

    def default(self) -> Config:
        # One warp waits for no other. Several share the registers that larger tiles need.
        alone = self.planes == 1 and self.head_dim <= 128 and self.block_rows == 16
        num_warps = 1 if alone else 2 if self.planes == 1 and max(self.head_dim // 8, self.block_rows) <= 32 else 4
        return self._config(num_warps, 1 if self.planes else 3 if self.head_dim <= 128 else 2)

    def candidates(self) -> list[Config]:
        others = [self._config(num_warps, num_stages) for num_warps in (1, 2, 4) for num_stages in (1, 2, 3)]
        return list(dict.fromkeys([self.default(), *others]))

    def _config(self, num_warps: int, num_stages: int) -> Config:
        splits = max(1, multiprocessors() * RESIDENT_WARPS // (num_warps * self.programs))
        return Config(splits, num_warps, num_stages, tile=64 if num_warps == 4 and self.head_dim <= 128 else 32)
