"""Attention by fixed runs, simulated (simulated_gpu.py): a query token has the same bits in every pass over its row.

Values are compared in float32: bfloat16 would hide another order of sums.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import in_pages
from problems.attention import Case, random_problem
from problems.low_bits import WIDE
from problems.rope_append import random_projections
from simulated_gpu import launch
from simulated_ptx import at_once, simulate

import pallas_kernels.attention.mosaic_gpu as attention
import pallas_kernels.rope_append.mosaic_gpu as rope_append
from pallas_kernels import dispatch
from pallas_kernels.attention import mosaic_plan, mosaic_runs, reference
from pallas_kernels.attention.mosaic_plan import Config
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.views import DenseView
from pallas_kernels.gpu import ptx

pytestmark = pytest.mark.kernels

# Rows of two runs of groups, of part of one and of none. Their last 16 tokens, which passes attend to in parts, cross the end of a chunk,
# and but for the second row's that of a run.
CASE = Case(16, 2, 1, 64, group_size=128, capacity=5, groups=(5, 1, 0))
BEFORE = 122, 56, 243  # tokens in the buffer before the last 16
ALL_ROWS = (0, 1, 2)
# Rows of the batch, the first token and the number of tokens, and the configuration.
PASSES = [
    (ALL_ROWS, 0, 16, Config(3, team=4)),
    ((0,), 3, 13, Config(3, team=1)),
    ((1, 2, 0), 8, 8, Config(7, team=2)),
    ((0,), 0, 4, Config(1, team=4)),
    ((0,), 3, 4, Config(2, team=1)),
    ((0,), 6, 1, Config(3, team=2)),
    ((0,), 15, 1, Config(1, team=1)),
    ((1,), 7, 2, Config(1, warpgroups=2, team=2)),
    ((1,), 8, 1, Config(1, team=4)),
    ((2,), 5, 2, Config(2, team=4)),
    ((2,), 12, 1, Config(1, team=1)),
]


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    simulate(monkeypatch)
    for kernel in (attention, rope_append):
        monkeypatch.setattr(kernel, "launch", launch)
    for module in (mosaic_plan, mosaic_runs):
        monkeypatch.setattr(module, "PASS_SPAN", 160)  # which no row's last tokens go beyond
    with dispatch.fixed_order():
        yield


def problem(planes: int | None) -> tuple[jax.Array, HierarchicalLayer | FullLayer, Lengths]:
    """Queries of the last 16 tokens, the layer, and the lengths before these."""
    q, layer = random_problem(CASE, "bfloat16", "gaussian")
    layer, lengths = CASE.attended(layer, planes)
    return q, layer, dataclasses.replace(lengths, buffered=jnp.array(BEFORE, jnp.int32))


def attend(q, layer, lengths, view, config, first: int = 0, tokens: int = 16) -> np.ndarray:
    """The values that tokens `first` to `first` + `tokens` - 1 read [B tokens N H], in a pass over these."""
    q = q[:, first : first + tokens]
    plan = dataclasses.replace(attention.plan_for(q, layer, view, config=config), totals=True)
    lengths = dataclasses.replace(lengths, buffered=lengths.buffered + first + tokens)
    return np.asarray(at_once(attention.run)(plan, q, lengths, layer)[0])


def of_rows(rows, *trees):
    return jax.tree.map(lambda x: x[jnp.array(rows)], trees)


def assert_close(found, expected) -> None:
    """A relative error (norm) of at most 1e-2."""
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)


@functools.cache
def of_pass(planes: int | None, rows: tuple, first: int, tokens: int, config: Config) -> np.ndarray:
    return attend(*of_rows(rows, *problem(planes)), DenseView(planes), config, first, tokens)


def passes_that_differ(planes: int | None, passes: list) -> list:
    """Passes of which a token's values differ from those that it had in a pass before, and the token."""
    seen, differ = {}, []
    for rows, first, tokens, config in passes:
        for row, values in zip(rows, of_pass(planes, rows, first, tokens, config)):
            for token, x in enumerate(values, first):
                if not np.array_equal(seen.setdefault((row, token), x), x):
                    differ.append((rows, first, tokens, config, row, token))
    return differ


def of_two_warps(passes: list) -> list:
    """The passes by the teams that a full cache may have."""
    return [(*others, dataclasses.replace(config, team=min(config.team, 2))) for *others, config in passes]


@pytest.mark.parametrize(("planes", "passes"), [(2, PASSES), (1, PASSES[::3]), (None, of_two_warps(PASSES[::2]))])
def test_a_token_has_the_same_bits_in_every_pass(planes, passes):
    assert passes_that_differ(planes, passes) == []


@pytest.mark.parametrize("planes", [2, None])
def test_teams_that_have_whole_folds_give_the_same_bits(monkeypatch, planes):
    passes = PASSES if planes else of_two_warps(PASSES)
    expected = of_pass(planes, *passes[0])
    monkeypatch.setattr(mosaic_plan, "FOLDS_EACH", 0)
    monkeypatch.setattr(mosaic_plan.Plan, "registers", 1000)  # enough for all of these
    for rows, first, tokens, config in passes[:2] + passes[4:6]:
        q, layer, lengths = of_rows(rows, *problem(planes))
        assert attention.plan_for(q, layer, DenseView(planes), config=config).whole_folds
        found = attend(q, layer, lengths, DenseView(planes), config, first, tokens)
        np.testing.assert_array_equal(found, expected[np.array(rows), first : first + tokens])


