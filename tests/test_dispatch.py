"""Which implementation of a kernel runs on which device, and why another does not."""

import dataclasses
import importlib
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from problems.attention import Case, random_problem

from pallas_kernels import attention, dispatch
from pallas_kernels.attention import mosaic_gpu, support, triton
from pallas_kernels.flush import flush
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.views import UPPER_PLANE, ChosenTokens, DenseView, LargestMass, ListedGroups
from pallas_kernels.formats.weights import Int8Weight
from pallas_kernels.matmul import mosaic_int8
from pallas_kernels.matmul import support as matmul_support

LISTED = ListedGroups(jnp.zeros((2, 2, 1), jnp.int32), jnp.zeros((2, 2), jnp.int32))
CASE = Case(1, 4, 2, 64, group_size=64, capacity=3, groups=(0, 2))


@pytest.fixture
def arguments():
    q, layer = random_problem(CASE, "bfloat16")
    return q, layer, Lengths(jnp.array([0, 128], jnp.int32), jnp.array([5, 70], jnp.int32))


def on_device(monkeypatch, capability) -> None:
    monkeypatch.setattr(dispatch.jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize(("capability", "number"), [("9.0", 9.0), ("8.6", 8.6), ("gfx90a", 0.0), (None, 0.0)])
def test_compute_capability(monkeypatch, capability, number):
    on_device(monkeypatch, capability)
    assert dispatch.compute_capability() == number


@pytest.mark.parametrize(("capability", "kilobytes"), [("9.0", 227), ("8.0", 163), ("8.6", 99), ("8.9", 99)])
def test_shared_memory(monkeypatch, capability, kilobytes):
    on_device(monkeypatch, capability)
    assert dispatch.shared_memory() == kilobytes * 1024


@pytest.mark.parametrize(
    ("capability", "installed", "words"), [("8.0", True, None), ("7.5", True, "8.0 or newer"), ("9.0", False, "jax-triton")]
)
def test_where_triton_runs(monkeypatch, capability, installed, words):
    on_device(monkeypatch, capability)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: installed or None)
    reason = dispatch.no_triton()
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize("capability", ["7.5", "gfx90a"])
def test_other_gpus_run_the_reference_and_say_why(monkeypatch, caplog, capability, arguments):
    on_device(monkeypatch, capability)
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            module = dispatch.choose("attention", "auto", *arguments, DenseView(1))
            assert module.__name__.endswith("reference")
    *passed, last = caplog.records
    assert [record.getMessage().split(" is passed over")[0] for record in passed] == ["attention: mosaic_gpu", "attention: triton"]
    assert last.levelno == logging.WARNING and "attention runs in plain JAX" in last.getMessage()


@pytest.mark.parametrize(("groups", "level"), [(0, logging.INFO), (2, logging.WARNING)])
def test_a_cache_without_room_for_a_group_is_not_called_slow(monkeypatch, caplog, groups, level):
    on_device(monkeypatch, "8.0")
    dispatch._log_once.cache_clear()
    layer = HierarchicalLayer.zeros(1, 1, groups, 8, 20, 64, jnp.bfloat16)
    nothing = jnp.zeros(1, jnp.int32)
    with caplog.at_level(logging.INFO):
        flush(layer, Lengths(nothing, nothing), nothing > 0, scheme="int8_first")
    assert max(record.levelno for record in caplog.records) == level


def test_a_cpu_runs_the_reference(arguments):
    assert dispatch.choose("attention", "auto", *arguments, DenseView(1)).__name__.endswith("reference")
    with pytest.raises(ValueError, match="no implementation 'cuda'; there are mosaic_gpu, triton, reference"):
        attention.decode_attention(*arguments, view=DenseView(1), implementation="cuda")
    with pytest.raises(NotImplementedError, match="attention: mosaic_gpu needs"):
        attention.decode_attention(*arguments, view=DenseView(1), implementation="mosaic_gpu")


