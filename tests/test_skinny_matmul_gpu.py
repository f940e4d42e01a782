"""The GPU kernels of linear for few rows and plain or INT8 weights, against float32, when they run, and what they do not take."""

import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import gpu, skip_or_fail
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from problems.matmul import activations, int8_weight, plain_weight, random_weight, relative_error, separate

from pallas_kernels import dispatch, matmul
from pallas_kernels.formats.weights import Int8Weight
from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES
from pallas_kernels.matmul import (
    gated_linear,
    linear,
    mosaic_int8,
    mosaic_int8_plan,
    mosaic_plain,
    mosaic_plain_plan,
    reference,
)
from pallas_kernels.replaced_attention import mosaic_choice

# Inputs, and the outputs of weights that share a launch: shapes of Llama models, outputs that blocks cannot divide evenly, fewer of them
# than blocks, and warps without inputs.
PLAIN_SHAPES = [
    (4096, (14336, 14336)),
    (4096, (11008, 11008)),
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (14336, (4096,)),
    (4096, (128256,)),
    (128, (8, 24)),
    (1920, (1064,)),
    (28672, (1032, 8)),
]
INT8_SHAPES = [(4096, (128256,)), (4096, (4096, 1024, 1024)), (256, (8, 24)), (2304, (1064,)), (28672, (1032, 8))]
skinny_matmul = jax.jit(lambda module, *args, dtype: module.skinny_matmul(*args, dtype=dtype), static_argnums=0, static_argnames="dtype")
gated_matmul = jax.jit(mosaic_plain.gated_matmul)


def few_rows_problems(plain: Sequence, int8: Sequence) -> pytest.MarkDecorator:
    """All shapes of both kinds of weights, each with these rows."""
    problems = [(plain_weight, *shape, rows) for shape in PLAIN_SHAPES for rows in plain]
    return pytest.mark.parametrize(
        ("make", "inputs", "outputs", "rows"), problems + [(int8_weight, *shape, rows) for shape in INT8_SHAPES for rows in int8]
    )


def module_of(make: Callable) -> ModuleType:
    return mosaic_plain if make is plain_weight else mosaic_int8


def skinny_kernel(make: Callable, x: jax.Array, weights: Sequence[jax.Array | Int8Weight], dtype) -> Callable:
    """The kernel for these weights, which gives `dtype`; skips the test where this machine cannot run it, and fails where it should."""
    module = module_of(make)
    skip_or_fail("mosaic_gpu", module.unsupported(x, weights, dtype=dtype))
    return functools.partial(skinny_matmul, module, dtype=dtype)


@gpu
@few_rows_problems([2, 13, 64, 65, 128], [1, 2, 8, 9, 16])
def test_skinny_equals_float32(make, inputs, outputs, rows):
    weights = tuple(make(out, inputs, i) for i, out in enumerate(outputs))
    # `mosaic_plain` gives no float32 of more inputs.
    exact = ["float32"] if make is int8_weight or inputs <= mosaic_plain_plan.MAX_EXACT_INPUTS else []
    for outliers, dtype in itertools.product((False, True), ["bfloat16", *exact]):
        x = activations(rows, inputs, outliers)
        y = skinny_kernel(make, x, weights, dtype)(x, weights)
        assert y.shape == (rows, sum(outputs)) and y.dtype == dtype
        most = max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights))
        assert most <= (5e-3 if dtype == "bfloat16" else 2e-5)


@gpu
@pytest.mark.parametrize("rows", [1, 8, 30, 64, 100])
@pytest.mark.parametrize(("inputs", "out"), [(4096, 14336), (4096, 11008), (128, 8), (1920, 1064), (8192, 28672)])
def test_gated_equals_float32(inputs, out, rows):
    gate, up = (plain_weight(out, inputs, i) for i in range(2))
    for outliers in (False, True):
        x = activations(rows, inputs, outliers)
        skip_or_fail("mosaic_gpu", mosaic_plain.unsupported(x, (gate, up), dtype="bfloat16"))
        assert gated_error(gated_matmul(x, gate, up), x, gate, up) <= GATED_TOLERANCE


