"""The Mosaic GPU kernels on a CPU, instruction by instruction (simulated_ptx.py): what they compute. The GPU tests take real shapes.

Not here: the fused layer (test_simulated_fused_layer.py), and flush, which is not written for warps.
"""

import contextlib
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import matmul_problems
import numpy as np
import pytest
import test_low_bits_gpu
import test_norm_gpu
import test_rope_append_gpu
from attention_problems import Case, all_listed, random_lists, random_problem, with_others_spoilt
from paging import in_pages
from simulated_gpu import COPIED, Past, Touched, here, launch
from simulated_ptx import at_once, simulate

import pallas_kernels.attention.mosaic_gpu as attention
import pallas_kernels.attention.mosaic_low_bits as low_bits
import pallas_kernels.gather.mosaic_gpu as gather
import pallas_kernels.matmul.mosaic_gpu as matmul
import pallas_kernels.matmul.mosaic_int8 as int8_matmul
import pallas_kernels.matmul.mosaic_wide as wide_matmul
import pallas_kernels.norm.mosaic_gpu as norm
import pallas_kernels.replaced_attention.mosaic_gpu as replaced_attention
import pallas_kernels.rope_append.mosaic_gpu as rope_append
from pallas_kernels.attention import mosaic_low_bits_plan, mosaic_plan
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.attention.arguments import AttentionArguments
from pallas_kernels.attention.mosaic_plan import Config
from pallas_kernels.attention.mosaic_stream import Pipeline
from pallas_kernels.formats.kv_cache import HierarchicalLayer, Lengths
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import Replaced
from pallas_kernels.formats.views import DenseView, ListedGroups
from pallas_kernels.formats.weights import Int4Weight, Int8Weight, dequantize_weight
from pallas_kernels.gpu import fragments, ptx
from pallas_kernels.matmul.mosaic_plan import Plan, Stage
from pallas_kernels.matmul.mosaic_wide_plan import PARAMETER_GROUPS, PARAMETER_SLOTS
from pallas_kernels.matmul.mosaic_wide_plan import Config as WideConfig
from pallas_kernels.matmul.mosaic_wide_plan import Plan as WidePlan
from pallas_kernels.replaced_attention.arguments import ReplacedArguments
from pallas_kernels.rope_append import reference as rope_append_reference
from pallas_kernels.rope_append.arguments import RopeAppendArguments


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    simulate(monkeypatch)
    for kernel in (attention, low_bits, matmul, norm, int8_matmul, wide_matmul, rope_append):
        monkeypatch.setattr(kernel, "launch", launch)


# How a missing order is seen. A warp that does not wait may be done with all its turns before the others begin theirs: the barriers have
# gone round by then, and who goes by them waits for ever.
SEEN, IN_VAIN = (AssertionError, TimeoutError), "waits for .* in vain"


# Attention over KIVI's format ------------------------------------------------------------------------------------------


@pytest.fixture
def few_tokens(monkeypatch):
    """The problems of test_low_bits_gpu, smaller: rows with nothing in codes, with a tile for some warps, with many, and with all."""
    monkeypatch.setattr(low_bits, "run", at_once(low_bits.run))
    monkeypatch.setattr(low_bits, "no_mosaic_gpu", lambda: None)
    monkeypatch.setattr(mosaic_low_bits_plan, "_splits", lambda heads, warps, places: 4)  # or a warp would have a tile or two
    monkeypatch.setattr(mosaic_low_bits_plan, "WARPGROUPS", dict.fromkeys(mosaic_low_bits_plan.WARPGROUPS, 1))
    sizes = dict(SIZE=640, ROWS=80, QUANTIZED=[0, 64, 416, 640], BUFFERED=[80, 17, 50, 64])
    for name, size in sizes.items():
        monkeypatch.setattr(test_low_bits_gpu, name, size)


