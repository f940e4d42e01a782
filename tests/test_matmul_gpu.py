"""The GPU kernels of int4_matmul against float32, and what they do not take."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import GPU_IMPLEMENTATIONS, int4_matmul
from pallas_kernels.matmul.mosaic_gpu import plan_for
from pallas_kernels.weight_format import Int4Weight, dequantize_weight

needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
gpu = lambda test: pytest.mark.gpu(needs_gpu(test))

# Inputs, and the outputs of weights that share a launch: the shapes of Llama models, an odd number of tiles, few and many groups.
SHAPES = [
    (4096, (28672,)),
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (14336, (4096,)),
    (11008, (4096,)),
    (768, (48, 16)),
    (256, (2064,)),
]
multiply = jax.jit(int4_matmul, static_argnames="implementation")


def random_weight(out: int, inputs: int, seed: int, group_size: int = 128) -> Int4Weight:
    r = np.random.default_rng([seed, out, inputs])
    groups = inputs // group_size
    scale = r.uniform(0.1, 0.4, (out, groups)) * np.where(r.random((out, groups)) < 0.05, 50, 1)
    codes = jnp.asarray(r.integers(0, 256, (out, groups, group_size // 2), np.uint8))
    return Int4Weight(codes, jnp.asarray(scale, jnp.bfloat16), jnp.asarray(-7.3 * scale, jnp.bfloat16), inputs)


def activations(rows: int, inputs: int, outliers: bool) -> jax.Array:
    r = np.random.default_rng(rows)
    x = r.standard_normal((rows, inputs))
    return jnp.asarray(x * np.where(np.arange(inputs) % 97 == 3, 1000, 1) if outliers else x, jnp.bfloat16)


def relative_error(y: jax.Array, x: jax.Array, weight: Int4Weight) -> float:
    wide = jnp.matmul(x.astype(jnp.float32), dequantize_weight(weight, jnp.float32).T, precision="highest")
    return float(jnp.linalg.norm(y.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))


@gpu
@pytest.mark.parametrize("implementation", GPU_IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [1, 4, 7, 8, 9, 16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_equals_float32_and_the_same_bits_twice(inputs, outputs, rows, implementation):
    weights = tuple(random_weight(out, inputs, i) for i, out in enumerate(outputs))
    for outliers in (False, True):
        x = activations(rows, inputs, outliers)
        ys = multiply(x, weights, implementation=implementation)
        for y, again, weight, out in zip(ys, multiply(x, weights, implementation=implementation), weights, outputs):
            assert y.shape == (rows, out) and y.dtype == jnp.bfloat16
            assert relative_error(y, x, weight) <= 5e-3
            np.testing.assert_array_equal(np.asarray(y), np.asarray(again))


@gpu
@pytest.mark.parametrize("implementation", GPU_IMPLEMENTATIONS)
def test_what_is_not_finite_stays_in_its_row(implementation):
    weight = random_weight(4096, 4096, 0)
    x = activations(5, 4096, False)
    (clean,) = multiply(x, (weight,), implementation=implementation)
    for spoilt in (jnp.nan, jnp.inf):
        (y,) = multiply(x.at[2, 77].set(spoilt), (weight,), implementation=implementation)
        others = np.arange(5) != 2
        assert not np.isfinite(np.asarray(y[2], np.float32)).any()
        np.testing.assert_array_equal(np.asarray(y)[others], np.asarray(clean)[others])


@gpu
@pytest.mark.parametrize("implementation", GPU_IMPLEMENTATIONS)
def test_leading_dimensions_are_rows(implementation):
    weight = random_weight(64, 256, 0)
    x = activations(6, 256, False)
    (flat,), (shaped,) = (multiply(x.reshape(*s, 256), (weight,), implementation=implementation) for s in ((6,), (2, 3)))
    np.testing.assert_array_equal(np.asarray(flat), np.asarray(shaped).reshape(6, 64))


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("groups", [2, 6, 32, 64, 86, 112, 128, 256])
def test_plans_cover_every_group_and_fit(groups, rows):
    plan = plan_for(rows, groups, (4096, 1024))
    assert plan.slots >= 3 and plan.shared_bytes <= 227 * 1024 and plan.slices * plan.blocks <= 132
    assert plan.slice_groups % 2 == 0 and plan.slice_groups <= plan.room
    assert (plan.slices - 1) * plan.slice_groups < groups <= plan.slices * plan.slice_groups


@pytest.mark.parametrize(
    ("rows", "inputs", "out", "group_size", "dtype", "reason"),
    [
        (17, 256, 64, 128, jnp.bfloat16, "up to 16 rows"),
        (2, 256, 64, 128, jnp.float32, "bfloat16, not float32"),
        (2, 256, 64, 64, jnp.bfloat16, "groups of 128"),
        (2, 384, 64, 128, jnp.bfloat16, "even number"),
        (2, 256, 72, 128, jnp.bfloat16, "multiples of 16"),
    ],
)
def test_kernels_take_no_other_shapes(monkeypatch, rows, inputs, out, group_size, dtype, reason):
    for implementation in GPU_IMPLEMENTATIONS:
        module = importlib.import_module(f"pallas_kernels.matmul.{implementation}")
        monkeypatch.setattr(module, "no_mosaic_gpu", lambda: None)
        weight = random_weight(out, inputs, 0, group_size)
        assert reason in module.unsupported(jnp.zeros((rows, inputs), dtype), (weight,))
    x = jnp.zeros((rows, inputs), dtype)
    assert multiply(x, (weight,))[0].shape == (rows, out)
