"""The GPU kernels of int4_matmul against float32, and what they do not take."""

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import skip_or_fail

from pallas_kernels.formats.weights import Int4Weight, dequantize_weight
from pallas_kernels.matmul import GPU_IMPLEMENTATIONS, int4_matmul, mosaic_gpu, mosaic_plan, triton

needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
gpu = lambda test: pytest.mark.gpu(needs_gpu(test))
every_kernel = pytest.mark.parametrize("implementation", GPU_IMPLEMENTATIONS)

# Inputs, and the outputs of weights that share a launch: the shapes of Llama models, an odd number of tiles, few and many groups.
SHAPES = [
    (4096, (28672,)),
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (14336, (4096,)),
    (11008, (4096,)),
    (768, (48, 16)),
    (256, (2064,)),
    (4096, (16, 16, 16)),
    (16384, (64,)),
    (32768, (48,)),
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


def kernel(implementation: str, *args) -> Callable:
    """int4_matmul by that implementation; skips the test where this machine cannot run it, and fails where it should."""
    module = importlib.import_module(f"pallas_kernels.matmul.{implementation}")
    skip_or_fail(implementation, module.unsupported(*args))
    return functools.partial(multiply, implementation=implementation)


def separate(y: jax.Array, weights: Sequence[Int4Weight]) -> list[jax.Array]:
    """The outputs of each weight."""
    return jnp.split(y, np.cumsum([weight.shape[0] for weight in weights])[:-1], axis=-1)


def relative_error(y: jax.Array, x: jax.Array, weight: Int4Weight) -> float:
    wide = jnp.matmul(x.astype(jnp.float32), dequantize_weight(weight, jnp.float32).T, precision="highest")
    return float(jnp.linalg.norm(y.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))


def plain_weight(out: int, inputs: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, out, inputs]).standard_normal((out, inputs), np.float32), jnp.bfloat16)


def plain_error(y: jax.Array, x: jax.Array, weight: jax.Array) -> float:
    wide = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return float(np.linalg.norm(np.asarray(y, np.float64) - wide) / np.linalg.norm(wide))


@gpu
@every_kernel
@pytest.mark.parametrize("rows", [1, 4, 7, 8, 9, 16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_equals_float32_and_the_same_bits_twice(inputs, outputs, rows, implementation):
    weights = tuple(random_weight(out, inputs, i) for i, out in enumerate(outputs))
    for outliers in (False, True):
        x = activations(rows, inputs, outliers)
        run = kernel(implementation, x, weights)
        y = run(x, weights)
        assert y.shape == (rows, sum(outputs)) and y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(y), np.asarray(run(x, weights)))
        assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3


@gpu
@every_kernel
def test_what_is_not_finite_stays_in_its_row(implementation):
    # The last row stands for those that a tile has no activations for; and 86 groups leave some warps without.
    for inputs in (4096, 11008):
        weight = random_weight(1024, inputs, 0)
        x = activations(5, inputs, False)
        run = kernel(implementation, x, (weight,))
        clean = run(x, (weight,))
        for row, spoilt in ((2, jnp.nan), (4, jnp.nan), (4, jnp.inf)):
            y = run(x.at[row, 77].set(spoilt), (weight,))
            others = np.arange(5) != row
            assert not np.isfinite(np.asarray(y[row], np.float32)).any()
            np.testing.assert_array_equal(np.asarray(y)[others], np.asarray(clean)[others])


@gpu
@every_kernel
def test_leading_dimensions_are_rows(implementation):
    weight = random_weight(64, 256, 0)
    x = activations(6, 256, False)
    run = kernel(implementation, x, (weight,))
    flat, shaped = (run(x.reshape(*s, 256), (weight,)) for s in ((6,), (2, 3)))
    np.testing.assert_array_equal(np.asarray(flat), np.asarray(shaped).reshape(6, 64))


@gpu
@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, (4096, 1024, 1024)), (11008, (4096,)), (896, (64, 32))])
def test_triton_in_every_configuration_worth_measuring(inputs, outputs, rows):
    weights = tuple(random_weight(out, inputs, i) for i, out in enumerate(outputs))
    x = activations(rows, inputs, True)
    kernel("triton", x, weights)
    for config in triton.Plan.of(x, weights).candidates():
        y = jax.jit(functools.partial(triton.int4_matmul, config=config))(x, weights)
        assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3, config