@pytest.mark.parametrize(
    ("bits", "T", "heads", "kv_heads", "head_dim", "group", "outliers"),
    [
        (1, 2, 8, 2, 128, 32, True),
        (2, 1, 7, 1, 128, 128, False),
        (2, 5, 1, 1, 64, 64, True),  # one group of a value's channels
        (1, 3, 2, 1, 256, 32, False),  # eight
    ],
)
def test_attention_over_low_bits(few_tokens, bits, T, heads, kv_heads, head_dim, group, outliers):
    test_low_bits_gpu.test_equals_float32(bits, T, heads, kv_heads, head_dim, group, outliers)


@pytest.mark.parametrize(
    ("bits", "T", "heads", "kv_heads", "group", "count", "outliers"), [(1, 2, 8, 2, 32, 64, False), (2, 2, 3, 1, 64, 33, True)]
)
def test_attention_with_replaced_tokens(few_tokens, bits, T, heads, kv_heads, group, count, outliers):
    test_low_bits_gpu.test_replaced_tokens(bits, T, heads, kv_heads, 128, group, count, outliers)


def test_low_bits_that_are_no_numbers_stay_in_their_row(few_tokens):
    q, layer, lengths = test_low_bits_gpu.problem(2, 1, 2, 1, 128, 32, outliers=False)
    clean = low_bits.decode_attention(q, layer, lengths)
    keys = dataclasses.replace(layer.keys, scale=layer.keys.scale.at[2, 0, 3, 5].set(jnp.nan))
    found = low_bits.decode_attention(q, dataclasses.replace(layer, keys=keys), lengths)
    assert np.isnan(np.asarray(found[2], np.float32)).all()
    np.testing.assert_array_equal(np.asarray(found, np.float32)[[0, 1, 3]], np.asarray(clean, np.float32)[[0, 1, 3]])


@pytest.mark.parametrize("function", ["wait_for_copies", "synchronize"])
def test_a_tile_that_is_not_waited_for_is_seen(few_tokens, monkeypatch, function):
    monkeypatch.setattr(ptx, function, lambda *args: None)
    with pytest.raises(AssertionError):
        low_bits.decode_attention(*test_low_bits_gpu.problem(2, 1, 2, 1, 128, 32, outliers=False))


def test_a_group_of_three_tiles(few_tokens, monkeypatch):
    """The second of two tiles that are taken in together is of the next group now and then. Groups are of very different loudness."""
    size = 672
    for name, value in (("SIZE", size), ("QUANTIZED", [0, 64, 416, size])):
        monkeypatch.setattr(test_low_bits_gpu, name, value)
    q, layer, lengths = test_low_bits_gpu.problem(1, 2, 8, 2, 128, 32, outliers=False)
    r = np.random.default_rng(0)
    keys = jnp.asarray(r.standard_normal((4, 2, size, 128)) * np.repeat(2.0 ** (np.arange(7) % 3), 96)[:, None], jnp.bfloat16)
    layer = dataclasses.replace(layer, keys=LowBits.of(keys, bits=1, tokens=96, channels=1, rule="centred", dtype=jnp.float16))
    found = np.asarray(low_bits.decode_attention(q, layer, lengths), np.float32)
    np.testing.assert_allclose(found, test_low_bits_gpu.exactly(q, layer, lengths), atol=0.02)


def test_what_lies_where_no_token_is_replaced_does_not_matter(few_tokens):
    q, layer, lengths = test_low_bits_gpu.problem(1, 1, 2, 1, 128, 32, outliers=False)
    positions = jnp.full((4, 1, 16), -1, jnp.int32).at[2, 0, 3].set(7)
    keys, values = (jnp.full((4, 1, 16, 128), jnp.nan, jnp.bfloat16).at[2, 0, 3].set(1) for _ in range(2))
    attended, share = test_low_bits_gpu.attend_replaced(q, layer, lengths, Replaced(positions, jnp.stack([keys, values], 3)))
    assert np.isfinite(np.asarray(attended, np.float32)).all() and not np.isnan(share).any()