# Either product may round to its neighbour in bfloat16, and so may the result.
GATED_TOLERANCE = (1 + 2**-8) ** 3 - 1


def gated_exactly(x: jax.Array, gate: jax.Array, up: jax.Array) -> np.ndarray:
    """silu(x @ gate.T) * (x @ up.T) of products in bfloat16, in float64."""
    products = [jnp.matmul(x, w.T, precision="highest", preferred_element_type=jnp.float32) for w in (gate, up)]
    a, b = (np.asarray(product.astype(jnp.bfloat16), np.float64) for product in products)
    return a * (0.5 + 0.5 * np.tanh(a / 2)) * b


def gated_error(y: jax.Array, x: jax.Array, gate: jax.Array, up: jax.Array) -> float:
    """The largest error of `gated_exactly` of each row, relative to the row's largest magnitude: the worst of them."""
    expected = gated_exactly(x, gate, up)
    return (np.abs(np.asarray(y, np.float64) - expected).max(1) / np.abs(expected).max(1)).max()


@gpu
@few_rows_problems([64, 128], [8, 16])
def test_a_skinny_row_depends_on_no_other(make, inputs, outputs, rows):
    weights = tuple(make(out, inputs, i) for i, out in enumerate(outputs))
    x = activations(rows, inputs, True)
    run = skinny_kernel(make, x, weights, "bfloat16")
    together = np.asarray(run(x, weights))
    for fewer in {8: [1, 5], 16: [9, 13], 64: [1, 8, 31], 128: [1, 64, 65, 72]}[rows]:
        np.testing.assert_array_equal(np.asarray(run(x[-fewer:], weights)), together[-fewer:])
    spoilt = np.asarray(run(x.at[2, 77].set(jnp.nan), weights))
    assert np.isnan(spoilt[2].astype(np.float32)).all()
    np.testing.assert_array_equal(np.delete(spoilt, 2, 0), np.delete(together, 2, 0))


@gpu
@pytest.mark.parametrize(
    ("make", "inputs", "outputs", "rows"),
    [(plain_weight, *shape, rows) for shape in ((4096, (4096, 1024, 1024)), (11008, (4096,)), (4096, (32064,))) for rows in (8, 33, 64)]
    + [(int8_weight, *shape, rows) for shape in ((4096, (32064,)), (14336, (4096,))) for rows in (1, 8, 13, 16)],
)
def test_skinny_gives_the_same_bits_in_a_thousand_launches(make, inputs, outputs, rows):
    weights = tuple(make(out, inputs, i) for i, out in enumerate(outputs))
    x = activations(rows, inputs, False)
    run = skinny_kernel(make, x, weights, "float32")
    first = run(x, weights)
    differing = sum(jnp.any(run(x, weights) != first).astype(jnp.int32) for _ in range(1000))
    assert int(differing) == 0


@gpu
@pytest.mark.parametrize("rows", [8, 64])
def test_gated_gives_the_same_bits_in_a_thousand_launches(rows):
    gate, up = (plain_weight(14336, 4096, i) for i in range(2))
    x = activations(rows, 4096, False)
    skip_or_fail("mosaic_gpu", mosaic_plain.unsupported(x, (gate, up), dtype="bfloat16"))
    first = gated_matmul(x, gate, up)
    differing = sum(jnp.any(gated_matmul(x, gate, up) != first).astype(jnp.int32) for _ in range(1000))
    assert int(differing) == 0


