"""The decode loop: propose, verify, commit, in one `lax.while_loop` with static shapes (QuantSpec, arXiv 2502.10424, algorithm 1).

Autoregressive decoding is the same loop with no drafts. Every row keeps its own lengths, counts and end.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax.caches.cache import Cache, where_rows
from qspec_jax.caches.schedule import eligible_drafts
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.logits_processors import seen_since
from qspec_jax.decoding.sampling import DRAFT, Sampler
from qspec_jax.decoding.state import RUNNING, DecodeState, Logprobs, status_after
from qspec_jax.drafts.draft import Draft, Prompt, Proposal, RoundResult, of_accepted
from qspec_jax.models.llama import Seen
from qspec_jax.models.viewed import Step

# Folded into the keys of an inner level. Larger than any position, so that inner and outer draws never share a key.
LEVEL = 0x7FFFFFFF


def decode(
    target: Step,
    draft: Draft | None,
    sampler: Sampler,
    state: DecodeState,
    limits: Limits,
    max_rounds: Int[Array, ""],
    min_running: Int[Array, ""] | int = 1,
    *,
    one_round: Callable[..., DecodeState] | None = None,
) -> DecodeState:
    """The state after `max_rounds` rounds, or when fewer than `min_running` rows run (1: when all have ended). one_round: a function of the
    arguments of `decode_round`, which is the default."""
    one_round = one_round or decode_round

    def unfinished(carry):
        done, state = carry
        return (done < max_rounds) & ((state.status == RUNNING).sum() >= min_running)

    def step(carry):
        done, state = carry
        return done + 1, one_round(target, draft, sampler, state, limits)

    return lax.while_loop(unfinished, step, (jnp.int32(0), state))[1]


def decode_round(target: Step, draft: Draft | None, sampler: Sampler, state: DecodeState, limits: Limits) -> DecodeState:
    """One round of every running row."""
    current = current_round(sampler, state, limits)
    with jax.named_scope("draft"):
        proposal, draft_state, cache = propose(draft, state.draft, state.cache, current)
    with jax.named_scope("verify"):
        verdict, cache = verify(target, proposal, cache, current, draft)
    return commit(draft, dataclasses.replace(state, cache=cache, draft=draft_state), current, proposal, verdict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CurrentRound:
    """A round before its drafts; see `qspec_jax.drafts.draft.Round`.

    Attributes:
        lengths: lengths of the target's cache before the round.
        keys: the key of each row's random draws.
        emitted: the number of new tokens of each row so far, the pending one included.
        seen: the ids in prompt and new tokens, if a processor needs them.
        sampler, limits: of the rows.
    """

    lengths: Lengths
    pending: Int[Array, "B"]
    position: Int[Array, "B"]
    eligible: Int[Array, "B"]
    running: Bool[Array, "B"]
    keys: Key[Array, "B"]
    emitted: Int[Array, "B"]
    seen: Bool[Array, "B V"] | None
    sampler: Sampler
    limits: Limits
    gamma: int = dataclasses.field(metadata={"static": True})
    varies: bool = dataclasses.field(metadata={"static": True})

    def choose(
        self, i: Array, logits: Float[Array, "B V"], drafts: Int[Array, "B gamma"], eligible: Int[Array, "B"]
    ) -> tuple[Array, Array, Array]:
        since = None
        if self.seen is not None:
            since = seen_since(self.seen, drafts) - i  # drafts in columns before i are seen in column i
        logits = self.limits.processed(logits[:, None], self.emitted + i, since)[:, 0]
        if self.limits.min_confidence is not None:
            # By the distribution, not by the token drawn from it: dropping some of its tokens would change the output's distribution.
            sure = jax.nn.softmax(logits, -1).max(-1) >= self.limits.min_confidence
            eligible = jnp.where(sure, eligible, jnp.minimum(eligible, i + 1))
        return *self.sampler.choose(logits, self.keys, self.position + i + 1, DRAFT), eligible

    def certain(self, tokens: Int[Array, "B gamma"], vocab_size: int) -> Float[Array, "B gamma W"]:
        return self.sampler.certain(tokens, vocab_size)

    def below(self) -> Self:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, LEVEL))(self.keys)
        return dataclasses.replace(self, keys=keys, sampler=self.sampler.below())

    def limited(self, eligible: Int[Array, "B"], gamma: int) -> Self:
        return dataclasses.replace(self, eligible=eligible, gamma=gamma, varies=True)

    def advanced(self, tokens: Int[Array, "B M"], count: Int[Array, "B"]) -> Self:
        last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
        return dataclasses.replace(
            self,
            pending=jnp.where(count > 0, last, self.pending),
            position=self.position + count,
            eligible=jnp.maximum(self.eligible - count, 0),
            emitted=self.emitted + count,
            seen=None if self.seen is None else mark_seen(self.seen, tokens, count),
        )

    def processed(self, logits: Float[Array, "B T V"], drafts: Int[Array, "B T-1"]) -> Float[Array, "B T V"]:
        """The logits that tokens are chosen from, after the pending token and each draft."""
        return self.limits.processed(logits, self.emitted, None if self.seen is None else seen_since(self.seen, drafts))

    def distributions(self, logits: Float[Array, "B T V"], drafts: Int[Array, "B T-1"]) -> Float[Array, "B T W"]:
        return self.sampler.distributions(self.processed(logits, drafts))

    def verify(self, logits: Float[Array, "B T V"], proposal: Proposal) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        positions = self.position[:, None] + jnp.arange(1, logits.shape[1] + 1)
        processed = self.processed(logits, proposal.tokens)
        return self.sampler.verify(processed, proposal.tokens, proposal.distributions, proposal.eligible, self.keys, positions)


def current_round(sampler: Sampler, state: DecodeState, limits: Limits, running: Bool[Array, "B"] | None = None) -> CurrentRound:
    """The round that begins at a state. running: the rows that take part; by default those that have not ended."""
    running = state.status == RUNNING if running is None else running
    most = jnp.minimum(limits.num_speculative_tokens, state.gamma)
    if state.adaptive is not None:
        most = jnp.minimum(most, state.adaptive.drafts(limits.draft_cost, state.gamma))
    eligible = eligible_drafts(most, state.cache.draft_room, limits.max_new_tokens - state.emitted)
    eligible = jnp.where(running, eligible, 0)
    lengths = state.cache.lengths
    varies = state.adaptive is not None or limits.min_confidence is not None
    of_rows = lengths, state.pending, lengths.total, eligible, running, state.keys, state.emitted, state.seen
    return CurrentRound(*of_rows, sampler, limits, state.gamma, varies)


def begin(draft: Draft | None, prompt: Prompt) -> Any:
    """The draft's state after prefill; empty without a draft."""
    return () if draft is None else draft.begin(prompt)


