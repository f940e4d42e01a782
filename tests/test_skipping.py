"""Drafts that skip layers: what a pass leaves out, and what it reads. Exactness: test_exactness.py."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import prepared, random_model, random_prompts

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.skip_search import RoundBytes, _Search, layers_to_skip, promises
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.registry import parse_draft
from qspec_jax.drafts.step_bytes import step_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.skipping import NO_LAYERS, MaskedSkippingModel, Skipped, SkippingModel

LAYERS, G = 4, 8
CONFIG = GenerationConfig(draft="quantspec", group_size=G, ignore_eos=True)


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


@pytest.mark.system
@pytest.mark.parametrize(
    "text",
    [
        *("0", "(0a,1m)", "(0m,1a,2,3a)", "none"),
        "(1,2)",
        "3",
        "(1a,3m)",
        "(0,1,2,3a)",
        "(0a,1a,2a,3a)",
    ],
)
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
    keep = np.array([[i not in skipped.attention, i not in skipped.mlp] for i in range(LAYERS)])
    masked, _ = MaskedSkippingModel(model, BOTH_PLANES, jnp.asarray(keep))(tokens, positions, cache)
    with pytest.raises(ValueError, match="cannot be used as target"):
        SkippingModel(model, BOTH_PLANES, skipped).watched(tokens, positions, cache, observe=True)
    np.testing.assert_allclose(masked, expected, rtol=1e-9, atol=1e-9)
    assert Skipped.parse(str(skipped)) == skipped


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
        ("quantspec:skip=x", "skip 'x' should be none, auto, or layers such as"),
        ("quantspec:skip=(1,,2)", "should be none, auto, or layers"),
        ("quantspec:skip=1,2", r"commas in a value need parentheses, as in skip=\(3,5a\)"),
        ("quantspec:skip=(1", "its parentheses should be in pairs"),
        ("sparse:skip=-1", "skip '-1' should be none, auto, or layers such as"),
        ("sparse:skip=(1,4a)", "skip names layer 4; the model has the layers 0 to 3"),
        ("quantspec:skip=(0,1,2,3)", "should leave something of the model's 4 layers"),
        ("quantspec:skip=(1,2a,1m)", "names layer 1 twice"),
        ("quantspec:skip=1\u0663", "should be none, auto, or layers"),
        ("quantspec:skip=99999", "skip names layer 99999; the model has"),
        ("quantspec:skip=0m,sensitive_layers=1", "leaves out layer 0, which sensitive_layers=1 keeps"),
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
    assert make_draft("quantspec", model).skipped == make_draft("snapkv", model).skipped == NO_LAYERS
    both = make_draft("h2o:skip=(1,2m)", model), make_draft("sparse:skip=(1,2m),budget=0.3", model)
    assert {draft.skipped for draft in both} == {Skipped(frozenset({1}), frozenset({1, 2}))}
    assert dataclasses.replace(both[0]).in_loop().skipped == both[0].skipped


IDLE = Skipped(frozenset({2}), frozenset({1}))  # the maximum that the search may leave out of four layers


def chosen(target, draft, lengths=(150, 30, 190), gamma=3):
    return draft.with_choice(functools.partial(layers_to_skip, target, random_prompts(lengths), CONFIG.cache_config, gamma))


WITHIN = pytest.param("combine:prompt-lookup+(sparse:skip=auto,dense_layers=1)", marks=pytest.mark.system)


@pytest.mark.system
@pytest.mark.parametrize("text", ["quantspec:skip=auto", WITHIN])
def test_the_search_leaves_out_what_adds_nothing(model, caplog, text):
    """Each of the other sublayers changes what the model says, as its weights are drawn at random."""
    model = muted(model, IDLE)
    made = make_draft(text.replace("auto", "auto,weight_bits=16,head_bits=16"), model)
    with caplog.at_level("INFO"):
        found = chosen(model, made)
    (skipped,) = map(Skipped.parse, found.chosen())
    assert skipped.attention >= IDLE.attention and skipped.mlp >= IDLE.mlp, skipped
    assert f"draft skip auto: {skipped}, of " in caplog.text and "times as fast" in caplog.text
    assert chosen(model, made).chosen() == (str(skipped),)  # whenever it is done
    told = len(caplog.messages)
    assert chosen(model, found).chosen() == (str(skipped),) and len(caplog.messages) == told  # nothing is left to choose


def test_nothing_is_skipped_where_prompts_or_layers_are_too_few(float64, caplog, model):
    few = random_model(jnp.float64, num_hidden_layers=2)
    with caplog.at_level("INFO"):
        assert not chosen(model, make_draft("quantspec:skip=auto", model), [9, 20, 13]).skipped
        assert not chosen(few, make_draft("quantspec:skip=auto", few)).skipped
    assert "the prompts are too short to choose by" in caplog.text and "there is no other" in caplog.text
    assert make_draft("quantspec", model).chosen() == ()


@dataclasses.dataclass(frozen=True)
class Coins:
    """In place of a model: each sublayer left out makes it miss one more token in twenty, at random; the same tokens, where it can."""

    draws: np.ndarray  # [blocks, tokens]

    def hits(self, sets, blocks):
        return [(self.draws[blocks] < 0.85 * 0.95 ** skip.sum()).sum(1) for skip in sets]


def test_what_is_chosen_is_faster_by_more_than_its_error(monkeypatch):
    """A sublayer saves a hundredth of a round's bytes, and a miss costs more: skipping nothing is best, and mostly stays."""
    layers, gamma, T = 12, 4, 5
    cost = RoundBytes(np.full((layers, 2), 1.0), 26, 200, gamma)
    skipped = []
    for seed in range(5):
        draws = np.random.default_rng(seed).random((26, T))
        passage = SimpleNamespace(tokens=np.zeros((26, 1, T)), valid=np.ones((26, 1, T), bool))
        search = _Search(None, passage, cost)
        monkeypatch.setattr(search, "_hits", Coins(draws).hits)
        found, _ = search.found()
        rate = 0.85 * 0.95 ** (len(found.attention) + len(found.mlp))
        skip = np.array([[i in found.attention, i in found.mlp] for i in range(layers)])
        skipped.append(float(cost.speed(skip, rate) / cost.speed(np.zeros_like(skip), 0.85)))
    assert np.mean(np.array(skipped) == 1) >= 0.8, skipped


