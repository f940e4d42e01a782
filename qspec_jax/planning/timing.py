"""Times of passes: the bytes at the bandwidth that reading reaches, the FLOPs at a share of their peak, and what kernels take besides.

A pass takes what its bytes and FLOPs take, plus a sum of coefficients times counts: so long for each layer, each attention, each token
that attention works through. `Efficiencies` has the coefficients, fitted on a few measured rows (docs/plan.md; tests/measured_rows.py says
which). They were measured on Hopper: arithmetic of kernels is scaled to other devices by multiprocessors times clock, and times per launch
are taken as they are.
"""

import dataclasses
import math
from collections import Counter

from pallas_kernels import dispatch, tuning
from pallas_kernels.attention.mosaic_plan import KERNEL
from pallas_kernels.attention.support import MAX_ROUND_TOKENS
from pallas_kernels.fused_layer.mosaic_gpu import MAX_PIECES as FUSED_PIECES
from pallas_kernels.fused_layer.mosaic_gpu import MAX_ROWS as FUSED_ROWS
from pallas_kernels.matmul import mosaic_wide_plan
from pallas_kernels.matmul.support import GROUP_SIZE
from qspec_jax.caches.cache import Reads
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.models.config import LlamaConfig
from qspec_jax.planning.devices import DEVICES, Device
from qspec_jax.planning.operations import (
    Work,
    int4_bytes,
    int4_matrix_bytes,
    layer_kinds,
    linear_parameters,
    linear_shapes,
    matrix_parameters,
    pass_work,
    prefill_work,
)
from qspec_jax.planning.steps import OutlinedDraft, StepReads, own_step

TILE_ROWS = 8  # query rows that a tile of attention has, for each KV head
FUSED_WIDTH = 4096  # numbers of the residual stream in a piece of the fused layer
INT4_TILE_ROWS = 4  # rows of activations in a tile of the INT4 matmul
# Bytes of activations, as the INT4 matmul stores them, that fit beside the weights in shared memory; more are placed in parts.
PLACED_BYTES = 160_000
REFERENCE_ITEM_BYTES = 4  # the plain-JAX INT4 matmul writes and reads its weights in float32


@dataclasses.dataclass(frozen=True)
class Efficiencies:
    """Coefficients of the model, in seconds on an H100 or H200 unless said otherwise. All are fitted but launch_small, which is assumed.

    Attributes:
        layer_one_row, layer_rows: a layer with its own weights, besides its bytes and its attention, with one row of activations and with
            several.
        layer_int4: the same of a fused INT4 layer.
        layer_batch: any layer, for each further row of a batch.
        launch_attention, launch_attention_triton, launch_matmul, launch_small: a launch of attention, of an INT4 matmul, of a norm or RoPE.
        launch_listed: a launch of attention over listed groups, with the launch that merges partial results.
        matmul_floor: an INT4 matmul in a launch of its own, as a share of the time of its bytes.
        full, int4, int8: attention, for each token and KV head, besides its bytes, by what is read.
        tile: attention, for each further tile of query rows.
        tile_exposed: the same on a device that reads faster than an H100, where reading hides less of it.
        observed: finding each group's mass, for each quantized token and tile of query rows.
        int4_default, int8_default: int4 and int8 on a device other than the H100 without a tuned configuration.
        int4_triton, int8_triton, tile_triton: int4, int8 and tile of the Triton kernels.
        int4_rows: the INT4 matmul, for each weight and each further tile of rows.
        int4_parts: the same where activations are placed in parts.
        launch_wide: a launch of the INT4 matmul of many rows.
        int4_wide: that kernel, for each row and each single weight of the busiest block, times the number of multiprocessors.
        round: sampling and all else that a round does once.
        flush_layer: a flush, for each layer.
        prefill_share: the share of the bf16 peak that prefill reaches.
        prefill_call: a call of prefill.
    """

    layer_one_row: float = 1.606e-05
    layer_rows: float = 3.454e-05
    layer_int4: float = 1.027e-05
    layer_batch: float = 3.29e-06
    launch_attention: float = 8.23e-06
    launch_attention_triton: float = 2.36e-05
    launch_listed: float = 7.52e-06
    launch_matmul: float = 2.38e-06
    launch_small: float = 2e-6
    matmul_floor: float = 0.14
    full: float = 5.42e-13
    int4: float = 5.19e-12
    int8: float = 6.32e-12
    tile: float = 1.22e-12
    tile_exposed: float = 8.46e-12
    observed: float = 2.22e-12
    int4_default: float = 1.591e-11
    int8_default: float = 3.355e-11
    int4_triton: float = 2.11e-11
    int8_triton: float = 1.159e-10
    tile_triton: float = 1.55e-11
    int4_rows: float = 1.95e-14
    int4_parts: float = 6.06e-14
    launch_wide: float = 6.19e-06
    int4_wide: float = 2.91e-15
    round: float = 0.000149
    flush_layer: float = 2.19e-05
    prefill_share: float = 0.577
    prefill_call: float = 0.00986


