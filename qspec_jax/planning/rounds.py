"""Rounds on average: how many tokens they emit, how many drafts they make, how often one flushes.

Every token of a draft's proposals is accepted with the same chance, given that those before it in the round were (the conditional
acceptance of docs/cli.md, and what `qspec bench decode --simulate-acceptance` simulates). The schedule's room limits the drafts of rounds
near the next flush (`qspec_jax/caches/schedule.py`). A draft may have no proposal in some rounds, and those may then ask another.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax.caches.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Asked:
    """One of the drafts that a round asks in turn, until one has a proposal. acceptance: the chance that a token that it proposes is
    accepted, given those before it. proposing: the chance that it has a proposal, of as many tokens as the round allows, and not none."""

    acceptance: float
    proposing: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Means over the rounds of a long decode.

    Attributes:
        tokens: emitted by a row.
        drafted: proposed for a row.
        proposing, rejected: the chance that a row's round has a proposal, and that verification rejects one of its tokens.
        asked: the chance that a round asks the last draft.
        allowed: the chance that the schedule allows a row's round 0, 1, ... drafts.
        emitted: the chance that a row's round emits 1, 2, ... tokens.
        passes: the chance, for each token k of the last draft, that the batch takes its pass, because some row asks it and may use k + 1
            tokens.
        flushes: the chance that some row of the batch flushes.
    """

    tokens: float
    drafted: float
    proposing: float
    rejected: float
    asked: float
    passes: tuple[float, ...]
    flushes: float
    allowed: tuple[float, ...]
    emitted: tuple[float, ...]

    @property
    def steps(self) -> float:
        """Passes of the last draft that the batch takes: those of the row with the most eligible drafts."""
        return sum(self.passes)

    @property
    def acceptance(self) -> float | None:
        """The conditional acceptance, as `qspec eval acceptance` counts it; None where nothing is drafted."""
        accepted = self.tokens - 1
        return accepted / (accepted + self.rejected) if self.drafted else None

    @property
    def accepted_of_drafted(self) -> float | None:
        """The acceptance rate; None where nothing is drafted."""
        return (self.tokens - 1) / self.drafted if self.drafted else None

    def passes_over_emitted(self, width: int) -> float:
        """Passes of `width` tokens in which a model reads what a round has emitted."""
        return sum(chance * math.ceil(tokens / width) for tokens, chance in enumerate(self.emitted, 1))


@dataclasses.dataclass(frozen=True)
class InnerRounds:
    """Means over the rounds of a cascade, whose middle draft verifies what the first one drafts.

    Attributes:
        passes: of the middle that the batch takes in a round.
        with_drafts: those of them in which the first draft has proposed something for some row.
        proposals: of the first draft in a round that have room for 1, 2, ... drafts in some row.
    """

    passes: float
    with_drafts: float
    proposals: tuple[float, ...]


@functools.cache
def expected_rounds(schedule: Schedule, gamma: int, *drafts: Asked, batch: int = 1) -> Rounds:
    """The mean round of up to gamma drafts. drafts: in the order in which a round asks them. batch: rows, whose flushes and proposals fall
    independently of each other."""
    turn = np.cumprod([1.0, *(1 - each.proposing for each in drafts)])  # the chance that a round comes to each draft, and past the last
    # In a round without a proposal nothing is accepted, and nothing is rejected.
    used = [(float(chance * each.proposing), each.acceptance) for chance, each in zip(turn, drafts)]
    proposing, last = float(1 - turn[-1]), float(turn[max(0, len(drafts) - 1)])

    def emitted(most):
        return _emitted(most, used)

    def passes(reached):
        return tuple(float(1 - (1 - last * share) ** batch) for share in reached)

    if (period := schedule.flush_size or schedule.span) is None:
        chances = emitted(gamma)
        tokens = float(chances @ np.arange(1, gamma + 2))
        rejected = sum(chance * (1 - rate**gamma) for chance, rate in used)
        allowed = (*[0.0] * gamma, 1.0)
        return Rounds(tokens, proposing * gamma, proposing, rejected, last, passes([1.0] * gamma), 0.0, allowed, tuple(chances.tolist()))
    # A row buffers G tokens after a flush, and its rounds end at exactly 2G; over a span they end at its last token. None has more drafts
    # than there is room for.
    visits = np.zeros(period + 1)
    visits[0] = 1.0
    begin = np.arange(period) + (schedule.flush_size or 0)
    eligible = np.minimum(gamma, schedule.draft_room(Lengths(begin - begin, begin)))
    for at in range(period):
        most = int(eligible[at])
        visits[at + 1 : at + most + 2] += visits[at] * emitted(most)
    visits = visits[:period]
    rounds = visits.sum()
    reached = [visits[eligible >= k].sum() / rounds for k in range(1, gamma + 1)]
    drafted = proposing * float(visits @ eligible / rounds)
    rejected = sum(chance * float(visits @ (1 - rate**eligible) / rounds) for chance, rate in used)
    allowed = [float(visits[eligible == m].sum() / rounds) for m in range(gamma + 1)]
    by_tokens = sum(chance * np.pad(emitted(m), (0, gamma - m)) for m, chance in enumerate(allowed))
    flushes = float(1 - (1 - 1 / rounds) ** batch) if schedule.flush_size else 0.0
    means = float(period / rounds), drafted, proposing, rejected, last, passes(reached), flushes
    return Rounds(*means, tuple(allowed), tuple(by_tokens.tolist()))


@functools.cache
def inner_rounds(allowed: tuple[float, ...], first_gamma: int, first: Asked, *, batch: int = 1) -> InnerRounds:
    """The mean round of a cascade, whose middle verifies up to first_gamma drafts of the first one in a pass, and adds a token of its own,
    until the round has its drafts. allowed: see `Rounds`. first: the first draft, as the middle judges it."""
    rows = np.zeros((len(allowed), len(allowed)))  # the chance that a row's round with m drafts has d of them
    rows[:, 0] = allowed
    passes, with_drafts, proposals = 0.0, 0.0, np.zeros(first_gamma)
    left = np.subtract.outer(np.arange(len(allowed)), np.arange(len(allowed)))

    def any_row(those: np.ndarray, chance: float = 1.0) -> float:
        return float(1 - (1 - min(1.0, rows[those].sum()) * chance) ** batch)

    while (share := any_row(left > 0)) > 0:
        passes += share
        with_drafts += any_row(left > 1, first.proposing)  # the place of the middle's own token is never drafted for
        proposals += [any_row(left > j) for j in range(1, first_gamma + 1)]
        after = np.zeros_like(rows)
        for m, d in zip(*np.nonzero((left > 0) & (rows > 0))):
            chances = _emitted(min(first_gamma, m - d - 1), [(first.proposing, first.acceptance)])
            after[m, d + 1 : d + 1 + len(chances)] += rows[m, d] * chances
        rows = after
    return InnerRounds(passes, with_drafts, tuple(proposals.tolist()))


def _emitted(most: int, used: Sequence[tuple[float, float]]) -> np.ndarray:
    """The chances of a round with room for `most` drafts to emit 1, 2, ... tokens. used: for each draft the chance that the round uses its
    proposal, and the acceptance of that."""
    chances = np.zeros(most + 1)
    for chance, rate in used:
        accepted = rate ** np.arange(most + 1)
        accepted[:-1] *= 1 - rate
        chances += chance * accepted
    chances[0] += 1 - sum(chance for chance, _ in used)
    return chances
