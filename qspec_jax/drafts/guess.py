"""SpeCache's guess at the next token, which each pass of the target reads after the token that is output.

The guess is never accepted as output: its queries choose what the next pass reads in full precision (`qspec_jax.caches.specache`). The pass
that outputs a token also makes the guess at the one after it. `qspec_jax.decoding.engine` adds it for caches whose settings ask for it.

Source: SpeCache (arXiv 2503.16163), section 3.3.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from qspec_jax.caches.cache import Cache, at_most_once, where_rows
from qspec_jax.drafts.draft import Draft, Prompt, Proposal, Round, RoundResult
from qspec_jax.models.viewed import ViewedModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuessState:
    """What is known of the rows' guesses.

    Attributes:
        guess: the guess at the token after the pending one.
        missed: whether the pending token differs from the guess at it.
        begun: whether the row has had the pass before its first round, which makes the first guess.
    """

    guess: Int[Array, "B"]
    missed: Bool[Array, "B"]
    begun: Bool[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NextTokenGuess(Draft):
    """Proposes its guess with eligible 0, so that the target reads it and never emits it.

    Attributes:
        step: the target's model, for the pass of the pending token alone that comes before a row's first round (the paper's pre-decoding).
    """

    step: ViewedModel

    guesses = True

    def begin(self, prompt: Prompt) -> GuessState:
        no = jnp.zeros(prompt.n.shape, bool)
        return GuessState(jnp.zeros_like(prompt.n), no, no)

    def propose(self, state: GuessState, cache: Cache, current: Round) -> tuple[Proposal, GuessState, Cache]:
        def pre_decoded(carry):
            state, cache = carry
            logits, stepped = self.step(current.pending[:, None], current.position[:, None], cache)
            layers = (
                dataclasses.replace(after, fetched=where_rows(~state.begun, after.fetched, before.fetched))
                for after, before in zip(stepped.layers, cache.layers, strict=True)
            )
            guess = where_rows(~state.begun, logits[:, 0].argmax(-1).astype(state.guess.dtype), state.guess)
            after = dataclasses.replace(stepped, layers=tuple(layers)).rollback(cache.lengths)
            return dataclasses.replace(state, guess=guess, begun=jnp.ones_like(state.begun)), after

        state, cache = at_most_once(~state.begun.all(), pre_decoded, (state, cache))
        tokens = jnp.broadcast_to(state.guess[:, None], (state.guess.shape[0], current.gamma))
        vocabulary = self.step.model.config.vocab_size
        proposal = Proposal(tokens, current.certain(tokens, vocabulary), jnp.zeros_like(current.eligible))
        return proposal, state, dataclasses.replace(cache, missed=state.missed)

    def commit(self, state: GuessState, result: RoundResult, cache: Cache) -> GuessState:
        went_on, guess = result.count > 0, result.top_tokens[:, 1].astype(state.guess.dtype)
        # In a row that has ended nothing is missed, or the others would wait for what it chooses.
        missed = went_on & (result.tokens[:, 0] != state.guess)
        return dataclasses.replace(state, guess=jnp.where(went_on, guess, state.guess), missed=missed)