def test_a_query_whose_logits_overflow_leaves_no_replaced_token_to_others(few_tokens):
    q, layer, lengths = test_low_bits_gpu.problem(1, 1, 2, 1, 128, 32, outliers=False)
    q = q.at[:, 0, :, 5].set(jnp.array([1, -1], q.dtype))
    layer = dataclasses.replace(layer, keys=dataclasses.replace(layer.keys, zero=layer.keys.zero.at[2, 0, 1, 5].set(jnp.inf)))
    # Known to lanes that work for these two queries alone.
    at = np.array([65, 70, 76, 92])
    positions = jnp.full((4, 1, 16), -1, jnp.int32).at[2, 0, ::4].set(at)
    replaced = Replaced(positions, jnp.ones((4, 1, 16, 2, 128), jnp.bfloat16))
    found = low_bits.run(low_bits.Plan.of(q, layer, 16), q, lengths, layer, replaced)
    weights = np.asarray(found["weights"][2, 0, :416, 1], np.float32)
    assert np.isfinite(weights).all() and not weights[at].any() and weights[64:96].any()


@pytest.mark.parametrize("places", [111, 128, 132])
@pytest.mark.parametrize("heads", [1, 3, 8, 128, 200, 300, 512, 4096])
def test_few_multiprocessors_wait_for_the_last_blocks(heads, places):
    for warps in (8, 12):
        blocks, rest = divmod(heads * mosaic_low_bits_plan._splits(heads, warps, places), warps)
        assert blocks / places / -(-blocks // places) > 0.8 and not rest


def test_attention_leaves_multiprocessors_to_fetching(monkeypatch):
    """132 blocks are a wave on 132 multiprocessors. Where others fetch on 4 of these, the last 4 blocks would be a second one."""
    plans = []

    def run(plan, *_):
        plans.append(plan)
        raise InterruptedError

    for module in (mosaic_low_bits_plan, gather):
        monkeypatch.setattr(module, "multiprocessors", lambda: 132)
    monkeypatch.setattr(low_bits, "run", run)
    monkeypatch.setattr(test_low_bits_gpu, "SIZE", 64)
    q, layer, lengths = test_low_bits_gpu.problem(1, 1, 33, 33, 128, 64, outliers=False)
    none = Replaced(jnp.full((4, 33, 16), -1, jnp.int32), jnp.zeros((4, 33, 16, 2, 128), jnp.bfloat16))
    with pytest.raises(InterruptedError):
        low_bits.decode_attention(q, layer, lengths)
    with pytest.raises(InterruptedError):
        replaced_attention.attend_and_choose(ReplacedArguments(q, layer, lengths, none, 16))
    alone, beside = (132 * plan.splits // plan.warps for plan in plans)
    assert alone == 132 and beside / 128 / -(-beside // 128) > 0.9


# INT4 matmul -----------------------------------------------------------------------------------------------------------


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
    weights = [matmul_problems.random_weight(out, inputs, i) for i, out in enumerate(outputs)]
    x = matmul_problems.activations(rows, inputs, outliers)
    plan = Plan.fitting(rows, (Stage(inputs // 128, outputs),), blocks)
    y = at_once(matmul.run)(dataclasses.replace(plan, room=room or plan.room), x, weights)
    assert y.shape == (rows, sum(outputs)) and y.dtype == jnp.bfloat16
    for part, weight in zip(matmul_problems.separate(y, weights), weights):
        assert matmul_problems.relative_error(part, x, weight) <= 5e-3


def test_int4_matmul_keeps_what_is_not_finite_in_its_row():
    weight, x = matmul_problems.random_weight(16, 256, 0), matmul_problems.activations(3, 256, False)
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
    x, weight = matmul_problems.activations(1, 256, False), matmul_problems.random_weight(256, 256, 0)
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
        (9, 1280, (64,), 1, WideConfig(1, 1), False),  # scales in two slots, of which the second is not full
        (24, 256, (48, 16, 32), 2, WideConfig(1, 1), True),  # a tile that is not full, and of two weights
        (64, 512, (128, 64), 1, WideConfig(1, 1), False),  # tiles one after the other
        (24, 768, (80,), 1, WideConfig(2, 3), False),  # a tile of rows for each block
        (64, 1280, (64, 64), 1, WideConfig(1, 2), True),  # more steps for one block than for the other
        (33, 1024, (64,), 1, WideConfig(1, 1), False),
        (1, 4608, (16,), 1, WideConfig(1, 1), True),  # more steps than the ring has slots
    ],
)
def test_int4_matmul_of_many_rows(rows, inputs, outputs, blocks, config, outliers):
    weights = [matmul_problems.random_weight(out, inputs, i) for i, out in enumerate(outputs)]
    x = matmul_problems.activations(rows, inputs, outliers)
    y = at_once(wide_matmul.run)(WidePlan(rows, inputs // 128, outputs, blocks, config), x, weights)
    assert y.shape == (rows, sum(outputs)) and y.dtype == jnp.bfloat16
    for part, weight in zip(matmul_problems.separate(y, weights), weights):
        assert matmul_problems.relative_error(part, x, weight) <= 5e-3


def test_one_of_many_rows_depends_on_no_other():
    x, weight = matmul_problems.activations(17, 512, True), matmul_problems.random_weight(64, 512, 0)
    multiply = lambda x: np.asarray(at_once(wide_matmul.run)(WidePlan(len(x), 4, (64,), 1, WideConfig(1, 1)), x, [weight]))
    together = multiply(x)
    np.testing.assert_array_equal(multiply(x[-9:]), together[-9:])
    for row, spoilt in ((2, jnp.nan), (16, jnp.inf)):  # the last stands for those that a tile has no activations for
        y = multiply(x.at[row, 9].set(spoilt))
        assert not np.isfinite(y[row].astype(np.float32)).any()
        np.testing.assert_array_equal(np.delete(y, row, 0), np.delete(together, row, 0))


def test_nibbles_as_bfloat16_are_rounded_once():
    """Every code of every input times scale plus zero, by activations that take one input each."""
    r = np.random.default_rng(0)
    scale, zero = (jnp.asarray(r.standard_normal((16, 2)) * 10.0 ** r.integers(-12, 7, (16, 2)), jnp.bfloat16) for _ in range(2))
    weight = Int4Weight(jnp.asarray(r.integers(0, 256, (16, 2, 64), np.uint8)), scale.at[0, 0].set(0), zero)
    plan = WidePlan(64, 2, (16,), 1, WideConfig(1, 1))
    y = jnp.concatenate([at_once(wide_matmul.run)(plan, x, [weight]) for x in jnp.split(jnp.eye(256, dtype=jnp.bfloat16), 4)])
    exact = dequantize_weight(weight, jnp.float32)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(exact.T.astype(jnp.bfloat16)))


@pytest.mark.parametrize(
    ("module", "function", "caller"),
    [
        (ptx, "synchronize", "arrive_once_all_have"),  # before a slot is handed over
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
    plan = WidePlan(9, 72, (64,), 1, WideConfig(1, 2))
    assert plan.steps > 2 * plan.slots and plan.groups > 2 * PARAMETER_SLOTS * PARAMETER_GROUPS
    x, weight = matmul_problems.activations(9, 72 * 128, False), matmul_problems.random_weight(64, 72 * 128, 0)
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
    weights = [matmul_problems.int8_weight(out, inputs, i) for i, out in enumerate(outputs)]
    return matmul_problems.activations(rows, inputs, outliers), weights


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
    for part, weight in zip(matmul_problems.separate(y, weights), weights):
        assert matmul_problems.relative_error(part, x, weight) <= (1e-5 if wide else 5e-3)


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
        ("synchronize", "arrive_once_all_have"),  # before a slot of either ring is given back or handed over
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


# The smaller kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1032)])
def test_norm(rows, width):
    x, added, weight = test_norm_gpu.problem(rows, width)
    total, normed = at_once(norm.run)(x, added, weight, eps=1e-5)
    np.testing.assert_array_equal(np.asarray(total), np.asarray(x + added))
    wide = (x + added).astype(jnp.float32)
    wide = wide / jnp.sqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * weight.astype(jnp.float32)
    np.testing.assert_allclose(np.asarray(normed, np.float32), np.asarray(wide), rtol=2**-7)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "head_dim", "offset"),
    [
        (2, 3, 6, 2, 64, None),
        (1, 2, 4, 2, 96, None),
        (4, 2, 2, 1, 64, test_rope_append_gpu.OUTSIDE),
        (4, 3, 2, 1, 64, test_rope_append_gpu.OUTSIDE),
    ],
)
def test_rope_append(batch, tokens, heads, kv_heads, head_dim, offset):
    qkv, cos, sin, buffer, within = test_rope_append_gpu.problem(batch, tokens, heads, kv_heads, head_dim)
    offset = within if offset is None else jnp.array(offset, jnp.int32)
    cos, sin = (x.astype(jnp.bfloat16) for x in (cos, sin))
    q, new = at_once(rope_append.run)(qkv, cos, sin, buffer, offset)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    expected = jax.jit(rope_append_reference.rotate_and_append)(RopeAppendArguments(*wide((qkv, cos, sin, buffer)), jnp.maximum(offset, 0)))
    for ours, theirs in zip(jax.tree.leaves((q, new)), jax.tree.leaves(expected)):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs), rtol=2**-8, atol=2**-8)


# Attention --------------------------------------------------------------------------------------------------------------

TEAMS = {
    "T1-rows": (Case(1, 2, 2, 128, group_size=64, capacity=3, groups=(0, 3)), Config(3)),
    "T1-steps": (Case(1, 2, 1, 64, group_size=64, capacity=24, groups=(24,)), Config(1)),
    "T7-GQA4-steps": (Case(7, 4, 1, 64, group_size=64, capacity=12, groups=(12,)), Config(1, team=2)),
    "T7-GQA4-warpgroup": (Case(7, 4, 1, 128, group_size=128, capacity=2, groups=(2,)), Config(1, team=4)),  # multiplied together
}


def attention_problem(case: Case, data: str) -> tuple[jax.Array, HierarchicalLayer, Lengths]:
    return *random_problem(case, "bfloat16", data), case.lengths


def attend(q, layer, lengths, view, config):
    """The simulated kernel's output and attention mass."""
    plan = attention.plan_for(AttentionArguments(q, layer, lengths, view), config=config)
    return at_once(attention.run)(plan, q, lengths, layer, view if isinstance(view, ListedGroups) else None)[:2]


def exactly(q, layer, lengths, view):
    """The same in float32, by the reference."""
    return jax.jit(attention_reference.decode_attention)(AttentionArguments(*test_low_bits_gpu.WIDE((q, layer)), lengths, view))


def assert_close(out: jax.Array, expected: jax.Array) -> None:
    """A relative error (norm) of at most 1e-2 in each row of the batch."""
    out, expected = (np.asarray(x, np.float32).reshape(len(x), -1) for x in (out, expected))
    assert (np.linalg.norm(out - expected, axis=1) <= 1e-2 * np.linalg.norm(expected, axis=1)).all()


# More rows than a warp has lanes, some of which have several blocks.
MANY_ROWS = Case(1, 1, 1, 64, group_size=64, capacity=2, groups=((0, 0, 2, 0, 0) * 7)[:33])


@pytest.mark.parametrize(("splits", "view"), [(1, DenseView(1)), (48, random_lists(MANY_ROWS))], ids=["dense", "listed"])
def test_attention_of_many_rows(splits, view):
    q, layer, lengths = attention_problem(MANY_ROWS, "gaussian")
    out, _ = attend(q, layer, lengths, view, Config(splits))
    assert_close(out, exactly(q, layer, lengths, view)[0])


@pytest.mark.parametrize("kind", ["dense", "listed", "long list"])
def test_attention_of_groups_in_pages(monkeypatch, kind):
    case, config = Case(1, 4, 2, 64, group_size=64, capacity=3, groups=(3, 0, 2)), Config(4)
    q, layer, lengths = attention_problem(case, "gaussian")
    view = DenseView(2) if kind == "dense" else random_lists(case)
    if kind == "long list":  # that lanes do not keep
        monkeypatch.setattr(mosaic_plan, "LIST_WORDS", 0)
    expected, _ = attend(q, layer, lengths, view, config)
    np.testing.assert_array_equal(np.asarray(attend(q, in_pages(layer), lengths, view, config)[0]), np.asarray(expected))


@pytest.mark.parametrize(("planes", "data"), [(1, "outliers"), (2, "outliers"), (None, "gaussian")])
@pytest.mark.parametrize(("case", "config"), TEAMS.values(), ids=TEAMS)
def test_attention(case, config, planes, data):
    q, layer, lengths = attention_problem(case, data)
    if planes is None:
        layer, lengths = layer.buffer, dataclasses.replace(lengths, quantized=jnp.zeros_like(lengths.quantized))
    out, _ = attend(q, layer, lengths, DenseView(planes), config)
    assert out.dtype == jnp.bfloat16
    assert_close(out, exactly(q, layer, lengths, DenseView(planes))[0])


APPENDED = {
    # One new token, the first of a chunk and in the middle of one; no groups, and none but new tokens, which lie on two chunks.
    "T1-GQA2-listed": (Case(1, 4, 2, 64, group_size=64, capacity=5, groups=(5, 0, 2)), Config(5), 1, [0, 32, 63]),
    "T7-GQA4-team": (Case(7, 4, 1, 128, group_size=128, capacity=1, groups=(1, 0)), Config(2, team=2), 2, [28, 0]),
    "T16-full": (Case(16, 7, 1, 64, group_size=64, groups=(0,)), Config(2), None, [57]),
    # Where there is no room, the last rows are written.
    "T2-no-room": (Case(2, 2, 2, 64, group_size=64, capacity=1, groups=(1, 0)), Config(2), 1, [129, -3]),
}


@pytest.mark.parametrize(("case", "config", "planes", "buffered"), APPENDED.values(), ids=APPENDED)
def test_append_and_attend_is_the_one_after_the_other(case, config, planes, buffered):
    B, T, N, K, H = len(case.groups), case.tokens, case.heads, case.kv_heads, case.head_dim
    _, layer, lengths = attention_problem(case, "gaussian")
    qkv, cos, sin, *_ = test_rope_append_gpu.problem(B, T, N, K, H)
    cos, sin = (x.astype(jnp.bfloat16) for x in (cos, sin))
    lengths = dataclasses.replace(lengths, buffered=jnp.array(buffered, jnp.int32))
    view = random_lists(case) if planes == 1 else DenseView(planes)
    if planes is None:
        layer, lengths = layer.buffer, dataclasses.replace(lengths, quantized=jnp.zeros_like(lengths.quantized))
    old = layer if planes is None else layer.buffer
    q, buffer = at_once(rope_append.run)(qkv, cos, sin, old, lengths.buffered)
    plan = attention.plan_for(AttentionArguments(q, layer, lengths, view), appends=True, config=config)
    lists = view if planes == 1 else None
    out, _, appended = at_once(attention.run)(plan, qkv, lengths, layer, lists, (cos, sin))
    for ours, theirs in zip(jax.tree.leaves(appended), jax.tree.leaves(buffer)):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    if max(buffered) + max(2, T) <= case.buffer_rows:
        new = buffer if planes is None else dataclasses.replace(layer, buffer=buffer)
        longer = dataclasses.replace(lengths, buffered=lengths.buffered + T)
        expected, _ = attend(q, new, longer, view, config)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))


@pytest.mark.parametrize(
    ("case", "config", "data"),
    [
        (Case(1, 3, 3, 64, group_size=64, capacity=5, groups=(0, 5, 1)), Config(3, team=2), "outliers"),
        # So many blocks that their division among the rows differs between the KV heads.
        (Case(1, 4, 2, 64, group_size=64, capacity=9, groups=(9, 8)), Config(7), "gaussian"),
        (Case(7, 4, 1, 128, group_size=128, capacity=3, groups=(3,)), Config(1, team=4), "gaussian"),
        (Case(7, 8, 2, 64, group_size=64, capacity=5, groups=(5,)), Config(1, team=2), "outliers"),
        (Case(16, 7, 1, 64, group_size=64, capacity=2, groups=(2,)), Config(1), "gaussian"),
    ],
    ids=["T1-MHA", "T1-GQA2", "T7-GQA4-warpgroup", "T7-GQA4", "T16-GQA7"],
)
def test_attention_to_listed_groups(case, config, data):
    q, layer, lengths = attention_problem(case, data)
    view = random_lists(case)
    # What is not listed is not read.
    out, _ = attend(q, with_others_spoilt(layer, view), lengths, view, config)
    assert_close(out, exactly(q, layer, lengths, view)[0])


def test_a_list_is_kept_by_the_lanes_where_it_is_short(monkeypatch):
    # Two words a lane, and two rows, of which a warp learns its own only as it divides the work.
    case = Case(1, 1, 1, 64, group_size=64, capacity=36, groups=(36, 34))
    q, layer, lengths = attention_problem(case, "gaussian")
    view, config = random_lists(case), Config(2, warpgroups=2)
    plan = attention.plan_for(AttentionArguments(q, layer, lengths, view), config=config)
    assert plan.list_words == 2 and int(view.count.max()) > 33
    kept, _ = attend(q, layer, lengths, view, config)
    assert_close(kept, exactly(q, layer, lengths, view)[0])
    monkeypatch.setattr(mosaic_plan, "LIST_WORDS", 1)
    assert plan.list_words == 0
    np.testing.assert_array_equal(np.asarray(attend(q, layer, lengths, view, config)[0]), np.asarray(kept))


@pytest.mark.parametrize("name", ["T1-rows", "T7-GQA4-steps"])
def test_all_groups_in_a_list_are_the_dense_view(name):
    case, config = TEAMS[name]
    q, layer, lengths = attention_problem(case, "gaussian")
    out, _ = attend(q, layer, lengths, all_listed(case), config)
    dense, _ = attend(q, layer, lengths, DenseView(1), config)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(dense))


