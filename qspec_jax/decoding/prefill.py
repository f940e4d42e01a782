"""Prefill: full-precision attention over the prompt, layer by layer, so that one layer's keys and values are alive at a time.

Within a layer the prompt is worked on in chunks: memory grows linearly with its length (a few hidden states and one layer's K/V). That
is so on a GPU; for a CPU XLA orders the layers' operations otherwise, and keeps several alive."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from qspec_jax.caches.registry import Cache
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import CHUNK_TOKENS, _by_chunks, _replaced, attend_prompt, equal_parts


def prefill(model: Llama, tokens: Int[Array, "B S"], n: Int[Array, "B"], cache: Cache) -> tuple[Float[Array, "B V"], Cache]:
    """Logits after the last token of each prompt, and the cache that holds the prompts.

    tokens: prompts of n[b] tokens padded on the right to S, a `bucket`. cache: empty.
    """
    S = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(S), tokens.shape)
    angles = model.cos_sin(positions, jnp.broadcast_to(n[:, None], tokens.shape))
    x = model.embed(tokens)
    layers = []
    for i, block in enumerate(model.layers):
        q, k, v = _by_chunks(block.before_attention, x, *model.angles_of(i, *angles))
        attended = attend_prompt(q, k, v)
        x = _replaced(block.after_attention, x, attended, parts=equal_parts(S, CHUNK_TOKENS))
        # The barrier makes XLA quantize this layer before it works on the next.
        x, layer = lax.optimization_barrier((x, cache.fill(i, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), n)))
        layers.append(layer)
    last = jax.vmap(lambda row, at: row[at - 1])(x, n)
    return model.logits(last[:, None])[:, 0], cache.filled(tuple(layers), n)
