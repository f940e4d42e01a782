"""The decode loop: draft, verify, accept, roll back, flush, in one `lax.while_loop` with static shapes.

Autoregressive decoding is the same loop with no drafts. Every row keeps its own lengths, counts and end.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from qspec_jax.adaptive import Adaptive
from qspec_jax.cache import Cache
from qspec_jax.model import Llama
from qspec_jax.processors import Processors, seen_since
from qspec_jax.quantize import quantize_head
from qspec_jax.sampling import DRAFT, Sampler

RUNNING, EOS, LENGTH, STOP = range(4)
UNLIMITED = jnp.iinfo(jnp.int32).max


class Step(Protocol):
    """A model over the cache, draft or target: a pytree that can be called."""

    def __call__(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: Cache) -> tuple[Float[Array, "B T V"], Cache]:
        """Logits of T tokens per row and the cache T tokens longer."""
        ...


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A model that reads one plane of the cache (1: a draft) or both (2: the target), or in each layer so many of them.

    head_bits: 8 if `in_loop` is to quantize its head. The model's weights must not be set anew afterwards: they are remembered.
    """

    model: Llama
    planes: int | tuple[int, ...]
    head_bits: int = 16

    @functools.cached_property
    def _flat(self) -> tuple[list, Any]:
        # Once, not with every call: to take a tree of some hundred modules apart takes milliseconds, of the same order as a round.
        return jax.tree.flatten(self.model)

    def tree_flatten(self):
        leaves, tree = self._flat
        return leaves, (tree, self.planes, self.head_bits)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        tree, *settings = static
        return cls(jax.tree.unflatten(tree, leaves), *settings)

    def __call__(self, tokens, positions, cache):
        return self.model(tokens, positions, cache, planes=self.planes)


