"""The GPU kernels of decode_attention against the reference in float32."""

import dataclasses
import functools
import importlib
import itertools
import operator
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import needs_gpu, skip_or_fail
from paging import in_pages, in_shared_pages
from problems.attention import Case, all_listed, random_lists, random_problem, with_garbage, with_others_spoilt

from pallas_kernels import dispatch
from pallas_kernels.attention import decode_attention, reference, support
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.views import DenseView, ListedGroups, View

pytestmark = [pytest.mark.gpu, needs_gpu]

# Rows of a batch: nothing quantized, one group, more groups than a program reads at once, full capacity.
long = functools.partial(Case, capacity=40, groups=(0, 1, 17, 40, 40, 2))
CASES = {
    "T1-MHA-128": long(1, 4, 4, 128, group_size=128),
    "T7-GQA4-128": long(7, 8, 2, 128, group_size=128),
    "T5-GQA7-64": long(5, 7, 1, 64, group_size=64),
    "T1-GQA8-256": long(1, 8, 1, 256, group_size=128),
    "T16-GQA7-128": long(16, 7, 1, 128, group_size=128),
    "T16-GQA4-256": long(16, 4, 1, 256, group_size=64),
    "T7-MHA-64": long(7, 2, 2, 64, group_size=128),
    "T7-GQA4-64-G128": long(7, 8, 2, 64, group_size=128),
    "T7-GQA4-256-G128": long(7, 8, 2, 256, group_size=128),
    "T1-GQA4-128-G64": long(1, 8, 2, 128, group_size=64),
}
KINDS = [
    *[(name, planes) for name in ("T1-MHA-128", "T7-GQA4-128", "T5-GQA7-64", "T1-GQA8-256") for planes in (1, 2, None)],
    *[(name, planes) for name in ("T16-GQA7-128", "T16-GQA4-256") for planes in (2, None)],
    *[(name, planes) for name in ("T7-GQA4-64-G128", "T7-GQA4-256-G128") for planes in (1, 2)],
    ("T7-MHA-64", 2),
    ("T1-GQA4-128-G64", 1),
]
every_kernel = pytest.mark.parametrize("implementation", dispatch.implementations("attention"))
every_kind = pytest.mark.parametrize("name, planes", KINDS)

problem = functools.cache(lambda name, data: random_problem(CASES[name], "bfloat16", data))
attend = jax.jit(decode_attention, static_argnames="implementation")


@jax.jit
def exactly_observed(
    q: jax.Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, view: View
) -> tuple[jax.Array, jax.Array | None]:
    wide = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    layer = wide(layer) if isinstance(layer, FullLayer) else dataclasses.replace(layer, buffer=wide(layer.buffer))
    return reference.decode_attention(wide(q), layer, lengths, view)


def exactly(q: jax.Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, view: View) -> jax.Array:
    return exactly_observed(q, layer, lengths, view)[0]


def expected(q: jax.Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, *, planes: int | None) -> jax.Array:
    return exactly(q, layer, lengths, DenseView(planes))


def kernel(implementation: str, *args, planes: int | None) -> Callable:
    """What decode_attention reads by that implementation; skips the test where this machine cannot run it, and fails where it should."""
    return kernel_for(implementation, *args, view=DenseView(planes))


def kernel_for(implementation: str, *args, view: View) -> Callable:
    """The same with any view."""
    run = observing(implementation, *args, view=view)
    return lambda *args: run(*args)[0]


def observing(implementation: str, *args, view: View) -> Callable:
    """The same, and the attention mass."""
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    skip_or_fail(implementation, module.unsupported(*args, view))
    return functools.partial(attend, view=view, implementation=implementation)


def configured(module: ModuleType, *, view: View | None = None, **settings) -> Callable:
    """What the kernel of that module reads with these settings, compiled; with the view that is given here, or in each call."""
    fixed = () if view is None else (view,)
    return jax.jit(lambda *args: module.decode_attention(*args, *fixed, **settings)[0])


