"""The combined draft: of what two drafts propose for a row, the longer.

Which one a row uses is decided by `Proposal.foreseen`: how many drafts each was to have before any was drawn. How many a draft came to have
in the end may depend on the tokens that it drew (`--min-draft-confidence` stops behind some and not behind others); to choose by that would
prefer some tokens to others, and the distributions handed on would not be those of the drafts that are verified.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from qspec_jax.caches.cache import Gives, where_rows
from qspec_jax.drafts.draft import Draft, DraftSettings, Prompt, Proposal, StepwiseDraft, checkpoints_of, needs_of
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CombinedDraft(Draft):
    """In each row and round the draft that foresees more tokens, the first of equals. The state is that of both.

    Both draw a position's token with the same noise; one of the two is used. The second is not run for rows in which the first one foresees
    all that the round allows.
    """

    first: Draft
    second: Draft

    @property
    def needs(self):
        return self.first.needs | self.second.needs

    @property
    def observes(self):
        return self.first.observes or self.second.observes

    @property
    def prompt_queries(self):
        return max(self.first.prompt_queries, self.second.prompt_queries)

    @property
    def extra_rows(self):
        return max(self.first.extra_rows, self.second.extra_rows)

    @property
    def max_length(self):
        return min((draft.max_length for draft in (self.first, self.second) if draft.max_length is not None), default=None)

    def in_turn(self):
        return self.first.in_turn() + self.second.in_turn()

    def with_choice(self, choose):
        return CombinedDraft(self.first.with_choice(choose), self.second.with_choice(choose))

    def chosen(self):
        return self.first.chosen() + self.second.chosen()

    def made_for(self):
        return self.first.made_for() + self.second.made_for()

    def begin(self, prompt):
        return tuple(draft.begin(_asked(prompt, draft.prompt_queries)) for draft in (self.first, self.second))

    def propose(self, state, cache, round):
        one, first_state, cache = self.first.propose(state[0], cache, round)
        one_foreseen = _foreseen(one, round.eligible)
        left = jnp.where(one_foreseen < round.eligible, round.eligible, 0)
        other, second_state, cache = self.second.propose(state[1], cache, round.limited(left, round.gamma))
        other_foreseen = _foreseen(other, left)
        picked = where_rows(
            other_foreseen > one_foreseen,
            Proposal(other.tokens, other.distributions, other.eligible, other_foreseen),
            Proposal(one.tokens, one.distributions, one.eligible, one_foreseen),
        )
        return picked, (first_state, second_state), cache

    def commit(self, state, result, cache):
        return self.first.commit(state[0], result, cache), self.second.commit(state[1], result, cache)

    def in_prefill(self):
        return CombinedDraft(self.first.in_prefill(), self.second.in_prefill())

    def in_loop(self):
        first = self.first.in_loop()
        return CombinedDraft(first, _with_head_of(first, self.first, self.second).in_loop())


def _with_head_of(made: Draft, before: Draft, draft: Draft) -> Draft:
    """The draft with the head that another one, `before`, has made for the loop, if they step the same model, so that there is one."""
    steps = all(isinstance(each, StepwiseDraft) for each in (made, before, draft))
    bits = lambda draft: getattr(draft, "head_bits", 16)
    if not steps or before.step.model is not draft.step.model or bits(before) == 16 or bits(before) != bits(draft):
        return draft
    return dataclasses.replace(draft, step=ViewedModel(made.step.model, draft.step.view), head_bits=16)


def _foreseen(proposal: Proposal, eligible: jax.Array) -> jax.Array:
    return eligible if proposal.foreseen is None else jnp.minimum(proposal.foreseen, eligible)


def _asked(prompt: Prompt, queries: int) -> Prompt:
    """The prompt with no more of its last queries than a draft asks for."""
    return dataclasses.replace(prompt, queries=tuple(q[:, q.shape[1] - queries :] for q in prompt.queries) if queries else ())


@dataclasses.dataclass(frozen=True)
class CombinedSettings:
    """The settings of two drafts."""

    first: DraftSettings
    second: DraftSettings

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The checkpoints that they read besides the target's."""
        return checkpoints_of(self.first) + checkpoints_of(self.second)

    @property
    def needs(self) -> frozenset[Gives]:
        """What they need of the target's cache."""
        return needs_of(self.first) | needs_of(self.second)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> CombinedDraft:
        """The draft of a model. Raises InputError as the two do."""
        int4 = functools.cache(int4)
        return CombinedDraft(self.first.make(model, int4), self.second.make(model, int4))