def propose(draft: Draft | None, draft_state: Any, cache: Cache, current: CurrentRound) -> tuple[Proposal, Any, Cache]:
    """The draft's proposal; without drafts, a proposal of no tokens."""
    if current.gamma == 0:
        B = current.pending.shape[0]
        return Proposal(jnp.zeros((B, 0), jnp.int32), jnp.zeros((B, 0, 0)), current.eligible), draft_state, cache
    proposal, draft_state, cache = draft.propose(draft_state, cache, current)
    # With more drafts the target would read other codes than one-by-one decoding does.
    return dataclasses.replace(proposal, eligible=jnp.minimum(proposal.eligible, current.eligible)), draft_state, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """The target's verdict on a proposal.

    Attributes:
        logits: the target's, before processors.
        accepted: the number of accepted drafts.
        own_token: the target's own token after them.
        seen: what the draft asks of the pass.
    """

    logits: Float[Array, "B T V"]
    accepted: Int[Array, "B"]
    own_token: Int[Array, "B"]
    seen: Seen = dataclasses.field(default_factory=Seen)


def verify(target: Step, proposal: Proposal, cache: Cache, current: CurrentRound, draft: Draft | None) -> tuple[Verdict, Cache]:
    """Feeds the pending token and the drafts to the target. Returns its verdict, and its cache with them."""
    logits, cache, seen = feed(target, jnp.concatenate([current.pending[:, None], proposal.tokens], 1), cache, current, draft)
    return Verdict(logits, *current.verify(logits, proposal), seen), cache


