"""Adaptive speculation: the number of drafts in a round depends on how many of the row's earlier drafts were accepted.

The choice depends only on the row's own earlier rounds, so its output does not depend on other rows. It is made before the round's random
draws, so the output's distribution remains the target's.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

DECAY = 0.95  # the factor by which the counts of earlier rounds shrink in each round
BEGIN_ACCEPTED, BEGIN_JUDGED = 3.2, 4.0  # the counts before a row's first round
PROBE_ROUNDS = 16  # rounds without drafts after which one token is drafted, to see whether speculation pays again


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """The history of each row.

    Attributes:
        accepted: accepted drafts, with decay.
        judged: drafts that were accepted or the first to be rejected, with decay.
        plain: rounds since the last draft.
    """

    accepted: Float[Array, "B"]
    judged: Float[Array, "B"]
    plain: Int[Array, "B"]

    @classmethod
    def begin(cls, batch: int) -> "Adaptive":
        return cls(jnp.full(batch, BEGIN_ACCEPTED), jnp.full(batch, BEGIN_JUDGED), jnp.zeros(batch, jnp.int32))

    def drafts(self, cost: Float[Array, "B"], gamma: int) -> Int[Array, "B"]:
        """The number of drafts, 0 to `gamma`, that emits the most tokens per time.

        With conditional acceptance r, g drafts emit 1 + r + ... + r^g tokens (arXiv 2211.17192, equation 1).

        Args:
            cost: the time of drafting a token, relative to verifying a round of any length; 0 for a row that always drafts `gamma`.
            gamma: the maximum number of drafts.
        """
        chance = self.accepted / self.judged
        drafts = jnp.arange(gamma + 1)
        emitted = jnp.cumsum(chance[:, None] ** drafts, 1)
        best = jnp.argmax(emitted / (1 + cost[:, None] * drafts), 1).astype(jnp.int32)
        best = jnp.where((best == 0) & (self.plain >= PROBE_ROUNDS), jnp.minimum(1, gamma), best)
        return jnp.where(cost > 0, best, gamma)

    def updated(self, eligible: Int[Array, "B"], accepted: Int[Array, "B"], running: Bool[Array, "B"]) -> "Adaptive":
        """The history after a round that accepted some of `eligible` drafts."""
        drafted = running & (eligible > 0)

        def count(old: Array, new: Array) -> Array:
            return jnp.where(drafted, DECAY * old + new, old)

        judged = accepted + (accepted < eligible)
        plain = jnp.where(drafted, 0, self.plain + running)
        return Adaptive(count(self.accepted, accepted), count(self.judged, judged), plain)