def assert_close(out: jax.Array, expected: jax.Array, label: str) -> None:
    """A relative error (norm) of at most 1e-2 in each row of the batch."""
    norms = lambda x: np.linalg.norm(np.asarray(x, np.float64).reshape(len(x), -1), axis=1)
    errors = norms(np.asarray(out, np.float64) - np.asarray(expected, np.float64)) / norms(expected)
    print(f"{label}: relative errors of the rows {np.array2string(errors, precision=5)}")
    assert (errors <= 1e-2).all(), f"{label}: {errors}"


@every_kernel
@every_kind
def test_equals_the_reference(name, planes, implementation):
    for data in ("gaussian", "outliers", "peaked"):
        q, layer = problem(name, data)
        layer, lengths = CASES[name].attended(layer, planes)
        out = kernel(implementation, q, layer, lengths, planes=planes)(q, layer, lengths)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert_close(out, expected(q, layer, lengths, planes=planes), f"{name}, {data}")


@every_kernel
@every_kind
def test_the_same_bits_twice_whatever_lies_beyond_the_lengths(name, planes, implementation):
    case = CASES[name]
    q, layer = problem(name, "gaussian")
    clean, lengths = case.attended(layer, planes)
    poisoned, _ = case.attended(with_garbage(case, layer, np.nan), planes)
    run = kernel(implementation, q, clean, lengths, planes=planes)
    first = np.asarray(run(q, clean, lengths))
    np.testing.assert_array_equal(first, np.asarray(run(q, clean, lengths)))
    np.testing.assert_array_equal(first, np.asarray(run(q, poisoned, lengths)))


@every_kernel
@pytest.mark.parametrize("planes", [2, None])
def test_one_compilation_whatever_the_lengths(planes, implementation):
    case = CASES["T7-GQA4-128"]
    q, layer = problem("T7-GQA4-128", "gaussian")
    layer, lengths = case.attended(layer, planes)
    run = kernel(implementation, q, layer, lengths, planes=planes)
    run(q, layer, lengths)
    compiled = attend._cache_size()
    G, T = case.group_size, case.tokens
    for quantized, buffered in ((0, T), (G, T + 1), (0, G - 1), (2 * G, G), (40 * G, G + 1), (3 * G, case.buffer_rows)):
        lengths = Lengths(*(jnp.full(len(case.groups), n, jnp.int32) for n in (quantized, buffered)))
        if planes is None:
            lengths = dataclasses.replace(lengths, quantized=jnp.zeros_like(lengths.quantized))
        assert_close(run(q, layer, lengths), expected(q, layer, lengths, planes=planes), f"{quantized} quantized, {buffered} buffered")
    assert attend._cache_size() == compiled


@every_kernel
def test_without_capacity_for_groups(implementation):
    case = dataclasses.replace(CASES["T7-GQA4-128"], capacity=0, groups=(0,) * 6)
    q, layer = random_problem(case, "bfloat16")
    run = kernel(implementation, q, layer, case.lengths, planes=2)
    assert_close(run(q, layer, case.lengths), expected(q, layer, case.lengths, planes=2), "buffer only")


@every_kernel
@pytest.mark.parametrize("name, planes", [("T1-MHA-128", 1), ("T7-GQA4-128", 2), ("T7-GQA4-128", None)])
def test_every_configuration_worth_measuring(name, planes, implementation):
    q, layer = problem(name, "outliers")
    layer, lengths = CASES[name].attended(layer, planes)
    kernel(implementation, q, layer, lengths, planes=planes)
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    reference = expected(q, layer, lengths, planes=planes)
    _, _, configs = module.tunable(q, layer, lengths, DenseView(planes))
    assert len(configs) > 1
    for config in configs:
        run = configured(module, view=DenseView(planes), config=config)
        assert_close(run(q, layer, lengths), reference, f"{config}")