def in_loop(step: Step) -> Step:
    """The step for a decode: with its head in INT8 if that is its wish. To be made after prefill and not kept, for there memory peaks.

    Not on a CPU, where XLA would keep a float32 copy of the codes.
    """
    if isinstance(step, CachedModel) and step.head_bits == 8 and jax.default_backend() != "cpu":
        return CachedModel(quantize_head(step.model), step.planes)
    return step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
    """What bounds each row: new tokens [B], drafts a round [B], and the ids that end it, [E] (-1 matches none).

    stop: sequences of new tokens that end a row, each at the right end of L columns, the others -1; one of -1 alone matches none.
    least_confidence: where the draft's likeliest token has less probability, it is the row's last draft of the round. draft_cost: see
    adaptive.py. None: of no row.
    """

    max_new_tokens: Int[Array, "B"]
    num_speculative_tokens: Int[Array, "B"]
    eos_token_ids: Int[Array, "E"]
    stop: Int[Array, "B K L"] | None = None
    processors: Processors | None = None
    least_confidence: Float[Array, "B"] | None = None
    draft_cost: Float[Array, "B"] | None = None

    @property
    def asks_what_was_seen(self) -> bool:
        return self.processors is not None and self.processors.repetition_penalty is not None

    def processed(self, logits: Float[Array, "B T V"], new: Int[Array, "B"], since: Int[Array, "B V"] | None) -> Float[Array, "B T V"]:
        """Logits as tokens are chosen from them; see `Processors`."""
        return logits if self.processors is None else self.processors(logits, new, since, self.eos_token_ids)


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """The target's log-probabilities of N tokens, and those of the k likeliest in each place, likeliest first, with their ids."""

    tokens: Float[Array, "B N"]
    top: Float[Array, "B N k"]
    top_ids: Int[Array, "B N k"]

    @classmethod
    def of(cls, logits: Float[Array, "B N V"], tokens: Int[Array, "B N"], alternatives: int) -> "Logprobs":
        """Of the target's logits as they are, before processors, temperature and filters."""
        all = jax.nn.log_softmax(logits, -1)
        return cls(jnp.take_along_axis(all, tokens[..., None], -1)[..., 0], *lax.top_k(all, alternatives))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Where each row stands. The last emitted token is pending: its keys and values are not cached yet.

    tokens[b, :emitted[b]] are the new tokens; the columns behind them, and those of logprobs, are scratch. status: RUNNING, EOS, LENGTH
    or STOP. seen: the ids in prompt and new tokens, where a processor asks for them.
    """

    cache: Cache
    keys: Key[Array, "B"]
    tokens: Int[Array, "B max_new+gamma+1"]
    emitted: Int[Array, "B"]
    pending: Int[Array, "B"]
    status: Int[Array, "B"]
    counts: Counts
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
    status = _status(first[:, None], tokens, 0 * one, one, limits)[1]
    if seen is not None:
        seen = seen.at[jnp.arange(B), first].set(True)
    adaptive = None if limits.draft_cost is None else Adaptive.begin(B)
    return DecodeState(cache, keys, tokens, one, first, status, Counts.zeros(B, gamma), seen, jax.tree.map(first_of, logprobs), adaptive)


def stopped(state: DecodeState, rows: Bool[Array, "B"]) -> DecodeState:
    """The state in which these rows run no more."""
    return dataclasses.replace(state, status=jnp.where(rows & (state.status == RUNNING), STOP, state.status))


def replace_rows(state: DecodeState, rows: DecodeState, slots: Int[Array, "k"]) -> DecodeState:
    """The state with others in place of k of its rows."""
    return jax.tree.map(lambda all, new: all.at[slots].set(new), state, rows)


def decode(
    target: Step,
    draft: Step | None,
    sampler: Sampler,
    state: DecodeState,
    limits: Limits,
    max_rounds: Int[Array, ""],
    least_running: Int[Array, ""] | int = 1,
) -> DecodeState:
    """Rounds until fewer than `least_running` rows run (1: until every row has ended), or `max_rounds` of them."""

    def unfinished(carry):
        done, state = carry
        return (done < max_rounds) & ((state.status == RUNNING).sum() >= least_running)

    def step(carry):
        done, state = carry
        return done + 1, decode_round(target, draft, sampler, state, limits)

    return lax.while_loop(unfinished, step, (jnp.int32(0), state))[1]


def decode_round(target: Step, draft: Step | None, sampler: Sampler, state: DecodeState, limits: Limits) -> DecodeState:
    """One round of every running row (QuantSpec, algorithm 1)."""
    lengths = state.cache.lengths
    running = state.status == RUNNING
    eligible = eligible_drafts(state, limits)
    with jax.named_scope("draft"):
        drafts, proposals, eligible, cache = draft_tokens(draft, sampler, state, eligible, limits)
    with jax.named_scope("verify"):
        tokens = jnp.concatenate([state.pending[:, None], drafts], 1)
        positions = lengths.total[:, None] + jnp.arange(tokens.shape[1])
        own, cache = target(tokens, positions, cache)
        logits = limits.processed(own, state.emitted, None if state.seen is None else seen_since(state.seen, drafts))
        accepted, after = sampler.verify(logits, drafts, proposals, eligible, state.keys, positions + 1)
    # The block of new tokens: the accepted drafts, then the target's own.
    column = jnp.arange(tokens.shape[1])
    block = jnp.where(column < accepted[:, None], jnp.roll(tokens, -1, 1), after[:, None])
    count, status = _status(block, state.tokens, state.emitted, accepted + 1, limits)
    count = jnp.where(running, count, 0)
    with jax.named_scope("flush"):
        # `after` is never negative; to ask makes the flush wait for the target. Without drafts nothing else of it is needed here,
        # so XLA would flush before the last layer has read its cache, and copy that (seen in jax 0.10).
        more = jnp.where(running & (after >= 0), accepted + 1, 0)
        cached = dataclasses.replace(lengths, buffered=lengths.buffered + more)
        cache, flushed = cache.rollback(cached).flush()
    old = state.counts
    counts = Counts(
        old.rounds + running,
        # Drafts behind an accepted EOS count neither as drafted nor as accepted.
        old.drafted + jnp.where(count <= accepted, count, eligible),
        old.accepted + jnp.minimum(accepted, count),
        old.flushes + flushed,
        old.histogram + (running[:, None] & (column == jnp.minimum(accepted, count)[:, None])),
    )
    seen, logprobs, adaptive = state.seen, state.logprobs, state.adaptive
    if seen is not None:
        emitted = jnp.where(column < count[:, None], block, seen.shape[1])
        seen = jax.vmap(lambda row, ids: row.at[ids].set(True, mode="drop"))(seen, emitted)
    if logprobs is not None:
        new = Logprobs.of(own, block, logprobs.top.shape[-1])
        logprobs = jax.tree.map(lambda all, new: _written(all, new, state.emitted, running), logprobs, new)
    if adaptive is not None:
        adaptive = adaptive.after(eligible, accepted, running)
    return DecodeState(
        cache,
        state.keys,
        _written(state.tokens, block, state.emitted, running),
        state.emitted + count,
        jnp.where(running, after, state.pending),
        jnp.where(running, status, state.status),
        counts,
        seen,
        logprobs,
        adaptive,
    )


def _written(all: Array, new: Array, at: Int[Array, "B"], running: Bool[Array, "B"]) -> Array:
    """New columns from at[b] on, in the rows that run."""
    write = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))
    return jnp.where(running.reshape(-1, *(1,) * (all.ndim - 1)), write(all, new, at), all)


def eligible_drafts(state: DecodeState, limits: Limits) -> Int[Array, "B"]:
    """How many drafts a row may use in this round: what the schedule has room for, one fewer than the tokens still wanted, and no more
    than pay."""
    wanted = limits.max_new_tokens - state.emitted
    most = jnp.minimum(jnp.minimum(limits.num_speculative_tokens, state.gamma), jnp.minimum(state.cache.draft_room, wanted - 1))
    if state.adaptive is not None:
        most = jnp.minimum(most, state.adaptive.drafts(limits.draft_cost, state.gamma))
    return jnp.where(state.status == RUNNING, jnp.maximum(most, 0), 0)


def draft_tokens(
    draft: Step | None, sampler: Sampler, state: DecodeState, eligible: Int[Array, "B"], limits: Limits
) -> tuple[Array, Array, Array, Cache]:
    """Drafts [B, gamma], what the sampler knows of their distributions [B, gamma, W], how many of them a row may use, and the cache
    rolled back.

    Stops early when no row may use another draft; the columns behind are zero.
    """
    B, gamma = state.pending.shape[0], state.gamma
    if gamma == 0:
        return jnp.zeros((B, 0), jnp.int32), jnp.zeros((B, 0, 0)), eligible, state.cache
    first = state.cache.lengths.total

    def propose(i, token, drafts, eligible, cache):
        logits, cache = draft(token[:, None], (first + i)[:, None], cache)
        since = None
        if state.seen is not None:
            since = seen_since(state.seen, drafts) - i  # the drafts of columns before i are seen in this one
        logits = limits.processed(logits, state.emitted + i, since)[:, 0]
        if limits.least_confidence is not None:
            # Of the distribution, not of the token drawn from it: to drop some of its tokens would change what is emitted.
            sure = jax.nn.softmax(logits, -1).max(-1) >= limits.least_confidence
            eligible = jnp.where(sure, eligible, jnp.minimum(eligible, i + 1))
        return *sampler.choose(logits, state.keys, first + i + 1, DRAFT), eligible, cache

    def step(carry):
        i, token, drafts, proposals, eligible, cache = carry
        token, proposal, eligible, cache = propose(i, token, drafts, eligible, cache)
        put = lambda all, new: lax.dynamic_update_index_in_dim(all, new, i, 1)
        return i + 1, token, put(drafts, token), put(proposals, proposal), eligible, cache

    drafts = jnp.zeros((B, gamma), jnp.int32)
    _, proposal, *_ = jax.eval_shape(propose, jnp.int32(0), state.pending, drafts, eligible, state.cache)
    proposals = jnp.zeros((B, gamma, proposal.shape[1]), proposal.dtype)
    carry = (jnp.int32(0), state.pending, drafts, proposals, eligible, state.cache)
    _, _, drafts, proposals, eligible, cache = lax.while_loop(lambda carry: carry[0] < carry[4].max(), step, carry)
    return drafts, proposals, eligible, cache.rollback(state.cache.lengths)


def _status(
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
