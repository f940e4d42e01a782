"""Reductions over a vocabulary that are done together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qspec_jax.decoding.reductions import best, reduced, weights


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    """Rows with ties, with entries that are -inf, with nothing else, with a NaN, and with what float32 can hardly hold."""
    r = np.random.default_rng(0)
    x = r.standard_normal((7, 3, 501)).astype(np.float32) * 5
    x[1, :, ::2] = -np.inf
    x[2] = r.integers(0, 4, x[2].shape)
    x[3] = -np.inf
    x[4, :, 77] = np.nan
    x[5] *= 6e36
    x[6] = x[6] * 1e-3 + 1e4
    return x


@pytest.mark.parametrize("jit", [False, True])
def test_they_are_what_they_are_alone(values, jit):
    noise = np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)

    def both(x):
        return reduced(weights(x), best(x + noise), best(-x))

    (largest, total), (most, place), (_, least) = (jax.jit(both) if jit else both)(jnp.asarray(values))
    np.testing.assert_array_equal(largest, values.max(-1))
    np.testing.assert_array_equal(place, jnp.argmax(values + noise, -1))
    np.testing.assert_array_equal(least, jnp.argmin(values, -1))
    np.testing.assert_array_equal(most, (values + noise).max(-1))
    finite = [0, 1, 2, 5, 6]
    expected = np.exp(values[finite].astype(np.float64) - values[finite].max(-1, keepdims=True)).sum(-1)
    np.testing.assert_allclose(total[jnp.array(finite)], expected, rtol=1e-5)
    assert np.isnan(total[4]).all() and (np.asarray(total[3]) == 501).all()  # weights that all are 0 are alike


def test_of_equal_values_the_first_is_best():
    for x in (np.zeros(9), np.full(9, -np.inf), np.array([1, 3, 0, 3, 3.0]), np.array([1, np.nan, 5, np.nan])):
        ((_, place),) = reduced(best(jnp.asarray(x, jnp.float32)))
        assert place == np.argmax(x) and place.dtype == jnp.int32