@every_kernel
@pytest.mark.parametrize("planes", [1, 2, None])
def test_what_is_not_finite_stays_in_its_row(planes, implementation):
    case = CASES["T7-GQA4-128"]
    q, layer = problem("T7-GQA4-128", "gaussian")
    clean, lengths = case.attended(layer, planes)
    run = kernel(implementation, q, clean, lengths, planes=planes)
    first = np.asarray(run(q, clean, lengths))
    spoilt, spoil = 3, lambda x: x.at[3].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
    out = np.asarray(run(q, jax.tree.map(spoil, clean), lengths))
    others = np.arange(len(out)) != spoilt
    assert np.isnan(out[spoilt].astype(float)).all()
    np.testing.assert_array_equal(out[others], first[others])


@every_kernel
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_group_that_could_not_be_quantized_reads_as_nan(part, planes, implementation):
    """Such a channel or token has a NaN scale, the codes of 0, and zero 0."""
    case = CASES["T7-GQA4-128"]
    q, layer = problem("T7-GQA4-128", "gaussian")
    run = kernel(implementation, q, layer, case.lengths, planes=planes)
    first = np.asarray(run(q, layer, case.lengths))
    row, at = 3, (3, slice(None), 5, 17)
    spoilt = getattr(layer, part)
    spoilt = dataclasses.replace(spoilt, scale=spoilt.scale.at[at].set(jnp.nan), zero=spoilt.zero.at[at].set(0))
    layer = dataclasses.replace(layer, **{part: spoilt})
    out = np.asarray(run(q, layer, case.lengths))
    assert np.isnan(np.asarray(expected(q, layer, case.lengths, planes=planes)[row])).all()
    assert np.isnan(out[row].astype(float)).all()
    others = np.arange(len(out)) != row
    np.testing.assert_array_equal(out[others], first[others])


@pytest.mark.parametrize("name, planes", [("T1-MHA-128", 1), ("T7-GQA4-128", 2), ("T7-GQA4-128", None)])
@pytest.mark.parametrize("team", [1, 2, 4])
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_mosaic_goes_around_its_ring_many_times(warpgroups, team, name, planes):
    q, layer = problem(name, "outliers")
    layer, lengths = CASES[name].attended(layer, planes)
    kernel("mosaic_gpu", q, layer, lengths, planes=planes)
    from pallas_kernels.attention import mosaic_gpu

    config = mosaic_gpu.Config(splits=1, warpgroups=warpgroups, team=team)
    try:
        mosaic_gpu.plan_for(q, layer, DenseView(planes), config=config)
    except ValueError as reason:
        assert warpgroups == 2 and planes == 2, reason  # no room for the rings of so many teams
        return
    run = configured(mosaic_gpu, view=DenseView(planes), config=config)
    first = run(q, layer, lengths)
    assert_close(first, expected(q, layer, lengths, planes=planes), f"{config}")
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(run(q, layer, lengths)))


def test_mosaic_with_more_rows_than_splits():
    case = CASES["T1-MHA-128"]
    q, layer = problem("T1-MHA-128", "gaussian")
    kernel("mosaic_gpu", q, layer, case.lengths, planes=1)
    from pallas_kernels.attention import mosaic_gpu

    run = configured(mosaic_gpu, view=DenseView(1), config=mosaic_gpu.Config(splits=2))
    assert_close(run(q, layer, case.lengths), expected(q, layer, case.lengths, planes=1), "2 splits for 6 rows")


