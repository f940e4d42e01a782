"""How kernels whose bodies place every register themselves are launched: what Pallas is asked for, with a kernel of plain JAX instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.launch import launch

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels need jax 0.11")


@pytest.fixture
def kernel(monkeypatch):
    """Pallas' kernels become this: y = a - b, and `total` grows by a."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def made(body, **settings):
        def run(a, b, total):
            assert a.ndim == b.ndim == 1 and settings["grid"] == (4,)
            total[...] += a
            return (a - b,)

        return run

    monkeypatch.setattr(plgpu, "kernel", made)


def run(a: jax.Array, b: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = launch("difference", None, {"b": b, "a": a}, {"y": a}, 8, 1, 128, {"total": total}, cluster=2)
    return found["y"], found["total"]


def test_arrays_come_and_go_by_their_names(kernel):
    a, b, total = jnp.array([5.0, 6.0]), jnp.array([1.0, 1.0]), jnp.array([10.0, 20.0])
    y, grown = jax.jit(run)(a, b, total)
    np.testing.assert_array_equal(y, [-4, -5])  # in the order of the inputs: b came first
    np.testing.assert_array_equal(grown, [11, 21])


def test_launches_under_vmap_are_of_one_each(kernel):
    a, b, total = jnp.arange(6.0).reshape(3, 2), jnp.ones(2), jnp.zeros((3, 2))
    y, grown = jax.jit(jax.vmap(run, in_axes=(0, None, 0)))(a, b, total)
    np.testing.assert_array_equal(y, 1 - np.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(grown, np.ones((3, 2)))
