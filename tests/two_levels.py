"""A draft that itself proposes and verifies, as TriForce does (arXiv 2404.11912): a small model drafts for a middle one, whose tokens and
distributions the target then verifies. For models of `markov.py`, which keep nothing."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from markov import Markov

from qspec_jax.drafts.draft import Draft, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoLevels(Draft):
    """small: drafts up to `inner_gamma` tokens at a time. middle: verifies them.

    fault: what a careless implementation gets wrong, for tests; "keys" draws on both levels with the same keys, "distributions" hands on
    those of the small model.
    """

    small: Draft
    middle: Markov
    inner_gamma: int = dataclasses.field(default=2, metadata={"static": True})
    fault: str | None = dataclasses.field(default=None, metadata={"static": True})

    def propose(self, state: Any, cache: Any, round: Any) -> tuple[Proposal, Any, Any]:
        B, gamma, width = len(round.pending), round.gamma, self.inner_gamma + 1
        level = round if self.fault == "keys" else round.below()
        put = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))

        def inner(carry):
            done, tokens, distributions, cache = carry
            here = level.after(tokens, done)
            most = jnp.clip(gamma - done - 1, 0, self.inner_gamma)
            here = dataclasses.replace(here, eligible=most, gamma=self.inner_gamma)
            proposal, _, cache = self.small.propose((), cache, here)
            block = jnp.concatenate([here.pending[:, None], proposal.tokens], 1)
            logits, cache = self.middle(block, here.position[:, None] + jnp.arange(width), cache)
            accepted, after = here.verify(logits, proposal)
            new = jnp.where(jnp.arange(width) < accepted[:, None], jnp.roll(block, -1, 1), after[:, None])
            found = here.distributions(logits, proposal.tokens)
            if self.fault == "distributions":
                found = jnp.concatenate([proposal.distributions, found[:, -1:]], 1)
            count = jnp.minimum(accepted + 1, gamma - done)
            return done + count, put(tokens, new, done), put(distributions, found, done), cache

        none = jnp.zeros((B, gamma + width), jnp.int32)
        kind = jax.eval_shape(lambda: round.distributions(jnp.zeros((B, 1, self.middle.table.shape[1])), none[:, :0]))
        carry = jnp.zeros(B, jnp.int32), none, jnp.zeros((B, gamma + width, kind.shape[2]), kind.dtype), cache
        _, tokens, distributions, longer = lax.while_loop(lambda carry: (carry[0] < gamma).any(), inner, carry)
        return Proposal(tokens[:, :gamma], distributions[:, :gamma], round.eligible), state, longer.rollback(cache.lengths)