@pytest.mark.parametrize("planes", [2, None])
def test_in_a_fixed_order_a_token_has_the_same_bits_in_every_pass(planes):
    """Single warps multiply up to two tiles of queries, with codes whole warpgroups more."""
    case = Case(16, 8, 2, 128, group_size=128, capacity=40, groups=(40, 9, 0))
    q, layer = random_problem(case, "bfloat16", "outliers")
    layer, lengths = case.attended(layer, planes)
    kernel("mosaic_gpu", q, layer, lengths, planes=planes)
    from pallas_kernels.attention import mosaic_gpu

    def run(*args):
        with dispatch.fixed_order():
            return np.asarray(configured(mosaic_gpu, view=DenseView(planes))(*args))

    whole = run(q, layer, lengths)
    for tokens, rows in itertools.product((1, 2, 4, 8, 13), ([0, 1, 2], [0], [1])):
        for first in range(0, 17 - tokens, 3):
            q_part, layer_part, ends = jax.tree.map(operator.itemgetter(np.array(rows)), (q[:, first : first + tokens], layer, lengths))
            ends = dataclasses.replace(ends, buffered=ends.buffered - (16 - first - tokens))
            out = run(q_part, layer_part, ends)
            np.testing.assert_array_equal(out, whole[rows, first : first + tokens], err_msg=f"tokens {first} to {first + tokens - 1}")


@every_kernel
@pytest.mark.parametrize("batch", [33, 64, 200])
@pytest.mark.parametrize("tokens, view", [(1, "listed"), (1, DenseView(1)), (7, DenseView(2)), (7, DenseView(None))])
def test_many_rows(tokens, view, batch, implementation):
    """Ragged rows, more than a warp has lanes."""
    groups = tuple(int(n) for n in np.random.default_rng(batch).integers(0, 13, batch))
    case = Case(tokens, 8, 2, 128, group_size=128, capacity=12, groups=groups)
    q, layer = random_problem(case, "bfloat16")
    view = random_lists(case) if view == "listed" else view
    layer, lengths = case.attended(layer, view.planes)
    run = kernel_for(implementation, q, layer, lengths, view=view)
    out = run(q, layer, lengths)
    assert_close(out, exactly(q, layer, lengths, view), f"{batch} rows")
    np.testing.assert_array_equal(np.asarray(out), np.asarray(run(q, layer, lengths)))


@pytest.mark.parametrize("view", [DenseView(1), DenseView(None), random_lists(CASES["T1-MHA-128"])], ids=["int4", "full", "listed"])
@pytest.mark.parametrize("splits, num_warps", [(1, 1), (3, 4), (64, 1)])
def test_triton_with_any_number_of_splits(view, splits, num_warps):
    case = CASES["T1-MHA-128"]
    q, layer = problem("T1-MHA-128", "gaussian")
    layer, lengths = case.attended(layer, view.planes)
    kernel_for("triton", q, layer, lengths, view=view)
    from pallas_kernels.attention import triton

    run = configured(triton, config=triton.Config(splits, num_warps))
    assert_close(run(q, layer, lengths, view), exactly(q, layer, lengths, view), f"{splits} splits")


# Listed groups ----------------------------------------------------------------------------------------------------------

LISTED = ("T1-MHA-128", "T7-GQA4-128", "T5-GQA7-64", "T1-GQA8-256", "T16-GQA7-128", "T1-GQA4-128-G64")


@every_kernel
@pytest.mark.parametrize("data", ["gaussian", "outliers", "peaked"])
@pytest.mark.parametrize("name", LISTED)
def test_listed_groups_equal_the_reference(name, data, implementation):
    q, layer = problem(name, data)
    lengths = CASES[name].lengths
    for seed in range(2):
        view = random_lists(CASES[name], seed)
        run = kernel_for(implementation, q, layer, lengths, view=view)
        out = run(q, layer, lengths)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert_close(out, exactly(q, layer, lengths, view), f"{name}, {data}, {seed}")
        # The same bits twice, whatever lies where nobody reads.
        np.testing.assert_array_equal(np.asarray(out), np.asarray(run(q, layer, lengths)))
        np.testing.assert_array_equal(np.asarray(out), np.asarray(run(q, with_others_spoilt(layer, view), lengths)))


