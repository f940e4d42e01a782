"""What drafts choose to read: groups by mass and age, budgets of heads, memory, chunks by their mean keys."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from runs import prepared, random_model, random_prompts

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.draft import RoundResult
from qspec_jax.drafts.sparse import HEADS, SparseSettings, select_groups
from qspec_jax.errors import InputError

G = 4
CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=24, group_size=G, ignore_eos=True)


@pytest.fixture(scope="module")
def model(float64):
    return random_model(jnp.float64, num_hidden_layers=1)


def test_groups_are_chosen_by_mass_and_age():
    mass = jnp.array([[[0.1, 0.0, 0.5, 0.3, 0.2, 0.0, 0.9, 0.0]]])
    pick = lambda groups, **settings: select_groups(mass, jnp.array([groups]), group_size=G, settings=SparseSettings(**settings))
    for groups, settings, expected in (
        (7, dict(budget=0.5, newest=0.5, min_groups=2), [0, 2, 5, 6]),  # the sink, the newest two of four, and the most mass
        (7, dict(budget=0.5, newest=0.0, min_groups=2), [0, 2, 3, 6]),  # the newest is always there
        (7, dict(budget=0.5, newest=1.0, min_groups=2), [0, 4, 5, 6]),
        (7, dict(budget=0.01, newest=0.5, min_groups=2), [0, 6]),
        (7, dict(budget=0.01, newest=0.5, min_groups=1), [0]),
        (7, dict(budget=3 * G + 1, newest=0.5, min_groups=1), [0, 2, 5, 6]),  # the number of groups that hold these tokens
        (5, dict(budget=1.0, newest=0.5, min_groups=2), [0, 1, 2, 3, 4]),
        (1, dict(budget=0.5, newest=0.5, min_groups=2), [0]),
        (0, dict(budget=0.5, newest=0.5, min_groups=2), []),
    ):
        found = pick(groups, **settings)
        assert found.groups[0, 0, : int(found.count[0, 0])].tolist() == expected


@pytest.mark.parametrize("groups", [0, 1, 2, 9, 23, 24])
def test_heads_share_a_budget_by_mass(groups):
    """Those with the most mass of all heads' together, beside what each reads always, and no more than four times the equal share of one;
    as many as equal budgets come to."""
    mass = np.random.default_rng(groups).gamma(0.2, size=(2, 3, 24)).astype(np.float32) * np.array([1, 30, 0.01], np.float32)[:, None]
    mass[1] = 0  # a row in which all are equal
    settings = [SparseSettings(budget=0.2, newest=0.25, min_groups=2, heads=heads) for heads in HEADS]
    equal, found = (select_groups(jnp.asarray(mass), jnp.array([groups, groups]), group_size=G, settings=each) for each in settings)
    share = int(equal.count[0, 0])
    for row in range(2):
        lists = [found.groups[row, head, : int(found.count[row, head])].tolist() for head in range(3)]
        assert sum(map(len, lists)) == int(equal.count[row].sum())
        recent = min(max(1, round(0.25 * share)), max(share - 1, 1))
        always = sorted({0, *range(max(groups - recent, 0), groups)}) if groups else []
        assert all(listed == sorted(set(listed)) and set(always) <= set(listed) <= set(range(groups)) for listed in lists)
        if not groups:
            continue
        # The same by hand: one after the other, the largest that is left, of heads that may have more.
        expected, most = [set(always) for _ in range(3)], min(24, 4 * share)
        order = sorted((-mass[row, head, group], head, group) for head in range(3) for group in set(range(groups)) - set(always))
        for _, head, group in order:
            if sum(map(len, expected)) < 3 * share and len(expected[head]) < most:
                expected[head].add(group)
        assert row == 1 or [set(listed) for listed in lists] == expected
    assert groups < 23 or len({int(count) for count in found.count[0]}) > 1


def test_what_a_head_reads_does_not_depend_on_longer_rows():
    """On the cache's capacity, which the longest row of a batch sets. One head has nearly all the mass."""
    mass = np.random.default_rng(0).gamma(0.2, size=(1, 8, 128)).astype(np.float32)
    mass[:, 0] *= 1000
    settings = dict(group_size=G, settings=SparseSettings(budget=0.06, newest=0.0, min_groups=1, heads="by-mass"))
    alone, beside = (
        select_groups(jnp.pad(jnp.asarray(mass), ((0, 0), (0, 0), (0, room))), jnp.array([128]), **settings) for room in (0, 896)
    )
    np.testing.assert_array_equal(alone.count, beside.count)
    assert int(alone.count[0, 0]) == 4 * 8  # an equal share is ceil(0.06 * 128)


