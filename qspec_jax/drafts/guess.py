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
        of_pending: the guess at the pending token itself, by which tokens were fetched.
        begun: whether the row has had the pass before its first round, which makes the first guess.
    """

    guess: Int[Array, "B"]
    of_pending: Int[Array, "B"]
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
        none = jnp.zeros_like(prompt.n)
        return GuessState(none, none, jnp.zeros(prompt.n.shape, bool))

    def propose(self, state: GuessState, cache: Cache, current: Round) -> tuple[Proposal, GuessState, Cache]:
        state, cache = self.before_pass(state, cache, current.pending, current.position, current.running)
        tokens = jnp.broadcast_to(state.guess[:, None], (state.guess.shape[0], current.gamma))
        vocabulary = self.step.model.config.vocab_size
        return Proposal(tokens, current.certain(tokens, vocabulary), jnp.zeros_like(current.eligible)), state, cache

    def commit(self, state: GuessState, result: RoundResult, cache: Cache) -> GuessState:
        return self.after_pass(state, result.top_tokens[:, 1], result.count > 0)

    def before_pass(
        self, state: GuessState, cache: Cache, pending: Int[Array, "B"], position: Int[Array, "B"], running: Bool[Array, "B"]
    ) -> tuple[GuessState, Cache]:
        """The state with a guess, and the cache ready for a pass over the pending token and that guess. running: the rows that go on."""

        def pre_decoded(carry):
            state, cache = carry
            logits, stepped = self.step(pending[:, None], position[:, None], cache)
            guess = where_rows(~state.begun, logits[:, 0].argmax(-1).astype(state.guess.dtype), state.guess)
            of_pending = where_rows(~state.begun, pending, state.of_pending)
            after = stepped.with_fetched(~state.begun, cache).rollback(cache.lengths)
            return GuessState(guess, of_pending, state.begun | running), after

        # In a row that has ended nothing is missed, or the others would wait for what it chooses.
        cache = cache.guided(chooses=running, missed=jnp.zeros_like(running))
        state, cache = at_most_once((running & ~state.begun).any(), pre_decoded, (state, cache))
        return state, cache.guided(missed=running & (pending != state.of_pending))

    def after_pass(self, state: GuessState, guess: Int[Array, "B"], running: Bool[Array, "B"]) -> GuessState:
        """The state after that pass. guess: the model's most likely token after the guess that it was given."""
        new = GuessState(guess.astype(state.guess.dtype), state.guess, state.begun)
        return where_rows(running, new, state)
