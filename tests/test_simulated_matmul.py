"""The Mosaic GPU matmuls on a CPU, instruction by instruction (simulated_ptx.py): what they compute, and that a missing order is seen."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems.matmul import activations, int8_weight, nested_weight, random_weight, relative_error, separate, with_zero_points
from simulated_gpu import launch
from simulated_ptx import at_once, bf16_bits, simulate

import pallas_kernels.matmul.mosaic_gpu as matmul
import pallas_kernels.matmul.mosaic_int8 as int8_matmul
import pallas_kernels.matmul.mosaic_wide as wide_matmul
from pallas_kernels.formats.quantization import pack
from pallas_kernels.formats.weights import Int4Weight, Int8Weight, NestedWeight, dequantize_weight
from pallas_kernels.gpu import fragments, ptx
from pallas_kernels.matmul.mosaic_plan import PLENTY_SLOTS, Plan, Stage
from pallas_kernels.matmul.mosaic_wide_plan import PARAMETER_GROUPS, PARAMETER_SLOTS
from pallas_kernels.matmul.mosaic_wide_plan import Config as WideConfig
from pallas_kernels.matmul.mosaic_wide_plan import Plan as WidePlan
from pallas_kernels.matmul.support import Parameters, parameters_of

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    simulate(monkeypatch)
    for kernel in (matmul, int8_matmul, wide_matmul):
        monkeypatch.setattr(kernel, "launch", launch)


# How a missing order is seen. A warp that does not wait may be done with all its turns before the others begin theirs: the barriers have
# gone round by then, and who goes by them waits for ever.
SEEN, IN_VAIN = (AssertionError, TimeoutError), "waits for .* in vain"


# In these matmuls the data decide nothing about what is done, so that half of the problems have outliers.
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "blocks", "room", "outliers"),
    [
        (1, 4096, (48, 16), 3, None, False),
        (2, 256, (64, 16, 32), 2, None, True),
        (3, 4608, (48,), 2, 2, True),  # two tiles together, and one
        (9, 4608, (48, 32), 2, 2, False),
        (7, 768, (32,), 1, None, True),
        (16, 256, (16, 32), 2, None, False),
        (1, 256, (32,), 3, None, False),  # a block without tiles
        (1, 4096, (128,), 1, None, True),  # more passes than the ring has slots
        (2, 10240, (80,), 1, 4, False),  # three tiles together, of which one is not there; four passes at once, and one more
        (5, 4608, (16,), 1, None, True),  # all passes resident, placed two at a time
        (3, 2432, (32, 16), 2, None, True),  # an odd number of groups: every other row of scales begins in the middle of a word
    ],
)
def test_int4_matmul(rows, inputs, outputs, blocks, room, outliers):
    weights = [random_weight(out, inputs, i) for i, out in enumerate(outputs)]
    x = activations(rows, inputs, outliers)
    plan = Plan.fitting(rows, (Stage(inputs // 128, outputs),), blocks)
    y = at_once(matmul.run)(dataclasses.replace(plan, room=room or plan.room), x, weights)
    assert y.shape == (rows, sum(outputs)) and y.dtype == jnp.bfloat16
    for part, weight in zip(separate(y, weights), weights):
        assert relative_error(part, x, weight) <= 5e-3


def test_inputs_that_are_placed_once_leave_their_room_to_weights():
    """Rows 1 to 8 of a layer of Llama-3.1-8B on an H200: a block takes two tiles of `down`, of 7 passes. And 7 passes for ten tiles."""
    stages = Stage(32, (4096,)), Stage(32, (14336,) * 2, normed=True, gated=True), Stage(112, (4096,)), Stage(32, (6144,), normed=True)
    plans = [Plan.fitting(rows, stages, 132) for rows in range(1, 9)]
    assert [plan.room for plan in plans] == [7, 4, 2, 2, 2, 2, 2, 2]
    assert [plan.slots for plan in plans] == [10, 10, 10, 10, 9, 8, 8, 7]
    assert all(plan.resident(stage) for plan in plans for stage in stages if stage.normed)
    several = Plan.fitting(3, (Stage(112, (16 * 1320,)),), 132)
    assert several.resident(several.stages[0]) and several.slots < PLENTY_SLOTS


@pytest.mark.parametrize("group_size", [128, 64, 32])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "blocks", "room", "scale_dtype"),
    [
        (1, 4096, (48, 16), 3, None, jnp.float16),
        (9, 4608, (48, 32), 2, 2, jnp.float16),
        (3, 2432, (32, 16), 2, None, jnp.float16),
        (3, 2432, (32, 16), 2, None, jnp.bfloat16),
        (7, 768, (32,), 1, None, None),
    ],
)
def test_int4_matmul_with_zero_points_and_small_groups(rows, inputs, outputs, blocks, room, scale_dtype, group_size):
    weights = [random_weight(out, inputs, i, group_size) for i, out in enumerate(outputs)]
    weights = [with_zero_points(weight, scale_dtype) for weight in weights] if scale_dtype else weights
    x = activations(rows, inputs, False)
    plan = Plan.fitting(rows, (Stage(inputs // 128, outputs),), blocks, parameters=parameters_of(weights[0]))
    y = at_once(matmul.run)(dataclasses.replace(plan, room=room or plan.room), x, weights)
    for part, weight in zip(separate(y, weights), weights):
        assert relative_error(part, x, weight) <= 5e-3


@pytest.mark.parametrize(("group_size", "steps"), [(128, 16), (64, 8), (32, 16)])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "blocks", "room", "outliers"),
    [(1, 4096, (48, 16), 3, None, True), (9, 4608, (48, 32), 2, 2, False), (3, 2432, (32, 16), 2, None, False)],
)
def test_nested_matmul_of_few_rows(rows, inputs, outputs, blocks, room, outliers, group_size, steps):
    weights = [nested_weight(out, inputs, i, group_size, steps) for i, out in enumerate(outputs)]
    x = activations(rows, inputs, outliers)
    plan = Plan.fitting(rows, (Stage(inputs // 128, outputs),), blocks, parameters=parameters_of(weights[0]))
    y = at_once(matmul.run)(dataclasses.replace(plan, room=room or plan.room), x, weights)
    for part, weight in zip(separate(y, weights), weights):
        assert relative_error(part, x, weight) <= 5e-3


def test_int4_matmul_keeps_what_is_not_finite_in_its_row():
    weight, x = random_weight(16, 256, 0), activations(3, 256, False)
    run = functools.partial(at_once(matmul.run), Plan.fitting(3, (Stage(2, (16,)),), 1))
    clean, spoilt = run(x, [weight]), run(x.at[1, 9].set(jnp.nan), [weight])
    assert np.isnan(np.asarray(spoilt[1], np.float32)).all()
    np.testing.assert_array_equal(np.asarray(spoilt)[[0, 2]], np.asarray(clean)[[0, 2]])


@pytest.mark.parametrize(
    ("function", "caller"),
    [
        ("synchronize", "one_pass"),  # before a slot of the ring of codes is given back
        ("synchronize", "one_turn"),  # before sums are handed over
        ("synchronize", "place"),  # before other lanes read activations
        ("wait_for_arrivals", "one_pass"),  # functions of that name in the producer and in the math warps
        ("wait_for_arrivals", "step"),
        ("arrive_after_copies", "copy_pass"),
    ],
)
def test_a_missing_order_is_seen(monkeypatch, function, caller):
    # More tiles than the ring has slots, so that every slot is filled again.
    plan = Plan.fitting(1, (Stage(2, (256,)),), 1)
    assert plan.stages[0].tiles > plan.slots
    x, weight = activations(1, 256, False), random_weight(256, 256, 0)
    run = functools.partial(at_once(matmul.run), plan, x, [weight])
    run()
    done = getattr(ptx, function)

    def left_out(*args):
        if sys._getframe(1).f_code.co_name != caller:
            return done(*args)
        if function == "arrive_after_copies":  # as soon as the copies are sent, not when they are there
            ptx.arrive(*args)

    monkeypatch.setattr(ptx, function, left_out)
    with pytest.raises(SEEN, match=rf"a race: warp|{IN_VAIN}"):
        run()


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "blocks", "config", "outliers"),
    [
        (9, 1280, (64,), 1, WideConfig(64, 1), False),  # scales in two slots, of which the second is not full
        (24, 256, (48, 16, 32), 2, WideConfig(64, 1), True),  # a tile that is not full, and of two weights
        (64, 512, (128, 64), 1, WideConfig(64, 1), False),  # tiles one after the other
        (24, 768, (80,), 1, WideConfig(128, 3), False),  # a tile of rows for each block
        (64, 1280, (64, 64), 1, WideConfig(64, 2), True),  # more steps for one block than for the other
        (33, 1024, (64,), 1, WideConfig(64, 1), False),
        (1, 4608, (16,), 1, WideConfig(64, 1), True),  # more steps than the ring has slots
        (17, 768, (80, 32), 2, WideConfig(48, 1), False),  # warps without outputs
        (9, 1280, (64, 16), 1, WideConfig(80, 2, 2), False),  # warpgroups that divide the inputs, one without steps of a second slot
    ],
)
def test_int4_matmul_of_many_rows(rows, inputs, outputs, blocks, config, outliers):
    weights = [random_weight(out, inputs, i) for i, out in enumerate(outputs)]
    x = activations(rows, inputs, outliers)
    y = at_once(wide_matmul.run)(WidePlan(rows, inputs // 128, outputs, blocks, config), x, weights)
    assert y.shape == (rows, sum(outputs)) and y.dtype == jnp.bfloat16
    for part, weight in zip(separate(y, weights), weights):
        assert relative_error(part, x, weight) <= 5e-3


@pytest.mark.parametrize(("group_size", "steps"), [(128, 16), (64, 8), (32, 16)])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "blocks", "config", "outliers"),
    [
        (1, 1280, (48, 16, 32), 2, WideConfig(64, 1), False),
        (24, 768, (80,), 1, WideConfig(128, 3), True),
        (64, 1280, (64, 64), 1, WideConfig(64, 2), False),
        (9, 1536, (96,), 1, WideConfig(32, 3, 2), True),
    ],
)
def test_nested_matmul(rows, inputs, outputs, blocks, config, outliers, group_size, steps):
    weights = [nested_weight(out, inputs, i, group_size, steps) for i, out in enumerate(outputs)]
    x = activations(rows, inputs, outliers)
    plan = WidePlan(rows, inputs // 128, outputs, blocks, config, parameters_of(weights[0]))
    y = at_once(wide_matmul.run)(plan, x, weights)
    assert y.shape == (rows, sum(outputs)) and y.dtype == jnp.bfloat16
    for part, weight in zip(separate(y, weights), weights):
        assert relative_error(part, x, weight) <= 5e-3


def test_one_of_many_rows_depends_on_no_other():
    x, weight = activations(17, 512, True), random_weight(64, 512, 0)
    multiply = lambda x: np.asarray(at_once(wide_matmul.run)(WidePlan(len(x), 4, (64,), 1, WideConfig(64, 1)), x, [weight]))
    together = multiply(x)
    np.testing.assert_array_equal(multiply(x[-9:]), together[-9:])
    for row, spoilt in ((2, jnp.nan), (16, jnp.inf)):  # the last is one of those that a tile has no activations for
        y = multiply(x.at[row, 9].set(spoilt))
        assert not np.isfinite(y[row].astype(np.float32)).any()
        np.testing.assert_array_equal(np.delete(y, row, 0), np.delete(together, row, 0))


def test_bits_of_bfloat16_are_those_of_one_rounding():
    """Of numbers halfway between two of bfloat16, and of the float64 before and after each of these."""
    low = np.arange(0x0000, 0x7F7F, 7, np.uint16)  # from 0 to the largest
    wide = lambda bits: (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    middle = (wide(low) + wide(low + 1)) / 2
    for sign, offset in ((1.0, 0), (-1.0, 0x8000)):
        np.testing.assert_array_equal(bf16_bits(sign * middle), low + (low & 1) + offset)
        np.testing.assert_array_equal(bf16_bits(sign * np.nextafter(middle, 0)), low + offset)
        np.testing.assert_array_equal(bf16_bits(sign * np.nextafter(middle, np.inf)), low + 1 + offset)
    np.testing.assert_array_equal(bf16_bits(np.array([np.inf, -np.inf, np.nan, 1e300])), [0x7F80, 0xFF80, 0x7FFF, 0x7F80])


def bits_rounded_once(weight) -> np.ndarray:
    """[in, out] bits of the weight in bfloat16. By way of float32 some would be halfway between two."""
    with jax.enable_x64(True):
        return bf16_bits(np.asarray(dequantize_weight(weight, jnp.float64).T))


def test_nibbles_as_bfloat16_are_rounded_once():
    """Every code of every input times scale plus zero, by activations that take one input each."""
    r = np.random.default_rng(0)
    scale, zero = (jnp.asarray(r.standard_normal((16, 2)) * 10.0 ** r.integers(-12, 7, (16, 2)), jnp.bfloat16) for _ in range(2))
    weight = Int4Weight(jnp.asarray(r.integers(0, 256, (16, 2, 64), np.uint8)), scale.at[0, 0].set(0), zero)
    plan = WidePlan(64, 2, (16,), 1, WideConfig(64, 1))
    y = jnp.concatenate([at_once(wide_matmul.run)(plan, x, [weight]) for x in jnp.split(jnp.eye(256, dtype=jnp.bfloat16), 4)])
    np.testing.assert_array_equal(np.asarray(y).view(np.uint16), bits_rounded_once(weight))


@pytest.mark.parametrize("steps", [16, 8])
def test_nested_codes_as_bfloat16_are_rounded_once(steps):
    """All of the 256 pairs of codes are among them."""
    r = np.random.default_rng(0)
    scale, zero = (jnp.asarray(r.standard_normal((16, 2)) * 10.0 ** r.integers(-12, 7, (16, 2)), jnp.bfloat16) for _ in range(2))
    codes = r.permutation(np.arange(16 * 2 * 128) % 256).reshape(16, 2, 128).astype(np.uint8)
    upper = Int4Weight(pack(jnp.asarray(codes >> 4)), scale.at[0, 0].set(0), zero)
    weight = NestedWeight(upper, pack(jnp.asarray(codes & 15)), steps)
    plan = WidePlan(64, 2, (16,), 1, WideConfig(64, 1), Parameters(lower_steps=steps))
    y = jnp.concatenate([at_once(wide_matmul.run)(plan, x, [weight]) for x in jnp.split(jnp.eye(256, dtype=jnp.bfloat16), 4)])
    np.testing.assert_array_equal(np.asarray(y).view(np.uint16), bits_rounded_once(weight))


@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("group_size", [128, 64, 32])
def test_weights_with_zero_points_are_rounded_once(group_size, scale_dtype):
    """As they are where a quantized checkpoint is dequantized to bfloat16."""
    r = np.random.default_rng(0)
    groups = 256 // group_size
    scale = jnp.asarray(r.standard_normal((16, groups)) * 10.0 ** r.integers(-7, 3, (16, groups)), scale_dtype)
    zero = jnp.asarray(np.arange(16 * groups).reshape(16, groups) % 17, jnp.int16)
    weight = Int4Weight(jnp.asarray(r.integers(0, 256, (16, groups, group_size // 2), np.uint8)), scale.at[0, 0].set(0), zero)
    plan = WidePlan(64, 2, (16,), 1, WideConfig(64, 1), parameters_of(weight))
    y = jnp.concatenate([at_once(wide_matmul.run)(plan, x, [weight]) for x in jnp.split(jnp.eye(256, dtype=jnp.bfloat16), 4)])
    exact = dequantize_weight(weight, jnp.float32)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(exact.T.astype(jnp.bfloat16)))


@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16, None])
@pytest.mark.parametrize("group_size", [128, 64, 32])
def test_int4_matmul_of_many_rows_with_zero_points_and_small_groups(group_size, scale_dtype):
    weights = [random_weight(out, 1280, i, group_size) for i, out in enumerate((48, 32))]
    weights = [with_zero_points(weight, scale_dtype) for weight in weights] if scale_dtype else weights
    x = activations(24, 1280, False)
    y = at_once(wide_matmul.run)(WidePlan(24, 10, (48, 32), 2, WideConfig(64, 2), parameters_of(weights[0])), x, weights)
    for part, weight in zip(separate(y, weights), weights):
        assert relative_error(part, x, weight) <= 5e-3


@pytest.mark.parametrize(
    ("module", "function", "caller"),
    [
        (ptx, "synchronize", "arrive_for_warp"),  # before a slot is handed over
        (ptx, "synchronize", "one_tile"),  # before sums take the place of the ring
        (ptx, "wait_for_arrivals", "step"),  # functions of that name in all kinds of warps
        (ptx, "wait_for_arrivals", "some"),
        (ptx, "arrive_after_copies", "step"),
        (ptx, "meet_cluster", "add_clusters"),
        (fragments, "products_done", "add_step"),
        (fragments, "publish", "step"),
    ],
)
def test_a_missing_order_of_the_matmul_of_many_rows_is_seen(monkeypatch, module, function, caller):
    # More steps than slots of either ring, so that every slot is filled again.
    plan = WidePlan(9, 72, (64,), 1, WideConfig(64, 2))
    assert plan.steps > 2 * plan.slots and plan.groups > 2 * PARAMETER_SLOTS * PARAMETER_GROUPS
    x, weight = activations(9, 72 * 128, False), random_weight(64, 72 * 128, 0)
    done = getattr(module, function)

    def left_out(*args):
        if sys._getframe(1).f_code.co_name != caller:
            return done(*args)
        if function == "arrive_after_copies":  # as soon as the copies are sent, not when they are there
            ptx.arrive(*args)
        return args[0] if function == "products_done" else None

    monkeypatch.setattr(module, function, left_out)
    with pytest.raises(SEEN, match=rf"a race: |which has ended|nobody waits for|{IN_VAIN}"):
        at_once(wide_matmul.run)(plan, x, [weight])


# Matmul with plain and INT8 weights ------------------------------------------------------------------------------------


def int8_problem(rows: int, inputs: int, outputs: tuple[int, ...], outliers: bool = False) -> tuple[jax.Array, list[Int8Weight]]:
    weights = [int8_weight(out, inputs, i) for i, out in enumerate(outputs)]
    return activations(rows, inputs, outliers), weights


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "cluster", "clusters", "wide", "outliers"),
    [
        (1, 2048, (24, 8), 1, 3, False, False),  # not as many tiles for each block
        (3, 256, (8, 16, 8), 1, 2, True, True),  # one warp has inputs
        (8, 4096, (112,), 1, 1, False, True),  # more passes than the ring has slots
        (13, 2304, (40,), 1, 2, False, True),  # a pass in which one warp has inputs
        (16, 768, (24,), 1, 2, True, False),
        (2, 4096, (40, 16), 2, 2, False, True),
        (8, 2304, (8, 24), 2, 2, True, False),  # one rank has inputs of a warp more
        (9, 3072, (24,), 4, 1, True, True),
    ],
)
def test_int8_matmul(rows, inputs, outputs, cluster, clusters, wide, outliers):
    x, weights = int8_problem(rows, inputs, outputs, outliers)
    y = at_once(int8_matmul.run)(int8_matmul.Plan(rows, inputs, outputs, cluster, clusters, wide), x, weights)
    assert y.shape == (rows, sum(outputs)) and y.dtype == (jnp.float32 if wide else jnp.bfloat16)
    for part, weight in zip(separate(y, weights), weights):
        assert relative_error(part, x, weight) <= (1e-5 if wide else 5e-3)


def test_int8_codes_are_exact():
    codes = jnp.tile(jnp.arange(-128, 128, dtype=jnp.int8), (8, 1))
    plan = int8_matmul.Plan(16, 256, (8,), 1, 1, float32_out=True)
    for x in jnp.split(jnp.eye(256, dtype=jnp.bfloat16), 16):
        y = at_once(int8_matmul.run)(plan, x, [Int8Weight(codes, jnp.ones(8))])
        np.testing.assert_array_equal(np.asarray(y), np.asarray(x, np.float32) @ np.asarray(codes, np.float32).T)


@pytest.mark.parametrize("cluster", [1, 2])
def test_int8_matmul_of_a_row_depends_on_no_other(cluster):
    x, weights = int8_problem(9, 2304, (16,))
    x = x.at[3, 9].set(jnp.nan)
    plan = functools.partial(int8_matmul.Plan, inputs=2304, outputs=(16,), cluster=cluster, clusters=2)
    run = lambda x: np.asarray(at_once(int8_matmul.run)(plan(len(x)), x, weights), np.float32)
    together = run(x)
    assert np.isnan(together[3]).all() and not np.isnan(np.delete(together, 3, 0)).any()
    for row in (0, 2, 8):
        np.testing.assert_array_equal(run(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(
    ("function", "caller"),
    [
        ("synchronize", "arrive_for_warp"),  # before a slot of either ring is given back or handed over
        ("wait_for_arrivals", "one_pass"),  # functions of that name in the producer and in the math warps
        ("wait_for_arrivals", "one_tile"),  # and in the math and epilogue warps
        ("wait_for_arrivals", "emit_block"),  # until activations are there
        ("meet_cluster", "add_clusters"),
    ],
)
def test_a_missing_order_of_the_int8_matmul_is_seen(monkeypatch, function, caller):
    x, weights = int8_problem(2, 1024, (256,))
    plan = int8_matmul.Plan(2, 1024, (256,), cluster=2, clusters=1)
    assert plan.tiles > plan.slots
    done = getattr(ptx, function)
    monkeypatch.setattr(ptx, function, lambda *args: None if sys._getframe(1).f_code.co_name == caller else done(*args))
    with pytest.raises(SEEN, match=rf"a race: |which has ended|{IN_VAIN}"):
        at_once(int8_matmul.run)(plan, x, weights)
