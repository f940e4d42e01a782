"""The protocol of drafts: three functions that the decode loop calls, and the state that they pass on.

    state                   = draft.begin(prompt)                   after prefill
    proposal, state, cache  = draft.propose(state, cache, current)    in every round
    state                   = draft.commit(state, result, cache)      when the round has ended

All three run inside one jitted program, for a whole batch at once. Whatever a draft does, the output is exactly the target's, as long as
the distributions in its proposal are those that its drafts were drawn from, and depend on no rejected draft of an earlier round.
"""

import abc
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import View
from qspec_jax.caches.cache import Cache, Gives
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.skipping import Skipped

State = Any


@dataclasses.dataclass(frozen=True)
class Taps:
    """The residual streams of the target that a draft reads as features.

    Attributes:
        layers: see `Llama.watched`.
        first: the number of tokens at the start of a prompt whose features `begin` is given.
        last: the same at its end.
    """

    layers: tuple[int, ...]
    first: int
    last: int

    def of_prompt(self, n: Int[Array, "B"]) -> Int[Array, "B W"]:
        """The positions of the tokens that `Prompt.features` belong to, in a prompt of n[b] tokens; columns beyond n[b] mean nothing."""
        column = jnp.arange(self.first + self.last)
        left_out = jnp.maximum(n - len(column), 0)[:, None]
        return jnp.where(column < self.first, column, column + left_out)

    def columns(self, positions: Int[Array, "B T"], n: Int[Array, "B"]) -> Int[Array, "B T"]:
        """Where `of_prompt` has these positions of a prompt of n[b] tokens; first + last for those that it leaves out."""
        width = self.first + self.last
        of_last = positions - jnp.maximum(n - width, 0)[:, None]
        return jnp.where(positions < self.first, positions, jnp.where(of_last < self.first, width, of_last))

    def of_width(self, width: int) -> Self:
        """The taps of features of this many tokens, of which the `first` are as they are."""
        return dataclasses.replace(self, last=width - self.first)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a draft begins with.

    Attributes:
        tokens: the prompts, padded on the right to the longest that the engine takes.
        n: tokens of each prompt.
        cache: the target's, which holds the prompts.
        queries: for each layer the target's queries after RoPE of the last Q tokens of each prompt, where Q is the draft's
            `prompt_queries`, the last token's in the last row; empty if Q is 0.
        num_queries: how many of the last rows of `queries` are those of tokens; the others mean nothing. None: all tokens of a prompt that
            there are rows for.
        features: of the tokens that the draft's `Taps.of_prompt` says, in `begin_again` perhaps of fewer last ones; None if it has no taps,
            or they are not known.
        capacity: the maximum number of tokens of a row, the generated ones included.
        gamma: the maximum number of drafts in a round.
        beyond: tokens that a draft may append to a cache of its own in a round beyond gamma: a cascade's last block may begin with the
            round's last draft. None of them is proposed.
        width: columns of `tokens` in use: the longest prompt of this call, rounded up (`bucket`); the rest is padding. None: all.
    """

    tokens: Int[Array, "B S"]
    n: Int[Array, "B"]
    cache: Cache
    queries: tuple[Float[Array, "B Q N H"], ...] = ()
    num_queries: Int[Array, "B"] | None = dataclasses.field(default=None, kw_only=True)
    features: Float[Array, "B W F"] | None = dataclasses.field(default=None, kw_only=True)
    capacity: int = dataclasses.field(kw_only=True, metadata={"static": True})
    gamma: int = dataclasses.field(kw_only=True, metadata={"static": True})
    beyond: int = dataclasses.field(default=0, kw_only=True, metadata={"static": True})
    width: int | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    @property
    def appended(self) -> int:
        """The maximum number of tokens that a draft appends in a round to a cache of its own."""
        return self.gamma + self.beyond

    def are_queries(self, count: int) -> Bool[Array, "B Q"]:
        """Which of the last `count` rows of `queries` are queries of tokens."""
        known = self.n if self.num_queries is None else self.num_queries
        return jnp.arange(count) >= count - known[:, None]

    def asked(self, draft: "Draft") -> Self:
        """The prompt as a part of another draft asks for it: with no more of its last queries, and features only if it has taps."""
        count = draft.prompt_queries
        queries = tuple(q[:, q.shape[1] - count :] for q in self.queries) if count else ()
        return dataclasses.replace(self, queries=queries, features=self.features if draft.taps else None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AcceptanceCounts:
    """How many drafts were accepted in passes that verify some.

    Attributes:
        drafted: drafts, those after a rejected one too.
        accepted: those that were accepted.
        rejected: passes that rejected one.
    """

    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    rejected: Int[Array, "B"]

    @classmethod
    def none(cls, batch: int) -> Self:
        return cls(*3 * (jnp.zeros(batch, jnp.int32),))

    @classmethod
    def of_pass(cls, active: Bool[Array, "B"], eligible: Int[Array, "B"], accepted: Int[Array, "B"]) -> Self:
        """The counts of one pass. active: the rows that took part in it. eligible: the drafts that each could use."""
        found = eligible, accepted, (accepted < eligible).astype(jnp.int32)
        return cls(*(jnp.where(active, count, 0) for count in found))

    def __add__(self, other: Self) -> Self:
        return jax.tree.map(jnp.add, self, other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a draft proposes in a round.

    Attributes:
        tokens: the proposed tokens.
        distributions: what the sampler knows of the distributions that they were drawn from.
        eligible: how many of the tokens a row may use.
        foreseen: the value of `eligible` before the first token of the round was drawn; None: all that the round allows. A choice between
            two drafts may depend on it, but not on `eligible`, which may have fallen because of a token that was drawn.
        by: whose token each is, an index of `Draft.proposers()`; None: the first one's. Only traces use it.
        inner: of a cascade, what its middle accepted of its first draft's tokens; `combine` leaves it out. Only measurements use it.
    """

    tokens: Int[Array, "B gamma"]
    distributions: Float[Array, "B gamma W"]
    eligible: Int[Array, "B"]
    foreseen: Int[Array, "B"] | None = None
    by: Int[Array, "B gamma"] | None = None
    inner: AcceptanceCounts | None = None

    def limited(self, most: int) -> Self:
        """No more than the first `most` tokens."""
        by = None if self.by is None else self.by[:, :most]
        eligible = jnp.minimum(self.eligible, most)
        return dataclasses.replace(self, tokens=self.tokens[:, :most], distributions=self.distributions[:, :most], eligible=eligible, by=by)


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
        accepted: the drafts that the target accepted, and that were emitted.
        flushed: 1 where a group left the buffer.
        masses: for each layer the attention mass that each group of the cache got from the round's query tokens, of which the first is the
            pending token; 0 for queries that were rejected. Empty where the draft does not observe.
        top_tokens: the verifying model's argmax after the pending token and after each proposed one, for a draft that `guesses`; None for
            every other, since what follows a rejected draft depends on it.
        features: of the pending token and of each proposed one, for a draft with `Taps`; 0 for those that were rejected.
    """

    tokens: Int[Array, "B gamma+1"]
    count: Int[Array, "B"]
    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    flushed: Int[Array, "B"]
    masses: tuple[Float[Array, "B K T C"], ...] = ()
    top_tokens: Int[Array, "B gamma+1"] | None = None
    features: Float[Array, "B gamma+1 F"] | None = None

    def __post_init__(self):
        if isinstance(self.drafted, jax.Array):  # jax.tree functions may put other objects there
            object.__setattr__(self, "drafted", jnp.minimum(self.drafted, self.accepted + 1))


def of_accepted(features: Float[Array, "B T F"] | None, kept: Int[Array, "B"]) -> Float[Array, "B T F"] | None:
    """The features of a pass with 0 for those of rejected drafts, see `RoundResult`. kept: tokens of the pass that stay."""
    return None if features is None else jnp.where((jnp.arange(features.shape[1]) < kept[:, None])[..., None], features, 0)


class Round(Protocol):
    """What a draft knows of the round that it proposes for; `qspec_jax.decoding.round.CurrentRound`.

    Attributes:
        pending: each row's last token, whose keys and values are not cached yet.
        position: the position of that token.
        eligible: how many drafts each row may use.
        running: the rows that have not ended; the state of others should stay as it is.
        gamma: the maximum number of drafts of any row.
        varies: whether rows may draft fewer than gamma for other reasons than a flush or the end of a row (adaptive drafting, a minimum
            confidence, a draft within a draft); if not, all gamma steps are made.
    """

    pending: Int[Array, "B"]
    position: Int[Array, "B"]
    eligible: Int[Array, "B"]
    running: Bool[Array, "B"]
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
        """This round with other numbers of drafts, for a draft within a draft: `eligible` of each row, and at most gamma."""
        ...

    def below(self) -> "Round":
        """This round one level deeper, with its own random draws, for a draft that itself proposes and verifies."""
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

    Its state changes during decoding. All leaves of the state have the batch axis first, so that a row of a running batch can be replaced.

    Attributes:
        needs: what it needs of the target's cache that not every cache gives.
        observes: whether `commit` uses the attention mass that verification saw.
        prompt_queries: how many of the prompt's last queries `begin` uses.
        taps: the residual streams of the target that `begin` and `commit` use; None for none.
        extra_rows: how many tokens beyond gamma + 1 `propose` appends to the target's cache before it rolls back; the cache has room for
            them.
        max_length: the maximum number of tokens of a row, prompt and new ones, that it can draft for; None: any that the target takes.
        proposes: for cost estimates (`qspec plan`); None if they cannot be made for this draft.
        verifies: whether the draft itself verifies tokens of another draft.
        independent: whether the draft uses nothing of the target but the emitted tokens and, if it has `taps`, features. It may be the
            first of a cascade before any middle.
        guesses: whether its tokens are never accepted and depend on no random draw, so that `commit` may know what follows them
            (`RoundResult.top_tokens`).
    """

    needs: frozenset[Gives] = frozenset()
    observes: ClassVar[bool] = False
    prompt_queries: ClassVar[int] = 0
    taps: Taps | None = None
    extra_rows: int = 0
    max_length: ClassVar[int | None] = None
    proposes: ClassVar[Proposes | None] = None
    verifies: ClassVar[bool] = False
    independent: bool = False
    guesses: ClassVar[bool] = False

    def with_choice(self, choose: Callable[["Draft"], Skipped]) -> Self:
        """The draft with its open settings (`skip=auto`) chosen by this function, which is given the part that steps the target's model. A
        draft that is made of others passes the function on to them."""
        return self

    def chosen(self) -> tuple[str, ...]:
        """The choices of `with_choice`, as texts, which identify a run."""
        return ()

    def made_for(self) -> tuple[tuple[str, int], ...]:
        """The fields of the target's config that the draft depends on: their names and values."""
        return ()

    def begin(self, prompt: Prompt) -> State:
        """The state after prefill."""
        return ()

    def begin_again(self, state: State, prompt: Prompt, unchanged: Int[Array, "B"]) -> State:
        """The state after the target has read more tokens, none of which were drafted.

        Args:
            state: the state before.
            prompt: the whole rows. Of the queries those of the tokens that were read last are known, of the features those of new tokens.
            unchanged: the first unchanged[b] tokens of a row are those of the row whose state was given, the others are new.
        """
        return self.begin(prompt)

    @abc.abstractmethod
    def propose(self, state: State, cache: Cache, current: Round) -> tuple[Proposal, State, Cache]:
        """Drafts for a round. The cache comes back with its valid region, bit for bit, and its lengths as they were."""

    def commit(self, state: State, result: RoundResult, cache: Cache) -> State:
        """The state after a round. cache: the target's, after the round's flush."""
        return state

    def within_round(self, state: State, max_tokens: int) -> State:
        """The state, after it has proposed, for the rest of a cascade's round, at whose end it is dropped.

        max_tokens: the maximum number of tokens, and the columns, of each later `commit`; arrays for those of a whole round may be cut.
        """
        return state

    def read_in_round(self, state: State, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        """What the drafts of a round read of the context in each layer, for measurements; None for a draft that reads everything, or
        nothing."""
        return None

    def in_turn(self) -> tuple["Draft", ...]:
        """The drafts of which a round uses one for each row: itself, unless it is a `combine`."""
        return (self,)

    def proposers(self) -> tuple["Draft", ...]:
        """The drafts whose tokens it proposes: itself, unless it is made of others; see `Proposal.by`."""
        return (self,)

    def in_prefill(self) -> Self:
        """The draft as `begin` runs it after prefill: with default values of the settings that `begin` does not use, so that drafts that
        differ only in those share a program."""
        return self

    def in_loop(self) -> Self:
        """The draft as the decode loop runs it. It is made once for a decode, after prefill, during which memory peaks."""
        return self


def check_made_for(draft: Draft, model: Llama) -> None:
    """Raises InputError if a draft was made for another model than this target."""
    for name, value in draft.made_for():
        if value != (own := getattr(model.checkpoint_config, name)):
            raise InputError(f"the draft was made for a model whose {name} is {value}, and that of this model is {own}; make one for it")


class DraftSettings(Protocol):
    """The settings of a draft: a frozen dataclass of numbers and texts, each with a default.

    Settings that name checkpoints have the attribute `checkpoints`, see `checkpoints_of`. Those of a draft that needs more of the target's
    cache than passes over all of it have the attribute `needs`, see `needs_of`; and `needs_full_layers`, see there, where it differs.
    """

    def make(self, model: Llama, int4: Callable[[], Llama]) -> Draft:
        """The draft of a model. int4: makes the model's INT4 weights, if the draft uses them. Raises InputError for a setting that does not
        fit the model."""
        ...


def checkpoints_of(settings: DraftSettings | None) -> tuple[str, ...]:
    """The checkpoints, directories or names on the Hub, that a draft reads besides the target's."""
    return getattr(settings, "checkpoints", ())


def needs_of(settings: DraftSettings | None) -> frozenset[Gives]:
    """What a draft needs that not every target's cache gives."""
    return getattr(settings, "needs", frozenset())


def needs_full_layers(settings: DraftSettings | None) -> bool:
    """Whether a draft needs layers without a sliding window: if it needs something of their cache, unless its settings say otherwise."""
    return getattr(settings, "needs_full_layers", bool(needs_of(settings)))
