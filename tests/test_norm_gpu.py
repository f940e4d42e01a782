"""The GPU kernel of residual connection and RMSNorm against float32, and what it does not take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import gpu, skip_or_fail
from problems.norm import random_rows

from pallas_kernels.norm import add_rms_norm, mosaic_gpu, reference

run = jax.jit(add_rms_norm, static_argnames=("eps", "implementation"))


@gpu
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("width", [64, 128, 896, 4096, 5120, 8192])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_equals_float32(rows, width, scale):
    x, added, weight = random_rows(rows, width, scale)
    skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(x, added, weight))
    for more in (added, None):
        total, normed = run(x, more, weight, eps=1e-5, implementation="mosaic_gpu")
        expected = x if more is None else x + more
        np.testing.assert_array_equal(np.asarray(total), np.asarray(expected))
        wide = expected.astype(jnp.float32)
        wide = wide / jnp.sqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * weight.astype(jnp.float32)
        # Rounded twice, as Hugging Face's models do: to 8 bits of mantissa.
        np.testing.assert_allclose(np.asarray(normed, np.float32), np.asarray(wide), rtol=2**-7, atol=0)
        again = run(x, more, weight, eps=1e-5, implementation="mosaic_gpu")
        np.testing.assert_array_equal(np.asarray(normed), np.asarray(again[1]))


@gpu
@pytest.mark.parametrize(("rows", "parts", "width"), [(1, 2, 4096), (8, 2, 4096), (32, 2, 64), (3, 3, 2048)])
def test_rows_with_weights_in_turn_are_those_of_each_alone(rows, parts, width):
    x, _, weight = (jnp.stack(each) for each in zip(*(random_rows(rows, width, part=i) for i in range(parts))))
    x = x.swapaxes(0, 1)
    skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(x, None, weight))
    total, normed = run(x, None, weight, eps=1e-5, implementation="mosaic_gpu")
    np.testing.assert_array_equal(np.asarray(total), np.asarray(x))
    for i in range(parts):
        alone = run(x[:, i], None, weight[i], eps=1e-5, implementation="mosaic_gpu")[1]
        np.testing.assert_array_equal(np.asarray(normed[:, i]), np.asarray(alone))


@gpu
def test_what_is_not_finite_stays_in_its_row():
    x, added, weight = random_rows(5, 4096)
    skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(x, added, weight))
    clean = run(x, added, weight, eps=1e-5, implementation="mosaic_gpu")
    spoilt = run(x.at[2, 9].set(jnp.nan), added, weight, eps=1e-5, implementation="mosaic_gpu")
    others = np.arange(5) != 2
    assert np.isnan(np.asarray(spoilt[1][2], np.float32)).all()
    for a, b in zip(clean, spoilt):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


def test_weights_are_as_many_as_parts(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    x, weight = jnp.ones((2, 4, 128), jnp.bfloat16), jnp.ones((2, 128), jnp.bfloat16)
    assert "in turns of 2" in mosaic_gpu.unsupported(x, None, weight) and mosaic_gpu.unsupported(x.reshape(4, 2, 128), None, weight) is None


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "reason"),
    [
        (65, 128, jnp.bfloat16, "up to 64 rows, not 65"),
        (1, 12, jnp.bfloat16, "multiples of 8"),
        (1, 16384, jnp.bfloat16, "up to 8192"),
        (1, 128, jnp.float32, "bfloat16, not float32"),
    ],
)
def test_the_kernel_takes_no_other_shapes(monkeypatch, rows, width, dtype, reason):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    x, weight = jnp.ones((rows, width), dtype), jnp.ones(width, dtype)
    assert reason in mosaic_gpu.unsupported(x, x, weight)
    assert reason in mosaic_gpu.unsupported(x, None, weight)
    total, normed = run(x, x, weight, eps=1e-5)
    np.testing.assert_array_equal(np.asarray(total), np.asarray(reference.add_rms_norm(x, x, weight, eps=1e-5)[0]))
    assert normed.shape == (rows, width)


def test_the_kernel_takes_the_shapes_of_a_decode_step(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    x, weight = jnp.ones((8, 7, 4096), jnp.bfloat16), jnp.ones(4096, jnp.bfloat16)
    assert mosaic_gpu.unsupported(x, x, weight) is None
