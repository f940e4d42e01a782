"""Where each row of a batch stands while it is decoded, and what ends it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from qspec_jax.caches.cache import Cache
from qspec_jax.decoding.adaptive import Adaptive
from qspec_jax.decoding.limits import Limits

RUNNING, EOS, LENGTH, STOP = range(4)
UNLIMITED = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Statistics per row. histogram[b, a]: rounds that accepted a drafts."""

    rounds: Int[Array, "B"]
    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    flushes: Int[Array, "B"]
    histogram: Int[Array, "B gamma+1"]

    @classmethod
    def zeros(cls, batch: int, gamma: int) -> "Counts":
        count = lambda: jnp.zeros(batch, jnp.int32)
        return cls(count(), count(), count(), count(), jnp.zeros((batch, gamma + 1), jnp.int32))

    def with_round(
        self, took_part: Bool[Array, "B"], drafted: Int[Array, "B"], accepted: Int[Array, "B"], flushed: Int[Array, "B"]
    ) -> "Counts":
        """The counts with those of one more round."""
        in_column = took_part[:, None] & (jnp.arange(self.histogram.shape[1]) == accepted[:, None])
        return Counts(
            self.rounds + took_part,
            self.drafted + drafted,
            self.accepted + jnp.where(took_part, accepted, 0),
            self.flushes + flushed,
            self.histogram + in_column,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """The target's log-probabilities of N tokens, and those of the k likeliest in each place, likeliest first, with their ids."""

    tokens: Float[Array, "B N"]
    top: Float[Array, "B N k"]
    top_ids: Int[Array, "B N k"]

    @classmethod
    def of(cls, logits: Float[Array, "B N V"], tokens: Int[Array, "B N"], alternatives: int) -> "Logprobs":
        """Log-probabilities by the target's logits as they are, before processors, temperature and filters."""
        all = jax.nn.log_softmax(logits, -1)
        return cls(jnp.take_along_axis(all, tokens[..., None], -1)[..., 0], *lax.top_k(all, alternatives))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Where each row stands. The last emitted token is pending: its keys and values are not cached yet.

    tokens[b, :emitted[b]] are the new tokens; the columns behind them, and those of logprobs, are scratch. status: RUNNING, EOS, LENGTH
    or STOP. draft: the draft's own state. seen: the ids in prompt and new tokens, where a processor asks for them.
    """

    cache: Cache
    keys: Key[Array, "B"]
    tokens: Int[Array, "B max_new+gamma+1"]
    emitted: Int[Array, "B"]
    pending: Int[Array, "B"]
    status: Int[Array, "B"]
    counts: Counts
    draft: Any = ()
    seen: Bool[Array, "B V"] | None = None
    logprobs: Logprobs | None = None
    adaptive: Adaptive | None = None

    @property
    def gamma(self) -> int:
        """The most drafts of a round."""
        return self.counts.histogram.shape[1] - 1


def start(
    cache: Cache,
    first: Int[Array, "B"],
    keys: Key[Array, "B"],
    limits: Limits,
    *,
    max_new_tokens: int,
    gamma: int,
    draft: Any = (),
    seen: Bool[Array, "B V"] | None = None,
    logprobs: Logprobs | None = None,
) -> DecodeState:
    """The state after prefill, with the first token of each row; at most `max_new_tokens` of any row.

    seen: the ids of the prompts, where a processor asks for them. logprobs: of the first token, where they are wanted.
    """
    B, N = first.shape[0], max_new_tokens + gamma + 1
    first_of = lambda new: jnp.zeros((B, N, *new.shape[2:]), new.dtype).at[:, :1].set(new)
    tokens = first_of(first[:, None])
    one = jnp.ones(B, jnp.int32)
    status = status_after(first[:, None], tokens, 0 * one, one, limits)[1]
    if seen is not None:
        seen = seen.at[jnp.arange(B), first].set(True)
    adaptive = None if limits.draft_cost is None else Adaptive.begin(B)
    return DecodeState(
        cache, keys, tokens, one, first, status, Counts.zeros(B, gamma), draft, seen, jax.tree.map(first_of, logprobs), adaptive
    )


def stopped(state: DecodeState, rows: Bool[Array, "B"]) -> DecodeState:
    """The state in which these rows run no more."""
    return dataclasses.replace(state, status=jnp.where(rows & (state.status == RUNNING), STOP, state.status))


def freed(state: DecodeState, rows: Bool[Array, "B"]) -> DecodeState:
    """The state in which these rows run no more and hold nothing, so that rounds of the others read nothing for them."""
    lengths = jax.tree.map(lambda n: jnp.where(rows, 0, n), state.cache.lengths)
    return dataclasses.replace(stopped(state, rows), cache=state.cache.rollback(lengths))


def replace_rows(state: DecodeState, rows: DecodeState, slots: Int[Array, "k"], pages: Int[Array, "k C"] | None = None) -> DecodeState:
    """The state with others in place of k of its rows. pages: see `Cache.with_rows`."""
    cache = state.cache.with_rows(rows.cache, slots, pages)
    without = lambda state: dataclasses.replace(state, cache=None)
    replaced = jax.tree.map(lambda all, new: all.at[slots].set(new), without(state), without(rows))
    return dataclasses.replace(replaced, cache=cache)


def status_after(
    block: Int[Array, "B T"], tokens: Int[Array, "B N"], emitted: Int[Array, "B"], count: Int[Array, "B"], limits: Limits
) -> tuple[Array, Array]:
    """How many of the first `count` tokens of a block to emit, and the row's status thereafter; tokens[b, :emitted[b]] came before.

    Up to an EOS, or the end of a stop sequence, whichever is first.
    """
    ends = jnp.where((block[..., None] == limits.eos_token_ids).any(-1), EOS, RUNNING)
    if limits.stop is not None:
        ends = jnp.where((ends == RUNNING) & _stops(block, tokens, emitted, limits.stop), STOP, ends)
    ends = jnp.where(jnp.arange(block.shape[1]) < count[:, None], ends, RUNNING)
    at = jnp.argmax(ends != RUNNING, 1).astype(jnp.int32)
    ended = jnp.take_along_axis(ends, at[:, None], 1)[:, 0]
    status = jnp.where(ended != RUNNING, ended, jnp.where(emitted + count >= limits.max_new_tokens, LENGTH, RUNNING))
    return jnp.where(ended != RUNNING, at + 1, count), status.astype(jnp.int32)


def _stops(block: Int[Array, "B T"], tokens: Int[Array, "B N"], emitted: Int[Array, "B"], stop: Int[Array, "B K L"]) -> Array:
    """Whether a stop sequence ends at each token of the block [B, T]."""
    T, L = block.shape[1], stop.shape[2]
    padded = jnp.pad(tokens, ((0, 0), (L - 1, 0)), constant_values=-2)  # which is no token: nothing matches what is before the first
    before = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, L - 1))(padded, emitted)
    text = jnp.concatenate([before, block], 1)
    windows = text[:, jnp.arange(T)[:, None] + jnp.arange(L)]  # [B, T, L]
    match = (windows[:, :, None] == stop[:, None]) | (stop[:, None] == -1)
    return (match.all(-1) & (stop != -1).any(-1)[:, None]).any(-1)
