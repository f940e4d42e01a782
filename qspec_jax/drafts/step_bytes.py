"""The bytes that a step of a draft must read: its weights, and what it reads of the context."""

import math

import jax

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts.draft import Draft, ModelDraft, Reads
from qspec_jax.models.llama import Llama

# bfloat16: queries, buffers, full caches, scales and zeros.
ITEM_BYTES = 2


def step_bytes(draft: Draft, cache: CacheConfig, tokens: int, *, most_item_bytes: int = 8) -> int | None:
    """The bytes that a draft's step must read: its weights, and what it reads of keys and values, where the target's cache would hold so
    many tokens with the one that it appends. None for a draft that is no `ModelDraft` (prompt-lookup, combine).

    cache: the target's. most_item_bytes: see `bytes_of`.
    """
    if not isinstance(draft, ModelDraft):
        return None
    c, total = draft.step.model.config, weight_bytes(draft.step.model, most_item_bytes=most_item_bytes)
    G, quantized = cache.group_size_for(c.head_dim), int(cache.schedule_for(c.head_dim).quantized_length(tokens))
    for layer in range(c.num_layers):
        reads = draft.reads(layer, quantized, tokens - quantized, G)
        total += bytes_of_tokens(reads, kv_heads=c.num_kv_heads, head_dim=c.head_dim, group_size=G)
    return total


def bytes_of_tokens(reads: Reads, *, kv_heads: int, head_dim: int, group_size: int) -> int:
    """Bytes of the keys and values of these tokens in one layer. group_size: tokens of a key group, where keys have groups."""
    codes = reads.planes * 2 * head_dim // 2
    # Values have a scale and a zero for each token.
    parameters = 2 * ITEM_BYTES * ((head_dim / group_size if reads.key_groups else 1) + 1)
    return round(kv_heads * (reads.quantized * (codes + parameters) + reads.full * 2 * head_dim * ITEM_BYTES))


def weight_bytes(model: Llama, *, most_item_bytes: int = 8) -> int:
    """Bytes of the weights that a step reads: all but an embedding that is not also the head, of which it reads a row for each token.
    `planning.operations.step_weight_bytes` counts the same from a model's shape alone.

    most_item_bytes: see `bytes_of`.
    """
    weights = dict(model.weights())
    if model.head is not None:
        weights.pop("embedding")
    return bytes_of(weights, most_item_bytes=most_item_bytes)


def bytes_of(tree, *, most_item_bytes: int = 8) -> int:
    """Bytes of the arrays in a tree, each counted once.

    most_item_bytes: what an array element counts at most, 2 to count float32 as if it were bfloat16.
    """
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}
    return sum(math.prod(leaf.shape) * min(leaf.dtype.itemsize, most_item_bytes) for leaf in arrays.values())
