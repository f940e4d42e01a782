"""Sampling is exact: joint distributions of emitted tokens against the enumerated target, for drafts as bad as can be."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import random_head
from hypothesis import given, settings
from hypothesis import strategies as st
from markov import DRAFTS, ROWS, TABLE, WRONG, V, counted, filtered, loop_of_its_own, p_value
from runs import prepared, random_model, random_prompts
from tiers import in_system

from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.views import FULL_PRECISION
from qspec_jax.caches.full import FullCache
from qspec_jax.decoding import sampling
from qspec_jax.decoding.config import GenerationConfig, beside_draft
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.sampling import ACCEPT, DRAFT, TARGET, Greedy, draw_keys, make_sampler, prompt_keys
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.cascade import CascadeDraft
from qspec_jax.drafts.eagle3 import Eagle3Draft
from qspec_jax.drafts.small_model import SmallModelDraft
from qspec_jax.models.viewed import ViewedModel

SAMPLERS = [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.8}]


# Each draft with some sampler, and each sampler with some draft.
SOME = [
    *((SAMPLERS[0], "uniform"), (SAMPLERS[1], "one-hot wrong"), (SAMPLERS[3], "the target")),
    *((SAMPLERS[2], name) for name in ("zero where the target is likely", "another table")),
]


@pytest.mark.parametrize(
    ("options", "draft"), [*SOME, *in_system(*(case for case in itertools.product(SAMPLERS, DRAFTS) if case not in SOME))], ids=str
)
def test_two_tokens_have_the_targets_distribution(options, draft):
    p = filtered(TABLE, **options)
    counts = counted(TABLE, DRAFTS[draft], make_sampler(GenerationConfig(**options)))
    assert p_value(counts, p[0][:, None] * p) > 1e-3


@pytest.mark.parametrize("draft", ["one-hot wrong", "another table", *in_system("uniform", "zero where the target is likely")])
def test_a_wrong_residual_is_seen(monkeypatch, draft):
    monkeypatch.setattr(sampling, "residual", lambda p, q: p)
    p = filtered(TABLE)
    counts = counted(TABLE, DRAFTS[draft], make_sampler(GenerationConfig(temperature=1.0)), loop=WRONG)
    # After the draft that always errs, drawing from p and from the residual differ by nothing.
    expected_to_fail = draft != "one-hot wrong" or p.min(-1).max() > 1e-3
    assert (p_value(counts, p[0][:, None] * p) < 1e-6) == expected_to_fail


class ResidualAlways(sampling.Sampling):
    """Planted: after the last counted draft too it draws from the residual, of a draft that was never counted."""

    def verify(self, logits, drafts, proposals, eligible, keys, positions):
        accepted, _ = super().verify(logits, drafts, proposals, eligible, keys, positions)
        p, q = self.probabilities(logits), jnp.concatenate([proposals, jnp.zeros_like(proposals[:, :1])], 1)
        at = accepted[:, None, None]
        rest = sampling.residual(jnp.take_along_axis(p, at, 1)[:, 0], jnp.take_along_axis(q, at, 1)[:, 0])
        keys = draw_keys(keys, jnp.take_along_axis(positions, accepted[:, None], 1)[:, 0], TARGET)
        return accepted, jax.vmap(lambda key, w: jax.random.categorical(key, jnp.log(w)))(keys, rest).astype(jnp.int32)


jax.tree_util.register_dataclass(
    ResidualAlways,
    data_fields=["temperature", "top_k", "top_p", "min_p"],
    meta_fields=["use_top_k", "use_top_p", "use_min_p", "some_greedy"],
)


@pytest.mark.parametrize("planted", [False, True])
def test_where_drafts_run_out_the_target_speaks(planted):
    """Even rows have room for one draft, and odd rows for three: the even ones draft on, but may not count it."""
    p = filtered(TABLE)
    sampler = make_sampler(GenerationConfig(temperature=1.0))
    sampler = ResidualAlways(**vars(sampler)) if planted else sampler
    # In one full run of the suite the planted sampler gave, to the last digit, what the other gives: nothing of theirs is shared here.
    settings = dict(room=np.where(np.arange(ROWS) % 2, 100, 1), rows=slice(0, None, 2), loop=loop_of_its_own())
    counts = counted(TABLE, DRAFTS["another table"], sampler, **settings)
    assert (p_value(counts, p[0][:, None] * p) < 1e-6) == planted


@pytest.fixture(scope="module")
def tiny():
    """A Llama of six tokens, a prompt, and the logits of all its continuations: with groups of two tokens, and in full precision."""
    model, (prompt,) = random_model(jnp.float32, vocab_size=V, spread=0.3, num_hidden_layers=1), random_prompts([40], V)
    return model, prompt, {cache: enumerated(model, prompt, cache) for cache in ("int8", "full")}


# All budgets are smaller than the prompt. Combined drafts and two levels without a model's cache: test_prompt_lookup.py, test_drafts.py.
PATHS = [
    "quantspec",
    "sparse:budget=0.2,min_groups=1",
    "sparse:budget=0.2,min_groups=2,memory=0.5,heads=by-mass",
    "streaming-llm:budget=3,sinks=1",
    "snapkv:budget=33,generated=1",
    "combine:(prompt-lookup:longest=3,shortest=3)+quantspec",
    "exact-topk:budget=0.2",
    "h2o:budget=0.2,min_groups=1",
    "chunk-means:budget=4,chunk=2,rebuild=1,dense_layers=0",
    "retrieval:budget=34,chunk=1,rebuild=0,generated=1",
    "a second model",
    "a window of a second model",
    "triforce with a window of a second model",
    "cascade:first=(sparse:budget=0.2,min_groups=1),middle=(quantspec:weight_bits=16)",
    "a head",
    "a head before quantspec",
]


# Retrieval chooses for a row at a time.
@pytest.mark.parametrize(
    ("draft", "each"), [("quantspec", 1024), *in_system(*((path, 1024 if "retrieval" in path else 2048) for path in PATHS))]
)
def test_the_whole_path_on_a_real_cache(draft, each, tiny):
    """So many rows of one prompt for each of two ways to sample, side by side; probabilities enumerated with the INT8 target."""
    model, prompt, logits = tiny
    samplers = SAMPLERS[1::2]
    # The last of a round's drafts is the middle's own, so that with one of them the small model would have none.
    new, gamma = (4, 2) if any(kind in draft for kind in ("triforce", "cascade", "before")) else (3, 1)
    settings = dict(max_new_tokens=new, group_size=2, num_speculative_tokens=gamma, ignore_eos=True)
    # One object each, and for a draft that is given: thousands of configs take longer to check than their rows to decode.
    configs = [config for options in samplers for config in [beside_draft(GenerationConfig(**settings, **options))] * each]
    if "second model" in draft:
        second = ViewedModel(random_model(jnp.float32, vocab_size=V, spread=0.3, num_hidden_layers=1, seed=3), FULL_PRECISION)
        made = SmallModelDraft(second, 2, 8) if "window" in draft else SmallModelDraft(second)
        if "triforce" in draft:
            made = CascadeDraft(made, make_draft("retrieval:budget=34,chunk=1,rebuild=0", model))
    elif "head" in draft:
        made = Eagle3Draft(random_head(model), 2, 8)
        if "before" in draft:
            made = CascadeDraft(made, make_draft("quantspec:weight_bits=16", model))
    else:
        made = make_draft(draft, model)
    engine = Engine.for_configs(model, made, configs, prompt_tokens=len(prompt))
    sampler, limits = make_sampler(*configs), make_limits(model, *configs)
    state = started(engine, prompt, sampler, prompt_keys(jax.random.key(1), len(configs)), limits)
    state = engine.rounds(state, sampler, limits)
    for i, options in enumerate(samplers):
        rows = slice(i * each, (i + 1) * each)
        assert 0.1 < state.counts.accepted[rows].sum() / state.counts.drafted[rows].sum() < 1
        counts = np.bincount(np.asarray(state.tokens)[rows, :3] @ [V * V, V, 1], minlength=V**3)
        expected = probabilities(logits["int8"], **options)
        big = expected * each >= 5
        pooled = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
        assert p_value(*pooled) > 1e-3 and counts[expected == 0].sum() == 0
    assert np.abs(probabilities(logits["full"]) - probabilities(logits["int8"])).max() > 1e-5  # the quantized cache matters


def started(engine, prompt, sampler, keys, limits):
    """The state of a row for each key. The prompt is read once, since all rows have the same."""
    rows = len(keys)
    logits, cache, draft = repeated((reading := engine.read(prompt)).logits, reading.cache, reading.draft, rows=rows)
    state = engine.resume(logits, None, jnp.full(rows, len(prompt), jnp.int32), sampler, keys, limits, None, None)
    return dataclasses.replace(state, cache=cache, draft=draft)


@functools.partial(jax.jit, static_argnames="rows")
def repeated(*row, rows):
    return jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), row)


@jax.jit
def forward(model, tokens, cache):
    return model(tokens, cache.lengths.total[:, None] + jnp.arange(tokens.shape[1]), cache)


def enumerated(model, prompt, cache):
    """Logits after the prompt and after all its continuations of one and two tokens, one token at a time over the target's cache."""
    config = GenerationConfig(draft="none", cache=cache, max_new_tokens=3, group_size=2, ignore_eos=True)
    kv = prepared(model, [prompt] * V * V, config)[0].cache
    tokens = jnp.asarray([prompt], jnp.int32)
    empty = FullCache(
        tuple(FullLayer.zeros(1, 2, len(prompt), 16, model.dtype) for _ in model.layers), Lengths(*jnp.zeros((2, 1), jnp.int32))
    )
    logits, _ = forward(model, tokens, empty)
    first, second = np.divmod(np.arange(V * V), V)
    after_one, kv = forward(model, jnp.asarray(first, jnp.int32)[:, None], kv)
    kv, _ = jax.jit(lambda kv: kv.flush())(kv)
    after_two, _ = forward(model, jnp.asarray(second, jnp.int32)[:, None], kv)
    return logits[0, -1], after_one[::V, 0], after_two[:, 0].reshape(V, V, V)