@pytest.mark.parametrize("team", [1, 2, 4])
@pytest.mark.parametrize("name", ["T1-MHA-128", "T7-GQA4-128"])
def test_all_groups_in_a_list_are_the_dense_view(name, team):
    q, layer = problem(name, "outliers")
    case = CASES[name]
    kernel_for("mosaic_gpu", q, layer, case.lengths, view=all_listed(case))
    from pallas_kernels.attention import mosaic_gpu

    run = configured(mosaic_gpu, config=mosaic_gpu.Config(splits=1, team=team))
    dense = run(q, layer, case.lengths, DenseView(1))
    np.testing.assert_array_equal(np.asarray(run(q, layer, case.lengths, all_listed(case))), np.asarray(dense))


@every_kernel
@pytest.mark.parametrize("name, planes", [*((name, planes) for name, planes in KINDS if planes), *((name, "listed") for name in LISTED)])
def test_groups_in_pages_give_the_same_bits(name, planes, implementation):
    case = CASES[name]
    q, layer = problem(name, "gaussian")
    view = random_lists(case) if planes == "listed" else DenseView(planes)
    run = kernel_for(implementation, q, layer, case.lengths, view=view)
    expected = np.asarray(run(q, layer, case.lengths))
    np.testing.assert_array_equal(np.asarray(run(q, in_pages(layer), case.lengths)), expected)


@every_kernel
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("planes", [1, 2, None])
def test_many_tokens_of_a_row(tokens, planes, implementation):
    """More query rows than a block takes: the blocks of a KV head divide them."""
    case = Case(tokens, 8, 2, 128, group_size=128, capacity=40, groups=(0, 1, 40))
    q, layer = random_problem(case, "bfloat16", "outliers")
    layer, lengths = case.attended(layer, planes)
    out = kernel(implementation, q, layer, lengths, planes=planes)(q, layer, lengths)
    assert_close(out, expected(q, layer, lengths, planes=planes), f"{tokens} tokens")


@pytest.mark.parametrize("shared", [0, 1, 12])
@pytest.mark.parametrize("tokens, planes", [(1, 1), (1, 2), (4, 2)])
def test_rows_that_share_groups(monkeypatch, tokens, planes, shared):
    """Values and attention mass are those of rows that are read one by one, also where a launch takes a part of the batch."""
    monkeypatch.setattr(support, "MAX_TOKENS", 4 * tokens)
    case = Case(tokens, 8, 2, 128, group_size=128, capacity=40, groups=(12, 13, 17, 40, 40, 12))
    q, layer = random_problem(case, "bfloat16", "outliers")
    together, apart = in_shared_pages(layer, shared)
    view = DenseView(planes, observed=True)
    module = importlib.import_module("pallas_kernels.attention.mosaic_shared")
    skip_or_fail("mosaic_gpu", module.unsupported(q, together, case.lengths, view))
    out, mass = jax.jit(module.decode_attention)(q, together, case.lengths, view)
    exact, exact_mass = exactly_observed(q, apart, case.lengths, view)
    assert_close(out, exact, f"{shared} shared groups")
    np.testing.assert_allclose(np.asarray(mass), np.asarray(exact_mass), atol=2e-2)


@every_kernel
def test_one_compilation_whatever_the_lists(implementation):
    case = CASES["T7-GQA4-128"]
    q, layer = problem("T7-GQA4-128", "gaussian")
    view = random_lists(case)
    kernel_for(implementation, q, layer, case.lengths, view=view)(q, layer, case.lengths)
    compiled = attend._cache_size()
    for seed in range(1, 4):
        view = random_lists(case, seed)
        out, _ = attend(q, layer, case.lengths, view=view, implementation=implementation)
        assert_close(out, exactly(q, layer, case.lengths, view), f"lists {seed}")
    none = dataclasses.replace(view, count=jnp.zeros_like(view.count))
    out, _ = attend(q, layer, case.lengths, view=none, implementation=implementation)
    assert_close(out, exactly(q, layer, case.lengths, none), "empty lists")
    assert attend._cache_size() == compiled


