"""Projections of tokens, to be rotated and appended to a buffer."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.kv_cache import FullLayer

OUTSIDE = [-3, 39, 40, 2**31 - 1]  # offsets in a buffer of 40 rows that leave no room


def random_projections(batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, rows: int = 40, dtype=jnp.bfloat16) -> tuple:
    r = np.random.default_rng([batch, tokens, heads])
    draw = lambda *shape: jnp.asarray(r.standard_normal(shape), dtype)
    angles = r.uniform(0, 6.28, (batch, tokens, head_dim // 2)).astype(np.float32)
    buffer = FullLayer(draw(batch, kv_heads, rows, head_dim), draw(batch, kv_heads, rows, head_dim))
    offset = jnp.asarray(r.integers(0, rows - max(2, tokens), batch, endpoint=True), jnp.int32)
    return draw(batch, tokens, (heads + 2 * kv_heads) * head_dim), jnp.cos(angles), jnp.sin(angles), buffer, offset
