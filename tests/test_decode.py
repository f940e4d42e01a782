"""The decode loop against the target written down a second way (models.py), in float32, and on a coarse cache; where rows end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import one_bit, target_logits
from runs import prepared, random_model, random_prompts, run_rounds
from scipy.special import softmax
from scipy.stats import chisquare
from tiers import in_system

from pallas_kernels.formats.quantization import SCHEMES
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.state import EOS
from qspec_jax.drafts import quantspec

G = 4
LENGTHS = (1, G - 1, G, G + 1, 2 * G - 1, 2 * G, 2 * G + 1, 5 * G + 3)
GAMMAS = (1, 4, 2 * G)
NEW = 6 * G  # three flushes and more, also after a prompt of one token
QUANTSPEC = GenerationConfig(draft="quantspec", max_new_tokens=NEW, group_size=G, ignore_eos=True)
TARGET = dataclasses.replace(QUANTSPEC, draft="none", cache="int8")


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def _coarse_scheme(monkeypatch):
    monkeypatch.setitem(SCHEMES, "one_bit", one_bit)


@functools.cache
def model_and_draft(dtype: str, layers: int = 2):
    model = random_model(jnp.dtype(dtype), num_hidden_layers=layers)
    return model, quantspec(model)


def prompts_of(lengths, seed: int = 0):
    return [random_prompts([n], seed=seed + i)[0] for i, n in enumerate(lengths)]


def check_greedy(model, prompts, run, scheme: str | None) -> None:
    for tokens, logits in zip(run.tokens, target_logits(model, prompts, run.tokens, group_size=G, scheme=scheme), strict=True):
        assert tokens == logits.argmax(-1).tolist()


def check_lengths(prompts, run) -> None:
    """Each row's lengths after every round, from the tokens emitted so far alone."""
    for state in run.rounds:
        cached = np.array([len(prompt) for prompt in prompts]) + state.emitted - 1
        np.testing.assert_array_equal(state.quantized, np.maximum(0, cached // G - 1) * G)
        np.testing.assert_array_equal(state.buffered, cached - state.quantized)
        assert state.buffered.max() <= 2 * G - 1
        np.testing.assert_array_equal(state.flushes, (state.quantized - run.rounds[0].quantized) // G)
    for before, after in zip(run.rounds, run.rounds[1:]):
        assert (before.buffered + after.emitted - before.emitted <= 2 * G).all()
    assert (run.rounds[-1].flushes >= 3).all() and (run.rounds[-1].emitted == NEW).all()


# The target ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int8_first", *in_system("paper", "one_bit")])
def test_one_by_one_decoding_is_the_int8_target(float64, scheme):
    model, _ = model_and_draft("float64")
    prompts = prompts_of(LENGTHS)
    run = run_rounds(model, prompts, dataclasses.replace(TARGET, scheme=scheme))
    check_greedy(model, prompts, run, scheme)
    check_lengths(prompts, run)


def test_with_a_full_cache_it_is_the_model_itself(float64):
    model, _ = model_and_draft("float64")
    prompts = prompts_of(LENGTHS)
    run = run_rounds(model, prompts, dataclasses.replace(TARGET, cache="full"))
    check_greedy(model, prompts, run, None)


@pytest.mark.parametrize("gamma", [4, *in_system(1, 2, 6, 8)])
def test_quantspec_on_a_coarse_target(float64, gamma):
    """Every prompt length in one batch, twice; a wrong schedule reads other codes, which one bit does not forgive."""
    model, draft = model_and_draft("float64", 1)
    config = dataclasses.replace(QUANTSPEC, scheme="one_bit", num_speculative_tokens=gamma)
    accepted = drafted = 0
    for seed in (0, 100):
        prompts = prompts_of(LENGTHS, seed)
        run = run_rounds(model, prompts, config, draft=draft)
        check_greedy(model, prompts, run, "one_bit")
        check_lengths(prompts, run)
        accepted, drafted = accepted + run.rounds[-1].accepted.sum(), drafted + run.rounds[-1].drafted.sum()
    assert 0 < accepted < drafted


# Batches of three with the other gammas: test_exactness.py. One layer compiles in half the time. Every gamma: the test above.
@pytest.mark.system
@pytest.mark.parametrize("batch, gamma, layers", [(3, 4, 2), *((1, gamma, 1) for gamma in GAMMAS)])
def test_float32_against_a_baseline_padded_to_as_many_rows(batch, gamma, layers):
    model, draft = model_and_draft("float32", layers)
    config = dataclasses.replace(QUANTSPEC, num_speculative_tokens=gamma)
    # The same executable that may not draft: one token a round, in a block of gamma + 1.
    limits = make_limits(model, *[config] * batch)
    no_drafts = dataclasses.replace(limits, num_speculative_tokens=jnp.zeros(batch, jnp.int32))
    accepted = drafted = 0
    for i, n in enumerate(LENGTHS):
        prompts = prompts_of((n, LENGTHS[(i + 3) % 8], LENGTHS[(i + 6) % 8])[:batch], seed=7 * i)
        baseline = run_rounds(model, prompts, config, draft=draft, limits=no_drafts)
        assert len(baseline.rounds) == NEW and baseline.rounds[-1].drafted.sum() == 0
        run = run_rounds(model, prompts, config, draft=draft)
        assert run.tokens == baseline.tokens
        check_lengths(prompts, run)
        check_lengths(prompts, baseline)
        accepted, drafted = accepted + run.rounds[-1].accepted.sum(), drafted + run.rounds[-1].drafted.sum()
    assert 0 < accepted < drafted


# With codes of 8 bits, and every draft: test_sampling.py.
@pytest.mark.system
def test_sampled_pairs_on_a_coarse_target():
    """Joint distribution of the last two of four tokens, 2,048 times, against every continuation of the one-bit target enumerated."""
    V, rows = 6, 2048
    model = random_model(jnp.float32, vocab_size=V, spread=0.3, num_hidden_layers=1)
    prompt = [1, 4, 2, 0, 5, 3]
    config = GenerationConfig(draft="quantspec", max_new_tokens=4, temperature=1.0, group_size=2, scheme="one_bit", ignore_eos=True)
    state, step, _ = prepared(model, [prompt] * rows, config, draft=quantspec(model))
    while (np.asarray(state.status) == 0).any():
        state = step(state)
    assert 0.2 < state.counts.accepted.sum() / state.counts.drafted.sum() < 0.9 and state.counts.flushes.sum() >= rows
    counts = np.zeros((V, V))
    np.add.at(counts, tuple(np.asarray(state.tokens)[:, 2:4].T), 1)

    def expected(scheme):
        texts = np.indices((V,) * 4).reshape(4, -1).T
        logits = np.array(target_logits(model, [prompt] * len(texts), texts.tolist(), group_size=2, scheme=scheme))
        chances = np.take_along_axis(softmax(logits.astype(np.float64), -1), texts[..., None], -1)[..., 0].prod(1)
        return chances.reshape((V,) * 4).sum((0, 1))

    p_value = lambda p: chisquare(counts.ravel(), p.ravel() / p.sum() * rows).pvalue
    assert p_value(expected("one_bit")) > 1e-3
    assert p_value(expected(None)) < 1e-6  # what a cache kept in full precision would give is told apart


# Where rows end --------------------------------------------------------------------------------------------------------


# At every place of a text, and with caps at fewer places: test_exactness.py.
@pytest.mark.system
def test_eos_at_every_place_of_a_block(float64):
    """An EOS accepted as any of four drafts or emitted after them, and at every place relative to the length cap."""
    model, _ = model_and_draft("float64")
    always = quantspec(model, weight_bits=16, cache="int8")  # so that blocks are long
    limits = make_limits(model, *[QUANTSPEC] * 8)
    places = set()
    for n in LENGTHS:
        prompts = prompts_of([n], seed=3) * 8  # a row for each cap
        tokens = run_rounds(model, prompts, QUANTSPEC, draft=always).tokens[0]
        for at in (i for i, token in enumerate(tokens) if token not in tokens[:i]):
            caps = np.clip(np.arange(at - 1, at + 7), 1, NEW)
            ended = dict(max_new_tokens=jnp.asarray(caps, jnp.int32), eos_token_ids=limits.eos_token_ids.at[0].set(tokens[at]))
            run = run_rounds(model, prompts, QUANTSPEC, draft=always, limits=dataclasses.replace(limits, **ended))
            assert run.tokens == [tokens[: min(at + 1, cap)] for cap in caps]
            assert ((run.rounds[-1].status == EOS) == (at < caps)).all()
            for row in np.flatnonzero((at > 0) & (at < caps)):
                before = [state.emitted[row] for state in run.rounds if state.status[row] == 0]
                places.add(at - before[-1])
    assert places == {0, 1, 2, 3, 4}


def test_a_row_that_has_ended_stays_as_it_is(float64):
    """While the others run on: its tokens, lengths, counts and every valid bit of its cache."""
    model, draft = model_and_draft("float64", 1)
    prompts = prompts_of((2 * G, 5 * G + 3, G, 1, G - 1, G + 1, 2 * G - 1, 2 * G + 1))
    # Shapes and scheme of test_quantspec_on_a_coarse_target, which has compiled them.
    config = dataclasses.replace(QUANTSPEC, scheme="one_bit", num_speculative_tokens=4)
    limits = make_limits(model, *[config] * len(prompts))
    limits = dataclasses.replace(limits, max_new_tokens=limits.max_new_tokens.at[0].set(6))
    state, step, _ = prepared(model, prompts, config, draft=draft, limits=limits)

    def row_0(state):
        """What is known of row 0; stale rows of its buffer cut off."""
        host = jax.device_get(dataclasses.replace(state, keys=jax.random.key_data(state.keys)))
        valid = host.cache.lengths.buffered[0]
        buffers = [(layer.buffer.keys[0, :, :valid], layer.buffer.values[0, :, :valid]) for layer in host.cache.layers]
        codes = [(layer.keys, layer.values) for layer in host.cache.layers]
        rest = (codes, host.cache.lengths, host.tokens[:, : host.emitted[0]], host.emitted, host.pending, host.status, host.counts)
        return buffers, jax.tree.map(lambda x: x[0], rest)

    ended = None
    while (np.asarray(state.status) == 0).any():
        state = step(state)
        if ended is not None:
            jax.tree.map(np.testing.assert_array_equal, row_0(state), ended)
        elif state.status[0] != 0:
            ended = row_0(state)
    assert ended[1][3] == 6 and state.emitted.tolist() == [6] + 7 * [NEW]
    assert state.counts.flushes[0] < state.counts.flushes[1]
