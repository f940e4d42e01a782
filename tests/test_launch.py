"""How kernels whose bodies place every register themselves are launched: what Pallas is asked for, with a kernel of plain JAX instead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.gpu.launch import launch

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels need jax 0.11")


@pytest.fixture
def kernel(monkeypatch):
    """Pallas' kernels become this: y = a - b, and `total` grows by a. Like them, it must not be given another axis."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    @custom_vmap
    def difference(a, b):
        return a - b

    @difference.def_vmap
    def refuse(*_):
        raise AssertionError("the kernel was given another axis")

    def made(body, **settings):
        def run(a, b, total):
            assert settings["grid"] == (4,)
            total[...] += a
            return (difference(a, b),)

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
    several = lambda a: jax.vmap(jax.vmap(run, in_axes=(0, None, None)), in_axes=(0, None, None))(a, b, total[0])
    np.testing.assert_array_equal(jax.jit(several)(a[None])[0], [1 - np.arange(6.0).reshape(3, 2)])


def test_results_within_shard_map_differ_between_devices_as_the_arrays_do(kernel):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    divided = functools.partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec("d"), PartitionSpec(), PartitionSpec()))
    arrays = jnp.array([5.0, 6.0]), jnp.array([1.0, 1.0]), jnp.array([10.0, 20.0])
    y, grown = jax.jit(divided(run, out_specs=PartitionSpec("d")))(*arrays)
    np.testing.assert_array_equal(y, [-4, -5])
    np.testing.assert_array_equal(grown, [11, 21])
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(divided(run, out_specs=PartitionSpec()))(*arrays)
