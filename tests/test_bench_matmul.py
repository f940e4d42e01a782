"""`qspec bench matmul` on shapes that a CPU does at once. No figure of speed is tested."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.formats.weights import dequantize_weight
from pallas_kernels.matmul import mosaic_gpu, mosaic_wide, triton
from qspec_jax import plots
from qspec_jax.bench import kernels, matmul, peers, timing
from qspec_jax.bench.matmul import LARGE, SHAPES, TINY, activations, bf16_problem, random_problem

FAST = ["bench", "matmul", "--shape", "tiny-down-M7", "--repeats", "2"]


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    """The read bandwidth is not measured, and short batches will do."""
    monkeypatch.setattr(kernels, "read_bandwidth", lambda *, repeats: 20.0)
    monkeypatch.setattr(timing, "BATCH_SECONDS", 1e-3)


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "outputs", "inputs"),
    [
        ("llama-3.1-8b-qkv-M1", 6144, 4096),
        ("llama-3.1-8b-o-M4", 4096, 4096),
        ("llama-3.1-8b-gate_up-M7", 28672, 4096),
        ("llama-3.1-8b-down-M16", 4096, 14336),
        ("llama-2-7b-qkv-M1", 12288, 4096),
        ("llama-2-7b-gate_up-M1", 22016, 4096),
        ("llama-2-7b-down-M1", 4096, 11008),
        ("tiny-qkv-M1", 128, 256),
    ],
)
def test_bytes(name, outputs, inputs):
    shape = SHAPES[name]
    # Half a byte a code, and 4 bytes of scale and zero for a group of 128.
    assert shape.coded_bytes == outputs * inputs * (0.5 + 4 / 128)
    assert shape.bf16_bytes == outputs * inputs * 2
    _, weights = jax.eval_shape(lambda: random_problem(shape, 0))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)]
    assert sum(sizes) == shape.coded_bytes


def test_there_is_each_layer_at_each_number_of_rows():
    assert len(LARGE) == len({shape.name for shape in LARGE}) == 42
    assert {shape.rows for shape in LARGE} == {1, 4, 7, 16, 32, 64}


@pytest.mark.parametrize("implementation", dispatch.implementations("matmul", "int4"))
def test_the_kernels_take_every_shape(monkeypatch, implementation):
    for module in (mosaic_gpu, mosaic_wide):
        monkeypatch.setattr(module, "no_mosaic_gpu", lambda: None)
    monkeypatch.setattr(triton, "no_triton", lambda: None)

    def reason(shape):
        return "supports up to 16 rows" if implementation == "triton" and shape.rows > 16 else None

    for shape in SHAPES.values():
        found, expected = matmul.unsupported(shape, implementation), reason(shape)
        assert found == expected or found.startswith(expected), shape.name


def test_a_whole_name_is_no_beginning():
    select = lambda *names: [shape.name for shape in kernels.select_shapes(names, (), LARGE)]
    assert select("llama-3.1-8b-o-M1") == ["llama-3.1-8b-o-M1"]
    assert select("llama-3.1-8b-o-M16", "llama-3.1-8b-o") == [f"llama-3.1-8b-o-M{m}" for m in (1, 4, 7, 16, 32, 64)]


def test_random_problems_differ_and_are_the_same_in_bfloat16():
    shape = SHAPES["tiny-qkv-M1"]
    (x, weights), (_, again), (_, others) = (random_problem(shape, seed) for seed in (0, 0, 1))
    for weight, same, other in zip(weights, again, others):
        np.testing.assert_array_equal(weight.codes, same.codes)
        assert (weight.codes != other.codes).mean() > 0.9
    assert (weights[1].codes != weights[2].codes).mean() > 0.9
    y, full = bf16_problem(shape, 0)
    np.testing.assert_array_equal(x, y)
    wide = jnp.concatenate([dequantize_weight(weight, jnp.float32) for weight in weights])
    assert full.shape == (128, 256) and full.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(full, np.float32), wide, rtol=2**-8)
    assert 0.03 < float(wide.std()) < 0.06 and abs(float(wide.mean())) < 0.005


# Measuring ------------------------------------------------------------------------------------------------------------


def test_every_call_is_timed_on_an_input_of_its_own():
    traced, seen = [], []

    def function(x, value, more):
        traced.append(value)
        jax.debug.callback(lambda value: seen.append(float(value)), value)
        return x + value, more

    inputs = [(jnp.float32(i), jnp.ones(2)) for i in range(4)]
    timed = timing.time_calls(function, jnp.zeros(3), inputs, repeats=3)
    jax.effects_barrier()
    assert len(traced) == 1
    assert {seen.count(float(i)) for i in range(4)} == {len(seen) / 4} and len(seen) >= timed.calls
    assert timed.inputs == 4 and timed.batches == 3 and timed.calls % 4 == 0 and timed.calls >= 8
    assert 0 < timed.lower_us <= timed.median_us <= timed.upper_us


@pytest.mark.parametrize("laps", [2, 3])
def test_no_lap_is_left_out(laps):
    """Calls without effects, of which XLA may leave out what no result depends on: the last lap's are what is returned."""
    inputs = [(jnp.full((8, 8), float(i)),) for i in range(2)]
    program = timing.calls(lambda x, weight: x @ weight, laps).lower(jnp.ones((8, 8)), inputs).compile()
    assert re.findall(r'known_trip_count":{"n":"(\d+)"', program.as_text()) == [str(laps)]


