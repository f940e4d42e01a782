"""Simulated acceptance, for models with random weights: which drafts are accepted is drawn at random; all other work is done."""

import dataclasses
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from qspec_jax.decoding.sampling import ACCEPT, Greedy, draw_keys
from qspec_jax.errors import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SimulatedGreedy(Greedy):
    """Greedy decoding in which each draft is accepted with probability `rate`, given that all before it in the round were.

    Attributes:
        rate: one for all rows, or one each.
        inner_rate: that of a level below, in a draft that itself verifies; None: the same.
    """

    rate: Float[Array, "*B"]
    inner_rate: Float[Array, "*B"] | None = None

    def below(self):
        return self if self.inner_rate is None else SimulatedGreedy(self.inner_rate)

    def _right(self, tokens, drafts, keys, positions):
        """Drawn, whatever the drafts are."""
        return jax.vmap(jax.vmap(jax.random.uniform))(draw_keys(keys, positions, ACCEPT)) < self.rate.reshape(-1, 1)


def ratio_of_rate(rate: float, gamma: int) -> float:
    """The mean of accepted over drafted tokens in rounds of gamma drafts, each accepted at this rate given those before it."""
    return sum(rate**i for i in range(1, gamma + 1)) / gamma


def rate_of_ratio(ratio: float, gamma: int) -> float:
    """The rate at which `ratio_of_rate` gives this ratio."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio_of_rate(middle, gamma) < ratio else (low, middle)
    return (low + high) / 2


def rates_of(
    acceptances: Sequence[float] | None, ratios: Sequence[float] | None, contexts: Sequence[int], gammas: Sequence[int]
) -> dict[int, float] | None:
    """The rate of acceptance at each context, as --simulate-acceptance or --simulate-ratio gives it; None without either.

    Args:
        acceptances: rates, one for all contexts or one for each.
        ratios: means of accepted over drafted tokens instead.
        contexts: that are measured.
        gammas: numbers of drafts a round that are measured.

    Raises:
        InputError: for both at once, for ratios with several gammas, and for another number of them than that of the contexts.
    """
    if acceptances and ratios:
        raise InputError("--simulate-acceptance and --simulate-ratio say the same; give one of them")
    if ratios and len(gammas) > 1:
        raise InputError("--simulate-ratio needs a single --gamma; with several give --simulate-acceptance")
    rates = acceptances or [rate_of_ratio(ratio, gammas[0]) for ratio in ratios or []]
    if len(rates) not in (0, 1, len(contexts)):
        flag = "--simulate-ratio" if ratios else "--simulate-acceptance"
        raise InputError(f"{flag} is given {len(rates)} times for {len(contexts)} contexts; give it once for all or once for each")
    return dict(zip(contexts, rates * len(contexts) if len(rates) == 1 else rates, strict=False)) or None
