"""Caches by name."""

import jax.numpy as jnp

from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from qspec_jax.caches.config import CacheConfig
from qspec_jax.caches.full import FullCache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.models.config import LlamaConfig

Cache = HierarchicalCache | FullCache


def empty_cache(model: LlamaConfig, config: CacheConfig, *, batch: int, capacity: int, num_speculative_tokens: int, dtype) -> Cache:
    """A cache without tokens, for rows of at most `capacity` cached tokens and rounds of `num_speculative_tokens` drafts."""
    lengths = Lengths(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))
    shape = dict(batch=batch, kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype)
    layers = range(model.num_layers)
    if config.kind == "full":
        rows = capacity + num_speculative_tokens + 1
        return FullCache(tuple(FullLayer.zeros(**shape, rows=rows) for _ in layers), lengths)
    G = config.group_size_for(model.head_dim)
    rows = 2 * G + num_speculative_tokens + 1
    groups = max(0, capacity // G - 1)
    layer = lambda: HierarchicalLayer.zeros(**shape, groups=groups, group_size=G, buffer_rows=rows)
    return HierarchicalCache(tuple(layer() for _ in layers), lengths, config.scheme)
