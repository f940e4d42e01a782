"""Sampling is exact: joint distributions of emitted tokens against the enumerated target, for drafts as bad as can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markov import DRAFTS, ROWS, TABLE, WRONG, V, counted, filtered, p_value
from runs import prepared, random_model
from scipy.stats import chisquare

from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from qspec_jax.caches.full import FullCache
from qspec_jax.decoding import sampling
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.sampling import ACCEPT, DRAFT, TARGET, Greedy, draw_keys, make_sampler, prompt_keys
from qspec_jax.drafts import quantspec

SAMPLERS = [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.8}]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_two_tokens_have_the_targets_distribution(options, draft):
    p = filtered(TABLE, **options)
    counts = counted(TABLE, DRAFTS[draft], make_sampler(GenerationConfig(**options)))
    assert p_value(counts, p[0][:, None] * p) > 1e-3


@pytest.mark.parametrize("draft", [name for name in DRAFTS if name != "the target"])
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
    counts = counted(TABLE, DRAFTS["another table"], sampler, room=np.where(np.arange(ROWS) % 2, 100, 1), rows=slice(0, None, 2))
    assert (p_value(counts, p[0][:, None] * p) < 1e-6) == planted


@pytest.mark.slow
def test_the_whole_path_on_a_real_cache():
    """A Llama of six tokens, groups of two tokens, 4,096 copies of a prompt; probabilities enumerated with the INT8 target."""
    model = random_model(jnp.float32, vocab_size=V, spread=0.3)
    prompt = [1, 4, 2, 0, 5, 3]
    config = GenerationConfig(max_new_tokens=3, temperature=1.0, group_size=2, num_speculative_tokens=1, ignore_eos=True)
    out = generate(model, [prompt] * 4096, config=config, draft=quantspec(model), key=jax.random.key(1))
    assert 0.1 < out.stats.draft_acceptance_rate < 0.99
    tokens = np.array(out.token_ids)
    counts = np.bincount(tokens[:, 0] * V * V + tokens[:, 1] * V + tokens[:, 2], minlength=V**3)
    expected = enumerated(model, prompt)
    big = expected * len(tokens) >= 5
    pooled = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    assert chisquare(pooled[0], pooled[1] * len(tokens)).pvalue > 1e-3
    full = enumerated(model, prompt, cache="full")
    assert np.abs(full - expected).max() > 1e-5  # the quantized cache matters


@jax.jit
def forward(model, tokens, cache):
    return model(tokens, cache.lengths.total[:, None] + jnp.arange(tokens.shape[1]), cache)


def enumerated(model, prompt, cache="int8"):
    """Probabilities of all three-token continuations, one token at a time over the target's cache."""
    config = GenerationConfig(draft="none", cache=cache, max_new_tokens=3, group_size=2, ignore_eos=True)
    kv = prepared(model, [prompt] * V * V, config)[0].cache
    tokens = jnp.asarray([prompt], jnp.int32)
    empty = FullCache(
        tuple(FullLayer.zeros(1, 2, len(prompt), 16, model.dtype) for _ in model.layers), Lengths(*jnp.zeros((2, 1), jnp.int32))
    )
    logits, _ = forward(model, tokens, empty)
    first, second = np.divmod(np.arange(V * V), V)
    chance = filtered(logits[:, -1])[0][first]
    logits, kv = forward(model, jnp.asarray(first, jnp.int32)[:, None], kv)
    kv, _ = jax.jit(lambda kv: kv.flush())(kv)
    chance = chance * filtered(logits[:, 0])[np.arange(V * V), second]
    logits, _ = forward(model, jnp.asarray(second, jnp.int32)[:, None], kv)
    return (chance[:, None] * filtered(logits[:, 0])).reshape(-1)


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
