"""SpeCache's guess at the next token, which goes through every pass of the target behind the token that is output.

The guess is fed to the target but never accepted as output; its queries choose what the next pass reads in full precision
(`qspec_jax.caches.specache`). The pass that outputs a token also makes the guess at the one after that. What is output is therefore the
target's own, one token a round; it is the cache that is lossy.

Source: SpeCache (arXiv 2503.16163), section 3.3.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.cache import Gives, where_rows
from qspec_jax.caches.specache import SpeCache
from qspec_jax.drafts.draft import Draft, Proposal
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeCacheState:
    """guess: at the token behind the pending one. missed: whether the pending token is another than was guessed. begun: whether the row has
    had the pass before its first round, which makes the first guess."""

    guess: Int[Array, "B"]
    missed: Bool[Array, "B"]
    begun: Bool[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeCacheDraft(Draft):
    """Proposes its guess with eligible 0, so that it is fed to the target and never emitted.

    step: the target's model, for the one pass of the pending token alone that comes before a row's first round (the paper's pre-decoding).
    """

    step: ViewedModel

    needs = frozenset({Gives.GUESSES})
    guesses = True

    def made_for(self):
        own = self.step.model.checkpoint_config
        return (("vocab_size", own.vocab_size), ("num_layers", own.num_layers))

    def begin(self, prompt):
        if not isinstance(prompt.cache, SpeCache):
            raise InputError("draft specache guesses for the cache of that name; give --cache specache")
        no = jnp.zeros(prompt.n.shape, bool)
        return SpeCacheState(jnp.zeros_like(prompt.n), no, no)

    def propose(self, state, cache, round):
        def pre_decoded(carry):
            state, cache, _ = carry
            logits, stepped = self.step(round.pending[:, None], round.position[:, None], cache)
            layers = (
                dataclasses.replace(after, fetched=where_rows(~state.begun, after.fetched, before.fetched))
                for after, before in zip(stepped.layers, cache.layers, strict=True)
            )
            guess = where_rows(~state.begun, logits[:, 0].argmax(-1).astype(state.guess.dtype), state.guess)
            after = dataclasses.replace(stepped, layers=tuple(layers)).rollback(cache.lengths)
            return dataclasses.replace(state, guess=guess, begun=jnp.ones_like(state.begun)), after, jnp.array(False)

        # A loop of at most one trip: lax.cond would copy the caches that it passes through (seen in jax 0.10).
        state, cache, _ = lax.while_loop(lambda carry: carry[2], pre_decoded, (state, cache, ~state.begun.all()))
        tokens = jnp.broadcast_to(state.guess[:, None], (state.guess.shape[0], round.gamma))
        vocabulary = self.step.model.config.vocab_size
        proposal = Proposal(tokens, round.certain(tokens, vocabulary), jnp.zeros_like(round.eligible))
        return proposal, state, dataclasses.replace(cache, missed=state.missed)

    def commit(self, state, result, cache):
        went_on, guess = result.count > 0, result.likeliest[:, 1].astype(state.guess.dtype)
        # In a row that has ended nothing is missed, or the others would wait for what it chooses.
        missed = went_on & (result.tokens[:, 0] != state.guess)
        return dataclasses.replace(state, guess=jnp.where(went_on, guess, state.guess), missed=missed)


@dataclasses.dataclass(frozen=True)
class GuessSettings:
    """There are none: those of the cache say what is read."""

    needs: ClassVar[frozenset[Gives]] = SpeCacheDraft.needs

    def make(self, model: Llama, int4: Callable[[], Llama]) -> SpeCacheDraft:
        """The draft of a model."""
        return SpeCacheDraft(ViewedModel(model, BOTH_PLANES))