def test_attention_to_lists_that_are_wrong_reads_nothing_outside():
    """The simulation fails where an address is of no array. What the lists stand for is said in `ListedGroups`."""
    case = Case(1, 2, 2, 64, group_size=64, capacity=3, groups=(3, 3, 0))
    q, layer, lengths = attention_problem(case, "gaussian")
    most = np.iinfo(np.int32).max
    rows = [[[-1, 2, 2, most], [3, -most - 1, 0, 1]], [[9, -9, most, 1]] * 2, [[most, -most - 1, 1, 0]] * 2]
    count = jnp.array([[most, 4], [5, -1], [-most - 1, 0]], jnp.int32)
    out, _ = attend(q, layer, lengths, ListedGroups(jnp.array(rows, jnp.int32), count), Config(4))
    nearest = ListedGroups(jnp.clip(jnp.array(rows, jnp.int32), 0, 2), jnp.clip(count, 0, 4))
    expected, _ = exactly(q, layer, lengths, nearest)
    np.testing.assert_array_equal(exactly(q, layer, lengths, ListedGroups(jnp.array(rows, jnp.int32), count))[0], expected)
    assert_close(out, expected)


def test_a_slot_that_is_filled_while_others_read_it_is_seen(monkeypatch):
    case, config = Case(7, 4, 1, 128, group_size=128, capacity=3, groups=(3,)), Config(1, warpgroups=1, team=4)
    q, layer, lengths = attention_problem(case, "gaussian")
    attend(q, layer, lengths, DenseView(2), config)
    monkeypatch.setattr(Pipeline, "_refill", lambda self, unit, step, place, slot: self._issue(unit, step, place, slot))
    with pytest.raises(AssertionError, match="a race: warp"):
        attend(q, layer, lengths, DenseView(2), config)