@pytest.mark.parametrize("planes", [2, None])
def test_rows_of_a_batch_have_the_bits_that_they_have_alone(monkeypatch, planes):
    """By the configurations that are chosen for them, which differ."""
    monkeypatch.setattr(mosaic_plan, "multiprocessors", lambda: 4)
    q, layer, lengths = problem(planes)
    every = attend(q, layer, lengths, DenseView(planes), None, 3, 5)
    configs = [attention.plan_for(q[:, :5], layer, DenseView(planes)).config]
    for row in ALL_ROWS:
        alone = of_rows((row,), q, layer, lengths)
        configs.append(attention.plan_for(alone[0][:, :5], alone[1], DenseView(planes)).config)
        np.testing.assert_array_equal(attend(*alone, DenseView(planes), None, 3, 5)[0], every[row])
    assert len(set(configs)) == 2 and configs[0] != configs[1]


@pytest.mark.parametrize("planes", [2, None])
def test_values_are_those_of_the_reference(planes):
    q, layer, lengths = problem(planes)
    out = of_pass(planes, *(PASSES if planes else of_two_warps(PASSES))[0])
    longer = dataclasses.replace(lengths, buffered=lengths.buffered + CASE.tokens)
    expected = jax.jit(reference.decode_attention)(*WIDE((q, layer)), longer, DenseView(planes))[0]
    assert_close(out, expected)


@pytest.mark.parametrize("moved", ["first_group", "first_chunk"])
def test_a_run_that_begins_a_step_later_is_seen(monkeypatch, moved):
    expected = of_pass(2, *PASSES[0])[0, -1:]
    first = getattr(mosaic_runs.Runs, moved)

    def later(self, run):
        second = self.without_chunks + 1 if moved == "first_chunk" else ptx.i32(1)
        return first(self, run) + ptx.select(run == second, ptx.i32(1), ptx.i32(0))

    monkeypatch.setattr(mosaic_runs.Runs, moved, later)
    found = attend(*of_rows((0,), *problem(2)), DenseView(2), Config(1, team=4), 15, 1)[0]
    assert_close(found, expected)
    assert not np.array_equal(found, expected)


def test_pages_change_no_bits():
    q, layer, lengths = problem(2)
    plain, paged = (attend(q, each, lengths, DenseView(2), Config(3, team=2), 9, 1) for each in (layer, in_pages(layer)))
    np.testing.assert_array_equal(paged, plain)


def test_the_attention_mass_of_a_token_has_the_same_bits_in_every_pass():
    q, layer, lengths = of_rows((0,), *problem(2))
    view = DenseView(2, observed=True)

    def mass(first, tokens, config):
        plan = attention.plan_for(q[:, first : first + tokens], layer, view, config=config)
        longer = dataclasses.replace(lengths, buffered=lengths.buffered + first + tokens)
        return np.asarray(at_once(attention.run)(plan, q[:, first : first + tokens], longer, layer)[1])[:, :, -1]

    found = [mass(8, 8, Config(2, team=4)), mass(15, 1, Config(1, team=1)), mass(14, 2, Config(1, team=2))]
    assert found[0].max() > 0.2
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_append_and_attend_is_the_one_after_the_other():
    """One of the last rows has no room, and one no tokens yet: they read and write nothing outside."""
    case = Case(2, 2, 1, 64, group_size=64, capacity=1, groups=(1, 0, 0, 1))
    q, layer = random_problem(case, "bfloat16", "gaussian")
    qkv, cos, sin, *_ = random_projections(4, 2, 2, 1, 64)
    cos, sin = (x.astype(jnp.bfloat16) for x in (cos, sin))
    lengths = dataclasses.replace(case.lengths, buffered=jnp.array([62, 30, -3, 400], jnp.int32))
    q, buffer = at_once(rope_append.run)(qkv, cos, sin, layer.buffer, lengths.buffered)
    plan = attention.plan_for(q, layer, DenseView(2), appends=True, config=Config(5, team=2))
    plan = dataclasses.replace(plan, totals=True)
    out, _, appended = at_once(attention.run)(plan, qkv, lengths, layer, None, (cos, sin))
    jax.tree.map(np.testing.assert_array_equal, appended, buffer)
    kept = (0, 1)
    expected = attend(*of_rows(kept, q, dataclasses.replace(layer, buffer=buffer), lengths), DenseView(2), Config(2, team=1), 0, 2)
    np.testing.assert_array_equal(np.asarray(out)[:2], expected)
    # Tokens beyond the last are passed over.
    (qkv, cos, sin, layer, lengths), plan = of_rows((0,), qkv, cos, sin, layer, lengths), dataclasses.replace(plan, batch=1)
    filled = jnp.pad(qkv, ((0, 0), (0, 6), (0, 0)), constant_values=jnp.nan)
    out, _, appended = at_once(attention.run)(plan, filled, lengths, layer, None, (cos, sin))
    jax.tree.map(np.testing.assert_array_equal, appended, of_rows((0,), buffer)[0])
    np.testing.assert_array_equal(np.asarray(out)[0, :2], expected[0])