def probabilities(logits, **options):
    """The probabilities [V, V, V] of all three-token continuations."""
    first, second, third = (filtered(x, **options) for x in logits)
    return (first[:, None, None] * second[:, :, None] * third).reshape(-1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-400, 400), min_size=12, max_size=12, unique=True),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.integers(0, 15),
    st.sampled_from([0.05, 0.3, 0.55, 0.9, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_are_hugging_faces(steps, temperature, top_k, top_p, min_p):
    logits = np.array(steps) / 37
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = np.asarray(make_sampler(GenerationConfig(**options)).probabilities(jnp.asarray(logits, jnp.float32)))
    np.testing.assert_allclose(got, filtered(logits, **options), atol=2e-6)


def test_temperature_zero_is_greedy():
    assert make_sampler(GenerationConfig(temperature=0.0, top_k=5)) == Greedy()


@pytest.mark.parametrize("options", [{}, dict(top_k=3), dict(min_p=0.5)], ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-30, 1e-45])
def test_at_a_tiny_temperature_the_most_likely_token_has_all_probability(temperature, options):
    """Also beside biases of the largest size and tokens that are banned, and in a program to which the temperature is an input."""
    logits = jnp.array([[[0.5, -2, 3, 2.5, -jnp.inf], [1e9, 2, -1e9, -jnp.inf, 3]]])
    sampler = make_sampler(GenerationConfig(temperature=temperature, **options))
    expected = jax.nn.one_hot(jnp.array([[2, 0]]), 5)
    np.testing.assert_array_equal(probabilities_of(sampler, logits), expected)
    keys, positions = prompt_keys(jax.random.key(0), 1), jnp.zeros((1, 2), jnp.int32)
    token, q = choose(sampler, logits[:, 0], keys, positions[:, 0])
    assert token == 2 and (q == expected[:, 0]).all()
    for drafts, found in (([[2]], (1, 0)), ([[3]], (0, 2))):
        given = jnp.array(drafts), jax.nn.one_hot(jnp.array(drafts), 5), jnp.array([1]), keys, positions
        accepted, token = jax.jit(lambda sampler, *args: sampler.verify(*args))(sampler, logits, *given)
        assert (accepted, token) == found


probabilities_of = jax.jit(lambda sampler, logits: sampler.probabilities(logits))
choose = jax.jit(lambda sampler, logits, keys, positions: sampler.choose(logits, keys, positions, DRAFT))


@pytest.mark.parametrize("temperature", [1e-5, 1e-2, 0.7])
def test_probabilities_of_a_large_vocabulary_sum_to_1(temperature):
    logits = 10 + 2 * jax.random.normal(jax.random.key(0), (1, 3, 1 << 17))
    sampler = make_sampler(GenerationConfig(temperature=temperature))
    np.testing.assert_allclose(np.asarray(probabilities_of(sampler, logits), np.float64).sum(-1), 1, rtol=2e-6)
    _, q = choose(sampler, logits[:, 0], prompt_keys(jax.random.key(0), 1), jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(q, probabilities_of(sampler, logits)[:, 0], rtol=2e-6)


@pytest.mark.parametrize(("temperature", "bias"), [(1.0, 1e9), (1.0, 1e7), (1e-6, 20.0)])
def test_tokens_with_the_same_large_bias_are_drawn_alike(temperature, bias):
    """As the distribution says that is handed on; not as what is left of the noise of a draw beside so large a number."""
    rows = 4096
    sampler, keys = make_sampler(GenerationConfig(temperature=temperature)), prompt_keys(jax.random.key(0), rows)
    logits = jnp.tile(jnp.array([0.0, bias, 1.0, bias]), (rows, 1))
    tokens, q = choose(sampler, logits, keys, jnp.zeros(rows, jnp.int32))
    assert (q == jnp.array([0, 0.5, 0, 0.5])).all()
    assert abs(int((tokens == 1).sum()) - rows / 2) < 4 * np.sqrt(rows) / 2 and int((tokens == 3).sum()) + int((tokens == 1).sum()) == rows


@pytest.mark.parametrize("options", [{}, dict(top_k=3), dict(top_p=0.8, min_p=0.1)], ids=str)
def test_a_token_after_no_draft_is_the_one_that_is_drawn_without_drafts(options):
    """Also where all drafts that count were accepted: the residual is that of a rejected draft alone."""
    sampler = make_sampler(GenerationConfig(temperature=0.7, **options))
    logits, proposals = jax.random.normal(jax.random.key(1), (64, 3, 11)), jnp.full((64, 2, 11), 1 / 11)
    keys, positions = prompt_keys(jax.random.key(2), 64), jnp.broadcast_to(jnp.arange(3), (64, 3))
    eligible = jnp.arange(64) % 3
    accepted, tokens = sampler.verify(logits, logits[:, :2].argmax(-1), proposals, eligible, keys, positions)
    drawn = jnp.stack([sampler.choose(logits[:, i], keys, positions[:, i], TARGET)[0] for i in range(3)], 1)
    all_counted = np.asarray(accepted == eligible)
    assert set(np.asarray(eligible)[all_counted]) == {0, 1, 2}
    np.testing.assert_array_equal(np.asarray(tokens)[all_counted], np.asarray(drawn)[np.arange(64), accepted][all_counted])


def test_draws_differ_by_row_position_and_purpose():
    keys = prompt_keys(jax.random.key(0), 5)
    positions = jnp.broadcast_to(jnp.arange(7), (5, 7))
    draws = [jax.vmap(jax.vmap(jax.random.bits))(draw_keys(keys, positions, purpose)) for purpose in (DRAFT, ACCEPT, TARGET)]
    assert len(np.unique(draws)) == 3 * 5 * 7
    alone = jax.vmap(jax.random.bits)(draw_keys(keys, positions[:, 3], ACCEPT))
    np.testing.assert_array_equal(alone, draws[1][:, 3])


@pytest.mark.parametrize("options", [{"temperature": 1e-40}, {"temperature": 1e-37}, {"temperature": 1.0, "top_p": 1e-46}])
def test_extreme_settings_draw_the_most_likely_token(options):
    p = make_sampler(GenerationConfig(**options)).probabilities(jnp.array([[40.0, -3.0, 39.0]], jnp.float32))
    np.testing.assert_array_equal(p, [[1, 0, 0]])
