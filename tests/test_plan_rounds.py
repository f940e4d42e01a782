"""Rounds of plans: drafts that are asked in turn, and how many passes a round takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import prepared, random_model, random_prompts

from pallas_kernels.formats.views import FULL_PRECISION
from qspec_jax.caches.schedule import Schedule, eligible_drafts
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.round import current_round, propose
from qspec_jax.decoding.sampling import make_sampler
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.small_model import BLOCK, SmallModelDraft
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.planning.rounds import Asked, expected_rounds


@pytest.mark.parametrize("schedule", [Schedule(16), Schedule(None, span=16)])
def test_rounds_that_ask_drafts_in_turn(schedule):
    """Rounds that are drawn one by one: the first draft has a proposal in 60 % of them, the second in half of the others, and so on."""
    drafts = Asked(0.5, 0.6), Asked(0.8, 0.5), Asked(0.9, 0.25)
    gamma, random, n, rounds = 5, np.random.default_rng(0), 16 * 9, 6000
    sums = np.zeros(5)
    passes = np.zeros(gamma)
    for _ in range(rounds):
        eligible = int(eligible_drafts(np.array([gamma]), schedule.draft_room(schedule.lengths(np.array([n]))), np.array([1 << 30]))[0])
        found = next((i for i, draft in enumerate(drafts) if random.random() < draft.proposing), None)
        rate = 0.0 if found is None else drafts[found].acceptance
        accepted = int(np.argmin(np.append(random.random(eligible) < rate, False)))
        asked = found is None or found == 2
        sums += accepted + 1, (found is not None) * eligible, found is not None, found is not None and accepted < eligible, asked
        passes[:eligible] += asked
        n += accepted + 1
    found = expected_rounds(schedule, gamma, *drafts)
    means = found.tokens, found.drafted, found.proposing, found.rejected, found.asked
    assert means == pytest.approx(tuple(sums / rounds), rel=0.08)
    assert found.passes == pytest.approx(tuple(passes / rounds), rel=0.1)
    assert found.asked == pytest.approx(0.4 * 0.5) and found.proposing == pytest.approx(1 - 0.4 * 0.5 * 0.75)
    assert (found.flushes > 0) == (schedule.flush_size is not None)
    several = expected_rounds(schedule, gamma, *drafts, batch=8)
    assert several.passes == pytest.approx([1 - (1 - each) ** 8 for each in found.passes]) and several.tokens == found.tokens
    free = expected_rounds(Schedule(None), 2, Asked(0.5, 0.6), Asked(0.9))
    assert free.tokens == pytest.approx(1 + 0.6 * (0.5 + 0.25) + 0.4 * (0.9 + 0.81)) and free.passes == pytest.approx((0.4, 0.4))
    assert free.rejected == pytest.approx(0.6 * 0.75 + 0.4 * 0.19) and free.drafted == pytest.approx(2)


def test_the_acceptance_of_rounds_is_the_conditional_one():
    for schedule in Schedule(16), Schedule(None):
        assert expected_rounds(schedule, 6, Asked(0.8)).acceptance == pytest.approx(0.8)
        # Rounds without a proposal reject nothing, as in `eval acceptance`.
        assert expected_rounds(schedule, 6, Asked(0.8, 0.3)).acceptance == pytest.approx(0.8)
        assert 0.5 < expected_rounds(schedule, 6, Asked(0.5, 0.3), Asked(0.8)).acceptance < 0.8
        assert expected_rounds(schedule, 6, Asked(0.8, 0.0)).acceptance is None


@pytest.mark.system
@pytest.mark.parametrize("own", [False, True])
def test_passes_of_a_round_are_those_that_are_planned(own):
    """The first draft comes from `first_pass` tokens, each other from a step; counted in a proposal that is run without compiling it."""
    model, gamma = random_model(jnp.float32, num_hidden_layers=1), 4
    draft = SmallModelDraft(ViewedModel(model, FULL_PRECISION)) if own else make_draft("quantspec:weight_bits=16", model)
    config = GenerationConfig(draft="quantspec", max_new_tokens=16, num_speculative_tokens=gamma, group_size=16, ignore_eos=True)
    state, _, limits = prepared(model, random_prompts([20]), config, draft=draft)
    widths, call = [], ViewedModel.__call__

    def counted(step, tokens, *arguments, **settings):
        if not isinstance(tokens, jax.core.Tracer):
            widths.append(tokens.shape[1])
        return call(step, tokens, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(ViewedModel, "__call__", counted)
        propose(draft, state.draft, state.cache, current_round(make_sampler(config), state, limits))
    assert widths == [draft.first_pass] + [1] * (gamma - 1) and draft.first_pass == (BLOCK if own else 1)
