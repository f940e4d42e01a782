"""Adaptive speculation: how many tokens to draft in a round, from how many of the row's earlier drafts were accepted.

The choice depends on the row's own earlier rounds, so a row's output depends on nothing else; and it is made before the draws of the
round that it is for, so that the output's distribution stays the target's.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

DECAY = 0.95  # of earlier rounds' counts, each round
BEGIN_ACCEPTED, BEGIN_JUDGED = 3.2, 4.0  # as if a row had come with them
PROBE_ROUNDS = 16  # of plain decoding, then one draft to see whether speculation pays again


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Drafts of each row that were accepted, and that were judged: accepted, or rejected first. Rounds since any was drafted."""

    accepted: Float[Array, "B"]
    judged: Float[Array, "B"]
    plain: Int[Array, "B"]

    @classmethod
    def begin(cls, batch: int) -> "Adaptive":
        return cls(jnp.full(batch, BEGIN_ACCEPTED), jnp.full(batch, BEGIN_JUDGED), jnp.zeros(batch, jnp.int32))

    def drafts(self, cost: Float[Array, "B"], most: int) -> Int[Array, "B"]:
        """How many drafts, 0 to `most`, emit the most tokens for their time.

        cost: of drafting a token, where verifying a round, of any length, costs 1; 0 for a row that always drafts `most`. With a chance
        r that a draft is accepted, given those before it, g drafts emit 1 + r + ... + r^g tokens (arXiv 2211.17192, equation 1).
        """
        chance = self.accepted / self.judged
        drafts = jnp.arange(most + 1)
        emitted = jnp.cumsum(chance[:, None] ** drafts, 1)
        best = jnp.argmax(emitted / (1 + cost[:, None] * drafts), 1).astype(jnp.int32)
        best = jnp.where((best == 0) & (self.plain >= PROBE_ROUNDS), jnp.minimum(1, most), best)
        return jnp.where(cost > 0, best, most)

    def updated(self, eligible: Int[Array, "B"], accepted: Int[Array, "B"], running: Bool[Array, "B"]) -> "Adaptive":
        """After a round that accepted some of `eligible` drafts."""
        some = running & (eligible > 0)
        judged = accepted + (accepted < eligible)
        count = lambda old, new: jnp.where(some, DECAY * old + new, old)
        plain = jnp.where(some, 0, self.plain + running)
        return Adaptive(count(self.accepted, accepted), count(self.judged, judged), plain)