@every_kernel
def test_lists_that_are_wrong_do_no_harm(implementation):
    """They stand for what `ListedGroups` says."""
    case = CASES["T1-MHA-128"]
    q, layer = problem("T1-MHA-128", "gaussian")
    r, most = np.random.default_rng(0), np.iinfo(np.int32).max
    groups = r.choice([-most - 1, -1, 0, 5, 5, case.capacity - 1, case.capacity, most], (6, 4, 9)).astype(np.int32)
    count = r.choice([-most - 1, -1, 0, 3, 9, 10, most], (6, 4)).astype(np.int32)
    view = ListedGroups(jnp.asarray(groups), jnp.asarray(count))
    nearest = ListedGroups(jnp.clip(view.groups, 0, case.capacity - 1), jnp.clip(view.count, 0, 9))
    out = kernel_for(implementation, q, layer, case.lengths, view=view)(q, layer, case.lengths)
    assert_close(out, exactly(q, layer, case.lengths, nearest), "wrong lists")


@every_kernel
@pytest.mark.parametrize("name", ["T1-MHA-128", "T1-GQA4-128-G64", "T7-GQA4-128"])
def test_every_configuration_for_lists(name, implementation):
    q, layer = problem(name, "outliers")
    lengths, view = CASES[name].lengths, random_lists(CASES[name])
    kernel_for(implementation, q, layer, lengths, view=view)
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    _, _, configs = module.tunable(q, layer, lengths, view)
    assert len(configs) > 1
    for config in configs:
        out = configured(module, config=config)(q, layer, lengths, view)
        assert_close(out, exactly(q, layer, lengths, view), f"{config}")


# Observation: the Mosaic kernel alone -----------------------------------------------------------------------------------

OBSERVED = [(name, 2) for name in ("T1-MHA-128", "T7-GQA4-128", "T5-GQA7-64", "T16-GQA7-128", "T16-GQA4-256", "T7-MHA-64")]


@pytest.mark.parametrize("data", ["gaussian", "outliers", "peaked"])
@pytest.mark.parametrize("name, planes", [*OBSERVED, ("T7-GQA4-128", 1)])
def test_attention_mass_equals_the_reference(name, planes, data):
    q, layer = problem(name, data)
    case, lengths = CASES[name], CASES[name].lengths
    run = observing("mosaic_gpu", q, layer, lengths, view=DenseView(planes, observed=True))
    out, mass = run(q, layer, lengths)
    expected_out, expected_mass = exactly_observed(q, layer, lengths, DenseView(planes, observed=True))
    assert mass.shape == expected_mass.shape and mass.dtype == jnp.float32
    assert_close(out, expected_out, f"{name}, {data}")
    some = np.array(case.groups) > 0
    assert_close(mass[some], expected_mass[some], f"{name}, {data}, mass")
    for row, groups in enumerate(case.groups):
        assert (np.asarray(mass)[row, :, :, groups:] == 0).all()
    again = run(q, with_garbage(case, layer, np.nan), lengths)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(again[0]))
    np.testing.assert_array_equal(np.asarray(mass), np.asarray(again[1]))
    # Observing changes nothing of what is read.
    np.testing.assert_array_equal(np.asarray(out), np.asarray(kernel("mosaic_gpu", q, layer, lengths, planes=planes)(q, layer, lengths)))


@pytest.mark.parametrize("team", [1, 2, 4])
def test_attention_mass_in_every_team(team):
    case = CASES["T7-GQA4-128"]
    q, layer = problem("T7-GQA4-128", "outliers")
    kernel_for("mosaic_gpu", q, layer, case.lengths, view=DenseView(2, observed=True))
    from pallas_kernels.attention import mosaic_gpu

    config = mosaic_gpu.Config(splits=1, team=team)
    view = DenseView(2, observed=True)
    run = jax.jit(lambda *args: mosaic_gpu.decode_attention(*args, view, config=config))
    first = run(q, layer, case.lengths)
    some = np.array(case.groups) > 0
    assert_close(first[1][some], exactly_observed(q, layer, case.lengths, DenseView(2, observed=True))[1][some], f"{config}")
    for _ in range(20):
        for ours, before in zip(run(q, layer, case.lengths), first):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(before))