@gpu
@pytest.mark.parametrize(("make", "rows"), [(plain_weight, 6), (int8_weight, 12)])
def test_linear_takes_the_skinny_kernel(monkeypatch, make, rows):
    weights = (make(64, 256, 0), make(32, 256, 1))
    x = activations(rows, 256, False).reshape(2, -1, 256)
    run = skinny_kernel(make, x, weights, "bfloat16")
    y = linear(x, weights)
    assert y.shape == (2, rows // 2, 96)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(run(x, weights)))
    monkeypatch.setattr(dispatch, "KERNELS", ())
    # XLA rounds products with codes before it scales them, and rounds the scales.
    rounded = 2**-7 if make is plain_weight else 2**-5
    np.testing.assert_allclose(np.asarray(linear(x, weights), np.float32), np.asarray(y, np.float32), rtol=rounded, atol=rounded)


@pytest.mark.parametrize(
    ("make", "weights", "rows", "ours"),
    [
        (plain_weight, 2, 1, False),
        (plain_weight, 2, 2, True),
        (plain_weight, 1, 64, True),
        (plain_weight, 1, 65, False),
        (int8_weight, 1, 1, True),
        (int8_weight, 1, 2, False),
        (int8_weight, 2, 8, False),
        (int8_weight, 1, 9, True),
    ],
)
def test_the_skinny_kernel_runs_where_it_was_faster(monkeypatch, make, weights, rows, ours):
    considered = []

    def choose(operation, implementation, *args, weight_format, rows, **settings):
        considered.extend(kernel for kernel in dispatch.kernels(operation, weight_format) if kernel.takes_rows(rows))
        return reference

    monkeypatch.setattr(matmul, "choose", choose)
    linear(activations(rows, 256, False), [make(8, 256, i) for i in range(weights)])
    assert bool(considered) == ours


@pytest.mark.parametrize(("make", "gated"), [(plain_weight, False), (plain_weight, True), (int8_weight, False)])
def test_vmap_and_derivatives_take_xla(monkeypatch, make, gated):
    second = 64 if gated else 32
    weights = (make(64, 256, 0), make(second, 256, 1))
    x = activations(6, 256, False)

    def of(module):
        if gated:
            return lambda x, weights: module.gated_matmul(x, *weights).astype(jnp.float32)
        return functools.partial(module.skinny_matmul, dtype=jnp.float32)

    # A kernel that is known by its results, and nothing can be derived of.
    ours, xla = of(module_of(make)), of(reference)
    run = lambda plan, x, weights: jax.lax.stop_gradient(xla(x, weights) + 1).astype(plan.dtype)
    monkeypatch.setattr(module_of(make), "run", run)
    marked = (xla(x, weights) + 1).astype(jnp.bfloat16 if gated else jnp.float32)
    np.testing.assert_array_equal(ours(x, weights), marked)
    loss = lambda multiply: jax.jit(jax.value_and_grad(lambda x: multiply(x, weights).sum()))(x)
    (value, gradient), (expected, expected_gradient) = loss(ours), loss(xla)
    np.testing.assert_allclose(value, marked.astype(jnp.float32).sum(), rtol=1e-2 if gated else 1e-4)  # in bfloat16 if gated
    np.testing.assert_allclose(np.asarray(gradient, np.float32), np.asarray(expected_gradient, np.float32), rtol=1e-6)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), weights, (*weights[:1], make(second, 256, 2)))
    for axes, *arguments in (((0, None), x.reshape(2, 3, 256), weights), ((None, 0), x, stacked)):
        found, expected = (jax.jit(jax.vmap(multiply, in_axes=axes))(*arguments) for multiply in (ours, xla))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@gpu
@pytest.mark.parametrize("make", [plain_weight, int8_weight])
def test_the_skinny_kernel_under_vmap_and_grad(make):
    weights = (make(64, 256, 0), make(32, 256, 1))
    x = activations(6, 256, False)
    run = skinny_kernel(make, x, weights, "float32")
    each = jax.jit(jax.vmap(run, in_axes=(0, None)))(x.reshape(2, 3, 256), weights)
    np.testing.assert_allclose(np.asarray(each).reshape(6, 96), np.asarray(run(x, weights)), rtol=1e-5, atol=1e-3)
    gradient = lambda multiply: jax.jit(jax.grad(lambda x: multiply(x, weights, dtype="float32").sum()))(x)
    both = functools.partial(skinny_matmul, module_of(make)), reference.skinny_matmul
    found, expected = (np.asarray(gradient(multiply), np.float32) for multiply in both)
    np.testing.assert_allclose(found, expected, rtol=2**-7)