@pytest.mark.parametrize("heard", [True, False])
def test_several_copies_of_the_same_wait_for_what_was_read_before_the_first(heard):
    """Not for what others read of that first copy. Warp 0 reads, warp 1 copies and reads, warp 2 copies the same."""
    words, lane, everyone = np.zeros((1, 1), int), np.array([0]), np.ones(32, bool)
    touched, pasts = Touched(1, 3), [Past(warp, 3) for warp in range(3)]

    def copy(warp):
        here.past, here.warp = pasts[warp], warp
        touched.writes(words, lane, COPIED, source=5)

    here.past = pasts[0]
    touched.reads(words, lane)
    told = pasts[0].tell(everyone)
    pasts[1].hear(told)
    copy(1)
    pasts[1].hear(pasts[1].tell_of_copies(COPIED))  # which has landed
    touched.reads(words, lane)
    if heard:
        pasts[2].hear(told)
    with contextlib.nullcontext() if heard else pytest.raises(AssertionError, match="a race: warp 2 writes what is read"):
        copy(2)


@pytest.mark.parametrize(
    ("case", "config", "planes", "data"),
    [
        (*TEAMS["T1-rows"], 1, "outliers"),
        (*TEAMS["T7-GQA4-warpgroup"], 2, "outliers"),
        # Rows of one block, and of several.
        (Case(1, 2, 1, 64, group_size=64, capacity=9, groups=(9, 0, 3)), Config(7), 1, "gaussian"),
        (Case(7, 4, 2, 64, group_size=64, capacity=3, groups=(3, 0, 1)), Config(3, team=2), 2, "gaussian"),
        # Two blocks of rows, of which the last is not full.
        (Case(16, 7, 1, 64, group_size=64, capacity=1, groups=(1,)), Config(1), 1, "gaussian"),
        # Four teams, whose rings have two slots each.
        (Case(7, 4, 1, 128, group_size=128, capacity=7, groups=(7,)), Config(1, warpgroups=4, team=4), 2, "outliers"),
    ],
    ids=["T1-rows", "T7-GQA4-warpgroup", "T1-GQA2-rows", "T7-GQA2-rows", "T16-GQA7", "T7-GQA4-two-slots"],
)
def test_attention_mass(case, config, planes, data):
    q, layer, lengths = attention_problem(case, data)
    out, mass = attend(q, layer, lengths, DenseView(planes, observed=True), config)
    expected_out, expected = exactly(q, layer, lengths, DenseView(planes, observed=True))
    assert mass.shape == expected.shape and mass.dtype == jnp.float32
    assert_close(out, expected_out)
    assert_close(mass, expected)
    np.testing.assert_allclose(mass, expected, atol=5e-3 * case.heads / case.kv_heads)
    assert np.abs(np.asarray(expected)).max() > 0.2
    for row, groups in enumerate(case.groups):
        assert (np.asarray(mass)[row, :, :, groups:] == 0).all()
    np.testing.assert_array_equal(np.asarray(attend(q, layer, lengths, DenseView(planes), config)[0]), np.asarray(out))


def test_there_is_no_mass_without_groups():
    case = Case(2, 2, 1, 64, group_size=64, capacity=0, groups=(0, 0))
    q, layer, lengths = attention_problem(case, "gaussian")
    out, mass = attend(q, layer, lengths, DenseView(2, observed=True), Config(2))
    assert mass.shape == (2, 1, 2, 0)
    assert_close(out, exactly(q, layer, lengths, DenseView(2))[0])
