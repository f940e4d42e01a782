"""Drafts that skip layers: what a pass leaves out, and what it reads. Exactness: test_exactness.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import prepared, random_model, random_prompts

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.registry import parse_draft
from qspec_jax.drafts.step_bytes import step_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.skipping import NOTHING, Skipped, SkippingModel

LAYERS, G = 4, 8
CONFIG = GenerationConfig(group_size=G, ignore_eos=True)


@pytest.fixture(scope="module")
def model(float64):
    return random_model(jnp.float64, num_hidden_layers=LAYERS)


def muted(model, skipped):
    """A model of which the output projections that end a skipped half are zero, so that it adds nothing."""
    muted = nnx.clone(model)
    for numbers, name in ((skipped.attention, "o_proj"), (skipped.mlp, "down_proj")):
        for number in numbers:
            weight = getattr(muted.layers[number], name).weight
            weight.set_value(jnp.zeros_like(weight.get_value()))
    return muted


@pytest.mark.parametrize("text", ["0", "(1,2)", "3", "(0a,1m)", "(1a,3m)", "(0m,1a,2,3a)", "(0,1,2,3a)", "(0a,1a,2a,3a)", "none"])
def test_a_pass_is_that_of_a_model_in_which_the_halves_add_nothing(model, text):
    """Over a cache whose other layers hold the same; it comes back as it was where nothing was fed."""
    skipped = Skipped.parse(text)
    state, *_ = prepared(model, random_prompts([37, 5]), CONFIG, draft=None)
    tokens, cache = jnp.array([[3, 1, 4], [1, 5, 9]]), state.cache
    positions = cache.lengths.total[:, None] + jnp.arange(3)
    expected, fed = muted(model, skipped)(tokens, positions, cache)
    found, left = SkippingModel(model, BOTH_PLANES, skipped)(tokens, positions, cache)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    for i, (a, b, before) in enumerate(zip(left.layers, fed.layers, cache.layers)):
        # Layers above see what the lower ones left, so that those that are fed are fed the same.
        for x, y in zip(*map(jax.tree.leaves, (a, before if i in skipped.attention else b))):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(left.lengths.total, fed.lengths.total)


@pytest.mark.parametrize("draft", ["quantspec:skip={},weight_bits=16", "sparse:skip={},weight_bits=16"])
def test_a_step_reads_no_bytes_of_what_is_skipped(model, draft):
    bytes_of = lambda skip: step_bytes(make_draft(draft.format(skip), model), CONFIG.cache_config, 100)
    H, c = 8, model.config
    attention = H * (c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + c.hidden_size)
    mlp = H * (3 * c.hidden_size * c.intermediate_size + c.hidden_size)
    assert bytes_of("none") - bytes_of("2m") == mlp
    of_cache = bytes_of("none") - bytes_of("2a") - attention
    assert of_cache > 0 and bytes_of("none") - bytes_of("(1,2a)") == 2 * (attention + of_cache) + mlp


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("quantspec:skip=x", "skip 'x' should be layers such as"),
        ("quantspec:skip=(1,,2)", "should be layers such as"),
        ("quantspec:skip=1,2", "several layers of skip stand in parentheses"),
        ("quantspec:skip=(1", "should be layers such as"),
        ("sparse:skip=-1", "skip '-1' should be layers such as"),
        ("sparse:skip=(1,4a)", "skip names layer 4; the model has the layers 0 to 3"),
        ("quantspec:skip=(0,1,2,3)", "should leave something of the model's 4 layers"),
    ],
)
def test_what_is_refused(model, text, words):
    with pytest.raises(InputError, match=words):
        make_draft(text, model)


@pytest.mark.parametrize("middle", ["(quantspec:skip=(1,2))", "quantspec:skip=(1,2)"])
def test_in_a_draft_within_a_draft(middle):
    assert parse_draft(f"triforce:model=x,middle={middle},gamma1=3").middle == parse_draft("quantspec:skip=(1,2)")
    assert parse_draft(f"combine:prompt-lookup+{middle}").second == parse_draft("quantspec:skip=(1,2)")


def test_all_other_drafts_skip_nothing(model):
    assert make_draft("quantspec", model).skipped == make_draft("snapkv", model).skipped == NOTHING
    both = make_draft("h2o:skip=(1,2m)", model), make_draft("sparse:skip=(1,2m),budget=0.3", model)
    assert {draft.skipped for draft in both} == {Skipped(frozenset({1}), frozenset({1, 2}))}
    assert dataclasses.replace(both[0]).in_loop().skipped == both[0].skipped