def test_weights_of_several_formats_are_multiplied_each_in_its_own():
    weights = (int8_weight(16, 256, 0), random_weight(16, 256, 1), plain_weight(8, 256, 2))
    x = activations(3, 256, False).astype(jnp.float32)
    for part, weight in zip(separate(linear(x, weights), weights), weights, strict=True):
        assert relative_error(part, x, weight) <= 1e-5


def test_gated_linear_takes_weights_of_any_format_and_biases():
    x = activations(3, 256, True).astype(jnp.float32)
    gate, up = int8_weight(16, 256, 0), random_weight(16, 256, 1)
    biases = jnp.linspace(-2, 2, 16), jnp.linspace(1, -1, 16)
    a, b = (linear(x, [weight], [bias]) for weight, bias in zip((gate, up), biases))
    np.testing.assert_allclose(gated_linear(x, gate, up, biases), a / (1 + jnp.exp(-a)) * b, rtol=1e-5, atol=1e-5)
    gate, up = plain_weight(16, 256, 2), plain_weight(16, 256, 3)
    assert gated_error(gated_linear(x.astype(jnp.bfloat16), gate, up), x.astype(jnp.bfloat16), gate, up) <= 2e-2
    with pytest.raises(ValueError, match="1 biases for 2 weights"):
        gated_linear(x, gate, up, biases[:1])
    with pytest.raises(ValueError, match="16 outputs of gate and 8 of up"):
        gated_linear(x, gate, up[:8])


@pytest.mark.parametrize(
    ("rows", "biased", "considered"), [(1, False, False), (2, False, True), (64, False, True), (65, False, False), (2, True, True)]
)
def test_gated_linear_is_one_product_without_biases(monkeypatch, rows, biased, considered):
    """What is added to a product comes before silu, so with biases the kernel for both weights does not serve."""
    called = []

    def choose(operation, implementation, *args, weight_format, rows, **settings):
        considered = any(kernel.takes_rows(rows) for kernel in dispatch.kernels(operation, weight_format))
        spy = lambda name: lambda *args, **settings: called.append((name, considered)) or getattr(reference, name)(*args, **settings)
        return SimpleNamespace(gated_matmul=spy("gated_matmul"), skinny_matmul=spy("skinny_matmul"))

    monkeypatch.setattr(matmul, "choose", choose)
    gated_linear(activations(rows, 256, False), plain_weight(8, 256, 0), plain_weight(8, 256, 1), [jnp.ones(8)] * 2 if biased else ())
    assert called == [("skinny_matmul" if biased else "gated_matmul", considered)]


MODELS = [(4096, 128256), (5120, 5120), (5120, 152064), (8192, 57344), (8192, 128256), (11008, 4096), (14336, 4096), (28672, 8192)]


@pytest.mark.parametrize("rows", range(1, 17))
def test_int8_plans_fit(rows):
    for inputs, out in [(256, 8), (2304, 1064), (4096, 1024), (32768, 16), *MODELS]:
        plan = mosaic_int8_plan.Plan.fitting(rows, inputs, (out,), 132)
        if plan is None:  # sums of this number of tiles would have to wait for other blocks
            assert rows > 8 and inputs > 4096 and out >= 8192
            continue
        assert plan.slots >= mosaic_int8_plan.ENOUGH_SLOTS and plan.layout.total <= 227 * 1024 and plan.blocks <= 132
        assert plan.clusters <= plan.tiles
        like = mosaic_int8_plan.Plan.fitting(1 if rows <= 8 else 16, inputs, (out,), 132)
        assert (plan.cluster, plan.clusters) == (like.cluster, like.clusters)