def test_no_kernel_is_a_candidate_for_more_rows_than_it_supports():
    for kernel in dispatch.KERNELS:
        module = importlib.import_module(f"pallas_kernels.{kernel.operation}.{kernel.module_name}")
        limit = getattr(module, "MAX_ROWS", matmul_support.MAX_ROWS) if kernel.operation == "matmul" else None
        assert callable(module.unsupported) and (kernel.max_rows is None) == (limit is None)
        assert limit is None or 1 <= kernel.min_rows <= kernel.max_rows <= limit
    assert dispatch.implementations("matmul", "int4") == ("mosaic_gpu", "triton")


def test_an_older_jax_is_told(monkeypatch, arguments):
    on_device(monkeypatch, "9.0")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs jax 0.11" in mosaic_gpu.unsupported(*arguments, DenseView(1))
    assert "jax-triton" in (triton.unsupported(*arguments, DenseView(1)) or "jax-triton")


def test_kernels_take_no_other_dtypes_or_shapes(arguments):
    q, layer, lengths = arguments
    assert support.unsupported(q, layer, lengths, UPPER_PLANE) is None
    wide = lambda planes: dataclasses.replace(planes, zero=planes.zero.astype(jnp.float32))
    for args, reason in (
        ((q.astype(jnp.float32), layer, lengths), "bfloat16, not float32"),
        ((q, dataclasses.replace(layer, values=wide(layer.values)), lengths), "bfloat16, not float32"),
        ((q, layer, jax.tree.map(lambda n: n.astype(jnp.int16), lengths)), "int32"),
        ((jnp.repeat(q, 129, 1), layer, lengths), "up to 128 tokens"),
        ((q[..., :32], layer, lengths), "head_dim"),
    ):
        assert reason in support.unsupported(*args, UPPER_PLANE)
    listed = dataclasses.replace(LISTED, count=LISTED.count.astype(jnp.int16))
    assert "counts of groups in int32" in support.unsupported(q, layer, lengths, listed)


def test_observation_runs_on_hopper_alone(monkeypatch, arguments):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    monkeypatch.setattr(triton, "no_triton", lambda: None)
    for view in (DenseView(2), LISTED):
        assert mosaic_gpu.unsupported(*arguments, view) is None and triton.unsupported(*arguments, view) is None
    view = DenseView(2, observed=True)
    assert mosaic_gpu.unsupported(*arguments, view) is None
    assert "what it observes" in triton.unsupported(*arguments, view)


@pytest.mark.parametrize(
    ("kernel", "names"),
    [
        (mosaic_gpu, {"planes", "head_dim", "group_size", "batch", "heads", "block_tiles"}),
        (triton, {"planes", "head_dim", "group_size", "programs", "block_rows"}),
    ],
)
def test_lists_are_tuned_apart(arguments, kernel, names):
    """A dense problem has no width, and is the one that was measured before there were lists."""
    problem = lambda view: kernel.tunable(*arguments, view)[1]
    assert set(problem(UPPER_PLANE)) == names
    of_width = lambda n: ListedGroups(jnp.zeros((2, 2, n), jnp.int32), LISTED.count)
    assert [problem(of_width(n)) for n in (1, 3, 4, 5)] == [problem(UPPER_PLANE) | {"list_width": n} for n in (1, 4, 4, 8)]


def test_views_that_no_kernel_takes(monkeypatch, caplog, arguments):
    """The reference runs, and says that it does; they cannot be observed."""
    q, layer, lengths = arguments
    views = ChosenTokens(jnp.zeros((2, 2, layer.groups * layer.group_size), bool)), LargestMass(jnp.array([0, 1], jnp.int32), True)
    for view in views:
        assert support.unsupported(q, layer, lengths, view).startswith("reads all")
    for view in (LISTED, *views):
        with pytest.raises(TypeError, match="observed"):
            dataclasses.replace(view, observed=True)
    on_device(monkeypatch, "9.0")
    for view in views:
        dispatch._log_once.cache_clear()
        chosen = dispatch.choose("attention", "auto", q, layer, lengths, view)
        assert chosen.__name__.endswith("reference")
    assert "attention runs in plain JAX, which is slow" in caplog.text