FITTED = Efficiencies()
# Those that are arithmetic of a kernel, and so faster on a device with more multiprocessors or a higher clock.
ARITHMETIC = {name for name in Efficiencies.__dataclass_fields__ if name.startswith(("full", "int4", "int8", "tile", "observed"))}


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of something: seconds by bytes and FLOPs alone, and how often each coefficient of `Efficiencies` counts besides. copying:
    seconds of copies from host memory, beside which all that runs."""

    floor: float
    counts: Counter = dataclasses.field(default_factory=Counter)
    copying: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        counts = Counter({k: self.counts[k] + other.counts[k] for k in self.counts | other.counts})
        return Cost(self.floor + other.floor, counts, self.copying + other.copying)

    def __rmul__(self, count: float) -> "Cost":
        return Cost(count * self.floor, Counter({name: count * times for name, times in self.counts.items()}), count * self.copying)

    def seconds(self, device: Device, efficiencies: Efficiencies = FITTED) -> float:
        """The time on a device."""

        def scale(name):
            return slowness(device) if name in ARITHMETIC else 1.0

        computing = self.floor + sum(count * scale(name) * getattr(efficiencies, name) for name, count in self.counts.items())
        return max(computing, self.copying)


def slowness(device: Device) -> float:
    """How much longer a device takes over what its multiprocessors do than an H100."""
    reference = DEVICES["h100"]
    return reference.multiprocessors * reference.clock_ghz / (device.multiprocessors * device.clock_ghz)


def pass_cost(device: Device, reads: StepReads, group_size: int, *, batch: int = 1, tokens: int = 1, observe: bool = False) -> Cost:
    """The time of feeding `tokens` new tokens to each of `batch` rows, in bfloat16. group_size: tokens of a key group, by which tuned
    configurations are found. observe: finding what they attend to as well."""
    work = pass_work(reads, batch=batch, tokens=tokens)
    c, rows = reads.config, batch * tokens
    quantized = [i for i, layer in enumerate(reads.layers) if layer.weight_bits == 4]
    int4 = layer_kinds(c, quantized)
    own = work.linear.stored_bytes - sum(count * int4_bytes(c, i) for i, count in int4.items())
    in_int4 = sum(count * linear_parameters(c, i) for i, count in int4.items())
    share = 1 - in_int4 / (matrix_parameters(c) + c.vocab_size * c.hidden_size)
    rest = Work(share * work.linear.flops, own, work.linear.activation_bytes)
    counts = Counter({("layer_one_row" if rows == 1 else "layer_rows"): len(reads.layers) - len(quantized)})
    counts["layer_batch"] = (batch - 1) * len(reads.layers)
    of_cache = math.ceil(tokens / MAX_ROUND_TOKENS) * batch * reads.cache_bytes / device.read_bytes_per_s
    cost = Cost(roofline(device, rest) + of_cache, counts, batch * reads.host_bytes / device.host_bytes_per_s)
    for number, count in int4.items():
        cost += count * _int4_layer(device, c, number, rows)
    for layer, count in Counter(reads.layers).items():
        cost += count * attention_cost(device, c, layer, group_size, batch=batch, tokens=tokens, observe=observe)
    return cost


def draft_cost(
    device: Device, draft: OutlinedDraft, target: LlamaConfig, cache: CacheConfig, *, context: int, batch: int, tokens=1, capacity=0
) -> Cost:
    """A pass of a draft's model over `tokens` new tokens of each row, after `context` tokens in the target's cache. capacity: tokens that a
    row of it has room for, if there are more. Only for a draft with a model."""
    reads = draft.reads(cache.outline(target, max(capacity, context + tokens)), context + tokens)
    return pass_cost(device, reads, cache.group_size_for(target.head_dim), batch=batch, tokens=tokens)


def target_cost(
    device: Device, target: LlamaConfig, cache: CacheConfig, *, context: int, batch: int, tokens: int, observe=False, capacity=0
) -> Cost:
    """A pass of the target over `tokens` new tokens of each row: a verification, or with one token a step without a draft. capacity: as of
    `draft_cost`."""
    reads = own_step(target, cache.outline(target, max(capacity, context + tokens)), context + tokens)
    return pass_cost(device, reads, cache.group_size_for(target.head_dim), batch=batch, tokens=tokens, observe=observe)


def roofline(device: Device, work: Work) -> float:
    """Seconds of work, by its bytes or its FLOPs, whichever take longer."""
    return max(work.bytes / device.read_bytes_per_s, work.flops / (device.flops_per_s * FITTED.prefill_share))


def _int4_layer(device: Device, config: LlamaConfig, layer: int, rows: int) -> Cost:
    """The linear layers of a layer in INT4: fused in one launch, one launch each, or the reference where there are too many rows."""
    if rows > max_int4_rows(device):
        dequantized = 2 * REFERENCE_ITEM_BYTES * linear_parameters(config, layer)
        return Cost((int4_bytes(config, layer) + dequantized) / device.read_bytes_per_s, Counter(layer_rows=1))
    pieces = rows * math.ceil(config.hidden_size / FUSED_WIDTH)
    fusable = config.is_fusable and not (config.output_bias or config.mlp_bias)
    fused = fusable and device.kernels == "mosaic_gpu" and rows <= FUSED_ROWS and pieces <= FUSED_PIECES
    if not fused:
        cost = Cost(0.0, Counter(launch_small=4))  # two norms, RoPE, the gated activation
        for out, inputs in linear_shapes(config, layer):
            cost += int4_matmul_cost(device, out, inputs, rows, config.int4_group_size)
        return cost
    counts = Counter(layer_int4=1)
    for out, inputs in linear_shapes(config, layer):
        counts.update(_int4_tiles(out, inputs, rows))
    return Cost(int4_bytes(config, layer) / device.read_bytes_per_s, counts)


def int4_kernels(device: Device) -> list[dispatch.Kernel]:
    """The INT4 matmul's kernels that run on a device, best first."""
    return [kernel for kernel in dispatch.kernels("matmul", "int4") if kernel.implementation == device.kernels]


