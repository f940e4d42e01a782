"""Reductions over a vocabulary that are done together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qspec_jax.decoding.reductions import best, reduced, total_of


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    """Rows with ties, with entries that are -inf, with nothing else, and with a NaN."""
    r = np.random.default_rng(0)
    x = r.standard_normal((5, 3, 501)).astype(np.float32) * 5
    x[1, :, ::2] = -np.inf
    x[2] = r.integers(0, 4, x[2].shape)
    x[3] = -np.inf
    x[4, :, 77] = np.nan
    return x


@pytest.mark.parametrize("together", [True, False])
def test_they_are_what_they_are_alone(values, together):
    noise = np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)

    @jax.jit
    def both(x):
        return reduced(total_of(jnp.exp(x)), best(x + noise), best(-x), together=together)

    (total,), (most, place), (_, lowest) = both(jnp.asarray(values))
    np.testing.assert_array_equal(place, jnp.argmax(values + noise, -1))
    np.testing.assert_array_equal(lowest, jnp.argmin(values, -1))
    np.testing.assert_array_equal(most, (values + noise).max(-1))
    np.testing.assert_allclose(total, np.exp(values.astype(np.float64)).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("together", [True, False])
def test_of_equal_values_the_first_is_best(together):
    for x in (np.zeros(9), np.full(9, -np.inf), np.array([1, 3, 0, 3, 3.0]), np.array([1, np.nan, 5])):
        ((_, place),) = reduced(best(jnp.asarray(x, jnp.float32)), together=together)
        assert place == np.argmax(x) and place.dtype == jnp.int32


def test_sums_are_in_float32():
    x = jnp.full((2, 4096), 1.0, jnp.bfloat16)
    for together in (True, False):
        ((total,),) = reduced(total_of(x), together=together)
        assert total.dtype == jnp.float32 and (total == 4096).all()