def test_the_search_prefers_what_resembles_the_best():
    tried = np.array([[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]], bool)
    pool = np.array([[1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 1]], bool)
    promise = promises(tried, np.array([0.0, 1.0, -1.0]), pool)
    assert promise.argsort().tolist() == [1, 0, 2]


@pytest.mark.system
def test_in_generate_and_batch(model, caplog):
    model = muted(model, Skipped(frozenset({1, 2}), frozenset({1})))
    prompts, config = random_prompts([160, 130]), dataclasses.replace(CONFIG, max_new_tokens=12)
    expected = generate(model, prompts, config=dataclasses.replace(config, draft="none", cache="int8")).token_ids
    config = dataclasses.replace(config, draft="quantspec:skip=auto,weight_bits=16")
    with caplog.at_level("INFO"):
        assert generate(model, prompts, config=config).token_ids == expected
    assert "draft skip auto: (" in caplog.text
    caplog.clear()
    requests = [Request(tokens, config, key) for tokens, key in zip(prompts, jax.random.split(jax.random.key(0)))]
    with caplog.at_level("INFO"):
        assert [r.token_ids for r in sorted(run_batch(model, requests, batch_size=2), key=lambda r: r.index)] == expected
    assert "draft skip auto: (" in caplog.text


def test_without_prompts_it_is_refused(model):
    draft = make_draft("quantspec:skip=auto", model)
    assert draft.chosen() == ()  # as where all lines of a batch are wrong
    for ask in (lambda: step_bytes(draft, CONFIG.cache_config, 100), lambda: draft.step_in_round((), None)):
        with pytest.raises(InputError, match="skip=auto needs prompts to choose by"):
            ask()
