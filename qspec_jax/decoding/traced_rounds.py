"""Rounds one at a time, by a program for each phase, with a record of each: what a trace is made of.

The phases are those of `decode_round`, which the loop of untraced decoding runs, and are not part of that loop here so that each can be
timed. Besides them only the record is computed: the tokens are those of untraced decoding.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.formats.views import ChosenTokens, ListedGroups
from qspec_jax.decoding.compiled import Call, Compiled
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.round import CurrentRound, Verdict, commit, current_round, propose, verify
from qspec_jax.decoding.sampling import Greedy, Sampler, Sampling, accept_draws
from qspec_jax.decoding.state import Counts, DecodeState
from qspec_jax.drafts.draft import Draft, Proposal
from qspec_jax.models.viewed import Step
from qspec_jax.traces.trace import DraftedToken, DraftLimits, Likely, RoundTrace

PHASES = ("draft", "verify", "commit")  # of `TracedRounds`
MAX_LIKELY = 3  # the most likely tokens of a place that are recorded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GreedyWithChances(Greedy):
    """Greedy decoding that knows the distributions, which it needs for nothing but a trace."""

    def distributions(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        return jax.nn.softmax(logits, -1)

    def certain(self, tokens: Int[Array, "B T"], vocab_size: int) -> Float[Array, "B T V"]:
        return jax.nn.one_hot(tokens, vocab_size)


def with_chances(sampler: Sampler) -> Sampler:
    """The strategy, knowing the distributions where it is greedy. One of a user's own may not know them, and a trace leaves them out."""
    return GreedyWithChances() if type(sampler) is Greedy else sampler


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundStart:
    """What is known of a round before its drafts.

    Attributes:
        gamma, adaptive, room, wanted: see `DraftLimits`.
        reads: for each layer whose groups a draft lists, the share of KV heads that read each group, 255 for all; None if it lists none.
        groups: the number of groups of each row.
    """

    gamma: Int[Array, "B"]
    adaptive: Int[Array, "B"] | None
    room: Int[Array, "B"]
    wanted: Int[Array, "B"]
    reads: UInt8[Array, "B L C"] | None
    groups: Int[Array, "B"] | None

    @classmethod
    def of(cls, draft: Draft | None, state: DecodeState, limits: Limits) -> "RoundStart":
        """The start of the round that begins at a state."""
        adaptive = None if state.adaptive is None else state.adaptive.drafts(limits.draft_cost, state.gamma)
        # A guess is no draft: it is never accepted.
        gamma = jnp.minimum(limits.num_speculative_tokens, 0 if draft is not None and draft.guesses else state.gamma)
        counts = gamma, adaptive, state.cache.draft_room, limits.max_new_tokens - state.emitted - 1
        reads = groups_read(draft, state)
        return cls(*counts, reads, None if reads is None else state.cache.lengths.quantized // state.cache.group_size)


def groups_read(draft: Draft | None, state: DecodeState) -> UInt8[Array, "B L C"] | None:
    """The share of KV heads that read each group in a round, in the layers in which the draft lists groups; None if it lists none."""

    def views():
        found = None if draft is None else draft.read_in_round(state.draft, state.cache)
        return [view for view in found or () if isinstance(view, ListedGroups | ChosenTokens)]

    if not jax.eval_shape(views):
        return None
    G, C = state.cache.group_size, state.cache.groups

    def share(view: ListedGroups | ChosenTokens) -> Float[Array, "B C"]:
        if isinstance(view, ChosenTokens):
            B, K, _ = view.chosen.shape
            return view.chosen.reshape(B, K, C, G).mean((1, 3))
        listed = jnp.arange(view.groups.shape[2]) < view.count[..., None]
        return ((view.groups[..., None] == jnp.arange(C)) & listed[..., None]).any(2).mean(1)

    return jnp.round(255 * jnp.stack([share(view) for view in views()], 1)).astype(jnp.uint8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Judged:
    """A proposal and the target's verdict on it, without whole distributions. What a strategy does not say is None.

    Attributes:
        tokens: the drafts.
        eligible: how many of them could be accepted.
        by: whose each of them is, see `Proposal.by`.
        accepted: how many of them the target accepted.
        own_token, own_p: the target's own token after them, and its probability.
        q, p, uniform: see `DraftedToken`.
        draft_likely: the probabilities and the ids of the draft's most likely tokens.
        likely: those of the target, after the pending token and after each draft.
    """

    tokens: Int[Array, "B gamma"]
    eligible: Int[Array, "B"]
    by: Int[Array, "B gamma"] | None
    accepted: Int[Array, "B"]
    own_token: Int[Array, "B"]
    own_p: Float[Array, "B"] | None
    q: Float[Array, "B gamma"] | None
    p: Float[Array, "B gamma"] | None
    uniform: Float[Array, "B gamma"] | None
    draft_likely: tuple[Array, Array] | None
    likely: tuple[Array, Array]

    @classmethod
    def of(cls, current: CurrentRound, proposal: Proposal, verdict: Verdict) -> "Judged":
        """The record of a round that has been verified."""
        sampler, gamma = current.sampler, proposal.tokens.shape[1]
        known = isinstance(sampler, Sampling | GreedyWithChances)
        processed = current.processed(verdict.logits, proposal.tokens)
        p = sampler.distributions(processed) if known else jax.nn.softmax(processed, -1)
        likely = lax.top_k(p, min(MAX_LIKELY, p.shape[-1]))
        about = proposal.tokens, proposal.eligible, proposal.by, verdict.accepted, verdict.own_token
        if not known:
            return cls(*about, None, None, None, None, None, likely)
        of_own = jnp.take_along_axis(p, verdict.accepted[:, None, None], 1)[:, 0]
        own_p = jnp.take_along_axis(of_own, verdict.own_token[:, None], 1)[:, 0]
        if gamma == 0:
            return cls(*about, own_p, None, None, None, None, likely)
        q_of, p_of = (jnp.take_along_axis(x, proposal.tokens[..., None], 2)[..., 0] for x in (proposal.distributions, p[:, :-1]))
        uniform = None
        if isinstance(sampler, Sampling):
            positions = current.position[:, None] + jnp.arange(1, gamma + 1)
            uniform = accept_draws(current.keys, positions, p.dtype)
        draft_likely = lax.top_k(proposal.distributions, likely[0].shape[-1])
        return cls(*about, own_p, q_of, p_of, uniform, draft_likely, likely)


@dataclasses.dataclass(frozen=True)
class Tally:
    """The number of new tokens of each row, and its statistics, on the host."""

    emitted: Int[np.ndarray, "B"]
    counts: Counts

    @classmethod
    def of(cls, state: DecodeState) -> "Tally":
        """The tally of a state."""
        return cls(*jax.device_get((state.emitted, state.counts)))


def _started(target: Step, draft: Draft | None, sampler: Sampler, state: DecodeState, limits: Limits) -> RoundStart:
    return RoundStart.of(draft, state, limits)


def _proposed(
    target: Step, draft: Draft | None, sampler: Sampler, state: DecodeState, limits: Limits
) -> tuple[DecodeState, CurrentRound, Proposal]:
    current = current_round(sampler, state, limits)
    proposal, draft_state, cache = propose(draft, state.draft, state.cache, current)
    return dataclasses.replace(state, cache=cache, draft=draft_state), current, proposal


def _verified(
    target: Step,
    draft: Draft | None,
    sampler: Sampler,
    state: DecodeState,
    limits: Limits,
    current: CurrentRound,
    proposal: Proposal,
) -> tuple[DecodeState, Verdict]:
    verdict, cache = verify(target, proposal, state.cache, current, draft)
    return dataclasses.replace(state, cache=cache), verdict


def _judged(
    target: Step,
    draft: Draft | None,
    sampler: Sampler,
    state: DecodeState,
    limits: Limits,
    current: CurrentRound,
    proposal: Proposal,
    verdict: Verdict,
) -> Judged:
    return Judged.of(current, proposal, verdict)


def _committed(
    target: Step,
    draft: Draft | None,
    sampler: Sampler,
    state: DecodeState,
    limits: Limits,
    current: CurrentRound,
    proposal: Proposal,
    verdict: Verdict,
) -> DecodeState:
    return commit(draft, state, current, proposal, verdict)


ROUND_START = Compiled(_started)
PROPOSE = Compiled(_proposed, passes=True, donate_argnames=("state",))
VERIFY = Compiled(_verified, passes=True, donate_argnames=("state",))
JUDGE = Compiled(_judged)
COMMIT = Compiled(_committed, passes=True, donate_argnames=("state",))


class Records:
    """What has been recorded of the rounds of a batch.

    Attributes:
        phases: the names of the parts of a round that are timed.
        seconds: of each round, those of each phase, with dispatch and the wait for the device.
        rounds: the record of each row's rounds.
        reads: for each row and round which groups it read, see `RoundStart`.
    """

    def __init__(self, rows: int, phases: tuple[str, ...]):
        self.phases = phases
        self.seconds: list[tuple[float, ...]] = []
        self.rounds: list[list[RoundTrace]] = [[] for _ in range(rows)]
        self.reads: list[list[UInt8[np.ndarray, "L C"]]] = [[] for _ in range(rows)]

    def add(self, seconds: tuple[float, ...], start: RoundStart, judged: Judged, old: Tally, new: Tally) -> None:
        """Adds a round.

        Args:
            seconds: of its phases.
            start, judged: its records, on the host.
            old, new: the tallies before and after it.
        """
        self.seconds.append(seconds)
        for b in np.flatnonzero(new.counts.rounds > old.counts.rounds):
            self.rounds[b].append(_round_of(b, start, judged, old, new))
            if start.reads is not None:
                self.reads[b].append(start.reads[b, :, : start.groups[b]])


class TracedRounds:
    """Runs rounds one at a time and records each in `records`.

    Args:
        engine: whose rounds they are.
        sampler, limits: of the rows.
        rows: the number of rows.
    """

    def __init__(self, engine: Engine, sampler: Sampler, limits: Limits, rows: int):
        self._engine, self._sampler, self._limits = engine, with_chances(sampler), limits
        self.records = Records(rows, PHASES)

    def run(self, state: DecodeState) -> DecodeState:
        """The state after one round. The state given is consumed."""
        self._engine.expect(1)
        old = Tally.of(state)
        start, _ = self._timed(ROUND_START, state)
        (state, current, proposal), draft_s = self._timed(PROPOSE, state)
        (state, verdict), verify_s = self._timed(VERIFY, state, current, proposal)
        judged, _ = self._timed(JUDGE, state, current, proposal, verdict)
        state, commit_s = self._timed(COMMIT, state, current, proposal, verdict)
        self.records.add((draft_s, verify_s, commit_s), *jax.device_get((start, judged)), old, Tally.of(state))
        return state

    def _timed(self, program: Compiled, state: DecodeState, *more: Any) -> tuple[Any, float]:
        """The result of a program, and the seconds until it was there; those of compiling are not among them."""
        return timed(self._engine, self._engine.call(program, state, self._sampler, self._limits, *more))


def timed(engine: Engine, call: Call) -> tuple[Any, float]:
    """The result of a call, and the seconds until it was there; those of compiling are not among them."""
    executable = engine.executable(call)
    began = time.perf_counter()
    found = jax.block_until_ready(executable(*call.args))
    return found, time.perf_counter() - began


def _round_of(b: int, start: RoundStart, judged: Judged, old: Tally, new: Tally) -> RoundTrace:
    """The trace of a round of row b; see `Records.add`."""
    eligible = int(judged.eligible[b])

    def number(values: Any, i: int) -> float | None:
        return None if values is None else float(values[b, i])

    def alternatives(found: tuple[Any, Any] | None, i: int) -> Likely:
        return [] if found is None else [(int(token), float(p)) for p, token in zip(found[0][b, i], found[1][b, i]) if p > 0]

    drafts = [
        DraftedToken(
            int(judged.tokens[b, i]),
            0 if judged.by is None else int(judged.by[b, i]),
            number(judged.q, i),
            number(judged.p, i),
            number(judged.uniform, i),
            alternatives(judged.draft_likely, i),
        )
        for i in range(eligible)
    ]
    added = {name: int(getattr(new.counts, name)[b] - getattr(old.counts, name)[b]) for name in ("drafted", "accepted", "flushes")}
    room = int(start.room[b])
    limits = DraftLimits(
        int(start.gamma[b]),
        None if start.adaptive is None else int(start.adaptive[b]),
        None if room == np.iinfo(np.int32).max else room,
        int(start.wanted[b]),
    )
    return RoundTrace(
        int(old.emitted[b]),
        int(new.emitted[b] - old.emitted[b]),
        limits,
        drafts,
        int(judged.accepted[b]),
        added["drafted"],
        added["accepted"],
        int(judged.own_token[b]),
        None if judged.own_p is None else float(judged.own_p[b]),
        [alternatives(judged.likely, i) for i in range(eligible + 1)],
        added["flushes"] > 0,
    )
