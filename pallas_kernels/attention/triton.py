"""Decode attention through jax-triton, for NVIDIA GPUs from Ampere on: split over the tokens, partial results merged at the end."""

import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention import support
from pallas_kernels.dispatch import compute_capability
from pallas_kernels.kv_format import FullLayer, HierarchicalLayer, Lengths

MAX_OUTPUTS = 64 * 128  # rows times channels of a program; more rows are another one's, which reads the cache again
RESIDENT_WARPS = 8  # of a multiprocessor, where each takes all the registers that it can


@dataclasses.dataclass(frozen=True)
class Config:
    """splits: programs that share the tokens of a KV head. tile: tokens of the full-precision cache that are read at a time."""

    splits: int
    num_warps: int
    num_stages: int = 1
    tile: int = 32


def unsupported(q: Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, *, planes: int | None) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if not (importlib.util.find_spec("jax_triton") and importlib.util.find_spec("triton")):
        return "needs jax-triton, which is not installed"
    if compute_capability() < 8:
        return "needs an NVIDIA GPU of compute capability 8.0 or newer"
    return support.unsupported(q, layer, lengths)


def decode_attention(
    q: Float[Array, "B T N H"],
    layer: HierarchicalLayer | FullLayer,
    lengths: Lengths,
    *,
    planes: int | None,
    config: Config | None = None,
) -> Float[Array, "B T N H"]:
    """See `pallas_kernels.attention.decode_attention`."""
    import jax_triton

    from pallas_kernels.attention import triton_kernel

    B, T, N, H = q.shape
    buffer = layer if isinstance(layer, FullLayer) else layer.buffer
    K, capacity = buffer.keys.shape[1:3]
    rows = T * (N // K)
    block_rows = min(64, MAX_OUTPUTS // H, max(16, 2 ** math.ceil(math.log2(rows))))
    row_blocks = math.ceil(rows / block_rows)
    if isinstance(layer, FullLayer) or layer.groups == 0:
        planes, groups, group_size = 0, 0, 0
        quantized = [q] * 8  # not read
    else:
        groups, group_size = layer.groups, layer.group_size
        quantized = [x for p in (layer.keys, layer.values) for x in (p.upper, p.lower, p.scale, p.zero)]
    if config is None:
        work = groups + math.ceil(capacity / 32)
        config = default_config(B * K * row_blocks, work, H, block_rows, planes, getattr(jax.devices()[0], "core_count", 132))

    partial = jax.ShapeDtypeStruct((B * K, config.splits, rows), jnp.float32)
    out, top, total = jax_triton.triton_call(
        q,
        lengths.quantized,
        lengths.buffered,
        *quantized,
        buffer.keys,
        buffer.values,
        kernel=triton_kernel.attend,
        name=f"decode_attention_{f'int{4 * planes}' if planes else 'full'}",
        out_shape=(jax.ShapeDtypeStruct((*partial.shape, H), jnp.float32), partial, partial),
        grid=(B * K, config.splits, row_blocks),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        TO_BASE_2=math.log2(math.e) / math.sqrt(H),
        T=T,
        K=K,
        PER_HEAD=N // K,
        H=H,
        M=block_rows,
        PLANES=planes,
        GROUPS=groups,
        G=group_size,
        CAPACITY=capacity,
        TILE=config.tile,
        SPLITS=config.splits,
    )
    weight = jnp.exp2(top - top.max(1, keepdims=True))
    out = (out * weight[..., None]).sum(1) / (total * weight).sum(1)[..., None]
    out = out.reshape(B, K, T, N // K, H)
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q.dtype)


@functools.cache
def default_config(programs: int, work: int, head_dim: int, block_rows: int, planes: int, multiprocessors: int) -> Config:
    """programs: without splits. work: groups and tiles that there can be, for a KV head. planes: 0 for a full-precision cache."""
    # One warp waits for nobody. More share the registers that larger tiles need.
    alone = planes == 1 and head_dim <= 128 and block_rows == 16
    num_warps = 1 if alone else 2 if planes == 1 and max(head_dim // 8, block_rows) <= 32 else 4
    splits = multiprocessors * RESIDENT_WARPS // (num_warps * programs)
    return Config(
        splits=max(1, min(splits, work)),
        num_warps=num_warps,
        num_stages=1 if planes else 3 if head_dim <= 128 else 2,
        tile=64 if num_warps == 4 and head_dim <= 128 else 32,
    )