@pytest.mark.parametrize("rows", range(1, 17))
def test_mosaic_plans_fit(rows):
    for groups, out in itertools.product((2, 6, 32, 64, 86, 112, 128, 256), (16, 5120, 256000)):
        plan = mosaic_gpu.plan_for(rows, groups, (out,))
        assert plan.slots >= mosaic_plan.LEAST_SLOTS and plan.shared_bytes <= 227 * 1024 and plan.blocks == 132
        (stage,) = plan.stages
        assert plan.resident(stage) or plan.room >= mosaic_plan.passes_at_once(rows)
        assert 1 <= plan.together(stage) <= mosaic_plan.MOST_TOGETHER


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
@pytest.mark.parametrize("groups", [1, 2, 7, 32, 64, 86, 112, 256])
def test_triton_plans_cover_every_group_and_fit(monkeypatch, groups, rows, kilobytes):
    monkeypatch.setattr(triton, "shared_memory", lambda: kilobytes * 1024)
    plan = triton.Plan(rows, groups, (4096, 1024, 48))
    configs = plan.candidates()
    assert configs[0] == plan.default() == plan.configured(None).config and len(configs) == len(set(configs))
    for config in configs:
        configured = plan.configured(config)
        assert configured.shared_bytes <= kilobytes * 1024 and configured.block_rows >= rows
        assert configured.slice_groups <= config.groups and config.groups.bit_count() == 1 and config.num_warps <= config.groups
        assert groups <= configured.slices * configured.slice_groups
        assert 1 <= configured.programs <= configured.tiles and configured.tiles * config.tile == 4096 + 1024 + 48


@every_kernel
@pytest.mark.parametrize(
    ("rows", "inputs", "out", "group_size", "dtype", "reason"),
    [
        (17, 256, 64, 128, jnp.bfloat16, "up to 16 rows"),
        (2, 256, 64, 128, jnp.float32, "bfloat16, not float32"),
        (2, 256, 64, 64, jnp.bfloat16, "groups of 128"),
        (2, 256, 72, 128, jnp.bfloat16, "multiples of 16"),
    ],
)
def test_kernels_take_no_other_shapes(monkeypatch, rows, inputs, out, group_size, dtype, reason, implementation):
    weight = random_weight(out, inputs, 0, group_size)
    x = jnp.zeros((rows, inputs), dtype)
    assert reason in here(monkeypatch, implementation).unsupported(x, (weight,))
    assert multiply(x, (weight,)).shape == (rows, out)


def test_what_one_kernel_alone_takes(monkeypatch):
    x, weight = jnp.zeros((2, 384), jnp.bfloat16), random_weight(64, 384, 0)
    assert "even number" in here(monkeypatch, "mosaic_gpu").unsupported(x, (weight,))
    assert here(monkeypatch, "triton").unsupported(x, (weight,)) is None
    x, weight = jnp.zeros((2, 256), jnp.bfloat16), random_weight(64, 256, 0)
    assert "3 weights" in here(monkeypatch, "triton").unsupported(x, 4 * (weight,))
    assert here(monkeypatch, "mosaic_gpu").unsupported(x, 4 * (weight,)) is None


def here(monkeypatch, implementation: str):
    """Its module, as if the machine had all that it needs."""
    module = importlib.import_module(f"pallas_kernels.matmul.{implementation}")
    monkeypatch.setattr(module, f"no_{implementation}", lambda: None)
    return module


@every_kernel
def test_weights_have_as_many_inputs_as_there_are_activations(monkeypatch, implementation):
    module = importlib.import_module(f"pallas_kernels.matmul.{implementation}")
    for reason in ("no_mosaic_gpu", "no_triton"):
        monkeypatch.setattr(module, reason, lambda: None, raising=False)
    narrow, wide = (random_weight(64, inputs, 0) for inputs in (256, 512))
    x = jnp.zeros((2, 256), jnp.bfloat16)
    assert module.unsupported(x, (narrow,)) is None
    for weights in ((narrow, wide), (wide,)):
        assert "256, not 512" in module.unsupported(x, weights)
