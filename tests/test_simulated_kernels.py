"""The Mosaic GPU kernels of attention, norm and RoPE on a CPU, instruction by instruction (simulated_ptx.py): what they compute.

The GPU tests take real shapes. Other kernels are in the other files named test_simulated_*; flush has none, as it is not written for
warps.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import in_pages, in_shared_pages
from problems.attention import Case, all_listed, random_lists, random_problem, with_others_spoilt
from problems.low_bits import WIDE
from problems.norm import random_rows
from problems.rope_append import OUTSIDE, random_projections
from simulated_gpu import launch
from simulated_ptx import at_once, simulate
from simulated_races import COPIED, Past, Touched, here

import pallas_kernels.attention.mosaic_gpu as attention
import pallas_kernels.attention.mosaic_shared as attention_shared
import pallas_kernels.norm.mosaic_gpu as norm
import pallas_kernels.rope_append.mosaic_gpu as rope_append
from pallas_kernels.attention import mosaic_plan
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.attention.mosaic_plan import Config
from pallas_kernels.attention.mosaic_stream import Pipeline
from pallas_kernels.formats.kv_cache import HierarchicalLayer, Lengths
from pallas_kernels.formats.views import DenseView, ListedGroups
from pallas_kernels.rope_append import reference as rope_append_reference

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    simulate(monkeypatch)
    for kernel in (attention, norm, rope_append):
        monkeypatch.setattr(kernel, "launch", launch)


# The smaller kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1032)])
def test_norm(rows, width):
    x, added, weight = random_rows(rows, width)
    total, normed = at_once(norm.run)(x, added, weight, eps=1e-5)
    np.testing.assert_array_equal(np.asarray(total), np.asarray(x + added))
    wide = (x + added).astype(jnp.float32)
    wide = wide / jnp.sqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * weight.astype(jnp.float32)
    np.testing.assert_allclose(np.asarray(normed, np.float32), np.asarray(wide), rtol=2**-7)


@pytest.mark.parametrize(("rows", "parts", "width"), [(1, 2, 64), (2, 3, 1032)])
def test_norm_with_weights_in_turn(rows, parts, width):
    each = [random_rows(rows, width, part=i) for i in range(parts)]
    x, weight = jnp.stack([x for x, *_ in each], 1), jnp.stack([weight for *_, weight in each])
    _, normed = at_once(norm.run)(x.reshape(-1, width), None, weight, eps=1e-5)
    for i, (x, _, weight) in enumerate(each):
        np.testing.assert_array_equal(np.asarray(normed)[i::parts], np.asarray(at_once(norm.run)(x, None, weight, eps=1e-5)[1]))


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "head_dim", "offset"),
    [
        (2, 3, 6, 2, 64, None),
        (1, 2, 4, 2, 96, None),
        (4, 2, 2, 1, 64, OUTSIDE),
        (4, 3, 2, 1, 64, OUTSIDE),
    ],
)
def test_rope_append(batch, tokens, heads, kv_heads, head_dim, offset):
    qkv, cos, sin, buffer, within = random_projections(batch, tokens, heads, kv_heads, head_dim)
    offset = within if offset is None else jnp.array(offset, jnp.int32)
    cos, sin = (x.astype(jnp.bfloat16) for x in (cos, sin))
    q, new = at_once(rope_append.run)(qkv, cos, sin, buffer, offset)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    expected = jax.jit(rope_append_reference.rotate_and_append)(*wide((qkv, cos, sin, buffer)), jnp.maximum(offset, 0))
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
    plan = attention.plan_for(q, layer, view, config=config)
    return at_once(attention.run)(plan, q, lengths, layer, view if isinstance(view, ListedGroups) else None)[:2]


def exactly(q, layer, lengths, view):
    """The same in float32, by the reference."""
    return jax.jit(attention_reference.decode_attention)(*WIDE((q, layer)), lengths, view)


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


@pytest.mark.parametrize(("shared", "tokens"), [(2, 3), (0, 1)])
def test_attention_of_rows_that_share_groups(monkeypatch, shared, tokens):
    """Values and attention mass are those of rows that are read one by one; a launch takes few queries, so that the batch has parts."""
    monkeypatch.setattr(attention_shared.support, "MAX_TOKENS", 2 * tokens)
    monkeypatch.setattr(attention_shared, "_run", at_once(attention_shared._run))
    case = Case(tokens, 2, 1, 64, group_size=64, capacity=4, groups=(3, 2, 4))
    q, layer, lengths = attention_problem(case, "outliers")
    together, apart = in_shared_pages(layer, shared)
    view = DenseView(2, observed=True)
    out, mass = attention_shared.decode_attention(q, together, lengths, view)
    expected, expected_mass = attention_reference.decode_attention(q, apart, lengths, view)
    assert_close(out, expected)
    np.testing.assert_allclose(np.asarray(mass), np.asarray(expected_mass, np.float32), atol=2e-2)


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
    qkv, cos, sin, *_ = random_projections(B, T, N, K, H)
    cos, sin = (x.astype(jnp.bfloat16) for x in (cos, sin))
    lengths = dataclasses.replace(lengths, buffered=jnp.array(buffered, jnp.int32))
    view = random_lists(case) if planes == 1 else DenseView(planes)
    if planes is None:
        layer, lengths = layer.buffer, dataclasses.replace(lengths, quantized=jnp.zeros_like(lengths.quantized))
    old = layer if planes is None else layer.buffer
    q, buffer = at_once(rope_append.run)(qkv, cos, sin, old, lengths.buffered)
    plan = attention.plan_for(q, layer, view, appends=True, config=config)
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
    plan = attention.plan_for(q, layer, view, config=config)
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
