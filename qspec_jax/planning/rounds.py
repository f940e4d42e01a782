"""Rounds on average: how many tokens they emit, how many drafts they make, how often one flushes.

Every draft is accepted with the same chance, given that those before it in the round were (the conditional acceptance of docs/cli.md, and
what `qspec bench decode --simulate-acceptance` simulates). The schedule's room limits the drafts of rounds near the next flush
(`qspec_jax/caches/schedule.py`).
"""

import dataclasses
import functools

import numpy as np

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax.caches.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Means over the rounds of a long decode. tokens: emitted by a row. drafted: made for a row. steps: draft steps that the batch takes,
    as many as the row with the most eligible drafts has. flushes: the chance that some row of the batch flushes."""

    tokens: float
    drafted: float
    steps: float
    flushes: float

    @property
    def accepted_of_drafted(self) -> float | None:
        """The acceptance rate; None where nothing is drafted."""
        return (self.tokens - 1) / self.drafted if self.drafted else None


@functools.cache
def expected_rounds(schedule: Schedule, gamma: int, acceptance: float, *, batch: int = 1) -> Rounds:
    """The mean round of up to gamma drafts, each accepted with this chance given those before it. batch: rows, whose flushes fall
    independently of each other."""
    if schedule.group_size is None:
        return Rounds(sum(acceptance**i for i in range(gamma + 1)), gamma, gamma, 0.0)
    G = schedule.group_size
    # A row buffers G tokens after a flush, and its rounds end at exactly 2G: none has more drafts than there is room for.
    visits = np.zeros(2 * G + 1)
    visits[G] = 1.0
    eligible = np.minimum(schedule.most_drafts(gamma), schedule.draft_room(Lengths(0, np.arange(2 * G))))
    for buffered in range(G, 2 * G):
        most = int(eligible[buffered])
        chances = acceptance ** np.arange(most + 1)
        chances[:-1] *= 1 - acceptance
        visits[buffered + 1 : buffered + most + 2] += visits[buffered] * chances
    visits, eligible = visits[G : 2 * G], eligible[G : 2 * G]
    rounds = visits.sum()
    share_below = [visits[eligible < k].sum() / rounds for k in range(1, gamma + 1)]
    steps = sum(1 - share**batch for share in share_below)
    return Rounds(G / rounds, float(visits @ eligible / rounds), float(steps), 1 - (1 - 1 / rounds) ** batch)
