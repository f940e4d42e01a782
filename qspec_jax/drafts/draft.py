"""What every draft is: three functions that the decode loop calls, and the state that they pass on.

    state                   = draft.begin(prompt)                   after prefill
    proposal, state, cache  = draft.propose(state, cache, round)    in every round
    state                   = draft.commit(state, result, cache)      when the round has ended

All three run inside one jitted program, for a whole batch at once. Whatever a draft does, the output is exactly the target's, as long as
the distributions in its proposal are those that its drafts were drawn from, and depend on nothing that a rejected draft left behind.
"""

import abc
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.views import DenseView, HeldKeys, View
from qspec_jax.caches.cache import AppendedCache, Cache, Gives
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.skipping import Skipped
from qspec_jax.models.viewed import Step, ViewedModel

State = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a draft begins with: n[b] tokens in each row, padded on the right to the longest that the engine takes, and the target's cache
    that holds them.

    queries: for each layer the target's queries after RoPE of the last tokens of each prompt, as many as the draft's `prompt_queries`, the
    last token's in the last row and zeros before a prompt's first; empty where none are asked for. capacity: the most tokens that any row
    may come to hold, the generated ones among them. gamma: the most drafts of a round. width: columns of `tokens` in use: the longest
    prompt of this call, rounded up (`bucket`); the rest is padding. None: all.
    """

    tokens: Int[Array, "B S"]
    n: Int[Array, "B"]
    cache: Cache
    queries: tuple[Float[Array, "B Q N H"], ...] = ()
    capacity: int = dataclasses.field(kw_only=True, metadata={"static": True})
    gamma: int = dataclasses.field(kw_only=True, metadata={"static": True})
    width: int | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a draft proposes: tokens, what the sampler knows of the distributions that they were drawn from, and how many of them a row may
    use.

    foreseen: the value `eligible` had before the first token of the round was drawn; None stands for all that the round allows. A choice
    between two drafts may depend on it, and not on `eligible`, which may have fallen because of a token that was drawn.
    """

    tokens: Int[Array, "B gamma"]
    distributions: Float[Array, "B gamma W"]
    eligible: Int[Array, "B"]
    foreseen: Int[Array, "B"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundResult:
    """The outcome of a round, as far as a draft may know it.

    The noise of the positions after the first rejected draft is drawn again in the next round, so nothing in here may depend on drafts
    after that one: see `__post_init__`.

    Attributes:
        tokens: the first count[b] were emitted: the accepted drafts and the target's own token after them, up to what ends a row.
        count: emitted tokens; 0 in a row that had ended before.
        drafted: the drafts that were judged: those that the target accepted, and the first that it rejected, if there is one. A larger
            number given to the constructor, such as all that were drafted, is cut to that.
        accepted: the drafts that the target accepted.
        flushed: 1 where a group left the buffer.
        masses: for each layer the attention mass that each group of the cache got from the round's query tokens, of which the first is the
            pending token; 0 for queries that were rejected. Empty where the draft does not observe.
        likeliest: the verifying model's argmax after the pending token and after each proposed one, for a draft that `guesses`; None for
            every other, since what follows a rejected draft depends on it.
    """

    tokens: Int[Array, "B gamma+1"]
    count: Int[Array, "B"]
    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    flushed: Int[Array, "B"]
    masses: tuple[Float[Array, "B K T C"], ...] = ()
    likeliest: Int[Array, "B gamma+1"] | None = None

    def __post_init__(self):
        if isinstance(self.drafted, jax.Array):  # and not what a function of trees puts in its place
            object.__setattr__(self, "drafted", jnp.minimum(self.drafted, self.accepted + 1))


class Round(Protocol):
    """What a draft is told of the round that it proposes for; `qspec_jax.decoding.round.CurrentRound`.

    pending: each row's last token, whose keys and values are not cached yet. position: that token's. gamma: the most drafts of any row.
    eligible: how many drafts each row may use. varies: whether rows may draft fewer than gamma for other reasons than a flush or the end of
    a row (adaptive drafting, a least confidence, a draft within a draft); if not, all gamma steps are made.
    """

    pending: Int[Array, "B"]
    position: Int[Array, "B"]
    eligible: Int[Array, "B"]
    gamma: int
    varies: bool

    def choose(self, i: Array, logits: Float[Array, "B V"], drafts: Int[Array, "B gamma"], eligible: Array) -> tuple[Array, Array, Array]:
        """Draft i of each row, what the sampler knows of its distribution, and how many drafts the row may use now.

        drafts: those chosen so far, in the columns before i.
        """
        ...

    def certain(self, tokens: Int[Array, "B gamma"], vocab_size: int) -> Float[Array, "B gamma W"]:
        """The distributions of tokens that were not drawn but given: all probability is theirs."""
        ...

    def limited(self, eligible: Int[Array, "B"], gamma: int) -> "Round":
        """This round with so many drafts that each row may use, and at most gamma of any, for a draft within a draft."""
        ...

    def below(self) -> "Round":
        """This round one level deeper, with random draws of its own, for a draft that itself proposes and verifies."""
        ...

    def advanced(self, tokens: Int[Array, "B M"], count: Int[Array, "B"]) -> "Round":
        """The round as it would be if the first count[b] of these tokens had been emitted; in a row with 0 nothing changes."""
        ...

    def distributions(self, logits: Float[Array, "B T V"], drafts: Int[Array, "B T-1"]) -> Float[Array, "B T W"]:
        """What the sampler knows of the distributions after the pending token and each draft, from a model's logits there."""
        ...

    def verify(self, logits: Float[Array, "B T V"], proposal: Proposal) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """How many of a proposal's drafts are accepted by a model with these logits, and its own token after them."""
        ...


class Proposes(enum.Enum):
    """How many tokens a draft proposes, of those that a round allows a row."""

    ALL = "all"
    ALL_OR_NONE = "all or none"


class Draft(abc.ABC):
    """The protocol of a draft. A subclass is a frozen dataclass of weights and settings, registered as a pytree.

    What changes while decoding is its state, whose leaves all have the batch axis first, so that a row of a running batch can be replaced.
    needs: what it needs of the target's cache that not every cache gives. observes: whether `commit` wants the attention mass that
    verification saw. prompt_queries: how many of the prompt's last queries `begin` wants. extra_rows: how many tokens beyond gamma + 1
    `propose` feeds to the target's cache before it rolls back; the cache has room for them. max_length: the most tokens of a row, prompt
    and new ones, that it can draft for; None: any that the target takes. proposes: for cost estimates (`qspec plan`); None for one that
    they know nothing of. verifies: whether the draft itself verifies what another drafts for it. guesses: whether its tokens are never
    accepted and depend on no random draw, so that `commit` may know what follows them
    (`RoundResult.likeliest`).
    """

    needs: frozenset[Gives] = frozenset()
    observes: ClassVar[bool] = False
    prompt_queries: ClassVar[int] = 0
    extra_rows: int = 0
    max_length: ClassVar[int | None] = None
    proposes: ClassVar[Proposes | None] = None
    verifies: ClassVar[bool] = False
    guesses: ClassVar[bool] = False

    def with_choice(self, choose: Callable[["Draft"], Skipped]) -> Self:
        """The draft with what it leaves to be chosen by the prompts (`skip=auto`), which this function does for a part that steps the
        target's model. A draft that is made of others passes it on to them."""
        return self

    def chosen(self) -> tuple[str, ...]:
        """What `with_choice` has chosen, as texts, by which a run is known."""
        return ()

    def made_for(self) -> tuple[tuple[str, int], ...]:
        """What the draft needs of the target that it was made for: names of fields of its config, and their values."""
        return ()

    def begin(self, prompt: Prompt) -> State:
        """The state after prefill."""
        return ()

    @abc.abstractmethod
    def propose(self, state: State, cache: Cache, round: Round) -> tuple[Proposal, State, Cache]:
        """Drafts for a round. The cache comes back with its valid region, bit for bit, and its lengths as they were."""

    def commit(self, state: State, result: RoundResult, cache: Cache) -> State:
        """The state behind a round. cache: the target's, after the round's flush."""
        return state

    def read_in_round(self, state: State, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        """What the drafts of a round read of the context in each layer, for measurements of what that is worth.

        None for a draft that does not choose: it reads everything, or nothing.
        """
        return None

    def in_turn(self) -> tuple["Draft", ...]:
        """The drafts that a round may ask in place of one another: itself, unless it is a `combine`."""
        return (self,)

    def in_prefill(self) -> Self:
        """The draft as `begin` runs behind prefill: with any values of the settings that `begin` does not ask for, so that drafts that
        differ in those alone share a program."""
        return self

    def in_loop(self) -> Self:
        """The draft as the decode loop runs it. It is made once for a decode, after prefill, during which memory peaks."""
        return self


@dataclasses.dataclass(frozen=True)
class Reads:
    """What a step reads of one layer of a row, in tokens, the one that it appends among them.

    quantized: tokens read in 4-bit codes, from `planes` planes each. full: tokens in full precision. key_groups: whether keys have a scale
    and a zero for each channel and group, as in the target's cache, or for each token. listed: whether the quantized tokens are those of
    listed groups, and not all that the row has.
    """

    planes: int
    quantized: int
    full: int
    key_groups: bool = dataclasses.field(default=True, kw_only=True)
    listed: bool = dataclasses.field(default=False, kw_only=True)


class ModelDraft(Draft):
    """A draft whose tokens come from single-token steps of a model. A subclass says what they read, for cost estimates (`qspec plan`).

    own_cache: whether the steps append to a cache in the draft's state, and not to the target's. own_model: whether the model is another
    than the target, with weights of its own, which reads the prompts for itself. first_pass: tokens of each row in the pass that the first
    draft of a round comes from; the others come from a step each. oracle: whether finding out what to read costs as much as reading
    everything, so that the draft is for measurement alone.
    """

    step: ViewedModel
    own_cache: ClassVar[bool] = False
    own_model: ClassVar[bool] = False
    first_pass: ClassVar[int] = 1
    oracle: ClassVar[bool] = False
    proposes = Proposes.ALL

    def made_for(self):
        names = ("vocab_size",) if self.own_model else ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
        return tuple((name, getattr(self.step.model.checkpoint_config, name)) for name in names)

    @abc.abstractmethod
    def reads(self, layer: int, quantized: int, buffered: int, group_size: int) -> Reads:
        """What a step reads of a layer, for cost estimates (`qspec plan`).

        quantized, buffered: tokens in the target's cache of a row, in groups of group_size and in full precision; buffered counts the one
        this step appends.
        """

    def holds(self, layer: int, prompt: int, capacity: int, gamma: int) -> Reads:
        """What the draft's own cache has memory for in a row and layer: unless a subclass says otherwise, what the first step reads.

        prompt: tokens of the prompt. capacity: the most tokens that the row may come to hold. gamma: the most drafts of a round.
        """
        return self.reads(layer, 0, prompt + 1, group_size=1)  # nothing is in groups, whose size is then of no account

    def raised_to(self, quantized: int, group_size: int) -> int | None:
        """How many groups a step reads in a row because of some least number, where the draft's budget asks for fewer; None otherwise."""
        return None

    def reads_of_prompt(self, prompt: int) -> int:
        """How many tokens of a prompt of so many a model of the draft's own is given in prefill."""
        return prompt if self.own_model else 0

    def check_capacity(self, capacity: int) -> None:
        """Raises InputError where rows that may hold so many tokens are too small for the settings."""


class StepwiseDraft(ModelDraft):
    """The common case: nothing but single-token steps of a model over a cache. A subclass says which view they read it through, and which
    cache. As the middle of `triforce` its steps have several tokens."""

    @abc.abstractmethod
    def step_in_round(self, state: State, cache: Cache) -> ViewedModel:
        """The step that a round's drafts are made by."""

    def cache_of_steps(self, state: State, cache: Cache) -> AppendedCache:
        """The cache that the steps append to and read: the target's, perhaps with another around it, or the draft's own."""
        return cache

    def after_steps(self, state: State, cache: Cache, stepped: AppendedCache, used: Bool[Array, "B"]) -> tuple[State, Cache]:
        """The state and the target's cache, once the steps have returned their cache, rolled back.

        used: the rows that may use drafts. Others are stepped for their neighbours' sake alone, or not at all, so nothing of their state
        may depend on it.
        """
        return state, stepped

    def read_in_round(self, state, cache):
        views = self.step_in_round(state, cache).view
        return views if isinstance(views, tuple) and any(not isinstance(view, DenseView) for view in views) else None

    def propose(self, state, cache, round):
        proposal, stepped = propose_by_steps(self.step_in_round(state, cache), self.cache_of_steps(state, cache), round)
        return proposal, *self.after_steps(state, cache, stepped, round.eligible > 0)


def check_made_for(draft: Draft, model: Llama) -> None:
    """Raises InputError where a draft was made for another model than this target."""
    for name, value in draft.made_for():
        if value != (own := getattr(model.checkpoint_config, name)):
            raise InputError(f"the draft was made for a model whose {name} is {value}, and that of this model is {own}; make one for it")


def propose_by_steps(
    step: Step, cache: AppendedCache, round: Round, *, first: Float[Array, "B V"] | None = None
) -> tuple[Proposal, AppendedCache]:
    """Drafts by single-token steps of a model over a cache, which comes back rolled back.

    Where the number of drafts varies it stops once no row may use another; the columns behind are zero then. first: the model's logits
    after the pending token, if the cache holds that already.
    """
    B, gamma, lengths = round.pending.shape[0], round.gamma, cache.lengths

    def step_from(i, token, cache):
        logits, cache = step(token[:, None], (round.position + i)[:, None], cache)
        return logits[:, 0], cache

    def chosen(carry, logits, cache):
        i, _, drafts, distributions, eligible, _ = carry
        token, distribution, eligible = round.choose(i, logits, drafts, eligible)
        put = lambda all, new: lax.dynamic_update_index_in_dim(all, new, i, 1)
        return i + 1, token, put(drafts, token), put(distributions, distribution), eligible, cache

    def one(carry):
        return chosen(carry, *step_from(carry[0], carry[1], carry[-1]))

    drafts = jnp.zeros((B, gamma), jnp.int32)
    logits = jax.eval_shape(step_from, jnp.int32(0), round.pending, cache)[0] if first is None else first
    _, distribution, _ = jax.eval_shape(round.choose, jnp.int32(0), logits, drafts, round.eligible)
    distributions = jnp.zeros((B, gamma, distribution.shape[1]), distribution.dtype)
    carry = (jnp.int32(0), round.pending, drafts, distributions, round.eligible, cache)
    if first is not None:
        carry = chosen(carry, first, cache)
    if round.varies:
        carry = lax.while_loop(lambda carry: carry[0] < carry[4].max(), one, carry)
    else:
        # A GPU is launched ahead through a known number of trips. Behind a condition it would stand still in each of them until the host
        # has read it, which costs more than the few drafts that no row may use.
        carry = lax.fori_loop(0 if first is None else 1, gamma, lambda _, carry: one(carry), carry)
    _, _, drafts, distributions, eligible, cache = carry
    return Proposal(drafts, distributions, eligible), cache.rollback(lengths)


class DraftSettings(Protocol):
    """The settings of a draft: a frozen dataclass of numbers and texts, each with a default.

    One that loads checkpoints of its own has them in `checkpoints`, see `checkpoints_of`. One that needs more of the target's cache than
    passes over all of it has that in `needs`, see `needs_of`.
    """

    def make(self, model: Llama, int4: Callable[[], Llama]) -> Draft:
        """The draft of a model. int4: makes the model's INT4 weights, for those that want them. Raises InputError for a setting that does
        not fit the model."""
        ...


def checkpoints_of(settings: DraftSettings | None) -> tuple[str, ...]:
    """The checkpoints, directories or names on the Hub, that a draft reads besides the target's."""
    return getattr(settings, "checkpoints", ())


def needs_of(settings: DraftSettings | None) -> frozenset[Gives]:
    """What a draft needs that not every target's cache gives."""
    return getattr(settings, "needs", frozenset())
