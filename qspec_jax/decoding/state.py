"""The state of a batch while it is decoded, and what ends a row."""

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
    """Statistics of each row.

    Attributes:
        rounds: rounds that the row ran in.
        drafted: drafts that were verified.
        accepted: drafts that were accepted.
        flushes: flushes of the row's cache.
        histogram: histogram[b, a] is the number of rounds that accepted a drafts.
    """

    rounds: Int[Array, "B"]
    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    flushes: Int[Array, "B"]
    histogram: Int[Array, "B gamma+1"]

    @classmethod
    def zeros(cls, batch: int, gamma: int) -> "Counts":
        counts = (jnp.zeros(batch, jnp.int32) for _ in range(4))
        return cls(*counts, jnp.zeros((batch, gamma + 1), jnp.int32))

    def with_round(
        self, took_part: Bool[Array, "B"], drafted: Int[Array, "B"], accepted: Int[Array, "B"], flushed: Int[Array, "B"]
    ) -> "Counts":
        """The counts after one more round."""
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
    """The target's log-probabilities of N tokens, and those of the k most likely tokens at each position, in descending order.

    Attributes:
        tokens: of the tokens.
        top: of the most likely tokens.
        top_ids: the ids of the most likely tokens.
    """

    tokens: Float[Array, "B N"]
    top: Float[Array, "B N k"]
    top_ids: Int[Array, "B N k"]

    @classmethod
    def of(cls, logits: Float[Array, "B N V"], tokens: Int[Array, "B N"], alternatives: int) -> "Logprobs":
        """Log-probabilities by the target's own logits, before processors, temperature and filters."""
        of_vocabulary = jax.nn.log_softmax(logits, -1)
        return cls(jnp.take_along_axis(of_vocabulary, tokens[..., None], -1)[..., 0], *lax.top_k(of_vocabulary, alternatives))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state of B rows. The last emitted token of each is pending: its keys and values are not cached yet.

    Attributes:
        cache: the target's cache.
        keys: the key of each row's random draws.
        tokens: tokens[b, :emitted[b]] are the new tokens; later columns are scratch, as are those of `logprobs`.
        emitted: the number of new tokens.
        pending: the last emitted token.
        status: RUNNING, EOS, LENGTH or STOP.
        counts: statistics.
        draft: the draft's own state.
        seen: the ids in prompt and new tokens, if a processor needs them.
        logprobs: of the new tokens, if they are kept.
        adaptive: the history of acceptance, if any row's number of drafts adapts to it.
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
        """The maximum number of drafts in a round."""
        return self.counts.histogram.shape[1] - 1


def start(
    cache: Cache | None,
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
    """The state after prefill.

    Args:
        cache: filled with the prompts; None if it is put in afterwards.
        first: the first new token of each row.
        keys, limits: of each row.
        max_new_tokens: the maximum number of new tokens of a row.
        gamma: the maximum number of drafts in a round.
        draft: the draft's own state.
        seen: the ids in the prompts, if a processor needs them.
        logprobs: of the first tokens, if they are kept.
    """
    B, N = first.shape[0], max_new_tokens + gamma + 1

    def first_of(new: Array) -> Array:
        return jnp.zeros((B, N, *new.shape[2:]), new.dtype).at[:, :1].set(new)

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
    """The state in which these rows have ended."""
    return dataclasses.replace(state, status=jnp.where(rows & (state.status == RUNNING), STOP, state.status))


def freed(state: DecodeState, rows: Bool[Array, "B"]) -> DecodeState:
    """The state in which these rows have ended and have no cached tokens, so that rounds of the others read nothing for them."""
    lengths = jax.tree.map(lambda n: jnp.where(rows, 0, n), state.cache.lengths)
    return dataclasses.replace(stopped(state, rows), cache=state.cache.rollback(lengths))


def replace_rows(state: DecodeState, rows: DecodeState, slots: Int[Array, "k"], pages: Int[Array, "k C"] | None = None) -> DecodeState:
    """The state with k of its rows replaced. pages: see `Cache.with_rows`."""
    cache = state.cache.with_rows(rows.cache, slots, pages)
    state, rows = (dataclasses.replace(each, cache=None) for each in (state, rows))
    return dataclasses.replace(jax.tree.map(lambda old, new: old.at[slots].set(new), state, rows), cache=cache)


def status_after(
    block: Int[Array, "B T"], tokens: Int[Array, "B N"], emitted: Int[Array, "B"], count: Int[Array, "B"], limits: Limits
) -> tuple[Array, Array]:
    """How many of the first `count` tokens of a block to emit, and each row's status after them.

    A row ends at the first EOS or end of a stop sequence. tokens[b, :emitted[b]] precede the block.
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
    padded = jnp.pad(tokens, ((0, 0), (L - 1, 0)), constant_values=-2)  # no token: nothing matches before the first one
    before = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, L - 1))(padded, emitted)
    text = jnp.concatenate([before, block], 1)
    windows = text[:, jnp.arange(T)[:, None] + jnp.arange(L)]  # [B, T, L]
    match = (windows[:, :, None] == stop[:, None]) | (stop[:, None] == -1)
    return (match.all(-1) & (stop != -1).any(-1)[:, None]).any(-1)