@pytest.mark.parametrize("multiprocessors", [16, 114, 132])
@pytest.mark.parametrize("rows", [1, 30, 64, 65, 128])
def test_plain_plans_cover_all_outputs_and_fit(rows, multiprocessors):
    for inputs, outputs in [*PLAIN_SHAPES, (128, 28 * (8,)), *((inputs, (out,)) for inputs, out in MODELS)]:
        plan = mosaic_plain_plan.Plan(rows, inputs, outputs, multiprocessors)
        assert all(share % 8 == 0 and share <= out <= share * plan.blocks for share, out in zip(plan.shares, outputs, strict=True))
        assert sum(plan.shares) <= mosaic_plain_plan.MAX_OUTPUTS and plan.slots >= min(mosaic_plain_plan.ENOUGH_SLOTS, plan.steps)
        # Blocks come in as few turns as there is room for.
        turns = math.ceil(plan.blocks / multiprocessors)
        assert turns == 1 or sum(math.ceil(out / (turns - 1) / multiprocessors / 8) * 8 for out in outputs) > mosaic_plain_plan.MAX_OUTPUTS
        copied = math.ceil(rows / 8) * 8
        used = 2 * plan.step * (plan.slots * (copied + sum(plan.shares)) + plan.product_rows - copied) + 16 * plan.slots
        assert used <= SHARED_BYTES - RESERVED_BYTES


