"""Prefill: full-precision attention over the prompt, layer by layer, so that one layer's keys and values are alive at a time.

Within a layer the prompt is worked on in chunks: memory grows linearly with its length (the hidden state and one layer's K/V).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.kv_format import FullLayer, Lengths
from qspec_jax.cache import Cache
from qspec_jax.model import Llama

CHUNK_TOKENS = 512


def bucket(tokens: int) -> int:
    """The padded length of a prompt: a multiple of 64, four sizes to an octave, so that few lengths are compiled."""
    step = max(64, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def prefill(model: Llama, tokens: Int[Array, "B S"], n: Int[Array, "B"], cache: Cache) -> tuple[Float[Array, "B V"], Cache]:
    """Logits after the last token of each prompt, and the cache that holds the prompts.

    tokens: prompts of n[b] tokens padded on the right to S, a `bucket`. cache: empty.
    """
    B, S = tokens.shape
    chunk = min(CHUNK_TOKENS, S & -S)
    split = lambda x: jnp.moveaxis(x.reshape(B, S // chunk, chunk, *x.shape[2:]), 1, 0)
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(B, S, *x.shape[3:])
    positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    angles = jax.tree.map(split, model.cos_sin(positions, jnp.broadcast_to(n[:, None], (B, S))))
    x = split(model.embed(tokens))
    ends = (jnp.arange(S // chunk) + 1) * chunk
    layers = []
    for i, block in enumerate(model.layers):
        # Queries are recomputed chunk by chunk below, which is cheaper than keeping them: XLA drops what is unused in each map.
        keys, values = (
            jnp.swapaxes(join(y), 1, 2) for y in lax.map(lambda part, block=block: block.before_attention(*part)[1:], (x, *angles))
        )
        everything = FullLayer(keys, values)

        def attend(part, block=block, everything=everything):
            x, cos, sin, end = part
            q, _, _ = block.before_attention(x, cos, sin)
            lengths = Lengths(jnp.zeros(B, jnp.int32), jnp.full(B, end, jnp.int32))
            return block.after_attention(x, decode_attention(q, everything, lengths, planes=None))

        x = lax.map(attend, (x, *angles, ends))
        # The barrier makes XLA quantize this layer before it works on the next.
        x, layer = lax.optimization_barrier((x, cache.fill(i, keys, values, n)))
        layers.append(layer)
    last = jax.vmap(lambda row, at: row[at - 1])(join(x), n)
    return model.logits(last[:, None])[:, 0], cache.filled(tuple(layers), n)
