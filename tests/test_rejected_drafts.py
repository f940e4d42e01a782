"""What a draft knows of a round holds nothing that rejected drafts decided: a draft that uses all of it is still lossless.

The noise of the positions after a rejection is drawn again, so the slightest trace shows in the distribution of what is emitted.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import Markov, NoCache, V, filtered, p_value
from runs import prepared, random_model

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax.caches.cache import longer
from qspec_jax.decoding import round as rounds
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.round import decode
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.decoding.state import UNLIMITED, start
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.draft import Draft, RoundResult, propose_by_steps

ROWS, BATCHES, NEW = 100_000, 3, 4


def tables(seed, spread, noise):
    """The target's table, and three that a draft may choose from."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, spread, (V, V))
    return target, np.stack([target + rng.normal(0, each, (V, V)) for each in noise])


FLAT, SHARP = tables(3, 1.2, (0.8, 1.5, 2.5)), tables(5, 1.8, (0.8, 1.2, 2.5))
LANGUAGES = {0.0: FLAT, 0.3: FLAT, 0.6: SHARP}  # by the least confidence at which their drafts are long enough to show a trace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableOfRow:
    """A model whose logits are a row of one of several tables, by the row of the batch."""

    tables: jax.Array
    which: jax.Array

    def __call__(self, tokens, positions, cache):
        return self.tables[self.which[:, None], tokens], cache.rollback(longer(cache.lengths, tokens.shape[1]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UsesEverything(Draft):
    """Chooses the table of its next drafts by all that it knows of the round before."""

    tables: jax.Array

    def propose(self, state, cache, round):
        proposal, cache = propose_by_steps(TableOfRow(self.tables, state), cache, round)
        return proposal, state, cache

    def commit(self, state, result, cache):
        number = jnp.zeros_like(state)
        for i, leaf in enumerate(jax.tree.leaves(result)):
            number += (2 * i + 1) * leaf.astype(jnp.int32).reshape(len(state), -1).sum(1)
        return jnp.where(result.count > 0, number % len(self.tables), state)


class UsesGuesses(UsesEverything):
    """Planted: it says that its tokens depend on no random draw, which they do."""

    guesses = True


jax.tree_util.register_dataclass(UsesGuesses, data_fields=["tables"], meta_fields=[])


def with_all_drafted(tokens, count, drafted, *more):
    """Planted: the result as it was, with all that were drafted."""
    result = RoundResult(tokens, count, drafted, *more)
    object.__setattr__(result, "drafted", drafted)
    return result


def p_values(kind, confidence):
    """For each of the first tokens, the p value of its pairs with the token before it. kind: of draft."""
    target, choices = LANGUAGES[confidence]
    draft = kind(jnp.asarray(choices))
    settings = dict(max_new_tokens=NEW + 3, num_speculative_tokens=5, min_draft_confidence=confidence)
    config = GenerationConfig(temperature=1.0, ignore_eos=True, **settings)
    limits = jax.tree.map(lambda x: x if x.ndim and x.shape[0] != 1 else jnp.repeat(x, ROWS, 0), make_limits(None, config))
    limits = dataclasses.replace(limits, eos_token_ids=jnp.full(1, -1))
    nothing, loop = jnp.zeros(ROWS, jnp.int32), jax.jit(lambda *args: decode(*args))
    cache, emitted = NoCache(Lengths(nothing, nothing + 3), nothing + 100), []
    for batch in range(BATCHES):
        keys = prompt_keys(jax.random.key(700 + batch), ROWS)
        state = start(cache, nothing, keys, limits, max_new_tokens=NEW + 3, gamma=5, draft=nothing)
        state = loop(Markov(jnp.asarray(target)), draft, make_sampler(config), state, limits, jnp.int32(UNLIMITED))
        emitted.append(np.asarray(state.tokens)[:, : NEW + 1])
    tokens, p = np.concatenate(emitted), filtered(target)
    found, before = [], np.eye(V)[0]
    for i in range(NEW):
        pairs = np.bincount(tokens[:, i] * V + tokens[:, i + 1], minlength=V * V).reshape(V, V)
        found.append(p_value(pairs, before[:, None] * p))
        before = before @ p
    return found


@pytest.mark.parametrize("confidence", LANGUAGES)
def test_a_draft_that_uses_all_that_it_knows_is_lossless(confidence):
    assert min(p_values(UsesEverything, confidence)) > 1e-4


@pytest.mark.parametrize("confidence", [0.3, 0.6])
def test_how_many_were_drafted_after_a_rejection_would_show(monkeypatch, confidence):
    monkeypatch.setattr(rounds, "RoundResult", with_all_drafted)
    assert min(p_values(UsesEverything, confidence)) < 1e-6


def test_what_follows_a_rejected_draft_would_show():
    assert min(p_values(UsesGuesses, 0.0)) < 1e-6


def test_a_result_is_a_tree():
    one = jnp.ones(1, jnp.int32)
    result = RoundResult(one[None], one, 5 * one, one, 0 * one)
    assert result.drafted == 2 and jax.tree.map(lambda x: x.shape, result).drafted == (1,)
    assert jax.eval_shape(lambda result: result, result).count.shape == (1,)


@pytest.mark.parametrize(("accepted", "gamma"), [(0, 3), (1, 5), (2, 7)])
def test_retrieval_chooses_by_judged_drafts_alone(accepted, gamma):
    """Rounds that differ in nothing but how many drafts came after the first rejected one leave the same state."""
    model = random_model(jnp.float32, num_hidden_layers=1)
    draft = make_draft("retrieval:budget=44,chunk=2,rebuild=0,least_accepted=0.9,generated=1", model)
    config = GenerationConfig(group_size=16, max_new_tokens=9, num_speculative_tokens=gamma)
    state, *_ = prepared(model, [list(range(60))], config, draft=draft)
    one = jnp.ones(1, jnp.int32)
    result = lambda drafted: RoundResult(jnp.zeros((1, gamma + 1), jnp.int32), (accepted + 1) * one, drafted * one, accepted * one, 0 * one)
    states = [draft.commit(state.draft, result(drafted), state.cache) for drafted in range(accepted + 1, gamma + 1)]
    assert all(jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), states[0], other)) for other in states[1:])