def max_int4_rows(device: Device) -> int:
    """The most rows of activations that a kernel multiplies by INT4 weights; above, they are dequantized in every step."""
    return max(kernel.max_rows for kernel in int4_kernels(device))


def int4_matmul_cost(device: Device, out: int, inputs: int, rows: int, group_size: int | None = None) -> Cost:
    """An INT4 matmul in a launch of its own. group_size: see `LlamaConfig.int4_group_size`."""
    floor = int4_matrix_bytes(out, inputs, group_size) / device.read_bytes_per_s
    modules = [kernel.module_name for kernel in int4_kernels(device) if kernel.takes_rows(rows)]
    if "mosaic_wide" in modules and inputs % (mosaic_wide_plan.STEP_GROUPS * GROUP_SIZE) == 0:
        plan = mosaic_wide_plan.Plan.fitting(rows, inputs // GROUP_SIZE, (out,), device.multiprocessors)
        weights = device.multiprocessors * plan.max_weights
        return Cost(floor, Counter(launch_wide=1, int4_wide=rows * weights))
    return Cost(floor, Counter(launch_matmul=1, matmul_floor=floor) + _int4_tiles(out, inputs, rows))


def _int4_tiles(out: int, inputs: int, rows: int) -> Counter:
    tiles = math.ceil(rows / INT4_TILE_ROWS)
    placed = 2 * INT4_TILE_ROWS * tiles * inputs  # two bytes each
    name = "int4_rows" if placed <= PLACED_BYTES else "int4_parts"
    return Counter({name: (tiles - 1) * out * inputs})


def attention_cost(
    device: Device, config: LlamaConfig, layer: Reads, group_size: int, *, batch: int = 1, tokens: int = 1, observe: bool = False
) -> Cost:
    """Attention of one layer over rows of one length, besides its bytes. observe: also how much each group was attended to."""
    c = config
    launches = math.ceil(tokens / MAX_ROUND_TOKENS)
    tiles = math.ceil(min(tokens, MAX_ROUND_TOKENS) * c.num_heads / c.num_kv_heads / TILE_ROWS)
    heads = launches * batch * c.num_kv_heads
    triton = "_triton" if device.kernels == "triton" else ""
    launch = "launch_listed" if layer.listed and not triton else f"launch_attention{triton}"
    counts = Counter({launch: launches, "full": heads * layer.full, "tile": heads * layer.full * (tiles - 1)})
    counts[_kind(device, c, layer.planes, tiles, group_size, batch)] += heads * layer.quantized
    counts[f"tile{triton or ('_exposed' if _reads_faster(device) else '')}"] += heads * layer.quantized * (tiles - 1)
    counts["observed"] += observe * heads * layer.quantized * tiles
    return Cost(0.0, counts)


def _kind(device: Device, config: LlamaConfig, planes: int, tiles: int, group_size: int, batch: int) -> str:
    """The coefficient of attention over quantized tokens.

    A configuration counts that was tuned for this very `Plan.problem`; blocks are taken to have all query rows of a KV head. This is
    stricter than the kernel, which also takes a configuration of a problem alike (`mosaic_plan.alike`), for which there is no coefficient.
    """
    name = "int4" if planes == 1 else "int8"
    if device.kernels == "triton":
        return f"{name}_triton"
    if not _defaults_are_slower(device):
        return name
    shape = dict(head_dim=config.head_dim, group_size=group_size, heads=config.num_kv_heads)
    problem = dict(planes=planes, batch=batch, block_tiles=tiles) | shape
    return name if problem in tuning.problems(KERNEL, device.kind) else f"{name}_default"


def _defaults_are_slower(device: Device) -> bool:
    """Whether attention without a tuned configuration has coefficients of its own. The defaults did well on the H100."""
    return device.kernels == "mosaic_gpu" and device.kind not in ("", DEVICES["h100"].kind)


def _reads_faster(device: Device) -> bool:
    """Whether reading hides less of what Mosaic's attention computes than on an H100."""
    return device.kernels == "mosaic_gpu" and device.read_bytes_per_s * slowness(device) > 1.1 * DEVICES["h100"].read_bytes_per_s


def tuned(device: Device, cost: Cost) -> bool | None:
    """Whether attention over quantized tokens has, in all that a cost counts, configurations that were tuned on the device. None where it
    reads no such tokens, and on a device with one coefficient for both."""
    if not _defaults_are_slower(device):
        return None
    if any(cost.counts[name] for name in ("int4_default", "int8_default")):
        return False
    return True if any(cost.counts[name] for name in ("int4", "int8")) else None


def flush_cost(config: LlamaConfig) -> Cost:
    """A flush of one group of some rows, in all layers."""
    return Cost(0.0, Counter(flush_layer=config.num_layers))


def prefill_cost(device: Device, config: LlamaConfig, *, batch: int, tokens: int) -> Cost:
    """Prefill of prompts of one length."""
    work = prefill_work(config, batch=batch, tokens=tokens).total
    return Cost(roofline(device, work), Counter(prefill_call=1))
