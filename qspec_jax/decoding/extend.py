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
from qspec_jax.caches.schedule import Schedule
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.drafts.draft import Draft, Prompt, Taps
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
    """Rows that have read more; see `State`.

    Attributes:
        features: of the tokens that `Taps.of_prompt` says in the rows as they will have read them, as far as they were read by these
            passes; None where nothing reads features.
    """

    cache: Cache
    draft: Any
    logits: Float[Array, "B V"]
    queries: tuple[Float[Array, "B Q N H"], ...]
    features: Float[Array, "B W F"] | None = None


def _passed(
    target: ViewedModel,
    guesses: Draft | None,
    rows: Extended,
    text: Int[Array, "B S"],
    end: Int[Array, "B"],
    *,
    width: int,
    scores: bool,
    taps: Taps | None,
) -> tuple[Extended, tuple[Float[Array, "B W"], Bool[Array, "B W"]] | None]:
    """Rows that have read on by one pass, as `tokens_of_pass` says; those that have read all of their tokens stay. The caller
    flushes rows that are due then.

    Args:
        target: the model that reads.
        guesses: what makes the guesses that the cache is read by; None for other caches.
        rows: before that.
        text: the tokens of the rows, those that were read before among them, padded on the right.
        end: the number of tokens to read.
        width: the tokens of a pass, besides a guess at the next one.
        scores: whether the tokens that are read are scored.
        taps: which features are taken; None: none are.

    Returns:
        The rows; and of the tokens of the pass, by the logits before each, the log-probability and whether it is the most likely token.
        None if they are not scored.
    """
    cache, state, queries, logits, features = rows.cache, rows.draft, rows.queries, rows.logits, rows.features
    n = cache.lengths.total
    count = jnp.clip(jnp.minimum(end - n - 1, cache.draft_room) + 1, 0, width)
    positions = n[:, None] + jnp.arange(width)
    tokens = jnp.take_along_axis(text, jnp.minimum(positions, text.shape[1] - 1), 1)
    if guesses is not None:
        state, cache = guesses.before_pass(state, cache, tokens[:, 0], n, count > 0)
        with_guess = jnp.concatenate([tokens, state.guess[:, None]], 1)
        found, after = target(with_guess, n[:, None] + jnp.arange(width + 1), cache)
        state = guesses.after_pass(state, found[:, width].argmax(-1), count > 0)
        found = found[:, :width]
    else:
        read = LastQueriesCache(cache, queries, count) if queries else cache
        found, after, seen = target.watched(tokens, positions, read, taps=() if taps is None else taps.layers)
        features = None if taps is None else _with_features(features, seen.features, taps, positions, n + count, end)
    if queries:
        queries, after = after.queries, after.cache
    scored = None
    if scores:
        # Of the token that is read first by the logits before, of the others by those of this pass.
        before = jnp.concatenate([logits[:, None], found[:, :-1]], 1)
        of_tokens = jnp.take_along_axis(jax.nn.log_softmax(before), tokens[..., None], 2)[..., 0]
        scored = of_tokens, before.argmax(-1) == tokens
    of_last = jnp.take_along_axis(found, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
    logits = jnp.where((count > 0)[:, None], of_last, logits)
    return Extended(after.keep(cache.lengths, count), state, logits, queries, features), scored


def _with_features(
    features: Float[Array, "B W F"],
    seen: Float[Array, "B T F"],
    taps: Taps,
    positions: Int[Array, "B T"],
    read: Int[Array, "B"],
    end: Int[Array, "B"],
) -> Float[Array, "B W F"]:
    """The features with those of a pass's tokens, before position read[b], each where `Taps.of_prompt` has it in rows of end[b] tokens."""
    columns = taps.of_width(features.shape[1]).columns(positions, end)
    columns = jnp.where(positions < read[:, None], columns, features.shape[1])
    return jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))(features, seen.astype(features.dtype), columns)


def _flushed(cache: Cache) -> Cache:
    return cache.flush()[0]


def _begun_again(
    draft: Draft,
    state: Any,
    cache: Cache,
    queries: tuple[Float[Array, "B Q N H"], ...],
    num_queries: Int[Array, "B"],
    features: Float[Array, "B W F"] | None,
    text: Int[Array, "B S"],
    end: Int[Array, "B"],
    unchanged: Int[Array, "B"],
    *,
    room: Room,
) -> Any:
    """See `Draft.begin_again`. end: the number of tokens that each row has read. num_queries: see `State`."""
    sizes = dict(capacity=room.capacity, gamma=room.gamma)
    prompt = Prompt(text, end, cache, queries, num_queries=num_queries, features=features, **sizes)
    return draft.begin_again(state, prompt, unchanged)


# A pass has no loop and no condition, for which the host would wait before it goes on: it knows how many passes there are, and after which
# of them rows are due.
PASS = Compiled(_passed, passes=True, static_argnames=("width", "scores", "taps"), donate_argnames=("rows",))
FLUSH = Compiled(_flushed, passes=True, donate_argnames=("cache",))
BEGIN_AGAIN = Compiled(_begun_again, passes=True, static_argnames=("room",), donate_argnames=("state",))


def tokens_of_pass(schedule: Schedule, n: int, end: int, width: int) -> int:
    """How many tokens a row of n tokens reads in its next pass on the way to `end` tokens, which is what `_passed` reads."""
    return min(end - n, schedule.room(n), width)