def feed(
    target: Step, tokens: Int[Array, "B T"], cache: Cache, current: CurrentRound, draft: Draft | None
) -> tuple[Float[Array, "B T V"], Cache, Seen]:
    """The target's logits after these tokens, the first of which is the pending one, its cache with them, what the draft asks to see."""
    positions = current.position[:, None] + jnp.arange(tokens.shape[1])
    if draft is not None and (draft.observes or draft.taps):
        return target.watched(tokens, positions, cache, observe=draft.observes, taps=draft.taps.layers if draft.taps else ())
    return *target(tokens, positions, cache), Seen()


def commit(draft: Draft | None, state: DecodeState, current: CurrentRound, proposal: Proposal, verdict: Verdict) -> DecodeState:
    """Emits the accepted drafts and the target's own token, up to the end of a row, and rolls the cache back to the emitted tokens."""
    accepted = verdict.accepted
    running = state.status == RUNNING
    column = jnp.arange(state.gamma + 1)
    tokens = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    block = jnp.where(column < accepted[:, None], tokens, verdict.own_token[:, None])
    count, status = status_after(block, state.tokens, state.emitted, accepted + 1, current.limits)
    count = jnp.where(running, count, 0)
    kept_drafts = jnp.minimum(accepted, jnp.maximum(count - 1, 0))  # the last emitted token is pending
    with jax.named_scope("flush"):
        cache, flushed = state.cache.commit(current.lengths, count, wait_for=[verdict.own_token, *verdict.seen.masses])
    draft_state = state.draft
    if draft is not None:
        masses = seen_by_accepted(verdict.seen.masses, count)
        features = of_accepted(verdict.seen.features, count)
        put_to_target = jnp.where(running, proposal.eligible, 0)
        top_tokens = verdict.logits.argmax(-1) if draft.guesses else None
        result = RoundResult(block, count, put_to_target, kept_drafts, flushed, masses, top_tokens, features)
        draft_state = draft.commit(state.draft, result, cache)
    # Drafts after an accepted EOS count neither as drafted nor as accepted.
    drafted, accepted_drafts = jnp.where(count <= accepted, count, proposal.eligible), jnp.minimum(accepted, count)
    counts = state.counts.with_round(running, drafted, accepted_drafts, flushed)
    seen, logprobs, adaptive = state.seen, state.logprobs, state.adaptive
    if seen is not None:
        seen = mark_seen(seen, block, count)
    if logprobs is not None:
        new = Logprobs.of(verdict.logits, block, logprobs.top.shape[-1])
        logprobs = jax.tree.map(lambda old, new: _written(old, new, state.emitted, running), logprobs, new)
    if adaptive is not None:
        adaptive = adaptive.updated(proposal.eligible, accepted, running)
    return DecodeState(
        cache,
        state.keys,
        _written(state.tokens, block, state.emitted, running),
        state.emitted + count,
        jnp.where(running, jnp.take_along_axis(block, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0], state.pending),
        jnp.where(running, status, state.status),
        counts,
        draft_state,
        seen,
        logprobs,
        adaptive,
    )


def seen_by_accepted(masses: tuple[Float[Array, "B K T C"], ...], kept: Int[Array, "B"]) -> tuple[Float[Array, "B K T C"], ...]:
    """The masses with 0 for the queries of rejected drafts.

    The noise of a position is used again after a rejection; that is exact only if rejected drafts influence nothing.
    """
    return tuple(jnp.where((jnp.arange(mass.shape[2]) < kept[:, None])[:, None, :, None], mass, 0) for mass in masses)


def mark_seen(seen: Bool[Array, "B V"], tokens: Int[Array, "B T"], count: Int[Array, "B"]) -> Bool[Array, "B V"]:
    """The seen ids with those of the first count[b] of these tokens."""
    ids = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], tokens, seen.shape[1])
    return jax.vmap(lambda row, ids: row.at[ids].set(True, mode="drop"))(seen, ids)


def _written(old: Array, new: Array, at: Int[Array, "B"], running: Bool[Array, "B"]) -> Array:
    """`old` with new columns from at[b] on, in the rows that run."""
    write = jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=0))
    return where_rows(running, write(old, new, at), old)
