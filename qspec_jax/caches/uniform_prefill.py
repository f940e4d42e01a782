"""Prefill in blocks of one row and one size, so that a prompt's bits depend neither on its padding nor on other rows."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.dispatch import fixed_order
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.views import FULL_PRECISION
from qspec_jax.caches.cache import Cache
from qspec_jax.models.block import Angles, Block
from qspec_jax.models.llama import Llama
from qspec_jax.models.uniform import WIDTH, alone, of_row, with_row

BLOCK = 64  # tokens; every padded length is a multiple of it


def filled_layer(
    block: Block, angles: Angles, x: Float[Array, "B S D"], n: Int[Array, "B"], cache: Cache, layer: int
) -> tuple[Float[Array, "B S D"], Any, Float[Array, "B S N H"]]:
    """The hidden states after a layer without a sliding window, the layer of the cache filled with the prompts, and the queries.

    Args:
        block: the layer.
        angles: as `prefill.embedded` returns them.
        x: the hidden states before it.
        n: tokens of each prompt.
        cache: an empty cache.
        layer: the number of the layer in the cache.
    """
    q, k, v = _by_blocks(block.before_attention, n, (x, *block.angles_of(angles)))
    keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    ends = jnp.broadcast_to(jnp.arange(1, x.shape[1] + 1, dtype=jnp.int32), x.shape[:2])

    def attended(x: Array, q: Array, end: Array, keys: Array, values: Array) -> Array:
        lengths = Lengths(jnp.zeros_like(end[:, -1]), end[:, -1])
        with fixed_order():
            found, _ = decode_attention(q, FullLayer(keys, values), lengths, FULL_PRECISION, implementation="reference")
        return block.after_attention(x, found)

    x = _by_blocks(attended, n, (x, q, ends), (keys, values))
    return x, cache.fill(layer, keys, values, n), q


def logits_of_rows(model: Llama, last: Float[Array, "B 1 D"], n: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Logits of one hidden state of each row. n: tokens of each prompt."""

    # Products of one row alone are none of a matmul's: XLA multiplies and sums them in an order that depends on what is around.
    padded = jnp.pad(last, ((0, 0), (0, WIDTH - 1), (0, 0)))

    def of(b: Array) -> Array:
        return alone(model.logits, of_row(padded, b), never=n[0] < 0)[:, 0]

    shape = jax.eval_shape(of, jnp.int32(0))
    empty = jnp.zeros((len(n), *shape.shape[1:]), shape.dtype)
    return lax.fori_loop(0, len(n), lambda b, found: with_row(found, b, of(b)), empty)


def _by_blocks(function: Callable, n: Int[Array, "B"], parts: Sequence[Array], rows: Sequence[Array] = ()) -> Any:
    """function(*parts, *rows) for each block that has tokens of a row; the results, [B, S, ...], are 0 in other blocks.

    Args:
        function: of a block of each array in `parts`, [1, BLOCK, ...], and one row of each in `rows`; its results are [1, BLOCK, ...].
        n: tokens of each row.
        parts: arrays [B, S, ...].
        rows: arrays [B, ...].
    """
    B, S = parts[0].shape[:2]

    def of_block(b: Array, i: Array) -> Any:
        block = [lax.dynamic_slice_in_dim(part, i * BLOCK, BLOCK, 1) for part in of_row(tuple(parts), b)]
        return alone(function, *block, *of_row(tuple(rows), b), never=n[0] < 0)

    def of_one_row(b: Array, found: Any) -> Any:
        def step(i: Array, row: Any) -> Any:
            def put(whole: Array, part: Array) -> Array:
                return lax.dynamic_update_slice_in_dim(whole, part, i * BLOCK, 1)

            return jax.tree.map(put, row, of_block(b, i))

        return with_row(found, b, lax.fori_loop(0, (n[b] + BLOCK - 1) // BLOCK, step, of_row(found, b)))

    shapes = jax.eval_shape(of_block, jnp.int32(0), jnp.int32(0))
    empty = jax.tree.map(lambda x: jnp.zeros((B, S, *x.shape[2:]), x.dtype), shapes)
    return lax.fori_loop(0, B, of_one_row, empty)
