"""Whole prompts: padding, and computation by chunks, such as attention in full precision."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.attention.reference import attend_readable
from pallas_kernels.dispatch import compute_capability
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.views import FULL_PRECISION

# Tokens in a chunk of a layer's matmuls: with fewer, a large GPU has too few tiles of outputs for all of its multiprocessors.
CHUNK_TOKENS = 2048
CHUNK_QUERIES = 512  # queries in a chunk of attention without cuDNN, whose logits are in float32
CUDNN_HEAD_DIM = 128  # the largest that cuDNN's attention takes on every device
FLASH_BYTES = 1 << 27  # approximate bytes of queries that cuDNN's attention is given at a time: more than enough to fill a GPU
# Approximate bytes of a prompt's keys, those of some heads, that are quantized at a time: the intermediate results take several times that.
QUANTIZED_BYTES = 1 << 27


def bucket(tokens: int) -> int:
    """The padded length of a prompt: a multiple of 64, four sizes to an octave, so that few lengths are compiled."""
    step = max(64, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def padded(rows: Sequence[Sequence[int]]) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
    """Token ids for `prefill`, padded to the longest row's bucket, and the length of each row."""
    tokens = np.zeros((len(rows), bucket(max(map(len, rows)))), np.int32)
    for row, ids in zip(tokens, rows):
        row[: len(ids)] = ids
    return jnp.asarray(tokens), jnp.array([len(ids) for ids in rows], jnp.int32)


def attend_prompt(
    q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], *, window: int | None = None
) -> Float[Array, "B S N H"]:
    """Causal attention within each row, in full precision.

    cuDNN's flash attention if it supports the device and the shapes, some heads at a time; otherwise a chunk of queries at a time.

    Args:
        q, k, v: queries, keys and values. S: a `bucket`.
        window: the number of tokens that a token attends to, itself included; None: all before it.
    """
    if compute_capability() >= 8 and q.dtype == jnp.bfloat16 and q.shape[-1] <= CUDNN_HEAD_DIM and q.shape[-1] % 8 == 0:
        local = {} if window is None else {"local_window_size": (window - 1, 0)}
        flash = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn", **local)
        return replaced(flash, q, k, v, axis=2, parts=math.gcd(k.shape[2], 1 << (q.nbytes // FLASH_BYTES).bit_length()))
    everything = FullLayer(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
    ends = jnp.broadcast_to(jnp.arange(1, q.shape[1] + 1, dtype=jnp.int32), q.shape[:2])

    def attend(q, end):
        lengths = Lengths(jnp.zeros_like(end[:, -1]), end[:, -1])
        return decode_attention(q, everything, lengths, FULL_PRECISION, implementation="reference")[0]

    def attend_window(q, end):
        size = min(k.shape[1], q.shape[1] + window - 1)  # tokens that any of these queries attends to
        first = jnp.clip(end[0, 0] - window, 0, k.shape[1] - size)
        near = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, 2), everything)
        position, reader = first + jnp.arange(size), end[..., None] - 1
        return attend_readable(q, near, (position <= reader) & (position > reader - window))[0]

    return replaced(attend if window is None else attend_window, q, ends, parts=equal_parts(q.shape[1], CHUNK_QUERIES))


def equal_parts(tokens: int, max_tokens: int) -> int:
    """The smallest number of equal parts of at most `max_tokens` each: each part of a matmul reads all of its weights."""
    return next(parts for parts in range(-(-tokens // max_tokens), tokens + 1) if tokens % parts == 0)


def replaced(function: Callable, x: Array, *args: Array, parts: int, axis: int = 1) -> Array:
    """Overwrites x with function(x, *args), of the same shape, in equal parts of all arguments along an axis, one after the other."""

    def step(i: Array, x: Array) -> Array:
        def part(a: Array) -> Array:
            return lax.dynamic_slice_in_dim(a, i * (a.shape[axis] // parts), a.shape[axis] // parts, axis)

        return lax.dynamic_update_slice_in_dim(x, function(part(x), *map(part, args)), i * (x.shape[axis] // parts), axis)

    return lax.fori_loop(0, parts, step, x)


def by_chunks(function: Callable, *args: Array, max_tokens: int | None = None, axis: int = 1) -> Any:
    """function(*args), arrays [B, S, ...] in and out, computed in equal chunks of S.

    Args:
        function: of parts of the arrays.
        args: the arrays.
        max_tokens: the maximum size of a chunk; None: `CHUNK_TOKENS`.
        axis: the axis of the arguments along which they are cut; the results are joined along axis 1.
    """
    S = args[0].shape[axis]
    parts = equal_parts(S, max_tokens or CHUNK_TOKENS)
    if parts == 1:
        return function(*args)
    chunk = S // parts
    # Zeros that depend on the barrier: otherwise XLA would make the arrays for the results of all layers at once.
    args, zero = lax.optimization_barrier((args, jnp.int32(0)))

    def of_chunk(i: Array | int) -> Any:
        return function(*(lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=axis) for x in args))

    def step(i: Array, results: Any) -> Any:
        return jax.tree.map(lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, i * chunk, axis=1), results, of_chunk(i))

    shapes = jax.eval_shape(lambda: of_chunk(0))
    return lax.fori_loop(0, parts, step, jax.tree.map(lambda x: jnp.full((x.shape[0], S, *x.shape[2:]), zero, x.dtype), shapes))


def by_heads(function: Callable, *args: Array) -> Any:
    """function(*args), arrays [B, K, S, ...] in and [B, K, ...] out, computed for some KV heads of whole prompts at a time."""
    heads, size = args[0].shape[1], args[0].nbytes
    swapped = functools.partial(jnp.swapaxes, axis1=1, axis2=2)

    def of_part(*part: Array) -> Any:
        # Sliced in the layout of prefill, token by token, and transposed afterwards: XLA would transpose whole arrays and hold both.
        return function(*(swapped(with_layout_constraint(x, Layout(tuple(range(x.ndim))))) for x in part))

    return by_chunks(of_part, *map(swapped, args), max_tokens=max(1, QUANTIZED_BYTES * heads // size), axis=2)