def test_the_plain_kernel_leaves_room_for_the_choice_of_tokens():
    """For a layer of an 8B model at the shape of which docs/measurements/2026-11.md has SpeCache's throughput."""
    choice = mosaic_choice.Plan(16, 8, 32768 + 512, 4, 8, 3, 64, 64)
    assert choice.shared.total + RESERVED_BYTES <= mosaic_plain_plan.OTHERS_BYTES
    for inputs, outputs in ((4096, (14336, 14336)), (4096, (4096, 1024, 1024)), (4096, (4096,)), (14336, (4096,))):
        plan = mosaic_plain_plan.Plan(32, inputs, outputs, 132)
        used = 2 * plan.step * (plan.slots * (32 + sum(plan.shares)) + 32)
        assert used + mosaic_plain_plan.OTHERS_BYTES <= SHARED_BYTES - RESERVED_BYTES


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "multiprocessors", "float32_out", "gated"),
    [
        (60, 1024, (48, 16), 2, False, False),  # more steps than slots, and another share of each weight
        (57, 128, (16,), 2, True, False),
        (64, 512, (32, 32), 4, False, True),
        (64, 384, (448,), 1, True, False),  # two turns
        (100, 1024, (48, 16), 2, True, False),  # two warpgroups
        (128, 512, (32, 32), 4, False, True),
        (13, 1024, (512, 512), 5, False, True),  # weights are the first operand
    ],
)
def test_the_emulated_plain_kernel_has_no_races(monkeypatch, capfd, rows, inputs, outputs, multiprocessors, float32_out, gated):
    """Products are done at once where they are emulated, so that slots are refilled too early is not seen here: see the next test, and the
    thousand launches on a GPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11):
        pytest.skip("needs a CPU, and jax 0.11 to emulate Mosaic GPU")
    needs_cores(rows)
    monkeypatch.setattr(mosaic_plain_plan.Plan, "slots", property(lambda plan: min(plan.steps, 3)))
    x, weights = activations(rows, inputs, True), [plain_weight(out, inputs, i) for i, out in enumerate(outputs)]
    plan = mosaic_plain_plan.Plan(rows, inputs, outputs, multiprocessors, float32_out, gated)
    assert plan.weights_first == (rows == 13)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y = mosaic_plain.run(plan, x, weights)
    assert y.shape == (rows, sum(plan.written)) and y.dtype == plan.dtype
    assert "RACE" not in "".join(capfd.readouterr())
    if gated:
        # Without rounding both products first, about half of the outputs would be others.
        others = np.asarray(y) != np.asarray(jnp.asarray(gated_exactly(x, *weights), jnp.bfloat16))
        assert others.mean() < 0.05 and gated_error(y, x, *weights) <= GATED_TOLERANCE
    else:
        most = max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights))
        assert most <= (2e-5 if float32_out else 5e-3)


def needs_cores(rows: int) -> None:
    """Two warpgroups that are emulated wait for each other, each on a core of its own."""
    if rows > mosaic_plain_plan.PRODUCT_ROWS and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two warpgroups are emulated on two cores")


def test_the_plain_kernel_waits_for_products_before_it_refills_their_slots():
    if jax.__version_info__ < (0, 11):
        pytest.skip("needs jax 0.11 to trace Mosaic GPU")
    plan = mosaic_plain_plan.Plan(64, 4096, (4096, 1024), 132)
    traced = str(jax.make_jaxpr(functools.partial(mosaic_plain.run, plan))(*shapes(64, 4096, plan.outputs)))
    order = re.findall(r"\bwgmma_ref\b|\bwgmma_wait\[n=\d+\]|\bcopy_gmem_to_smem\b", traced)
    # Copies before the loop; in it a product of each weight, after which only these two may be under way, and the copies of a later step.
    before = (plan.slots * 3) * ["copy_gmem_to_smem"]
    in_loop = [*2 * ["wgmma_ref"], "wgmma_wait[n=2]", *3 * ["copy_gmem_to_smem"]]
    assert [x for x in order if x != "wgmma_wait[n=0]"] in (before + in_loop, in_loop + before)


def shapes(rows: int, inputs: int, outputs: Sequence[int]) -> tuple[jax.ShapeDtypeStruct, list[jax.ShapeDtypeStruct]]:
    """The shapes of activations and of plain weights."""
    x, *weights = (jax.ShapeDtypeStruct((n, inputs), jnp.bfloat16) for n in (rows, *outputs))
    return x, weights


def test_outputs_of_the_plain_kernel_differ_between_devices():
    if jax.__version_info__ < (0, 11):
        pytest.skip("needs jax 0.11 to trace Mosaic GPU")
    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,))
    found = []

    def run(x, weight):
        y = mosaic_plain.run(mosaic_plain_plan.Plan(8, 256, (32,), 4), x, [weight])
        found.append(jax.typeof(y).manual_axis_type.varying)
        return y

    own = jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec(None, "d"))
    x, (weight,) = shapes(8, 256, (64,))
    assert jax.eval_shape(own, x, weight).shape == (8, 64) and found == [frozenset({"d"})]


@pytest.mark.parametrize(
    ("rows", "outputs", "gated"),
    [(1, (104, 104), True), (5, (104, 8), False), (33, (104, 104), True), (65, (104, 8), False), (5, (456, 456), True)],
)
def test_the_emulated_plain_kernel_with_fewer_rows_and_outputs(rows, outputs, gated):
    """Fewer rows than a product takes, outputs that blocks cannot divide evenly, and a weight of fewer outputs than there are blocks: what
    is read while it is copied, and what two blocks write, makes no difference."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11):
        pytest.skip("needs a CPU, and jax 0.11 to emulate Mosaic GPU")
    needs_cores(rows)
    x, weights = activations(rows, 256, False), [plain_weight(out, 256, i) for i, out in enumerate(outputs)]
    plan = mosaic_plain_plan.Plan(rows, 256, outputs, 5, float32_out=not gated, gated=gated)
    assert plan.weights_first == (outputs[0] == 456)
    assert plan.shares[0] * (plan.blocks - 1) < outputs[0] < plan.shares[0] * plan.blocks
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        y = mosaic_plain.run(plan, x, weights)
    if gated:
        assert gated_error(y, x, *weights) <= GATED_TOLERANCE
    else:
        assert max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights)) <= 2e-5


