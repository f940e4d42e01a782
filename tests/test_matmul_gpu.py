"""The GPU kernels of coded_matmul against float32, and what they do not take."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import gpu, skip_or_fail
from problems.matmul import activations, nested_weight, random_weight, relative_error, separate, with_zero_points

from pallas_kernels import dispatch
from pallas_kernels.formats.weights import Int4Weight
from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES
from pallas_kernels.matmul import (
    coded_matmul,
    linear,
    mosaic_gpu,
    mosaic_plan,
    mosaic_wide,
    mosaic_wide_block,
    mosaic_wide_plan,
    triton,
    unsupported,
)
from pallas_kernels.matmul.support import GROUP_SIZES, Parameters

every_kernel = pytest.mark.parametrize("implementation", dispatch.implementations("matmul", "int4"))

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
ODD_GROUPS = (5504, (4096,))  # Llama-2-7B on two devices


def with_rows(rows: Sequence[int], shapes: Sequence) -> list:
    """Each shape with one of the numbers of rows in turn, for tests of what depends on neither alone."""
    return [(number, *shape) for number, shape in zip(itertools.cycle(rows), shapes)]


multiply = jax.jit(coded_matmul, static_argnames="implementation")


def kernel(implementation: str, *args) -> Callable:
    """coded_matmul by that implementation; skips the test where this machine cannot run it, and fails where it should."""
    skip_or_fail(implementation, unsupported(*args, implementation))
    return functools.partial(multiply, implementation=implementation)


@gpu
@every_kernel
@pytest.mark.parametrize("rows", [1, 4, 7, 8, 9, 16])
@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, ODD_GROUPS])
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
@every_kernel
@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16, None])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), with_rows((16, 8, 1), [*SHAPES, ODD_GROUPS]))
def test_zero_points_and_small_groups_equal_float32(rows, inputs, outputs, group_size, scale_dtype, implementation):
    weights = tuple(random_weight(out, inputs, i, group_size) for i, out in enumerate(outputs))
    weights = tuple(with_zero_points(weight, scale_dtype) for weight in weights) if scale_dtype else weights
    x = activations(rows, inputs, True)
    run = kernel(implementation, x, weights)
    y = run(x, weights)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(run(x, weights)))
    assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3


@gpu
@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, (4096, 1024, 1024)), (11008, (4096,)), (896, (64, 32))])
def test_triton_in_every_configuration_worth_measuring(inputs, outputs, rows):
    weights = tuple(random_weight(out, inputs, i) for i, out in enumerate(outputs))
    x = activations(rows, inputs, True)
    kernel("triton", x, weights)
    for config in triton.Plan.of(x, weights).candidates():
        y = jax.jit(functools.partial(triton.coded_matmul, config=config))(x, weights)
        assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3, config


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("rows", range(1, 17))
def test_mosaic_plans_fit(rows, group_size):
    for groups, out in itertools.product((2, 6, 32, 64, 86, 112, 128, 256), (16, 5120, 256000)):
        plan = mosaic_gpu.plan_for(rows, groups, (out,), Parameters(group_size=group_size))
        if group_size < 128 and rows > 13 and plan.slots < mosaic_plan.MIN_SLOTS:
            assert groups % 2 == 0, "such a shape has the kernel of many rows"
            continue  # `unsupported` says so
        assert plan.slots >= mosaic_plan.MIN_SLOTS and plan.layout.total <= 227 * 1024 and plan.blocks == 132
        (stage,) = plan.stages
        assert plan.resident(stage) or plan.room >= mosaic_plan.passes_at_once(rows)
        assert 1 <= plan.together(stage) <= mosaic_plan.MAX_TOGETHER


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
@pytest.mark.parametrize("groups", [1, 2, 7, 32, 64, 86, 112, 256])
@pytest.mark.parametrize(("group_size", "lower_steps"), [*((size, None) for size in GROUP_SIZES), (128, 16)])
def test_triton_plans_cover_every_group_and_fit(monkeypatch, group_size, lower_steps, groups, rows, kilobytes):
    monkeypatch.setattr(triton, "shared_memory", lambda: kilobytes * 1024)
    plan = triton.Plan(rows, groups, (4096, 1024, 48), group_size=group_size, lower_steps=lower_steps)
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
        (65, 256, 64, 128, jnp.bfloat16, "rows, not 65"),
        (2, 256, 64, 128, jnp.float32, "bfloat16, not float32"),
        (2, 256, 64, 16, jnp.bfloat16, "groups of 128 or 64 or 32"),
        (2, 256, 72, 128, jnp.bfloat16, "multiples of 16"),
    ],
)
def test_kernels_take_no_other_shapes(monkeypatch, rows, inputs, out, group_size, dtype, reason, implementation):
    weight = random_weight(out, inputs, 0, group_size)
    x = jnp.zeros((rows, inputs), dtype)
    assert reason in reason_here(monkeypatch, implementation, x, (weight,))
    assert multiply(x, (weight,)).shape == (rows, out)


def test_kernels_take_zero_points_of_few_dtypes(monkeypatch):
    x, weight = jnp.zeros((2, 256), jnp.bfloat16), random_weight(64, 256, 0)
    several = [with_zero_points(weight, dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)]
    for implementation in dispatch.implementations("matmul", "int4"):
        for supported in several[:2]:
            assert reason_here(monkeypatch, implementation, x, (supported,)) is None
        assert "not float32 with zeros in int16" in reason_here(monkeypatch, implementation, x, several[2:])
        assert "the same dtypes" in reason_here(monkeypatch, implementation, x, (weight, several[0]))
    # The operation multiplies by each.
    assert linear(x, [weight, several[0]]).shape == (2, 128)


def test_what_one_kernel_alone_takes(monkeypatch):
    x, weight = jnp.zeros((2, 256), jnp.bfloat16), random_weight(64, 256, 0)
    assert "3 weights" in reason_here(monkeypatch, "triton", x, 4 * (weight,))
    assert reason_here(monkeypatch, "mosaic_gpu", x, 4 * (weight,)) is None
    x = jnp.zeros((17, 256), jnp.bfloat16)
    assert "up to 16 rows" in reason_here(monkeypatch, "triton", x, (weight,))
    assert reason_here(monkeypatch, "mosaic_gpu", x, (weight,)) is None
    x, small = jnp.zeros((2, 256), jnp.bfloat16), (random_weight(64, 256, 0, 64), random_weight(64, 256, 0, 32))
    for implementation in dispatch.implementations("matmul", "int4"):
        assert reason_here(monkeypatch, implementation, x, small[:1]) is reason_here(monkeypatch, implementation, x, small[1:]) is None
        assert "one size" in reason_here(monkeypatch, implementation, x, small)
    assert "multiples of 128" in reason_here(monkeypatch, "mosaic_gpu", x[:, :192], (random_weight(64, 192, 0, 64),))
    assert reason_here(monkeypatch, "triton", x[:, :192], (random_weight(64, 192, 0, 64),)) is None
    x, weight = jnp.zeros((17, 384), jnp.bfloat16), random_weight(64, 384, 0)
    assert "even number" in reason_here(monkeypatch, "mosaic_gpu", x, (weight,))


@gpu
def test_a_kernel_under_vmap_runs_for_one_after_the_other():
    weight, x = random_weight(64, 256, 0), activations(6, 256, False)
    run = kernel("mosaic_gpu", x[:2], [weight])
    each = jax.jit(jax.vmap(lambda x: run(x, [weight])))(x.reshape(3, 2, 256))
    np.testing.assert_array_equal(np.asarray(each).reshape(6, 64), np.asarray(run(x, [weight])))


# Many rows --------------------------------------------------------------------------------------------------------------

WIDE_ROWS = next(kernel.min_rows for kernel in dispatch.kernels("matmul", "int4") if kernel.module == "mosaic_wide")
many_rows = jax.jit(mosaic_wide.coded_matmul, static_argnames="config")
few_rows = jax.jit(mosaic_gpu.coded_matmul)


def many_rows_kernel(x: jax.Array, weights: Sequence[Int4Weight]) -> Callable:
    """The kernel; skips the test where this machine cannot run it, and fails where it should."""
    skip_or_fail("mosaic_gpu", mosaic_wide.unsupported(x, weights))
    return many_rows


@gpu
@pytest.mark.parametrize("rows", [1, 9, 16, 17, 33, 47, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (4096, (4096, 4096, 4096)), (4096, (11008, 11008)), (1280, (272, 80, 16))])
def test_many_rows_equal_float32_and_the_same_bits_twice(inputs, outputs, rows):
    weights = tuple(random_weight(out, inputs, i) for i, out in enumerate(outputs))
    for outliers in (False, True):
        x = activations(rows, inputs, outliers)
        run = many_rows_kernel(x, weights)
        y = run(x, weights)
        assert y.shape == (rows, sum(outputs)) and y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(y), np.asarray(run(x, weights)))
        assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3


@gpu
@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), with_rows((64, 1, 17, 9), SHAPES))
def test_many_rows_with_zero_points_and_small_groups_equal_float32(rows, inputs, outputs, group_size, scale_dtype):
    weights = tuple(with_zero_points(random_weight(out, inputs, i, group_size), scale_dtype) for i, out in enumerate(outputs))
    x = activations(rows, inputs, True)
    run = many_rows_kernel(x, weights)
    y = run(x, weights)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(run(x, weights)))
    assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3


@gpu
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, (28672,)), (4096, (4096, 1024, 1024)), (4096, (4096,)), (14336, (4096,))])
def test_many_rows_give_the_same_bits_in_200_launches(inputs, outputs, rows):
    weights = tuple(random_weight(out, inputs, i) for i, out in enumerate(outputs))
    x = activations(rows, inputs, False)
    run = many_rows_kernel(x, weights)
    first = run(x, weights)
    differing = sum(jnp.any(run(x, weights) != first).astype(jnp.int32) for _ in range(200))
    assert int(differing) == 0


@gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, (28672,)), (4096, (4096, 1024, 1024)), (11008, (4096,))])
def test_one_of_many_rows_depends_on_no_other(inputs, outputs):
    weights = tuple(random_weight(out, inputs, i) for i, out in enumerate(outputs))
    x = activations(64, inputs, True)
    run = many_rows_kernel(x, weights)
    together = np.asarray(run(x, weights))
    for fewer in (9, 16, 33, 47):
        np.testing.assert_array_equal(np.asarray(run(x[-fewer:], weights)), together[-fewer:])
    # The last of 47 rows stands for those that a tile has no activations for.
    together = np.asarray(run(x[:47], weights))
    for row, spoilt in ((2, jnp.nan), (46, jnp.nan), (46, jnp.inf)):
        y = np.asarray(run(x[:47].at[row, 77].set(spoilt), weights))
        assert not np.isfinite(y[row].astype(np.float32)).any()
        np.testing.assert_array_equal(np.delete(y, row, 0), np.delete(together, row, 0))


@gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, (1024, 256)), (3072, (528, 80))])
def test_many_rows_in_every_configuration_worth_measuring(inputs, outputs):
    weights = tuple(random_weight(out, inputs, i) for i, out in enumerate(outputs))
    x = activations(37, inputs, True)
    run = many_rows_kernel(x, weights)
    for config in itertools.starmap(mosaic_wide_plan.Config, itertools.product((32, 64, 80, 128, 192, 224, 256), (1, 2, 3, 5, 8), (1, 2))):
        if mosaic_wide_plan.Plan(37, inputs // 128, outputs, 132, config).fits:
            y = run(x, weights, config=config)
            assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3, config


@gpu
@pytest.mark.parametrize("rows", [WIDE_ROWS - 1, WIDE_ROWS, 64])
def test_int4_matmul_takes_the_kernel_of_many_rows(rows):
    weights, x = (random_weight(64, 256, 0), random_weight(32, 256, 1)), activations(rows, 256, False).reshape(1, rows, 256)
    run = kernel("mosaic_gpu", x, weights)
    ours = np.asarray(many_rows_kernel(x, weights)(x, weights))
    y = np.asarray(run(x, weights))
    assert y.shape == (1, rows, 96)
    assert (y == ours).all() == (rows >= WIDE_ROWS)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("rows", [1, 9, 17, 33, 47, 64])
def test_plans_of_many_rows_fit(rows, group_size):
    parameters = Parameters(group_size=group_size)
    for groups, outputs in itertools.product(
        (2, 6, 32, 64, 86, 112, 224), ((16,), (48, 16), (4096, 1024, 1024), (4096,), (28672,), (128256,))
    ):
        plan = mosaic_wide_plan.Plan.fitting(rows, groups, outputs, 132, parameters)
        assert plan.fits and plan.layout.total + RESERVED_BYTES <= SHARED_BYTES
        # Tiles have every output, steps every input, and of the blocks one alone has each tile in each step.
        assert (plan.tiles - 1) * plan.tile < sum(outputs) <= plan.tiles * plan.tile
        assert plan.steps * mosaic_wide_plan.STEP_GROUPS == groups
        worked = np.zeros((plan.tiles, plan.steps), int)
        for share in (mosaic_wide_block.share_of(plan, block) for block in range(plan.blocks)):
            assert share.count > 0 and (share.upper - share.lower == 1 if plan.config.cluster > 1 else share.upper > share.lower)
            worked[share.lower : share.upper, share.first : share.first + share.count] += 1
        assert (worked == 1).all()
        sums = plan.math_warps * plan.row_tiles * 32 * mosaic_wide_block.SUMS_BYTES
        assert plan.config.cluster == 1 or sums <= plan.slots * plan.slot_bytes


def reason_here(monkeypatch, implementation: str, *args) -> str | None:
    """Why it cannot run on these arguments, as if the machine had all that it needs."""
    for module in (mosaic_gpu, mosaic_wide, triton):
        for reason in ("no_mosaic_gpu", "no_triton"):
            monkeypatch.setattr(module, reason, lambda: None, raising=False)
    return unsupported(*args, implementation)


@every_kernel
def test_weights_have_as_many_inputs_as_there_are_activations(monkeypatch, implementation):
    narrow, wide = (random_weight(64, inputs, 0) for inputs in (256, 512))
    x = jnp.zeros((2, 256), jnp.bfloat16)
    assert reason_here(monkeypatch, implementation, x, (narrow,)) is None
    for weights in ((narrow, wide), (wide,)):
        assert "256 inputs, the number of activations, not 512" in reason_here(monkeypatch, implementation, x, weights)


@gpu
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), with_rows([1, 8, 64, 16, 3], [shape for shape in SHAPES if shape[0] // 128 % 2 == 0])
)
def test_nested_equals_float32(rows, inputs, outputs):
    for group_size, outliers in ((128, False), (128, True), (32, False)):
        weights = tuple(nested_weight(out, inputs, i, group_size) for i, out in enumerate(outputs))
        x = activations(rows, inputs, outliers)
        skip_or_fail("mosaic_gpu", mosaic_wide.unsupported(x, weights))
        y = many_rows(x, weights)
        assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3
        first = np.asarray(y)
        np.testing.assert_array_equal(np.asarray(many_rows(x[-1:], weights)), first[-1:])


@gpu
@pytest.mark.parametrize(("rows", "inputs", "outputs"), with_rows([1, 8, 3], [*SHAPES, ODD_GROUPS]))
def test_nested_of_few_rows_equals_float32(rows, inputs, outputs):
    for group_size, steps, outliers in ((128, 16, True), (128, 8, False), (64, 16, False), (32, 8, True)):
        weights = tuple(nested_weight(out, inputs, i, group_size, steps) for i, out in enumerate(outputs))
        x = activations(rows, inputs, outliers)
        skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(x, weights))
        y = few_rows(x, weights)
        assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3
        np.testing.assert_array_equal(np.asarray(few_rows(x[-1:], weights)), np.asarray(y)[-1:])


@gpu
@pytest.mark.parametrize(("rows", "inputs", "outputs"), with_rows([1, 7, 16, 3], SHAPES))
def test_nested_through_triton_equals_float32(rows, inputs, outputs):
    for group_size, steps, outliers in ((128, 16, True), (128, 8, False), (64, 16, False), (32, 8, True)):
        if inputs % group_size:
            continue
        weights = (nested_weight(out, inputs, i, group_size) for i, out in enumerate(outputs))
        weights = tuple(dataclasses.replace(weight, steps=steps) for weight in weights)
        x = activations(rows, inputs, outliers)
        y = kernel("triton", x, weights)(x, weights)
        assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 5e-3


def test_what_the_nested_kernel_does_not_take(monkeypatch):
    monkeypatch.setattr(mosaic_wide, "no_mosaic_gpu", lambda: None)
    weight = nested_weight(32, 256, 0)
    x = activations(2, 256, False)
    assert mosaic_wide.unsupported(x, [weight]) is None
    wide = jax.tree.map(lambda a: a.astype(jnp.float16) if a.dtype == jnp.bfloat16 else a, weight)
    assert "in bfloat16" in mosaic_wide.unsupported(x, [wide])
    assert "up to 64 rows, not 65" in mosaic_wide.unsupported(activations(65, 256, False), [weight])
    for config in (mosaic_wide_plan.Config(64, 1, 2), mosaic_wide_plan.Config(64, 2), mosaic_wide_plan.Config(16, 1, 3)):
        with pytest.raises(ValueError, match=r"Config\(tile=.* does not fit 2 rows and weights \[\(32, 256\)\]"):
            mosaic_wide.coded_matmul(x, [weight], config=config)
