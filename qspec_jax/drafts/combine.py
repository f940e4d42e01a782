"""The combined draft: the longer of the proposals of two drafts, for each row and round.

Which one a row uses is decided by `Proposal.foreseen`: how many tokens each would have before any was drawn. How many a draft has at the
end may depend on the tokens that it drew (`--min-draft-confidence` stops after some and not after others). A choice by that would prefer
some tokens to others, and the proposal's distributions would not be those of the tokens that are verified.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from qspec_jax.caches.cache import Cache, where_rows
from qspec_jax.drafts.draft import Draft, DraftSettings, Prompt, Proposal, Round, State
from qspec_jax.drafts.draft_of_two import DraftOfTwo, SettingsOfTwo
from qspec_jax.models.llama import Llama


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CombinedDraft(DraftOfTwo):
    """In each row and round the draft that foresees more tokens, the first of equals.

    Both draw a position's token with the same noise; one of the two is used. The second is not run for rows in which the first one foresees
    all that the round allows.
    """

    first: Draft
    second: Draft
    PARTS = "first", "second"

    def in_turn(self) -> tuple[Draft, ...]:
        return self.first.in_turn() + self.second.in_turn()

    def begin(self, prompt: Prompt) -> State:
        return tuple(draft.begin(prompt.asked(draft)) for draft in self.parts)

    def begin_again(self, state: State, prompt: Prompt, unchanged: Int[Array, "B"]) -> State:
        return tuple(draft.begin_again(own, prompt.asked(draft), unchanged) for draft, own in zip(self.parts, state, strict=True))

    def propose(self, state: State, cache: Cache, current: Round) -> tuple[Proposal, State, Cache]:
        one, first_state, cache = self.first.propose(state[0], cache, current)
        one_foreseen = _foreseen(one, current.eligible)
        left = jnp.where(one_foreseen < current.eligible, current.eligible, 0)
        other, second_state, cache = self.second.propose(state[1], cache, current.limited(left, current.gamma))
        other_foreseen = _foreseen(other, left)
        picked = where_rows(
            other_foreseen > one_foreseen,
            Proposal(other.tokens, other.distributions, other.eligible, other_foreseen, _by(other, len(self.first.proposers()))),
            Proposal(one.tokens, one.distributions, one.eligible, one_foreseen, _by(one, 0)),
        )
        return picked, (first_state, second_state), cache


def _foreseen(proposal: Proposal, eligible: jax.Array) -> jax.Array:
    return eligible if proposal.foreseen is None else jnp.minimum(proposal.foreseen, eligible)


def _by(proposal: Proposal, before: int) -> Int[Array, "B gamma"]:
    """Whose tokens a part's are, by the numbers of the whole; `before` is the number of proposers of the parts before it."""
    return before + (jnp.zeros_like(proposal.tokens) if proposal.by is None else proposal.by)


@dataclasses.dataclass(frozen=True)
class CombinedSettings(SettingsOfTwo):
    """The settings of two drafts."""

    first: DraftSettings
    second: DraftSettings
    PARTS = "first", "second"

    def make(self, model: Llama, int4: Callable[[], Llama]) -> CombinedDraft:
        """The draft of a model. Raises InputError as the two do."""
        int4 = functools.cache(int4)
        return CombinedDraft(self.first.make(model, int4), self.second.make(model, int4))