def test_sharded_weights_are_refused_but_not_a_devices_own(monkeypatch):
    monkeypatch.setattr(mosaic_plain, "no_mosaic_gpu", lambda: None)
    reasons = []

    def ask(x, weight):
        reasons.append(mosaic_plain.unsupported(x, [weight], dtype=jnp.bfloat16))
        return weight

    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,))
    x, weight = (jax.ShapeDtypeStruct((n, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())) for n in (2, 64))
    jax.eval_shape(ask, x, weight)
    own = jax.shard_map(ask, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec("d"))
    jax.eval_shape(own, x, weight)
    assert reasons == ["needs all arrays on one device", None]


@pytest.mark.parametrize("shape", [(2048, 512), (16, 128), (16, 1, 256)])
def test_weights_of_other_inputs_are_refused(monkeypatch, shape):
    monkeypatch.setattr(mosaic_plain, "no_mosaic_gpu", lambda: None)
    x, weight = jnp.zeros((2, 256), jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)
    assert "[outputs, 256]" in mosaic_plain.unsupported(x, [weight], dtype=jnp.bfloat16)


def test_so_many_weights_as_a_block_has_no_outputs_for_are_refused(monkeypatch):
    monkeypatch.setattr(mosaic_plain, "no_mosaic_gpu", lambda: None)
    x, weight = jnp.zeros((2, 256), jnp.bfloat16), jnp.zeros((8, 256), jnp.bfloat16)
    assert mosaic_plain.unsupported(x, [weight] * 28, dtype=jnp.bfloat16) is None
    assert "up to 28 weights, not 29" in mosaic_plain.unsupported(x, [weight] * 29, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("rows", "inputs", "out", "dtypes", "reason"),
    [
        (2, 256, 64, ("float32", "bfloat16", "float32"), "bfloat16, not float32"),
        (2, 256, 64, ("bfloat16", "float32", "float32"), "bfloat16, not float32"),
        (2, 256, 64, ("bfloat16", "bfloat16", "float16"), "not float16"),
        (2, 192, 64, ("bfloat16",) * 3, "multiples of 128"),
        (2, 14464, 64, ("bfloat16", "bfloat16", "float32"), "float32 of up to 14336 inputs"),
        (2, 256, 60, ("bfloat16",) * 3, "multiples of 8"),
        (0, 256, 64, ("bfloat16",) * 3, "needs a row"),
        (2, 0, 64, ("bfloat16",) * 3, "multiples of 128"),
        (2, 256, 0, ("bfloat16",) * 3, "multiples of 8"),
        (17, 256, 64, ("bfloat16", "int8", "bfloat16"), "up to 16 rows"),
        (16, 65536, 64, ("bfloat16", "int8", "bfloat16"), "no room"),
        (2, 256, 64, ("float32", "int8", "float32"), "bfloat16, not float32"),
        (2, 256, 64, ("bfloat16", "int8", "float16"), "not float16"),
        (2, 384, 64, ("bfloat16", "int8", "bfloat16"), "multiples of 256"),
        (2, 256, 60, ("bfloat16", "int8", "bfloat16"), "multiples of 8"),
    ],
)
def test_what_the_skinny_kernel_does_not_take(monkeypatch, rows, inputs, out, dtypes, reason):
    module = mosaic_int8 if dtypes[1] == "int8" else mosaic_plain
    monkeypatch.setattr(module, "no_mosaic_gpu", lambda: None)
    x, weight = jnp.zeros((rows, inputs), dtypes[0]), jnp.zeros((out, inputs), dtypes[1])
    if dtypes[1] == "int8":
        weight = Int8Weight(weight, jnp.ones(out))
    assert reason in module.unsupported(x, (weight,), dtype=dtypes[2])
    y = linear(x, (weight,), dtype=dtypes[2])
    assert y.shape == (rows, out) and y.dtype == dtypes[2]
