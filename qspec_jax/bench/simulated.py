"""Simulated acceptance, for models whose drafts mean nothing: which drafts are accepted is drawn at random, all else is done."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qspec_jax.decoding.sampling import ACCEPT, Greedy, draw_keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SimulatedGreedy(Greedy):
    """Greedy decoding in which each draft is accepted with probability `rate`, given that all before it were."""

    rate: Float[Array, "*B"]  # of every row, or of each

    def verify(self, logits, drafts, proposals, eligible, keys, positions):
        if drafts.shape[1] == 0:
            return super().verify(logits, drafts, proposals, eligible, keys, positions)
        tokens = jnp.argmax(logits[:, :-1], -1).astype(jnp.int32)
        chances = jax.vmap(jax.vmap(jax.random.uniform))(draw_keys(keys, positions[:, :-1], ACCEPT))
        # What the target would have chosen, or anything else.
        drafts = jnp.where(chances < self.rate.reshape(-1, 1), tokens, tokens ^ 1)
        return super().verify(logits, drafts, proposals, eligible, keys, positions)


def ratio_of_rate(rate: float, gamma: int) -> float:
    """Accepted over drafted tokens, in the mean, of rounds with gamma drafts."""
    return sum(rate**i for i in range(1, gamma + 1)) / gamma


def rate_of_ratio(ratio: float, gamma: int) -> float:
    """The rate that gives this ratio."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio_of_rate(middle, gamma) < ratio else (low, middle)
    return (low + high) / 2
