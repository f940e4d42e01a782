"""Prefill: full-precision attention over the prompt, layer by layer, so that one layer's keys and values are alive at a time.

Within a layer the prompt is worked on in chunks: on a GPU memory grows linearly with its length, by a few hidden states and the keys and
values of one layer. For a CPU XLA orders operations differently, and keeps those of several layers alive.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from qspec_jax.caches.cache import Cache
from qspec_jax.caches.uniform_prefill import filled_layer, logits_of_rows
from qspec_jax.models.block import Angles, Block
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import CHUNK_TOKENS, attend_prompt, by_chunks, equal_parts, replaced


def prefill(
    model: Llama, tokens: Int[Array, "B S"], n: Int[Array, "B"], cache: Cache, *, num_queries: int = 0, uniform: bool = False
) -> tuple[Float[Array, "B V"], Cache] | tuple[Float[Array, "B V"], Cache, tuple[Float[Array, "B Q N H"], ...]]:
    """Logits after the last token of each prompt, and the cache that holds the prompts.

    Args:
        model: the target.
        tokens: prompts of n[b] tokens, padded on the right to S, the bucket of the longest.
        n: tokens of each prompt.
        cache: an empty one.
        num_queries: if it is not 0, also returns for each layer the queries after RoPE of this number of last tokens of each prompt, the
            last one in the last row, and zeros before a prompt's first.
        uniform: whether the prompts are computed in blocks of one size, see `uniform_prefill`.
    """
    x, angles = embedded(model, tokens, n)
    x, layers, last_queries = through_layers(model.layers, angles, x, n, cache, num_queries=num_queries, uniform=uniform)
    out = last_logits(model, x, n, uniform=uniform), cache.filled(layers, n)
    return (*out, last_queries) if num_queries else out


def embedded(model: Llama, tokens: Int[Array, "B S"], n: Int[Array, "B"]) -> tuple[Float[Array, "B S D"], Angles]:
    """Embeds the prompts: the hidden states before the first layer, and the tokens' angles (`Llama.angles`). Arguments as of `prefill`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.embed(tokens), model.angles(positions, jnp.broadcast_to(n[:, None], tokens.shape))


def through_layers(
    blocks: Sequence[Block],
    angles: Angles,
    x: Float[Array, "B S D"],
    n: Int[Array, "B"],
    cache: Cache,
    *,
    num_queries: int,
    uniform: bool = False,
) -> tuple[Float[Array, "B S D"], tuple[Any, ...], tuple[Float[Array, "B Q N H"], ...]]:
    """The hidden states after these layers; the layers of the cache, filled with the prompts; and the last queries of each layer, see
    `prefill`.

    Args:
        blocks: the layers.
        angles: as `embedded` returns them.
        x: the hidden states before these layers.
        n: tokens of each prompt.
        cache: an empty cache of the same number of layers.
        num_queries, uniform: see `prefill`.
    """
    layers, last_queries = [], []
    for i, block in enumerate(blocks):
        if uniform:
            x, layer, q = filled_layer(block, angles, x, n, cache, i)
            layers.append(layer)
            last_queries += [_last(q, n, num_queries)] if num_queries else []
            continue
        q, k, v = by_chunks(block.before_attention, x, *block.angles_of(angles))
        cache_queries = min(cache.prompt_queries, q.shape[1])
        # The attended values overwrite the queries, so this barrier makes XLA slice the last queries first. Without it XLA may slice later,
        # and copy all queries before; where it expects memory to be short it slices at the end of the program, and keeps the queries of
        # all layers until then (jax 0.11).
        q, last = lax.optimization_barrier((q, _last(q, n, max(num_queries, cache_queries))))
        attended = attend_prompt(q, k, v, window=block.window)
        x = replaced(block.after_attention, x, attended, parts=equal_parts(x.shape[1], CHUNK_TOKENS))
        # Without this barrier XLA would quantize before it attends where codes go to host memory, and hold what both need at once.
        x, k, v = lax.optimization_barrier((x, k, v))
        fill_args = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), n
        if cache_queries:
            fill_args += (last[:, last.shape[1] - cache_queries :],)
        # This barrier makes XLA quantize this layer before it works on the next.
        x, layer = lax.optimization_barrier((x, cache.fill(i, *fill_args)))
        layers.append(layer)
        if num_queries:
            last_queries.append(last[:, last.shape[1] - num_queries :])
    return x, tuple(layers), tuple(last_queries)


def last_logits(model: Llama, x: Float[Array, "B S D"], n: Int[Array, "B"], *, uniform: bool = False) -> Float[Array, "B V"]:
    """Logits after the last token of each prompt, from the hidden states after the last layer. uniform: see `prefill`."""
    last = jax.vmap(lambda row, at: row[at - 1])(x, n)
    if uniform:
        return logits_of_rows(model, last[:, None], n)
    return model.logits(last[:, None])[:, 0]


def _last(q: Float[Array, "B S N H"], n: Int[Array, "B"], count: int) -> Float[Array, "B Q N H"]:
    """The rows n[b] - count to n[b] - 1 of each prompt; never the padding after a prompt's end."""
    padded = jnp.pad(q, ((0, 0), (count, 0), (0, 0), (0, 0)))
    return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, count, 0))(padded, n)
