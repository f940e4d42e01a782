"""Reading more tokens onto states, by passes of the target over some tokens at a time.

The result is that of one-by-one decoding in which these tokens were chosen: a pass ends where it would have flushed the cache, so every
token reads the same codes. How the tokens are divided over passes and calls makes no difference.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from qspec_jax.caches.cache import AppendedCache, Cache
from qspec_jax.caches.queried import QueriedCache
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.drafts.draft import Draft, Prompt
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.states.state import Room


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LastQueriesCache(QueriedCache):
    """A cache that keeps the queries of the last tokens.

    Attributes:
        queries: of each layer those of the last Q tokens that stayed.
        count: how many tokens of the next pass stay.
    """

    cache: AppendedCache
    queries: tuple[Float[Array, "B Q N H"], ...]
    count: Int[Array, "B"]

    def of_queries(self, layer: int, q: Float[Array, "B T N H"], entry: Any) -> Float[Array, "B Q N H"]:
        before = self.queries[layer]
        take = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, before.shape[1], 0))
        return take(jnp.concatenate([before, q.astype(before.dtype)], 1), self.count)

    def after_pass(self, left: tuple[Any, ...]) -> Self:
        return dataclasses.replace(self, queries=left)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extended:
    """Rows that have read more; see `State`."""

    cache: Cache
    draft: Any
    logits: Float[Array, "B V"]
    queries: tuple[Float[Array, "B Q N H"], ...]


def _extended(
    target: ViewedModel,
    draft: Draft | None,
    rows: Extended,
    num_queries: Int[Array, "B"],
    text: Int[Array, "B S"],
    end: Int[Array, "B"],
    *,
    room: Room,
    width: int,
    scores: bool,
) -> tuple[Extended, tuple[Float[Array, "B S"], Bool[Array, "B S"]] | None]:
    """Rows that have read their first end[b] tokens.

    Args:
        target: the model that reads.
        draft: it begins again at the end, unless it makes the guesses that the cache is read by; None without one.
        rows: before that; logits of a row that reads nothing stay.
        num_queries: how many of each row's `queries` are known.
        text: the tokens of the rows, those that were read before among them, padded on the right.
        end: the number of tokens.
        room: the sizes of the rows.
        width: tokens in a pass, besides a guess at the next one.
        scores: whether the tokens that are read are scored.

    Returns:
        The rows; and of each token of `text` that was read, by the logits before it, the log-probability and whether it is the most likely
        token. Other columns are 0. None if they are not scored.
    """
    begun = rows.cache.lengths.total

    guesses = draft is not None and draft.guesses

    def block(carry: tuple) -> tuple:
        cache, state, queries, logits, scored = carry
        n = cache.lengths.total
        count = jnp.clip(jnp.minimum(end - n - 1, cache.draft_room) + 1, 0, width)
        positions = n[:, None] + jnp.arange(width)
        tokens = jnp.take_along_axis(text, jnp.minimum(positions, text.shape[1] - 1), 1)
        if guesses:
            state, cache = draft.before_pass(state, cache, tokens[:, 0], n, count > 0)
            with_guess = jnp.concatenate([tokens, state.guess[:, None]], 1)
            found, after = target(with_guess, n[:, None] + jnp.arange(width + 1), cache)
            state = draft.after_pass(state, found[:, width].argmax(-1), count > 0)
            found = found[:, :width]
        else:
            found, after = target(tokens, positions, LastQueriesCache(cache, queries, count) if queries else cache)
        if queries:
            queries, after = after.queries, after.cache
        if scores:
            # Of the token that is read first by the logits before, of the others by those of this pass.
            before = jnp.concatenate([logits[:, None], found[:, :-1]], 1)
            of_tokens = jnp.take_along_axis(jax.nn.log_softmax(before), tokens[..., None], 2)[..., 0], before.argmax(-1) == tokens
            at = jnp.where(jnp.arange(width) < count[:, None], positions, text.shape[1])
            put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
            scored = tuple(put(held, at, new) for held, new in zip(scored, of_tokens, strict=True))
        of_last = jnp.take_along_axis(found, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
        logits = jnp.where((count > 0)[:, None], of_last, logits)
        cache, _ = after.commit(cache.lengths, count, wait_for=[found.argmax(-1)])
        return cache, state, queries, logits, scored

    nothing = (jnp.zeros(text.shape, rows.logits.dtype), jnp.zeros(text.shape, bool)) if scores else None
    carry = rows.cache, rows.draft if guesses else None, rows.queries, rows.logits, nothing
    cache, guessed, queries, logits, scored = lax.while_loop(lambda carry: (carry[0].lengths.total < end).any(), block, carry)
    state = guessed if guesses else rows.draft
    if draft is not None and not guesses:
        known = jnp.minimum(num_queries + end - begun, draft.prompt_queries)
        shapes = dict(capacity=room.capacity, gamma=room.gamma)
        state = draft.begin_again(state, Prompt(text, end, cache, queries, num_queries=known, **shapes), begun)
    return Extended(cache, state, logits, queries), scored


EXTEND = Compiled(_extended, passes=True, static_argnames=("room", "width", "scores"), donate_argnames=("rows",))
