"""Prompt lookup: no model, but the tokens that followed an earlier place where the row's text is as it is at its end.

Source: prompt lookup decoding (Apoorv Saxena, 2023); n-grams are looked up as `PromptLookupCandidateGenerator` in transformers does it, the
longest first, but of several places the most recent one is taken.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from qspec_jax.caches.cache import Cache
from qspec_jax.drafts.draft import Draft, Prompt, Proposal, Proposes, Round, RoundResult
from qspec_jax.drafts.history import History
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.settings_text import check_settings, setting

UNROLLED = 8  # tokens of the longest n-gram that is compared in one kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookupDraft(Draft):
    """Proposes the tokens after the most recent earlier place of the longest n-gram that ends a row's text; none if there is no such
    place. Its state is the text.

    longest, shortest: tokens of the n-grams.
    """

    vocab_size: int = dataclasses.field(metadata={"static": True})
    longest: int = dataclasses.field(metadata={"static": True})
    shortest: int = dataclasses.field(metadata={"static": True})

    proposes = Proposes.ALL_OR_NONE
    independent = True

    def made_for(self) -> tuple[tuple[str, int], ...]:
        return (("vocab_size", self.vocab_size),)

    def begin(self, prompt: Prompt) -> History:
        return History.begin(prompt)

    def propose(self, state: History, cache: Cache, current: Round) -> tuple[Proposal, History, Cache]:
        state = state.written(0, current.pending[:, None])
        tokens, found = look_up(state.tokens, state.n + 1, current.gamma, longest=self.longest, shortest=self.shortest)
        eligible = jnp.where(found, current.eligible, 0)
        return Proposal(tokens, current.certain(tokens, self.vocab_size), eligible, eligible), state, cache

    def commit(self, state: History, result: RoundResult, cache: Cache) -> History:
        return state.after(result)


def look_up(
    text: Int[Array, "B R"], length: Int[Array, "B"], count: int, *, longest: int, shortest: int
) -> tuple[Int[Array, "B count"], Array]:
    """What followed the most recent earlier place of the longest n-gram, of `shortest` to `longest` tokens, that ends each row's text.

    text: length[b] tokens of each row; later columns are not read. Where fewer than `count` tokens followed, the proposal
    goes on in itself, as if each token had been looked up in turn. Returns the tokens, and whether there is such a place [B]; where there
    is none the tokens mean nothing. Takes time that grows with longest * R.
    """
    B, R = text.shape
    longest = min(longest, R)
    last = length[:, None] - 1
    column = jnp.arange(R)
    # Before a text comes -1, and -2 in the n-gram: equal to no token, and not to each other.
    before = jnp.pad(text, ((0, 0), (longest, 0)), constant_values=-1)

    def compare(k, carry):
        run, matched = carry
        wanted = jnp.take_along_axis(text, jnp.maximum(last - k, 0), 1)
        run &= lax.dynamic_slice_in_dim(before, longest - k, R, 1) == jnp.where(last >= k, wanted, -2)
        return run, matched + run

    # matched[b, i]: how many of the tokens up to i are as the last ones of the text
    earlier = jnp.broadcast_to(column < last, (B, R))
    # A loop would be launches of its own, of a few us each.
    _, matched = lax.fori_loop(0, longest, compare, (earlier, jnp.zeros((B, R), jnp.int32)), unroll=longest <= UNROLLED)
    most = matched.max(1, keepdims=True)
    start = jnp.where(matched == most, column, -1).max(1, keepdims=True) + 1
    followed = jnp.maximum(last + 1 - start, 1)
    tokens = jnp.take_along_axis(text, jnp.minimum(start + jnp.arange(count) % followed, R - 1), 1)
    return tokens, most[:, 0] >= shortest


@dataclasses.dataclass(frozen=True)
class PromptLookupSettings:
    """N-grams are looked for from the longest to the shortest."""

    longest: int = setting(3, "How many tokens the longest n-gram has.")
    shortest: int = setting(1, "How many tokens the shortest n-gram has.", minimum=1)

    def __post_init__(self):
        check_settings("draft", self)
        if self.longest < self.shortest:
            raise InputError(f"draft longest {self.longest} should be at least shortest, {self.shortest}: the tokens of an n-gram")

    def make(self, model: Llama, int4: Callable[[], Llama]) -> PromptLookupDraft:
        """The draft for a model, of which it takes the size of the vocabulary."""
        return PromptLookupDraft(model.config.vocab_size, self.longest, self.shortest)
