"""The decode loop: draft, verify, accept, roll back, flush, in one `lax.while_loop` with static shapes.

Autoregressive decoding is the same loop with no drafts. Every row keeps its own lengths, counts and end."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from qspec_jax.caches.registry import Cache
from qspec_jax.decoding.processors import seen_since
from qspec_jax.decoding.sampling import DRAFT, Sampler
from qspec_jax.decoding.state import RUNNING, Counts, DecodeState, Limits, Logprobs, _status
from qspec_jax.drafts.cached_model import Step


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