def test_few_bytes_are_read_several_times_in_a_program(monkeypatch):
    inputs = [(jnp.zeros(1000, jnp.float32),)] * 5
    assert timing._laps(inputs) == 2
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "LAPPED_BYTES", 50_000)
    assert timing._laps(inputs) == 3
    assert timing._laps(inputs * 3) == 1


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_errors_are_small(shape):
    for name in ("reference", "xla"):
        row = matmul.measure(shape, name, repeats=1)
        assert row.status == "measured", row.note
        assert 1e-4 < row.relative_error < 5e-3
        assert row.peer == (name == "xla")


def test_a_wrong_weight_is_seen():
    shape = SHAPES["tiny-qkv-M1"]
    peer = matmul.xla()
    out = peer(activations(shape), bf16_problem(shape, 1)[1])
    assert kernels.relative_error(out, matmul._wide_product(*bf16_problem(shape, 0))) > 0.5


def test_a_failure_is_a_row(monkeypatch):
    def fails():
        raise RuntimeError("no room\nand more")

    monkeypatch.setitem(matmul.PEERS, "torch", fails)
    row = matmul.measure(SHAPES["tiny-down-M7"], "torch")
    assert (row.status, row.note, row.timing) == ("failed", "RuntimeError: no room", None)

    monkeypatch.setitem(matmul.PEERS, "xla", lambda: peers.Peer(lambda x, w: x @ w.T * jnp.nan, lambda *a: a, lambda y: y, None))
    row = matmul.measure(SHAPES["tiny-down-M7"], "xla")
    assert row.status == "failed" and "finite" in row.note


# Command line ---------------------------------------------------------------------------------------------------------


def test_json(run):
    code, out, err = run("bench", "matmul", "--shape", "tiny", "--repeats", 2, "--json", "--implementation", "reference")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report.keys() == {"device", "date", "versions", "earlier", "read_bandwidth_gb_per_s", "repeats", "shapes", "rows"}
    assert report["shapes"]["tiny-qkv-M1"] == {
        "model": "tiny",
        "layer": "qkv",
        "rows": 1,
        "inputs": 256,
        "outputs": [64, 32, 32],
        "planes": 1,
    }
    assert [(row["shape"], row["implementation"]) for row in report["rows"]] == [
        (shape.name, name) for shape in TINY for name in ("xla", "torch", "reference")
    ]
    for row in report["rows"]:
        assert row.keys() == {
            *("shape", "implementation", "peer", "status", "note", "bytes", "timing", "gb_per_s", "share_of_read_bandwidth"),
            *("ratio_to_fastest_peer", "relative_error"),
        }
    found = {row["implementation"]: row for row in report["rows"] if row["shape"] == "tiny-qkv-M1"}
    ours, xla = found["reference"], found["xla"]
    assert (ours["bytes"], xla["bytes"]) == (128 * (128 + 8), 128 * 256 * 2)
    assert ours["gb_per_s"] == ours["bytes"] / ours["timing"]["median_us"] / 1e3
    assert ours["share_of_read_bandwidth"] == ours["gb_per_s"] / report["read_bandwidth_gb_per_s"]
    if jax.default_backend() == "cpu":
        assert found["torch"]["status"] == "unavailable"
        assert ours["ratio_to_fastest_peer"] == xla["timing"]["median_us"] / ours["timing"]["median_us"]


def test_the_table_and_the_output_file(run, tmp_path):
    path = tmp_path / "table.txt"
    code, out, _ = run(*FAST, "--output", path)
    assert (code, out) == (0, "")
    text = path.read_text()
    for words in (
        "Matmul of weights in 4 and 8 bits on",
        "jax",
        "tiny-down-M7",
        "M=7, 48 outputs of 512 inputs",
        "quartiles",
        "xla",
        "float32",
    ):
        assert words in text
    if jax.default_backend() == "cpu":
        assert "reference" in text and "torch: not measured" in text


@pytest.mark.parametrize("implementation", dispatch.implementations("matmul", "int4"))
def test_an_implementation_that_cannot_run_says_why(run, implementation):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU may support it")
    code, out, _ = run(*FAST, "--implementation", implementation, "--no-peers", "--json")
    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert (row["implementation"], row["status"]) == (implementation, "unavailable") and "needs" in row["note"]


def test_plot(run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "times.png"
    code, _, _ = run(*FAST, "--no-peers", "--plot", path)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_of_all_shapes_where_some_have_no_figures(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    timed = timing.Timing(10.0, 9.0, 11.0, 1, 1, 1, "")
    found = [kernels.KernelRow(shape.name, "mosaic_gpu", False, "measured", "", 1, timed) for shape in LARGE[:5]]
    found += [kernels.KernelRow(shape.name, "xla", True, "failed", "no room", 1) for shape in LARGE]
    path = tmp_path / "times.svg"
    report = matmul.MatmulReport("a GPU", "2026-01-01", {}, 1.0, 1, {shape.name: shape for shape in LARGE}, found)
    plots.save(report.figure(), path)
    assert "</svg>" in path.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shape", "huge"], ["huge", "llama-3.1-8b-gate_up", "-M16", "tiny-qkv-M1"]),
        (["--implementation", "cuda"], ["cuda", "mosaic_gpu, triton, reference"]),
        (["--repeats", "0"], ["--repeats"]),
        (["--output", "no/such/folder/file"], ["no/such/folder/file"]),
        (["--plot", "no/such/folder/a.png"], ["no/such/folder/a.png"]),
        (["--plot", "a.txt"], [".png"]),
        (["--plot", "a.png", "--output", "./a.png"], ["same file"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_bad_flags(fails, flags, words):
    if "--plot" in flags:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    fails([*FAST, *flags], *words)


def test_large_shapes_need_a_gpu(fails):
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    for flags in ([], ["--shape", "llama-2"], ["--shape", "tiny", "--shape", "llama-3.1-8b-o-M1"]):
        fails(["bench", "matmul", *flags], "needs a GPU")
