"""Single tokens of a cache, from where it is stored and from what was read of it before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import gpu
from simulated_gpu import launch
from simulated_ptx import at_once, simulate

from pallas_kernels.formats.token_codes import FullTokens
from pallas_kernels.gather import gather_tokens, mosaic_gpu, reference

IN_HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def problem(B: int, K: int, S: int, H: int, n: int, dtype) -> tuple[jax.Array, jax.Array]:
    """A store, and positions, some of them before its first token or behind its last."""
    r = np.random.default_rng(S + H)
    store = jnp.asarray(r.standard_normal((B, K, S, 2, H)), dtype)
    return store, jnp.asarray(r.integers(-1, S + 2, (B, K, n)), jnp.int32)


def expected(store: jax.Array, positions: jax.Array) -> np.ndarray:
    B, K, S, *_ = store.shape
    return np.asarray(store)[np.arange(B)[:, None, None], np.arange(K)[:, None], np.clip(positions, 0, S - 1)]


@pytest.mark.parametrize("sharding", [None, IN_HOST], ids=["on the device", "in host memory"])
def test_by_the_reference(sharding):
    store, positions = problem(2, 3, 40, 8, 5, jnp.float32)
    found = jax.jit(lambda store, positions: reference.gather_tokens(store, positions, None))(jax.device_put(store, sharding), positions)
    np.testing.assert_array_equal(found, expected(store, positions))
    assert found.sharding.memory_kind == "device"


@pytest.mark.parametrize(
    ("B", "K", "S", "H", "n", "dtype"),
    [
        (2, 3, 40, 64, 5, jnp.bfloat16),  # two tokens to a read of a warp
        (1, 2, 33, 128, 30, jnp.bfloat16),  # each warp has several trips
        (2, 1, 20, 256, 3, jnp.bfloat16),  # a token is two reads
        (1, 1, 9, 4, 1, jnp.float32),
    ],
)
def test_by_the_kernel(monkeypatch, B, K, S, H, n, dtype):
    """On a simulated GPU. What is fetched already is other than in the store here, to see where a token comes from."""
    simulate(monkeypatch)
    monkeypatch.setattr(mosaic_gpu, "launch", launch)
    monkeypatch.setattr(mosaic_gpu, "run", at_once(mosaic_gpu.run))
    monkeypatch.setattr(mosaic_gpu, "occupied", lambda: 2)
    monkeypatch.setattr(mosaic_gpu, "WARPS", 4)  # a warpgroup
    store, positions = problem(B, K, S, H, n, dtype)
    np.testing.assert_array_equal(mosaic_gpu.gather_tokens(store, positions, None), expected(store, positions))
    r = np.random.default_rng(0)
    before = r.permuted(np.broadcast_to(np.arange(-1, S), (B, K, S + 1)), axis=2)[:, :, : S // 2]
    fetched = FullTokens(jnp.asarray(before, jnp.int32), jnp.asarray(r.standard_normal((B, K, S // 2, 2, H)), dtype))
    found, wanted = mosaic_gpu.gather_tokens(store, positions, fetched), np.array(expected(store, positions))
    for b, j, i in np.ndindex(B, K, n):
        (place,) = np.nonzero(before[b, j] == np.asarray(positions)[b, j, i])
        if place.size and positions[b, j, i] >= 0:
            wanted[b, j, i] = np.asarray(fetched.keys_values)[b, j, place[0]]
    np.testing.assert_array_equal(found, wanted)
    monkeypatch.setattr(mosaic_gpu, "MAX_FETCHED", 1)  # fewer than there are: none is looked for
    np.testing.assert_array_equal(mosaic_gpu.gather_tokens(store, positions, fetched), expected(store, positions))


@gpu
def test_on_a_gpu():
    store, positions = problem(3, 4, 500, 128, 64, jnp.bfloat16)
    in_host = jax.device_put(store, IN_HOST)
    fetched = FullTokens(positions[:, :, ::2] + 1, jax.jit(lambda store, at: gather_tokens(store, at))(in_host, positions[:, :, ::2] + 1))
    found = jax.jit(lambda *args: gather_tokens(*args, implementation="mosaic_gpu"))(in_host, positions, fetched)
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected(store.astype(jnp.float32), positions))
