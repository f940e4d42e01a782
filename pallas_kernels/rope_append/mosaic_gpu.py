"""RoPE and append on NVIDIA Hopper: one launch a layer, which writes to the buffer where it lies, for the few tokens of a decode step.

A thread rotates two channels of a head with the two that are half a head further, and writes all four.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import in_fixed_order, no_mosaic_gpu
from pallas_kernels.formats.kv_cache import FullLayer
from pallas_kernels.gpu.launch import launch

THREADS = 128  # of a block: a warpgroup
MAX_TOKENS = 256  # of all rows together; for more XLA does well


def unsupported(qkv: Array, cos: Array, sin: Array, buffer: FullLayer, offset: Int[Array, "B"]) -> str | None:
    if reason := no_mosaic_gpu():
        return reason
    if others := {a.dtype.name for a in (qkv, buffer.keys, buffer.values)} - {"bfloat16"}:
        return f"needs bfloat16, not {', '.join(sorted(others))}"
    if offset.dtype != jnp.int32:
        return f"needs offsets in int32, not {offset.dtype}"
    if (tokens := math.prod(qkv.shape[:2])) > MAX_TOKENS and not in_fixed_order():
        return f"supports up to {MAX_TOKENS} tokens, not {tokens}"
    if (rows := buffer.keys.shape[2]) < max(2, qkv.shape[1]):
        return f"needs a buffer of at least {max(2, qkv.shape[1])} rows, not {rows}"
    if (head_dim := buffer.keys.shape[-1]) % 4:
        return f"supports head_dim in multiples of 4, not {head_dim}"
    return None


def rotate_and_append(
    qkv: Array, cos: Array, sin: Array, buffer: FullLayer, offset: Int[Array, "B"]
) -> tuple[Float[Array, "B T N H"], FullLayer]:
    return run(qkv, cos.astype(qkv.dtype), sin.astype(qkv.dtype), buffer, offset)


# A function of its own in the program: however many layers call it, it is lowered once.
@jax.jit
def run(qkv: Array, cos: Array, sin: Array, buffer: FullLayer, offset: Int[Array, "B"]) -> tuple[Array, FullLayer]:
    """One launch. cos, sin: in bfloat16."""
    B, T, channels = qkv.shape
    _, kv_heads, rows, head_dim = buffer.keys.shape
    heads = channels // head_dim - 2 * kv_heads
    parts = math.ceil(channels // 4 / THREADS)
    emit = functools.partial(_emit_part, heads, kv_heads, rows, head_dim, T, parts)
    inputs = {"qkv": qkv, "cos": cos, "sin": sin, "offset": offset}
    outputs = {"q": jax.ShapeDtypeStruct((B, T, heads, head_dim), jnp.bfloat16)}
    updated = {"keys": buffer.keys, "values": buffer.values}
    found = launch("rotate_and_append", emit, inputs, outputs, B * T * parts, 1, 128, updated)
    return found["q"], FullLayer(found["keys"], found["values"])


def _emit_part(heads: int, kv_heads: int, rows: int, head_dim: int, tokens: int, parts: int, refs: dict) -> None:
    from pallas_kernels.gpu import numerics, ptx

    at = {name: ptx.address(ref) for name, ref in refs.items()}
    block = ptx.block_index()
    place, item = block // parts, block % parts * THREADS + ptx.thread_index()  # of all tokens, of the token's pairs
    pairs, head_bytes = head_dim // 4, 2 * head_dim
    every = heads + 2 * kv_heads
    with ptx.when(item < every * pairs):
        head, within = item // pairs, ptx.i64(item % pairs * 4)
        half = head_dim  # bytes
        source = at["qkv"] + ptx.i64((place * every + head) * head_bytes) + within
        (a,), (b,) = ptx.load_global(source), ptx.load_global(source + half)
        angle = ptx.i64(place * half) + within
        (cos,), (sin,) = (ptx.load_global(at[name] + angle) for name in ("cos", "sin"))
        offset = ptx.load_global(at["offset"] + ptx.i64(place // tokens) * 4)[0]
        # An offset without room moves to where there is room, as in the reference: nothing is written beyond the buffer.
        offset = ptx.maximum(ptx.minimum(offset, ptx.i32(rows - max(2, tokens))), ptx.i32(0))
        row = offset + place % tokens
        first, second = numerics.rotated(a, b, cos, sin)
        is_query, is_value = head < heads, ptx.i32(heads + kv_heads - 1) < head
        kv_head = head - ptx.select(is_value, ptx.i32(heads + kv_heads), ptx.select(is_query, ptx.i32(0), ptx.i32(heads)))
        kept = ((ptx.i64(place // tokens) * kv_heads + ptx.i64(kv_head)) * rows + ptx.i64(row)) * head_bytes
        array = ptx.select(is_value, at["values"], at["keys"])
        to = ptx.select(is_query, at["q"] + ptx.i64((place * heads + head) * head_bytes), array + kept) + within
        ptx.store_global(to, ptx.select(is_value, a, first))
        ptx.store_global(to + half, ptx.select(is_value, b, second))
