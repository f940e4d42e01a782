"""Cascades: a draft that itself proposes and verifies. A first draft drafts for a middle one, which drafts for the target.

The middle draft makes the steps of another draft, such as INT4 weights over listed groups of the cache; but instead of one token a step, it
verifies what the first drafts for it, `first_gamma` tokens at a time, until the round has all its drafts. The target then verifies these
against the distributions that the middle model gave, the very ones that it verified with. So both levels are lossless: the tokens of the
middle have the middle's own distribution, those of the target the target's.

Source: TriForce (arXiv 2404.11912), sections 4.2 and 4.3, algorithm 1. Its gamma2 is the round's gamma.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.support import MAX_ROUND_TOKENS
from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import View
from qspec_jax.caches.cache import AppendedCache, Cache, longer
from qspec_jax.drafts.draft import (
    AcceptanceCounts,
    Draft,
    DraftSettings,
    Prompt,
    Proposal,
    Proposes,
    Round,
    RoundResult,
    State,
    of_accepted,
)
from qspec_jax.drafts.draft_of_two import DraftOfTwo, SettingsOfTwo
from qspec_jax.drafts.prompt_lookup import PromptLookupSettings
from qspec_jax.drafts.sparse import SparseSettings
from qspec_jax.drafts.stepwise import StepwiseDraft
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.skipping import NO_LAYERS, Deferred
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.settings_text import check_settings, setting

FIRST_GAMMA = 2  # where it is not chosen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CascadeDraft(DraftOfTwo):
    """Two levels of drafting and verifying. Raises InputError for drafts that cannot be its levels.

    Attributes:
        first: drafts for the middle. It is an `independent` draft, or both levels only step the target's own cache.
        middle: verifies these drafts by its steps, each of several tokens.
        first_gamma: how many tokens the first draft drafts at a time, if the gamma of a round is larger.
    """

    first: Draft
    middle: StepwiseDraft
    first_gamma: int = dataclasses.field(default=FIRST_GAMMA, metadata={"static": True})

    PARTS = "first", "middle"
    verifies = True
    proposes = Proposes.ALL  # the middle goes on until the round has its drafts

    def __post_init__(self):
        if not isinstance(self.middle, Draft) or not isinstance(self.first, Draft):
            return  # jax.tree functions may put other objects there
        if not isinstance(self.middle, StepwiseDraft):
            raise InputError(
                "the middle draft of a cascade should be one that only steps the target's own model, such as sparse or retrieval"
            )
        if not self.first.independent and not (_steps_targets_cache(self.first) and _steps_targets_cache(self.middle)):
            raise InputError(
                "the first draft of a cascade should be prompt-lookup, small-model, eagle3, or a combine of these; or both should be "
                "drafts that step the target's own cache, such as quantspec and sparse"
            )
        skipped = getattr(self.middle, "skipped", NO_LAYERS)
        # What such a middle leaves out of a layer the first draft would read there: what earlier drafts left, rejected ones among them.
        if (self.first.taps or not self.first.independent) and (isinstance(skipped, Deferred) or skipped):
            raise InputError("the middle draft of a cascade should skip no layers, unless the first is prompt-lookup or small-model")

    def at_once(self, gamma: int) -> int:
        """How many tokens the first draft drafts at a time in rounds of gamma.

        One of a round's drafts at least is the middle's own token, so it never needs more than gamma - 1. A round's drafts end before row
        2G of the target's buffer, or before its capacity, and after these it has gamma + 1 rows. So a block of the middle has room there,
        of at most gamma tokens (2 with gamma 1), wherever it begins, and `extra_rows` counts none for it. A cache of the middle's own has
        no such end: see `begin`. Nor has a ring of the target's.
        """
        return max(1, min(self.first_gamma, gamma - 1))

    @property
    def extra_rows(self) -> int:
        of_blocks = self.first_gamma if self.middle.step.model.config.windowed_layers else 0
        return max(super().extra_rows, of_blocks)

    def begin(self, prompt: Prompt) -> State:
        prompt = self._prompt(prompt)
        return self.first.begin(prompt.asked(self.first)), self.middle.begin(prompt.asked(self.middle))

    def begin_again(self, state: State, prompt: Prompt, unchanged: Int[Array, "B"]) -> State:
        prompt = self._prompt(prompt)
        first = self.first.begin_again(state[0], prompt.asked(self.first), unchanged)
        return first, self.middle.begin_again(state[1], prompt.asked(self.middle), unchanged)

    def _prompt(self, prompt: Prompt) -> Prompt:
        """The prompt for drafts of blocks, the last of which may extend beyond the round."""
        # A block may begin with the round's last draft, or after it in a row that waits for others.
        return dataclasses.replace(prompt, beyond=prompt.beyond + self.first_gamma)

    def propose(self, state: State, cache: Cache, current: Round) -> tuple[Proposal, State, Cache]:
        # What the middle reads is settled once a round, so that all distributions of the round are of one and the same model.
        model, stepped = self.middle.step_in_round(state[1], cache), self.middle.cache_of_steps(state[1], cache)
        level, before, first_gamma = current.below(), stepped.lengths, self.at_once(current.gamma)
        put = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))

        def first_drafts(first, stepped, tokens, done):
            """What the first draft drafts after the first done[b] tokens of the round. The middle adds a token of its own."""
            here = level.advanced(tokens, done)
            wanted = jnp.clip(current.eligible - done - 1, 0, first_gamma)
            read = cache if self.first.independent else stepped
            proposal, first, read = self.first.propose(first, read, here.limited(wanted, first_gamma))
            # It may propose fewer than are wanted, but never more: one place is the middle's own token's.
            proposal = dataclasses.replace(proposal, eligible=jnp.minimum(proposal.eligible, wanted))
            return first, proposal, stepped if self.first.independent else read

        def inner_round(most, carry):
            """A pass of the middle over at most that many tokens of the first draft."""
            done, tokens, distributions, by, stepped, first, drafts, inner = carry
            here, drafts, width = level.advanced(tokens, done), drafts.limited(most), most + 1
            block = jnp.concatenate([here.pending[:, None], drafts.tokens], 1)
            logits, stepped, features = self._verified(model, block, here.position[:, None] + jnp.arange(width), stepped)
            accepted, own_token = here.verify(logits, drafts)
            of_first = jnp.arange(width) < accepted[:, None]
            new = jnp.where(of_first, jnp.roll(block, -1, 1), own_token[:, None])
            came = jnp.where(done < current.eligible, accepted + 1, 0)
            drafted, accepted_drafts = jnp.where(came > 0, drafts.eligible, 0), jnp.minimum(accepted, came)
            inner += AcceptanceCounts.of_pass(came > 0, drafts.eligible, accepted)
            if self.first.independent:  # another's state says what it reads in the whole round
                kept = of_accepted(features, came)
                result = RoundResult(new, came, drafted, accepted_drafts, jnp.zeros_like(came), features=kept)
                first = self.first.commit(first, result, cache)
            tokens = put(tokens, new, done)
            distributions = put(distributions, here.distributions(logits, drafts.tokens), done)
            by = put(by, self._by(drafts, of_first), done)
            done += came
            stepped = stepped.rollback(longer(before, done))
            first, drafts, stepped = first_drafts(first, stepped, tokens, done)
            return done, tokens, distributions, by, stepped, first, drafts, inner

        def goes_on(carry):
            return (carry[0] < current.eligible).any()

        def has_drafts(carry):
            """Whether the first draft has proposed anything, for a row that goes on."""
            return ((carry[0] < current.eligible) & (carry[6].eligible > 0)).any()

        def inner_rounds(carry):
            """Passes with drafts, then passes without, which are steps of one token."""
            carry = lax.while_loop(has_drafts, functools.partial(inner_round, first_gamma), carry)
            return lax.while_loop(lambda carry: goes_on(carry) & ~has_drafts(carry), functools.partial(inner_round, 0), carry)

        tokens, distributions = self._empty(model, stepped, current)
        done = jnp.zeros_like(current.eligible)
        began, drafts, stepped = first_drafts(state[0], stepped, tokens, done)
        within = self.first.within_round(began, first_gamma + 1)
        carry = done, tokens, distributions, jnp.zeros_like(tokens), stepped, within, drafts, AcceptanceCounts.none(len(done))
        # A program with both kinds of passes takes longer to compile: for drafts that always propose it has one.
        one_pass = functools.partial(inner_round, first_gamma) if self.first.proposes is Proposes.ALL else inner_rounds
        _, tokens, distributions, by, stepped, *_, inner = lax.while_loop(goes_on, one_pass, carry)
        middle, cache = self.middle.after_steps(state[1], cache, stepped.rollback(before), current.eligible > 0)
        # The first draft's state after its first drafts is kept, since later ones follow tokens that the target may reject. Its `commit`
        # takes in the tokens that were emitted.
        tokens, distributions, by = (x[:, : current.gamma] for x in (tokens, distributions, by))
        return Proposal(tokens, distributions, current.eligible, by=by, inner=inner), (began, middle), cache

    def _verified(
        self, model: ViewedModel, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AppendedCache
    ) -> tuple[Float[Array, "B T V"], AppendedCache, Float[Array, "B T F"] | None]:
        """A pass of the middle, and the features that the first draft reads instead of the target's, until that has verified."""
        if self.first.taps is None:
            return *model(tokens, positions, cache), None
        logits, cache, seen = model.watched(tokens, positions, cache, taps=self.first.taps.layers)
        return logits, cache, seen.features

    def _by(self, drafts: Proposal, of_first: Array) -> Int[Array, "B T"]:
        """Who proposed each token of a block: an index of `proposers`, of which the last is the middle."""
        of_drafts = jnp.zeros_like(drafts.tokens) if drafts.by is None else drafts.by
        return jnp.where(of_first, jnp.pad(of_drafts, ((0, 0), (0, 1))), len(self.first.proposers()))

    def _empty(self, model: Callable, stepped: AppendedCache, current: Round) -> tuple[Int[Array, "B M"], Float[Array, "B M W"]]:
        """Room for the round's tokens, for those that the first draft drafts beyond them, and for their distributions."""
        none = jnp.zeros((current.pending.shape[0], current.gamma + self.first_gamma + 1), jnp.int32)
        logits, _ = jax.eval_shape(model, none[:, :1], none[:, :1], stepped)
        kind = jax.eval_shape(current.distributions, logits, none[:, :0])
        return none, jnp.zeros((*none.shape, kind.shape[2]), kind.dtype)

    def read_in_round(self, state: State, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        return self.middle.read_in_round(state[1], cache)


def _steps_targets_cache(draft: Draft) -> bool:
    """Whether all that a draft does with the target's cache is to step it."""
    return isinstance(draft, StepwiseDraft) and type(draft).cache_of_steps is StepwiseDraft.cache_of_steps


def first_gamma_setting(of: str) -> Any:
    """The setting of how many tokens a cascade's first draft drafts at a time. of: that draft, for the docs."""
    return setting(
        None,
        f"How many tokens {of} drafts at a time, if a round's gamma is larger. By default it is chosen by stored costs where requests "
        f"are prepared from a draft's text, and {FIRST_GAMMA} elsewhere.",
        minimum=1,
        maximum=MAX_ROUND_TOKENS - 1,
        parse=_auto_or_number,
        takes=f"auto, or a whole number from 1 to {MAX_ROUND_TOKENS - 1}",
    )


def _auto_or_number(text: str) -> int | None:
    return None if text == "auto" else int(text)


@dataclasses.dataclass(frozen=True)
class CascadeSettings(SettingsOfTwo):
    """The first draft is prompt-lookup, small-model, eagle3, or a combine of these; or both step the target's own cache, as quantspec and
    sparse do. The middle is any draft that only makes steps of the target's own model: sparse, quantspec, retrieval, ..."""

    first: DraftSettings = setting(
        PromptLookupSettings(),
        "The draft whose tokens the middle verifies, prompt-lookup by default.",
        example="first=(small-model:model=DIR,reads=window)",
    )
    middle: DraftSettings = setting(
        SparseSettings(), "The draft whose steps verify them, sparse by default.", example="middle=(sparse:budget=0.03)"
    )
    first_gamma: int | None = first_gamma_setting("the first draft")
    PARTS = "first", "middle"
    NAME_OF_FIRST_GAMMA = "first_gamma"

    def __post_init__(self):
        check_settings("draft", self)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> CascadeDraft:
        """The draft of a model. Raises InputError as the two do, and as `CascadeDraft`."""
        # The first one's checkpoint may be refused, before INT4 weights take their time.
        int4 = functools.cache(int4)
        first = self.first.make(model, int4)
        return CascadeDraft(first, self.middle.make(model, int4), FIRST_GAMMA if self.first_gamma is None else self.first_gamma)
