"""Chunks of a text, scored by the attention that a query pays to the mean of their keys, and a cache that remembers such queries.

Source: TriForce (arXiv 2404.11912), section 4.1.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.rounding import accumulation_dtype
from qspec_jax.caches.cache import AppendedCache, Cache
from qspec_jax.caches.queried import QueriedCache

SCORED_AT_ONCE = 4096  # tokens, about, whose keys are scored at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FirstQueriesCache(QueriedCache):
    """A cache that keeps the queries of the first token of its first pass, [B, N, H] for each layer without a sliding window."""

    cache: AppendedCache
    queries: tuple[Float[Array, "B N H"], ...]
    passes: Int[Array, ""]

    def of_queries(self, layer: int, q: Float[Array, "B T N H"], entry: Any) -> Float[Array, "B N H"]:
        return q[:, 0]

    def after_pass(self, left: tuple[Any, ...]) -> Self:
        kept = tuple(jnp.where(self.passes == 0, left[i], old) for i, old in zip(self.full_layers, self.queries, strict=True))
        return FirstQueriesCache(self.cache, kept, self.passes + 1)

    def queries_where(self, used: Bool[Array, "B"], before: tuple[Array, ...]) -> tuple[Float[Array, "B N H"], ...]:
        """The queries of these rows, and of others those from before."""
        return tuple(jnp.where(used[:, None, None], new, old) for new, old in zip(self.queries, before))


def chunk_scores(
    q: Float[Array, "R N H"],
    cache: Cache,
    layer: int,
    whole: Int[Array, "R"],
    batch_rows: Int[Array, "R"] | None = None,
    *,
    tokens: int,
    chunk: int,
) -> Float[Array, "R K chunks"]:
    """The attention that a query pays to the mean keys of the first whole[r] chunks of a row, summed over the query heads of a KV head.

    The score of the first chunk, which is always kept, is infinity; that of chunks from whole[r] on is minus infinity.

    Args:
        q: the query of each row.
        cache, layer: whose keys are scored.
        whole: how many chunks a row has.
        batch_rows: these rows of the batch; None: all.
        tokens: how many positions of the cache are cut into chunks.
        chunk: tokens of a chunk.
    """
    wide, chunks_at_once = accumulation_dtype(q.dtype), max(1, min(SCORED_AT_ONCE, tokens) // chunk)
    at_once = chunks_at_once * chunk
    kv_heads = jax.eval_shape(lambda: cache.tokens(layer, jnp.zeros((1, 1, 1), jnp.int32)))[0].shape[1]
    scaled = q.reshape(q.shape[0], kv_heads, -1, q.shape[2]).astype(wide) * q.shape[2] ** -0.5

    def logits_from(i: Array) -> Float[Array, "R K N/K chunks"]:
        keys = cache.tokens(layer, (i * at_once + jnp.arange(at_once))[None, None], batch_rows)[0].astype(wide)
        means = keys.reshape(*keys.shape[:2], -1, chunk, keys.shape[3]).mean(3)
        return jnp.einsum("bkrh,bkch->bkrc", scaled, means, precision=lax.Precision.HIGHEST)

    logits = jnp.moveaxis(lax.map(logits_from, jnp.arange(-(-tokens // at_once))), 0, 3)
    logits = logits.reshape(*logits.shape[:3], -1)[..., : -(-tokens // chunk)]
    number = jnp.arange(logits.shape[3])
    there = (number < whole[:, None])[:, None]
    score = jax.nn.softmax(jnp.where(there[:, :, None], logits, -1e30), -1).sum(2)
    return jnp.where(there, jnp.where(number == 0, jnp.inf, score), -jnp.inf)
