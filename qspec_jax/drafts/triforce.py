"""TriForce: a draft that itself proposes and verifies. A small model drafts for a middle one, which drafts for the target.

The middle draft makes the steps of another draft, such as the target's weights over a retrieval cache; but instead of one token a step, it
verifies what the small model drafts for it, gamma1 tokens at a time, until the round has all its drafts. The target then verifies these
against the distributions that the middle model gave, the very ones that it verified with. So both levels are lossless: the tokens of the
middle have the middle's own distribution, those of the target the target's.

Source: TriForce (arXiv 2404.11912), sections 4.2 and 4.3, algorithm 1. Its gamma2 is the round's gamma.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.support import MAX_ROUND_TOKENS
from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import View
from qspec_jax.caches.cache import AppendedCache, Cache, longer
from qspec_jax.drafts.draft import Draft, DraftSettings, Prompt, Proposal, Round, RoundResult, State, StepwiseDraft
from qspec_jax.drafts.draft_of_two import DraftOfTwo, SettingsOfTwo
from qspec_jax.drafts.retrieval import RetrievalSettings
from qspec_jax.drafts.small_model import SmallModelSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.settings_text import check_settings, setting

SMALL, MIDDLE = range(2)  # of `PARTS`: whose token one of the round is


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TriForceDraft(DraftOfTwo):
    """small: drafts up to gamma1 tokens for the middle at a time; it may use its own state and the emitted tokens, but neither the target's
    cache nor queries or masses, of which it is given none. middle: verifies them by its steps, each of several tokens."""

    small: Draft
    middle: StepwiseDraft
    gamma1: int = dataclasses.field(default=2, metadata={"static": True})

    PARTS = "small", "middle"
    verifies = True

    def at_once(self, gamma: int) -> int:
        """How many tokens the small model drafts at a time in rounds of gamma.

        One of a round's drafts at least is the middle's own token, so it never needs more than gamma - 1. A round's drafts end before row
        2G of the target's buffer, or before its capacity, and after these it has gamma + 1 rows. So a block of the middle has room there,
        of at most gamma tokens (2 with gamma 1), wherever it begins, and `extra_rows` counts none for it. A cache of the middle's own has
        no such end: see `begin`. Nor has a ring of the target's.
        """
        return max(1, min(self.gamma1, gamma - 1))

    @property
    def extra_rows(self) -> int:
        of_blocks = self.gamma1 if self.middle.step.model.config.windowed_layers else 0
        return max(super().extra_rows, of_blocks)

    def begin(self, prompt: Prompt) -> State:
        of_small, of_middle = self._prompts(prompt)
        return self.small.begin(of_small), self.middle.begin(of_middle)

    def begin_again(self, state: State, prompt: Prompt, unchanged: Int[Array, "B"]) -> State:
        of_small, of_middle = self._prompts(prompt)
        return self.small.begin_again(state[0], of_small, unchanged), self.middle.begin_again(state[1], of_middle, unchanged)

    def _prompts(self, prompt: Prompt) -> tuple[Prompt, Prompt]:
        """What the small model and the middle begin with."""
        # A block that begins with the round's last draft, or after it in a row that waits for others, extends beyond the round.
        prompt = dataclasses.replace(prompt, gamma=prompt.gamma + self.gamma1)
        return dataclasses.replace(prompt, queries=()), prompt

    def propose(self, state: State, cache: Cache, current: Round) -> tuple[Proposal, State, Cache]:
        # What the middle reads is settled once a round, so that all distributions of the round are of one and the same model.
        model, stepped = self.middle.step_in_round(state[1], cache), self.middle.cache_of_steps(state[1], cache)
        level, before, gamma1 = current.below(), stepped.lengths, self.at_once(current.gamma)
        width = gamma1 + 1
        put = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))

        def small_drafts(small, tokens, done):
            """What the small model drafts after the first done[b] tokens of the round. The middle adds a token of its own."""
            here = level.advanced(tokens, done)
            wanted = jnp.clip(current.eligible - done - 1, 0, gamma1)
            proposal, small, _ = self.small.propose(small, cache, here.limited(wanted, gamma1))
            # It may propose fewer than are wanted, but never more: one place is the middle's own token's.
            return small, dataclasses.replace(proposal, eligible=jnp.minimum(proposal.eligible, wanted))

        def inner_round(carry):
            done, tokens, distributions, by, stepped, small, drafts = carry
            here = level.advanced(tokens, done)
            block = jnp.concatenate([here.pending[:, None], drafts.tokens], 1)
            logits, stepped = model(block, here.position[:, None] + jnp.arange(width), stepped)
            accepted, own_token = here.verify(logits, drafts)
            of_small = jnp.arange(width) < accepted[:, None]
            new = jnp.where(of_small, jnp.roll(block, -1, 1), own_token[:, None])
            came = jnp.where(done < current.eligible, accepted + 1, 0)
            drafted, accepted_drafts = jnp.where(came > 0, drafts.eligible, 0), jnp.minimum(accepted, came)
            small = self.small.commit(small, RoundResult(new, came, drafted, accepted_drafts, jnp.zeros_like(came)), cache)
            tokens = put(tokens, new, done)
            distributions = put(distributions, here.distributions(logits, drafts.tokens), done)
            by = put(by, jnp.where(of_small, SMALL, MIDDLE).astype(by.dtype), done)
            done += came
            small, drafts = small_drafts(small, tokens, done)
            return done, tokens, distributions, by, stepped.rollback(longer(before, done)), small, drafts

        tokens, distributions = self._empty(model, stepped, current)
        done = jnp.zeros_like(current.eligible)
        first, drafts = small_drafts(state[0], tokens, done)
        carry = done, tokens, distributions, jnp.zeros_like(tokens), stepped, first, drafts
        _, tokens, distributions, by, stepped, *_ = lax.while_loop(lambda carry: (carry[0] < current.eligible).any(), inner_round, carry)
        middle, cache = self.middle.after_steps(state[1], cache, stepped.rollback(before), current.eligible > 0)
        # The small model's state after its first drafts is kept, since later ones follow tokens that the target may reject. `commit`
        # compares these drafts with the emitted tokens, and the model reads the others again in the next round.
        tokens, distributions, by = (x[:, : current.gamma] for x in (tokens, distributions, by))
        return Proposal(tokens, distributions, current.eligible, by=by), (first, middle), cache

    def _empty(self, model: Callable, stepped: AppendedCache, current: Round) -> tuple[Int[Array, "B M"], Float[Array, "B M W"]]:
        """Room for the round's tokens, for those that the small model drafts beyond them, and for their distributions."""
        none = jnp.zeros((current.pending.shape[0], current.gamma + self.gamma1 + 1), jnp.int32)
        logits, _ = jax.eval_shape(model, none[:, :1], none[:, :1], stepped)
        kind = jax.eval_shape(current.distributions, logits, none[:, :0])
        return none, jnp.zeros((*none.shape, kind.shape[2]), kind.dtype)

    def read_in_round(self, state: State, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        return self.middle.read_in_round(state[1], cache)


RETRIEVAL = RetrievalSettings()


@dataclasses.dataclass(frozen=True)
class TriForceSettings(SettingsOfTwo):
    """The small model reads the first tokens and the most recent ones, see `SmallModelSettings`. The middle is any draft that only makes
    steps of a model (`StepwiseDraft`): retrieval, streaming-llm, snapkv, sparse, quantspec, ..."""

    model: str = setting("", "The small model's checkpoint: a directory, or ORG/NAME on the Hub.")
    gamma1: int = setting(
        2, "How many tokens the small model drafts at a time, if a round's gamma is larger.", minimum=1, maximum=MAX_ROUND_TOKENS - 1
    )
    middle: DraftSettings = setting(
        RETRIEVAL,
        "The draft whose steps verify what the small model drafts, retrieval by default.",
        example="middle=(retrieval:budget=8192,chunk=4)",
    )
    sinks: int = setting(16, "How many of the first tokens the small model reads.", minimum=0)
    window: int = setting(240, "How many of the most recent tokens the small model reads.", minimum=1)
    PARTS = "small", "middle"

    def __post_init__(self):
        if not self.model:
            raise InputError("the triforce draft needs a small model: triforce:model=DIR")
        check_settings("draft", self)

    @property
    def small(self) -> SmallModelSettings:
        """The settings of the small model."""
        return SmallModelSettings(self.model, reads="window", sinks=self.sinks, window=self.window)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> TriForceDraft:
        """The draft of a model. Raises InputError as the small model's settings and the middle's do, and for a middle that does more than
        make steps of a model."""
        small = self.small.make(model, int4)  # which may be refused, before the middle's INT4 weights take their time
        middle = self.middle.make(model, int4)
        if not isinstance(middle, StepwiseDraft):
            raise InputError("draft middle should be a draft that only makes steps of a model, such as retrieval or sparse")
        return TriForceDraft(small, middle, self.gamma1)
