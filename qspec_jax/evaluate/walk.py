"""Rounds along real texts: each drafts and verifies as in generation, and then real tokens replace those that it would have emitted."""

import dataclasses
import operator
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import View
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.round import CurrentRound, Verdict, current_round, feed, propose, seen_by_accepted
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import DecodeState
from qspec_jax.decoding.traced_rounds import Judged, Records, RoundStart, Tally, timed, with_chances
from qspec_jax.drafts.draft import AcceptanceCounts, Draft, Proposal, RoundResult, of_accepted
from qspec_jax.evaluate.coverage import WatchedCache
from qspec_jax.models.viewed import Step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walked:
    """A round along a text.

    Attributes:
        current, proposal, verdict: of the round, as in generation.
        rejected: the rows in which it rejected a draft.
        covered: the sum over its accepted tokens of the share of attention on what the draft reads; None if the draft does not choose, or
            the target's cache has no groups to choose from.
    """

    current: CurrentRound
    proposal: Proposal
    verdict: Verdict
    rejected: Bool[Array, "B"]
    covered: Float[Array, "B"] | None

    @property
    def sums(self) -> "Sums":
        return Sums(self.rejected.astype(jnp.int32), self.covered, self.proposal.inner)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the rounds of each row: of those that rejected a draft, of `Walked.covered`, and of what a cascade's middle accepted."""

    rejected: Int[Array, "B"]
    covered: Float[Array, "B"] | None
    inner: AcceptanceCounts | None

    def __add__(self, other: Self) -> Self:
        return jax.tree.map(jnp.add, self, other)


def _walk(
    target: Step, draft: Draft, sampler: Sampler, state: DecodeState, limits: Limits, real: Int[Array, "B T"]
) -> tuple[DecodeState, Sums]:
    """The state after the text, and the sums over its rounds."""

    def walking(carry) -> Array:
        # Stop when no draft can count any more: the last token of the text only serves verification.
        return (carry[0].emitted < limits.max_new_tokens).any()

    def step(carry):
        state, sums = carry
        state, walked = walk_round(target, draft, sampler, state, limits, real)
        return state, sums + walked.sums

    nothing = jnp.zeros_like(state.emitted)
    covered = None if jax.eval_shape(lambda: _chosen(draft, state)) is None else nothing.astype(jnp.float32)
    inner = AcceptanceCounts.none(len(nothing)) if draft.verifies else None
    return lax.while_loop(walking, step, (state, Sums(nothing, covered, inner)))


def walk_round(
    target: Step, draft: Draft, sampler: Sampler, state: DecodeState, limits: Limits, real: Int[Array, "B T"]
) -> tuple[DecodeState, Walked]:
    """The state after one round of the rows whose text has not ended, and the round.

    Args:
        target, draft, sampler, state, limits: as in `decode_round`.
        real: the tokens of each text, and gamma + 1 others.
    """
    width = state.gamma + 1
    block_at = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width))
    active = state.emitted < limits.max_new_tokens
    this_round = current_round(sampler, state, limits, active)
    choice = _chosen(draft, state)
    proposal, draft_state, cache = propose(draft, state.draft, state.cache, this_round)

    def read(cache, tokens):
        cache = cache.rollback(this_round.lengths)
        cache = cache if choice is None else WatchedCache(cache, choice)
        logits, cache, seen = feed(target, tokens, cache, this_round, draft)
        return (cache, (logits, seen, None)) if choice is None else (cache.cache, (logits, seen, cache.shares))

    # The drafts are read, and then the real tokens: the cache keeps their keys and values, and the draft may observe their queries.
    # In a loop the pass, which is most of the program, is compiled once.
    pending = state.pending[:, None]
    passes = jnp.stack([jnp.concatenate([pending, proposal.tokens], 1), block_at(real, state.emitted - 1)])
    cache, found = lax.scan(read, cache, passes)
    (logits, _, _), (_, seen, shares) = (jax.tree.map(operator.itemgetter(i), found) for i in range(2))
    accepted, own_token = this_round.verify(logits, proposal)
    moved = jnp.where(active, accepted + 1, 0)
    covered = None if choice is None else jnp.where(jnp.arange(width) < moved[:, None], shares, 0).sum(1)
    cache, flushed = cache.commit(this_round.lengths, moved, wait_for=[own_token, *seen.masses])
    drafted, taken = jnp.where(active, proposal.eligible, 0), moved - active
    masses, features = seen_by_accepted(seen.masses, moved), of_accepted(seen.features, moved)
    result = RoundResult(block_at(real, state.emitted), moved, drafted, taken, flushed, masses, features=features)
    counts = state.counts.with_round(active, proposal.eligible, accepted, flushed)
    emitted = state.emitted + moved
    state = dataclasses.replace(
        state,
        cache=cache,
        draft=draft.commit(draft_state, result, cache),
        pending=block_at(real, emitted - 1)[:, 0],
        emitted=emitted,
        counts=counts,
        adaptive=None if state.adaptive is None else state.adaptive.updated(proposal.eligible, accepted, active),
    )
    return state, Walked(this_round, proposal, Verdict(logits, accepted, own_token), active & (accepted < proposal.eligible), covered)


def _chosen(draft: Draft, state: DecodeState) -> tuple[View | HeldKeys, ...] | None:
    return draft.read_in_round(state.draft, state.cache) if isinstance(state.cache, HierarchicalCache) else None


def _recorded_round(
    target: Step, draft: Draft, sampler: Sampler, state: DecodeState, limits: Limits, real: Int[Array, "B T"]
) -> tuple[DecodeState, RoundStart, Judged, Sums]:
    start = RoundStart.of(draft, state, limits)
    state, walked = walk_round(target, draft, sampler, state, limits, real)
    return state, start, Judged.of(walked.current, walked.proposal, walked.verdict), walked.sums


WALK = Compiled(_walk, donate_argnames=("state",))
RECORDED_ROUND = Compiled(_recorded_round, donate_argnames=("state",))


def traced_walk(
    engine: Engine, sampler: Sampler, limits: Limits, state: DecodeState, real: Int[Array, "B T"]
) -> tuple[tuple[DecodeState, Sums], Records]:
    """What `WALK` returns, and a record of each round; the rounds run one at a time, and the state given is consumed."""
    records, sampler = Records(len(real), ("round",)), with_chances(sampler)
    sums, new = None, Tally.of(state)
    while (new.emitted < jax.device_get(limits.max_new_tokens)).any():
        old = new
        (state, start, judged, found), seconds = timed(engine, engine.call(RECORDED_ROUND, state, sampler, limits, real))
        new = Tally.of(state)
        records.add((seconds,), *jax.device_get((start, judged)), old, new)
        sums = found if sums is None else sums + found
    return (state, sums), records