@pytest.mark.parametrize("planes", [None, 0, 3])
def test_planes_must_fit_the_layer(planes, arguments):
    q, layer, lengths = arguments
    with pytest.raises(ValueError, match="1 or 2 for a HierarchicalLayer"):
        attention.decode_attention(q, layer, lengths, view=DenseView(planes))
    assert isinstance(layer.buffer, FullLayer)
    with pytest.raises(ValueError, match="None for a FullLayer"):
        attention.decode_attention(q, layer.buffer, lengths, view=DenseView(1))


def test_in_a_fixed_order_there_are_kernels_or_no_implementation(monkeypatch, arguments):
    """What falls back to the reference outside of `fixed_order` is an error within it."""
    on_device(monkeypatch, "9.0")
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    q, layer, lengths = arguments

    def chosen(*args):
        return dispatch.choose("attention", "auto", *args, DenseView(2)).__name__.rpartition(".")[2]

    shared = dataclasses.replace(layer, shared_groups=jnp.zeros(2, jnp.int32))
    without_room = HierarchicalLayer.zeros(2, 2, 0, 64, 200, 64, jnp.bfloat16)
    monkeypatch.setattr("pallas_kernels.attention.mosaic_shared.unsupported", lambda *args: None)
    assert [chosen(q, each, lengths) for each in (layer, shared, without_room)] == ["mosaic_gpu", "mosaic_shared", "mosaic_gpu"]
    with dispatch.fixed_order():
        assert chosen(q, layer, lengths) == "mosaic_gpu"
        with pytest.raises(dispatch.NoFixedOrder, match="attention in a fixed order: mosaic_gpu reads the groups of each row for itself"):
            chosen(q, shared, lengths)
        with pytest.raises(dispatch.NoFixedOrder, match="needs a layer with room for at least one group"):
            chosen(q, without_room, lengths)
        with pytest.raises(dispatch.NoFixedOrder, match="flush in a fixed order: there is no such kernel"):
            dispatch.choose("flush", "auto")
        monkeypatch.undo()
        assert chosen(q, layer, lengths) == "reference"


def test_a_fixed_order_takes_rows_from_one_on():
    def rows(weight_format: str) -> dict[str, list[int]]:
        of_format = dispatch.kernels("matmul", weight_format)
        return {kernel.module_name: [n for n in (1, 2, 16, 17, 64, 65) if kernel.takes_rows(n)] for kernel in of_format}

    assert rows("plain") == {"mosaic_plain": [2, 16, 17, 64]}
    with dispatch.fixed_order():
        assert rows("plain") == {"mosaic_plain": [1, 2, 16, 17, 64, 65]}
        assert rows("int4") == {"mosaic_wide": [1, 2, 16, 17, 64], "mosaic_gpu": [], "triton": []}
    assert dispatch.rows_in_fixed_order("matmul", "plain") == dispatch.ANY


def test_in_a_fixed_order_int8_has_the_clusters_of_16_rows_or_no_kernel(monkeypatch):
    monkeypatch.setattr(mosaic_int8, "no_mosaic_gpu", lambda: None)
    monkeypatch.setattr(mosaic_int8, "multiprocessors", lambda: 132)

    def problem(inputs: int, outputs: int, rows: int):
        shape = jax.ShapeDtypeStruct
        codes, scale = shape((outputs, inputs), jnp.int8), shape((outputs,), jnp.float32)
        return shape((rows, inputs), jnp.bfloat16), [Int8Weight(codes, scale)]

    def clusters(inputs: int, outputs: int) -> set[int]:
        return {mosaic_int8.plan_for(*problem(inputs, outputs, rows), jnp.bfloat16).cluster for rows in range(1, 17)}

    assert clusters(14336, 4096) == {2, 4}
    assert mosaic_int8.unsupported(*problem(28672, 8192, 1), dtype=jnp.bfloat16) is None
    with dispatch.fixed_order():
        assert clusters(14336, 4096) == {4}
        reason = mosaic_int8.unsupported(*problem(28672, 8192, 1), dtype=jnp.bfloat16)
    assert reason == "has no room in shared memory for 16 rows of 28672 inputs and their sums"
