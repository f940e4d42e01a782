"""Prefill: full-precision attention over the prompt, layer by layer, so that one layer's keys and values are alive at a time.

Within a layer the prompt is worked on in chunks: memory grows linearly with its length (a few hidden states and one layer's K/V). That
is so on a GPU; for a CPU XLA orders the layers' operations otherwise, and keeps several alive.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from qspec_jax.caches.cache import Cache
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import CHUNK_TOKENS, attend_prompt, by_chunks, equal_parts, replaced


def prefill(
    model: Llama, tokens: Int[Array, "B S"], n: Int[Array, "B"], cache: Cache, *, queries: int = 0
) -> tuple[Float[Array, "B V"], Cache] | tuple[Float[Array, "B V"], Cache, tuple[Float[Array, "B Q N H"], ...]]:
    """Logits after the last token of each prompt, and the cache that holds the prompts.

    tokens: prompts of n[b] tokens padded on the right to S, a `bucket`. cache: empty. queries: also returns, for each layer, the queries
    after RoPE of the last so many tokens of each prompt, the last one in the last row; zeros stand before a prompt's first token.
    """
    S = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(S), tokens.shape)
    angles = model.cos_sin(positions, jnp.broadcast_to(n[:, None], tokens.shape))
    x = model.embed(tokens)
    layers, last_queries = [], []
    for i, block in enumerate(model.layers):
        q, k, v = by_chunks(block.before_attention, x, *model.angles_of(i, *angles))
        if queries:
            last_queries.append(_last(q, n, queries))
        attended = attend_prompt(q, k, v)
        x = replaced(block.after_attention, x, attended, parts=equal_parts(S, CHUNK_TOKENS))
        # The barrier makes XLA quantize this layer before it works on the next.
        x, layer = lax.optimization_barrier((x, cache.fill(i, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), n)))
        layers.append(layer)
    last = jax.vmap(lambda row, at: row[at - 1])(x, n)
    out = model.logits(last[:, None])[:, 0], cache.filled(tuple(layers), n)
    return (*out, tuple(last_queries)) if queries else out


def _last(q: Float[Array, "B S N H"], n: Int[Array, "B"], count: int) -> Float[Array, "B Q N H"]:
    """The rows n[b] - count to n[b] - 1 of each prompt; the padding behind a ragged prompt's end is never among them."""
    padded = jnp.pad(q, ((0, 0), (count, 0), (0, 0), (0, 0)))
    return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, count, 0))(padded, n)