def test_memory_is_a_decaying_average_over_rounds(model):
    """A round counts by the mean over its tokens, one token as much as three; a row that emitted nothing keeps what it has."""
    draft = make_draft("sparse:memory=0.75", model)
    old = jnp.array([[[1.0, 0.0]], [[0.5, 0.5]], [[0.0, 1.0]]])[:, None]  # of one layer
    masses = (jnp.array([[[[0.0, 0.8], [0, 0], [0, 0]]], [[[0.2, 0.4], [0.1, 0.2], [0.6, 0.3]]], [[[9.0, 9], [9, 9], [9, 9]]]]),)
    count = jnp.array([1, 3, 0])
    result = RoundResult(jnp.zeros((3, 3), jnp.int32), count, 2 * (count > 0), jnp.maximum(count - 1, 0), jnp.zeros(3, jnp.int32), masses)
    found = draft.commit(old, result, None)[:, 0]
    expected = [[[0.75, 0.2]], [[0.375 + 0.25 * 0.3, 0.375 + 0.25 * 0.3]], [[0.0, 1.0]]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    forgetting = dataclasses.replace(draft, settings=dataclasses.replace(draft.settings, memory=0.0)).commit(old, result, None)
    np.testing.assert_allclose(forgetting[:, 0], [[[0, 0.8]], [[0.3, 0.3]], [[0, 1]]], rtol=1e-6)


@pytest.mark.parametrize("text", ["sparse:budget=0.3", "h2o:budget=0.3"])
def test_before_the_first_verification_the_prompts_last_queries_choose(model, text):
    """In a prompt as short as the queries asked for are many, and in a longer one. A mass that is no number takes nobody's place."""
    draft = make_draft(text, model)
    state, *_ = prepared(model, random_prompts([124, 3]), CONFIG, draft=draft)
    mass = state.draft[:, 0]
    assert mass.shape[:2] == (2, 2) and (np.asarray(mass[0, :, :30]) > 1e-4).all() and (np.asarray(mass[1]) < 1e-20).all()
    # The mass of no more than those queries, each of which gives at most 1 for each of two query heads.
    assert (np.asarray(mass[0]).sum(-1) < 2 * draft.prompt_queries).all()
    newer = jnp.broadcast_to(jnp.arange(mass.shape[2], dtype=jnp.float32) * 1e-30, (1, 2, mass.shape[2]))
    for found in (newer, newer.at[0, 0, 20].set(jnp.nan)):
        chosen = select_groups(found, jnp.array([30]), settings=SparseSettings(budget=0.3, newest=0.5, min_groups=2), group_size=G)
        assert chosen.groups[0, 0, :9].tolist() == [0, *range(22, 30)]


@pytest.mark.system
def test_chunks_are_chosen_by_their_mean_keys(model):
    """And again after this number of tokens, by the last pending token's query; until then what leaves the buffer is read besides."""
    text = "chunk-means:budget=8,chunk=2,rebuild=6,dense_layers=0,weight_bits=16"
    draft = make_draft(text, model)
    config = dataclasses.replace(CONFIG, num_speculative_tokens=1)
    state, step, _ = prepared(model, random_prompts([62, 5]), config, draft=draft)

    def expected(state, row):
        n = int(state.cache.lengths.quantized[row])
        # As many positions each time, or each operation would be compiled again.
        keys = np.asarray(state.cache.tokens(0, jnp.arange(62 + config.max_new_tokens)[None, None])[0])[row, :, :n]
        q = np.asarray(state.draft.queries[0][row]).reshape(2, -1, 1, 16)
        logits = (q * keys.reshape(2, 1, -1, 2, 16).mean(3)).sum(-1) / 4
        score = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).sum(1)
        score[:, 0] = np.inf
        return np.repeat(score >= -np.sort(-score)[:, 3:4], 2, axis=-1)

    chosen = lambda state: np.asarray(state.draft.chosen[0])[0, :, : int(state.cache.lengths.quantized[0])]
    np.testing.assert_array_equal(chosen(state), expected(state, 0))
    assert (chosen(state).sum(-1) == 8).all() and not np.asarray(state.draft.chosen[0])[1].any()
    rebuilt = kept = 0
    while (np.asarray(state.status) == 0).any():
        before, quantized = chosen(state), int(state.cache.lengths.quantized[0])
        state = step(state)
        if int(state.draft.since[0]) == 0:
            np.testing.assert_array_equal(chosen(state), expected(state, 0))
            rebuilt += 1
        else:
            np.testing.assert_array_equal(chosen(state)[:, :quantized], before)
            assert chosen(state)[:, quantized:].all()
            kept += chosen(state).shape[1] > quantized
    assert rebuilt >= 2 and kept >= 1


def test_chunks_divide_groups(model):
    with pytest.raises(InputError, match="chunk 8 should divide the groups of 4 tokens"):
        generate(model, random_prompts([9]), config=dataclasses.replace(CONFIG, draft="chunk-means:dense_layers=0"))
