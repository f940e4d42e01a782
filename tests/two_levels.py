"""A draft that itself proposes and verifies, as TriForce does (arXiv 2404.11912): a small model drafts for a middle one, whose tokens and
distributions the target then verifies. The middle model may be one of `markov.py`, or read and write the target's cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qspec_jax.caches.cache import longer
from qspec_jax.drafts.draft import Draft, Proposal
from qspec_jax.models.viewed import Step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoLevels(Draft):
    """small: drafts up to `inner_gamma` tokens at a time. middle: verifies them.

    fault: what a careless implementation gets wrong, for tests: "keys" draws on both levels with the same keys, "distributions" hands on
    those of the small model, "rows" takes no room for what the middle model feeds beyond the drafts.
    """

    small: Draft
    middle: Step
    inner_gamma: int = dataclasses.field(default=2, metadata={"static": True})
    fault: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def extra_rows(self) -> int:
        return 0 if self.fault == "rows" else self.inner_gamma

    def propose(self, state: Any, cache: Any, round: Any) -> tuple[Proposal, Any, Any]:
        B, gamma, width = len(round.pending), round.gamma, self.inner_gamma + 1
        level = round if self.fault == "keys" else round.below()
        put = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))

        def inner(carry):
            done, tokens, distributions, cache = carry
            here = level.advanced(tokens, done)
            most = jnp.clip(gamma - done - 1, 0, self.inner_gamma)
            here = here.limited(most, self.inner_gamma)
            proposal, _, cache = self.small.propose((), cache, here)
            block = jnp.concatenate([here.pending[:, None], proposal.tokens], 1)
            logits, cache = self.middle(block, here.position[:, None] + jnp.arange(width), cache)
            accepted, after = here.verify(logits, proposal)
            new = jnp.where(jnp.arange(width) < accepted[:, None], jnp.roll(block, -1, 1), after[:, None])
            found = here.distributions(logits, proposal.tokens)
            if self.fault == "distributions":
                found = jnp.concatenate([proposal.distributions, found[:, -1:]], 1)
            done, at = done + jnp.minimum(accepted + 1, gamma - done), done
            cache = cache.rollback(longer(lengths, done))
            return done, put(tokens, new, at), put(distributions, found, at), cache

        none, lengths = jnp.zeros((B, gamma + width), jnp.int32), cache.lengths
        logits, _ = jax.eval_shape(self.middle, none[:, :1], none[:, :1], cache)
        kind = jax.eval_shape(round.distributions, logits, none[:, :0])
        carry = jnp.zeros(B, jnp.int32), none, jnp.zeros((B, gamma + width, kind.shape[2]), kind.dtype), cache
        _, tokens, distributions, cache = lax.while_loop(lambda carry: (carry[0] < gamma).any(), inner, carry)
        return Proposal(tokens[:, :gamma], distributions[:, :gamma], round.eligible), state, cache.rollback(lengths)
