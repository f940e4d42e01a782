"""The Mosaic GPU kernel of attention over KIVI's format on a CPU, instruction by instruction (simulated_ptx.py)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from problems.low_bits import (
    LARGE,
    SMALL,
    assert_attention_is_exact,
    assert_attention_with_replaced_tokens_is_exact,
    attend_replaced,
    exactly,
    random_codes,
)
from simulated_gpu import launch
from simulated_ptx import at_once, simulate

import pallas_kernels.attention.mosaic_low_bits as low_bits
import pallas_kernels.gather.mosaic_gpu as gather
import pallas_kernels.replaced_attention.mosaic_gpu as replaced_attention
from pallas_kernels.attention import mosaic_low_bits_plan
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import FullTokens
from pallas_kernels.gpu import ptx

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    simulate(monkeypatch)
    for kernel in (low_bits,):
        monkeypatch.setattr(kernel, "launch", launch)


@pytest.fixture
def few_tokens(monkeypatch):
    """Smaller plans, for the problems that are called SMALL."""
    monkeypatch.setattr(low_bits, "run", at_once(low_bits.run))
    monkeypatch.setattr(low_bits, "no_mosaic_gpu", lambda: None)
    monkeypatch.setattr(mosaic_low_bits_plan, "_splits", lambda heads, warps, places: 4)  # or a warp would have a tile or two
    monkeypatch.setattr(mosaic_low_bits_plan, "WARPGROUPS", dict.fromkeys(mosaic_low_bits_plan.WARPGROUPS, 1))


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
    assert_attention_is_exact(*random_codes(bits, T, heads, kv_heads, head_dim, group, outliers=outliers, sizes=SMALL))


@pytest.mark.parametrize(
    ("bits", "T", "heads", "kv_heads", "group", "count", "outliers"), [(1, 2, 8, 2, 32, 64, False), (2, 2, 3, 1, 64, 33, True)]
)
def test_attention_with_replaced_tokens(few_tokens, bits, T, heads, kv_heads, group, count, outliers):
    problem = random_codes(bits, T, heads, kv_heads, 128, group, outliers=outliers, sizes=SMALL)
    assert_attention_with_replaced_tokens_is_exact(*problem, count, outliers)


def test_low_bits_that_are_no_numbers_stay_in_their_row(few_tokens):
    q, layer, lengths = random_codes(2, 1, 2, 1, 128, 32, sizes=SMALL)
    clean = low_bits.decode_attention(q, layer, lengths)
    keys = dataclasses.replace(layer.keys, scale=layer.keys.scale.at[2, 0, 3, 5].set(jnp.nan))
    found = low_bits.decode_attention(q, dataclasses.replace(layer, keys=keys), lengths)
    assert np.isnan(np.asarray(found[2], np.float32)).all()
    np.testing.assert_array_equal(np.asarray(found, np.float32)[[0, 1, 3]], np.asarray(clean, np.float32)[[0, 1, 3]])


@pytest.mark.parametrize("function", ["wait_for_copies", "synchronize"])
def test_a_tile_that_is_not_waited_for_is_seen(few_tokens, monkeypatch, function):
    monkeypatch.setattr(ptx, function, lambda *args: None)
    with pytest.raises(AssertionError):
        low_bits.decode_attention(*random_codes(2, 1, 2, 1, 128, 32, sizes=SMALL))


def test_a_group_of_three_tiles(few_tokens, monkeypatch):
    """The second of two tiles that are taken in together is of the next group now and then. Groups are of very different loudness."""
    size = 672
    sizes = SMALL._replace(codes=size, quantized=[0, 64, 416, size])
    q, layer, lengths = random_codes(1, 2, 8, 2, 128, 32, sizes=sizes)
    r = np.random.default_rng(0)
    keys = jnp.asarray(r.standard_normal((4, 2, size, 128)) * np.repeat(2.0 ** (np.arange(7) % 3), 96)[:, None], jnp.bfloat16)
    layer = dataclasses.replace(layer, keys=LowBits.of(keys, bits=1, tokens=96, channels=1, rule="centred", dtype=jnp.float16))
    found = np.asarray(low_bits.decode_attention(q, layer, lengths), np.float32)
    np.testing.assert_allclose(found, exactly(q, layer, lengths), atol=0.02)


def test_what_lies_where_no_token_is_replaced_does_not_matter(few_tokens):
    q, layer, lengths = random_codes(1, 1, 2, 1, 128, 32, sizes=SMALL)
    positions = jnp.full((4, 1, 16), -1, jnp.int32).at[2, 0, 3].set(7)
    keys, values = (jnp.full((4, 1, 16, 128), jnp.nan, jnp.bfloat16).at[2, 0, 3].set(1) for _ in range(2))
    attended, share = attend_replaced(q, layer, lengths, FullTokens(positions, jnp.stack([keys, values], 3)))
    assert np.isfinite(np.asarray(attended, np.float32)).all() and not np.isnan(share).any()


def test_a_query_whose_logits_overflow_leaves_no_replaced_token_to_others(few_tokens):
    q, layer, lengths = random_codes(1, 1, 2, 1, 128, 32, sizes=SMALL)
    q = q.at[:, 0, :, 5].set(jnp.array([1, -1], q.dtype))
    layer = dataclasses.replace(layer, keys=dataclasses.replace(layer.keys, zero=layer.keys.zero.at[2, 0, 1, 5].set(jnp.inf)))
    # Known to lanes that work for these two queries alone.
    at = np.array([65, 70, 76, 92])
    positions = jnp.full((4, 1, 16), -1, jnp.int32).at[2, 0, ::4].set(at)
    replaced = FullTokens(positions, jnp.ones((4, 1, 16, 2, 128), jnp.bfloat16))
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
    q, layer, lengths = random_codes(1, 1, 33, 33, 128, 64, sizes=LARGE._replace(codes=64))
    none = FullTokens(jnp.full((4, 33, 16), -1, jnp.int32), jnp.zeros((4, 33, 16, 2, 128), jnp.bfloat16))
    with pytest.raises(InterruptedError):
        low_bits.decode_attention(q, layer, lengths)
    with pytest.raises(InterruptedError):
        replaced_attention.attend_and_choose(q, layer, lengths, none, 16)
    alone, beside = (132 * plan.splits // plan.warps for plan in plans)
    assert alone == 132 and beside / 128 / -(-beside // 128) > 0.9
