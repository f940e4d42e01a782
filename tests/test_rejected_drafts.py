"""What a draft knows of a round holds nothing that rejected drafts decided: a draft that uses all of it is still lossless.

The noise of the positions after a rejection is drawn again, so the slightest trace shows in the distribution of what is emitted.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import ROWS, V, counted, filtered, loop_of_its_own, p_value
from tiers import in_system

from qspec_jax.caches.cache import longer
from qspec_jax.decoding import round as rounds
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.sampling import make_sampler
from qspec_jax.drafts.draft import Draft, RoundResult
from qspec_jax.drafts.stepwise import propose_by_steps

pytestmark = pytest.mark.optimized
NEW = 4


def tables(seed, spread, noise):
    """The target's table, and three that a draft may choose from."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, spread, (V, V))
    return target, np.stack([target + rng.normal(0, each, (V, V)) for each in noise])


# By min_draft_confidence: those in which the errors that are planted below show in few rows.
LANGUAGES = {0.0: tables(6, 1.0, (1.0, 1.5, 2.0)), 0.3: tables(3, 1.2, (0.8, 1.5, 2.5)), 0.6: tables(5, 1.8, (0.8, 1.2, 2.5))}


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

    def propose(self, state, cache, current):
        proposal, cache = propose_by_steps(TableOfRow(self.tables, state), cache, current)
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


def p_values(kind, confidence, *, batches):
    """For each of the first tokens, the p value of its pairs with the token before it. kind: of draft. batches: of ROWS rows."""
    target, choices = LANGUAGES[confidence]
    config = GenerationConfig(temperature=1.0, ignore_eos=True, draft="quantspec", min_draft_confidence=confidence)
    counts = counted(
        *(target, kind(jnp.asarray(choices)), make_sampler(config)),
        **dict(seed=700, batches=batches, gamma=5, loop=loop_of_its_own(), length=NEW + 1),
        **dict(settings=config, draft_state=jnp.zeros(ROWS, jnp.int32)),
    )
    p = filtered(target)
    found, before = [], p[0]
    for i in range(NEW):
        others = tuple(axis for axis in range(NEW + 1) if axis not in (i, i + 1))
        found.append(p_value(counts.sum(others), before[:, None] * p))
        before = before @ p
    return found


@pytest.mark.parametrize("confidence", in_system(0.0, 0.3, 0.6))
def test_a_draft_that_uses_all_that_it_knows_is_lossless(confidence):
    assert min(p_values(UsesEverything, confidence, batches=15)) > 1e-4


@pytest.mark.parametrize("confidence", [pytest.param(confidence, marks=pytest.mark.system) for confidence in (0.3, 0.6)])
def test_how_many_were_drafted_after_a_rejection_would_show(monkeypatch, confidence):
    monkeypatch.setattr(rounds, "RoundResult", with_all_drafted)
    assert min(p_values(UsesEverything, confidence, batches=15)) < 1e-6


def test_what_follows_a_rejected_draft_would_show():
    assert min(p_values(UsesGuesses, 0.0, batches=5)) < 1e-6


def test_a_result_is_a_tree():
    one = jnp.ones(1, jnp.int32)
    result = RoundResult(one[None], one, 5 * one, one, 0 * one)
    assert result.drafted == 2 and jax.tree.map(lambda x: x.shape, result).drafted == (1,)
    assert jax.eval_shape(lambda result: result, result).count.shape == (1,)
