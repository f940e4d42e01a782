"""Draws depend on (seed, prompt index, position, purpose) alone, whatever random generator JAX is set to."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import DRAFTS, TABLE, counted, filtered, loop_of_its_own, p_value
from runs import random_model, random_prompts
from tiers import in_system

from qspec_jax import GenerationConfig, InputError, generate
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.keys import IMPLEMENTATION, as_threefry, key_of, stacked
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import DRAFT, draw_keys, make_sampler

GENERATORS = ["threefry2x32", "rbg", "unsafe_rbg"]
HOT = GenerationConfig(max_new_tokens=6, temperature=1e6, group_size=16, ignore_eos=True, draft="quantspec:weight_bits=16")
PROMPTS = random_prompts([9, 5, 9])


@pytest.fixture(scope="module")
def model():
    return random_model(jnp.float32, num_hidden_layers=1)


@contextlib.contextmanager
def jax_set_to(generator, partitionable=True):
    with jax.default_prng_impl(generator), jax.threefry_partitionable(partitionable):
        yield


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_key_of_a_seed_is_the_same_of_every_generator(generator):
    with jax_set_to(generator):
        for key in (jax.random.key(7), jax.random.PRNGKey(7), np.asarray(jax.random.PRNGKey(7))):
            assert (jax.random.key_data(as_threefry(key)) == jax.random.key_data(jax.random.key(7, impl="threefry2x32"))).all()
        assert (jax.random.key_data(key_of(7)) == jax.random.key_data(jax.random.key(7, impl="threefry2x32"))).all()


@pytest.mark.parametrize("key", [lambda impl: jax.random.key(3, impl=impl), lambda impl: jax.random.split(jax.random.key(3, impl=impl))[1]])
@pytest.mark.parametrize("generator", GENERATORS)
def test_a_key_becomes_the_same_under_jit(generator, key):
    made = key(generator)
    assert (jax.random.key_data(jax.jit(as_threefry)(made)) == jax.random.key_data(as_threefry(made))).all()


@pytest.mark.parametrize("generator", GENERATORS)
def test_keys_that_differ_stay_different(generator):
    """Those that fold_in and split make, which differ in all of their words."""
    made = jax.random.key(3, impl=generator)
    keys = [made, *jax.random.split(made, 20), *(jax.random.fold_in(made, i) for i in range(100, 120))]
    found = {tuple(np.asarray(jax.random.key_data(as_threefry(key))).tolist()) for key in keys}
    assert len(found) == len(keys)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (7, "not 7"),
        (None, "not None"),
        (jax.random.split(jax.random.key(0), 2), "shape [2]"),
        (jnp.zeros((2, 2), jnp.uint32), "shape [2, 2]"),
        (jnp.zeros(2), "float32"),
    ],
)
def test_what_is_no_key_is_refused(key, message):
    with pytest.raises(InputError, match=f"key should be one key of JAX.*{message.translate(str.maketrans({'[': '.', ']': '.'}))}"):
        Request([1], HOT, key)


def test_rows_keys_of_another_generator_are_refused():
    with pytest.raises(InputError, match=r"row keys should be of threefry2x32.*rbg"):
        draw_keys(jax.random.split(jax.random.key(0, impl="rbg"), 2), jnp.zeros(2, jnp.int32), DRAFT)


@pytest.mark.system
@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("generator", GENERATORS)
def test_rows_are_as_alone_and_draw_many_tokens(generator, partitionable, model):
    """At a temperature at which all tokens are as likely, a row that draws from one key alone repeats a token."""
    if generator != "threefry2x32" and not partitionable:
        pytest.skip("threefry alone has the setting")
    with jax_set_to(generator, partitionable):
        key = jax.random.key(11)
        requests = [Request(prompt, HOT, jax.random.fold_in(key_of(1), i)) for i, prompt in enumerate(PROMPTS)]
        together = sorted(run_batch(model, requests, batch_size=3), key=lambda result: result.index)
        for result, request in zip(together, requests, strict=True):
            (alone,) = run_batch(model, [request])
            assert result.token_ids == alone.token_ids and len(set(result.token_ids)) > 3
        out = generate(model, PROMPTS, config=HOT, key=key).token_ids
        assert all(len(set(row)) > 3 for row in out) and out[0] != out[2]
    with jax_set_to("threefry2x32", partitionable):
        assert out == generate(model, PROMPTS, config=HOT, key=jax.random.key(11)).token_ids


@pytest.mark.parametrize(("generator", "partitionable"), [("rbg", True), *in_system(("unsafe_rbg", True), ("threefry2x32", False))])
def test_the_distribution_is_the_targets(generator, partitionable):
    options = {"temperature": 1.0}
    with jax_set_to(generator, partitionable):
        p = filtered(TABLE, **options)
        counts = counted(TABLE, DRAFTS["another table"], make_sampler(GenerationConfig(**options)), loop=loop_of_its_own())
    assert p_value(counts, p[0][:, None] * p) > 1e-3


def test_keys_are_stacked_without_a_program():
    keys = [jax.random.fold_in(key_of(3), i) for i in range(5)]
    found = stacked(keys)
    assert found.shape == (5,) and jax.random.key_impl(found) == IMPLEMENTATION
    assert [jax.random.uniform(found[i]) for i in range(5)] == [jax.random.uniform(key) for key in keys]
