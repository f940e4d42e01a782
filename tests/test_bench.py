"""`qspec bench attention`, with --tune, and `qspec bench flush`, on shapes that a CPU does at once. No figure of speed is tested."""

import dataclasses
import io
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.views import DenseView
from qspec_jax.bench import attention, attention_tuning, flush, kernels, peers, timing
from qspec_jax.bench.attention_shapes import LARGE, SHAPES, TINY, bytes_read, random_problem, random_view

pytestmark = pytest.mark.optimized

FAST = ["bench", "attention", "--shape", "tiny-int8", "--repeats", "2"]

attend = jax.jit(lambda *args, **settings: decode_attention(*args, **settings)[0])


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    """The read bandwidth is measured in one test alone, and short batches will do."""
    monkeypatch.setattr(kernels, "read_bandwidth", lambda *, repeats: 20.0)
    monkeypatch.setattr(timing, "BATCH_SECONDS", 1e-3)
    monkeypatch.setattr(timing, "LOOP_TRIPS", (2, 2))


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 1,023 groups of 128 tokens and 192 in the buffer. A token and KV head takes 128 bytes of codes in a plane, 4 of its group's
        # key parameters and 4 of value parameters; in bfloat16 512.
        ("int4-T1-mha-128k", 32 * (130944 * 136 + 192 * 512)),
        ("int8-T7-mha-128k", 32 * (130944 * 264 + 192 * 512)),
        ("int8-T7-gqa-128k", 8 * (130944 * 264 + 192 * 512)),
        ("bf16-T7-gqa-128k", 8 * 131136 * 512),
        # Groups 31, 45, 58, 72, 86, 100, 113, 127, of 80,896 tokens; 82,432 - 80,896 in the buffers.
        ("int4-T1-gqa-16k-ragged", 8 * (80896 * 136 + 1536 * 512)),
        # 2 KV heads, H = G = 64: 3 groups and 96 tokens, and a row that is all in the buffer.
        ("tiny-int8-T3-ragged", 2 * (192 * (2 * 64 + 8) + (96 + 40) * 256)),
    ],
)
def test_bytes_read(name, expected):
    assert bytes_read(SHAPES[name]) == expected


def test_bytes_of_listed_groups_and_of_observing():
    listed = dataclasses.replace(SHAPES["int4-T1-mha-128k"], listed=0.03)  # 31 of 1,023 groups, and a list with its count
    assert bytes_read(listed) == 32 * (31 * 128 * 136 + 192 * 512 + 32 * 4)
    ragged = dataclasses.replace(SHAPES["int4-T1-gqa-16k-ragged"], listed=0.1)
    groups = 4 + 5 + 6 + 8 + 9 + 10 + 12 + 13
    assert bytes_read(ragged) == 8 * (groups * 128 * 136 + 1536 * 512 + (groups + 8) * 4)
    shape = SHAPES["int8-T7-gqa-128k"]
    mass = bytes_read(dataclasses.replace(shape, observe=True)) - bytes_read(shape)
    assert mass == 8 * 7 * 1023 * 4 < 1e-3 * bytes_read(shape)


def test_random_lists_name_groups_that_are_there():
    shape = dataclasses.replace(SHAPES["tiny-int4-T1-512"], context=(544, 200, 40), listed=0.5)
    view, other = (random_view(shape, seed) for seed in (0, 1))
    np.testing.assert_array_equal(view.count, np.repeat([[4], [1], [0]], 2, 1))
    assert view.groups.shape == (3, 2, 4) and (view.groups != other.groups).any()
    for row, there in enumerate((7, 2, 0)):
        for head, count in enumerate(np.asarray(view.count)[row]):
            groups = np.asarray(view.groups)[row, head, :count]
            assert (np.diff(groups) > 0).all() and (groups >= 0).all() and (groups < there).all()


def test_bytes_of_a_full_row_are_those_of_the_arrays():
    shape = dataclasses.replace(SHAPES["tiny-int4-T1-256"], planes=2)
    # The number of planes that are read changes nothing of the arrays, and this problem other tests have too.
    _, layer, lengths = random_problem(SHAPES["tiny-int4-T1-256"], 0)
    stored = sum(x.nbytes for x in jax.tree.leaves((layer.keys, layer.values)))
    buffer = layer.buffer.keys[:, :, : int(lengths.buffered[0])].nbytes
    assert layer.groups * layer.group_size == int(lengths.quantized[0])
    assert bytes_read(shape) == stored + 2 * buffer


@pytest.mark.parametrize("shape", [*LARGE, *TINY], ids=lambda shape: shape.name)
def test_problems_fit_what_they_are_for(shape):
    for short in (shape, shape.shortened(4096)):
        q, layer, lengths = jax.eval_shape(lambda short=short: random_problem(short, 0))
        buffer = layer if short.planes is None else layer.buffer
        G = short.group_size
        assert q.shape == (short.batch, short.tokens, short.heads, short.head_dim)
        assert lengths.quantized.shape == lengths.buffered.shape == (short.batch,)
        assert buffer.keys.shape[:2] == (short.batch, short.kv_heads)
        assert all(short.tokens <= rows <= buffer.keys.shape[2] for rows in short.buffered)
        if short.planes is not None:
            assert buffer.keys.shape[2] == 2 * G + 8
            assert all(tokens % G == 0 and tokens <= layer.groups * G for tokens in short.quantized)
            assert all(rows < 2 * G for rows in short.buffered)
    assert max(short.context) <= 4096 and short.ragged == shape.ragged


def test_random_problems_are_of_unit_size_and_differ():
    shape = SHAPES["tiny-int8-T3-ragged"]
    outs = [attend(*random_problem(shape, seed), view=DenseView(2)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert (outs[0] != outs[2]).any()
    q, layer, _ = random_problem(shape, 0)
    assert 0.9 < float(jnp.std(q.astype(jnp.float32))) < 1.1
    # The middle code of 0..15 stands for about 0.
    assert abs(float((7.5 * layer.keys.scale + layer.keys.zero).astype(jnp.float32).mean())) < 0.1


# Peers and timing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-int4-T1-256", "tiny-bf16-T3-ragged"])
def test_the_xla_peer_computes_decode_attention(name):
    shape = dataclasses.replace(SHAPES[name], planes=None)
    q, layer, lengths = random_problem(shape, 0)
    out = jax.jit(peers.xla(shape))(q, layer.keys, layer.values)
    expected = np.asarray(attend(q, layer, lengths, view=DenseView(None))).astype(float)
    assert np.linalg.norm(np.asarray(out).astype(float) - expected) < 1e-2 * np.linalg.norm(expected)


def test_xla_is_not_asked_for_logits_that_do_not_fit():
    with pytest.raises(peers.Unavailable, match="logits would take 9 GB"):
        peers.xla(dataclasses.replace(SHAPES["bf16-T7-gqa-128k"], tokens=512))


def test_what_the_host_adds_to_a_batch_is_not_counted():
    batch = lambda programs: 0.003 + 0.01 * programs
    timed = timing._measure(timing._without_host(batch, 3), 5, 3, "")
    assert timed.lower_us == pytest.approx(2000) and timed.upper_us == pytest.approx(2000)


def test_of_a_program_of_seconds_nothing_is_subtracted():
    """What the host adds to it is not worth the time to find out: the seconds of as many programs again."""
    calls = []

    def batch(programs: int) -> float:
        calls.append(programs)
        return 0.003 + (timing.LONG_SECONDS + 1) * programs

    timed = timing._measure(timing._without_host(batch, 5), 1, 5, "")
    assert timed.median_us == pytest.approx(1e6 * (timing.LONG_SECONDS + 1.003))
    assert calls == [1] * (1 + 2 + 1 + 2 + 5)  # compiles, and twice, for each of the two functions; and what is timed


@pytest.mark.parametrize("slow", range(8))
def test_a_hiccup_of_the_host_does_not_end_the_search_for_a_long_batch(slow):
    """One call, whichever it is but the one that is timed, takes 5 s longer, as where the machine is busy."""
    calls = itertools.count()
    batch = lambda programs: 0.0005 + 0.0001 * programs + (5 if next(calls) == slow else 0)
    timed = timing._measure(timing._without_host(batch, 1), 1, 1, "")
    assert timed.median_us == pytest.approx(100)


def test_a_loop_is_as_long_as_the_host_needs(monkeypatch):
    monkeypatch.setattr(timing, "LOOP_SECONDS", 1.0)
    monkeypatch.setattr(timing, "LOOP_TRIPS", (2, 8))
    assert [timing.loop_trips(seconds) for seconds in (0.01, 0.2, 0.9)] == [8, 5, 2]


def test_a_loop_makes_its_trips():
    x = jnp.ones(3)
    program, _ = timing.loop(lambda total, x: (total + x,), 5).compile((jnp.zeros(3),), (x,))
    timed, (total,) = timing.time_loop(program, 5, (jnp.zeros(3),), (x,), repeats=2)
    assert timed.calls % 5 == 0 and total[0] >= 2 * timed.calls and total[0] % 5 == 0


def test_every_call_is_timed_on_an_input_of_its_own():
    calls = []

    def function(query, value):
        calls.append(value)
        return query + value

    timed = timing.time_jax(function, jnp.zeros(3), [(jnp.float32(i),) for i in range(4)], repeats=3)
    assert len(calls) == 1  # traced once
    assert (timed.inputs, timed.batches, timed.calls % 4) == (4, 3, 0)
    assert 0 < timed.lower_us <= timed.median_us <= timed.upper_us


def test_calls_in_place_keep_what_they_update():
    inputs = [(jnp.float32(i),) for i in range(3)]
    timed = timing.time_in_place(
        lambda x, kept, value: (x + value, kept + 1), jnp.zeros(3), [jnp.zeros(3) for _ in inputs], inputs, repeats=2, size=1
    )
    assert (timed.inputs, timed.batches, timed.calls % 6) == (3, 2, 0)
    assert 0 < timed.lower_us <= timed.median_us <= timed.upper_us


def test_laps_hide_the_launch_of_the_next_program(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    inputs = [(jnp.zeros(4, jnp.float32),)] * 5
    monkeypatch.setattr(timing, "LAPPED_BYTES", 1000)
    assert [timing._laps(inputs, size) for size in (None, 16, 100, 1000)] == [13, 13, 2, 1]
    monkeypatch.setattr(timing, "MAX_LAPS", 7)
    assert timing._laps(inputs) == 7


def test_read_bandwidth():
    assert timing.read_bandwidth(repeats=1) > 0.1


def test_a_failure_is_a_row(monkeypatch):
    def fails(shape):
        raise RuntimeError("no available kernel\nand more")

    monkeypatch.setitem(peers.PEERS, "torch_flash", fails)
    shape = SHAPES["tiny-bf16-T3-ragged"]
    row = attention.measure_peer(shape, "torch_flash")
    assert (row.status, row.note, row.timing) == ("failed", "RuntimeError: no available kernel", None)

    monkeypatch.setattr(attention, "decode_attention", lambda q, *_, **__: (q * jnp.nan, None))
    attention._error.cache_clear()
    row = attention.measure(shape, "reference")
    assert row.status == "failed" and "finite" in row.note


# Command line ---------------------------------------------------------------------------------------------------------


def test_json(run):
    code, out, err = run(*FAST, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report.keys() == {"device", "date", "versions", "earlier", "read_bandwidth_gb_per_s", "repeats", "shapes", "rows"}
    assert {"python", "platform", "jax", "jaxlib"} <= report["versions"].keys()
    assert report["shapes"]["tiny-int8-T3-ragged"]["context"] == [40, 288]
    rows = {row["implementation"]: row for row in report["rows"]}
    assert list(rows) == [*peers.PEERS, "reference"]
    for row in rows.values():
        assert row.keys() == {
            *("shape", "implementation", "peer", "status", "note", "bytes", "timing", "gb_per_s", "share_of_read_bandwidth"),
            *("ratio_to_fastest_peer", "relative_error"),
        }
    ours, xla = rows["reference"], rows["xla"]
    assert ours["status"] == xla["status"] == "measured"
    assert ours["timing"].keys() == {"median_us", "lower_us", "upper_us", "batches", "calls", "inputs", "method"}
    assert 0 < ours["relative_error"] < 1e-2 and 0 < xla["relative_error"] < 1e-2
    assert xla["ratio_to_fastest_peer"] == 1
    assert ours["ratio_to_fastest_peer"] == xla["timing"]["median_us"] / ours["timing"]["median_us"]
    assert ours["gb_per_s"] == ours["bytes"] / ours["timing"]["median_us"] / 1e3
    assert ours["share_of_read_bandwidth"] == ours["gb_per_s"] / report["read_bandwidth_gb_per_s"]
    if jax.default_backend() == "cpu":
        assert (rows["cudnn"]["status"], rows["cudnn"]["note"]) == ("unavailable", "needs an NVIDIA GPU")
        assert rows["torch_flash"]["status"] == rows["flashinfer"]["status"] == "unavailable"


@pytest.mark.system
@pytest.mark.parametrize(
    ("shape", "flags", "name"),
    [
        ("tiny-int4-T1-256", ["--listed", 0.4], "tiny-int4-T1-256-listed-0.4"),
        ("tiny-int8", ["--observe"], "tiny-int8-T3-ragged-observed"),
        ("tiny-int8", ["--observe", "--append"], "tiny-int8-T3-ragged-appended-observed"),
        ("tiny-int4-T1-256", ["--listed", 0.4, "--append"], "tiny-int4-T1-256-appended-listed-0.4"),
        ("tiny-bf16", ["--append"], "tiny-bf16-T3-ragged-appended"),
    ],
)
def test_listed_groups_observing_and_appending(run, shape, flags, name):
    code, out, _ = run("bench", "attention", "--shape", shape, "--no-peers", "--repeats", 1, *flags, "--json")
    (row,) = json.loads(out)["rows"]
    assert code == 0 and (row["shape"], row["status"]) == (name, "measured")
    assert row["relative_error"] < 1e-2


def test_the_table_and_the_output_file(run, tmp_path):
    path = tmp_path / "table.txt"
    code, out, _ = run(*FAST, "--output", path)
    assert (code, out) == (0, "")
    text = path.read_text()
    for words in ("Decode attention on", "jax", "tiny-int8-T3-ragged", "INT8, T=3, 4/2 heads, 2 rows of 40 to 288 tokens", "quartiles"):
        assert words in text
    if jax.default_backend() == "cpu":
        assert "cudnn: not measured, needs an NVIDIA GPU" in text


def test_an_implementation_that_cannot_run_says_why(run):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU may support it")
    code, out, _ = run(*FAST, "--implementation", "mosaic_gpu", "--no-peers", "--json")
    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert row["implementation"] == "mosaic_gpu" and row["status"] in ("unavailable", "failed") and row["note"]


def test_plot(run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "latency.png"
    code, _, _ = run("bench", "attention", "--shape", "tiny-int4-T1-256", "--no-peers", "--repeats", 1, "--plot", path)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, out, err = run(*FAST, "--plot", tmp_path / "a.png")
    assert (code, out) == (2, "")
    assert "pip install matplotlib" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--shape", "huge"], "huge"),
        (["--implementation", "cuda"], "mosaic_gpu, triton, reference"),
        (["--repeats", "0"], "--repeats"),
        (["--output", "no/such/folder/file"], "no/such/folder/file"),
        (["--plot", "no/such/folder/a.png"], "no/such/folder/a.png"),
        (["--plot", "a.txt"], ".png"),
        (["--plot", "a.png"], "single row"),
        (["--shape", "tiny", "--plot", "a.png", "--output", "./a.png"], "same file"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--listed", "0.1"], "upper plane"),
        (["--listed", "0"], "above 0"),
        (["--listed", "0.1", "--observe"], "exclude each other"),
        (["--shape", "tiny", "--observe"], "tiny-bf16"),
        (["--observe", "--plot", "a.png"], "--plot"),
        (["--append", "--plot", "a.png"], "--append"),
    ],
)
def test_bad_flags(run, flags, word):
    if "a." in flags[-1] or "a.png" in flags[-1]:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    code, out, err = run(*FAST, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("qspec: error: ") and len(err.splitlines()) == 1
    assert word in err


def test_large_shapes_need_a_gpu(run):
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    for flags in ([], ["--shape", "int4"], ["--shape", "tiny", "--shape", "bf16-T7-gqa-128k"]):
        code, out, err = run("bench", "attention", *flags)
        assert (code, out) == (2, "")
        assert "needs a GPU" in err and len(err.splitlines()) == 1


# Tuning ---------------------------------------------------------------------------------------------------------------


def trial(config: dict, shape: str, microseconds: float, error: float = 1e-3) -> attention_tuning.Trial:
    timing_ = timing.Timing(microseconds, microseconds, microseconds, 1, 1, 2, "")
    row = kernels.KernelRow(shape, "mosaic_gpu", False, "measured", "", 1, timing=timing_, relative_error=error)
    return attention_tuning.Trial("attention.mosaic_gpu", {"planes": 1}, config, False, row)


def test_the_configuration_that_is_best_over_all_shapes_is_chosen():
    a, b, c = ({"splits": n} for n in (1, 2, 3))
    trials = [trial(a, "short", 10), trial(b, "short", 11), trial(a, "long", 130), trial(b, "long", 100)]
    assert [t.chosen for t in attention_tuning.choose(trials)] == [False, True, False, True]
    # The fastest is wrong, or failed on a shape.
    wrong = [*trials, trial(c, "short", 1, error=0.5), trial(c, "long", 1)]
    assert [t.config for t in attention_tuning.choose(wrong) if t.chosen] == [b, b]
    failed = dataclasses.replace(trial(a, "short", 1), row=kernels.KernelRow("short", "mosaic_gpu", False, "failed", "no room", 1))
    assert not any(t.chosen for t in attention_tuning.choose([failed]))


def test_the_tuning_table():
    a, b = {"splits": 1}, {"splits": 2}
    trials = attention_tuning.choose([trial(a, "short", 10), trial(b, "short", 5, error=0.5)])
    text = io.StringIO()
    failed = dataclasses.replace(trials[0], row=kernels.KernelRow("long", "mosaic_gpu", False, "failed", "no room", 1), chosen=False)
    report = attention_tuning.TuningReport("a GPU", "2026-01-01", {}, "gpu.json", [*trials, failed], ["triton is not there"])
    rich.console.Console(file=text, width=140).print(report.table())
    lines = text.getvalue().splitlines()
    assert [line.split()[2:4] for line in lines if line.startswith("short")] == [["splits", "2"], ["splits", "1"]]
    assert [line.split()[-1] for line in lines if line.startswith("short")] == ["wrong", "chosen"]
    assert [line.split()[2:] for line in lines if line.startswith("long")] == [["splits", "1", "-", "-", "-", "no", "room"]]
    assert "gpu.json" in text.getvalue() and "Not tuned: triton" in text.getvalue()


def test_tune_needs_a_gpu_and_kernels(fails):
    if jax.default_backend() == "cpu":
        fails([*FAST, "--tune", "--implementation", "mosaic_gpu"], "--tune", "needs a GPU")
        fails(["bench", "attention", "--tune"], "--tune", "needs a GPU")
    else:
        fails([*FAST, "--tune", "--implementation", "reference"], "--tune", "reference")
        fails([*FAST, "--tune", "--plot", "a.png"], "--tune", "--plot")


# Flush ----------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_flush():
    # 2 KV heads, H = G = 64, 2 G + 8 rows: keys and values are read, but for G rows written; 1 byte a code, scales and zeros in bfloat16.
    assert flush.bytes_moved(SHAPES["tiny-int4-T1-256"]) == 2 * (2 * (136 + 72) * 64 * 2 + 2 * 64 * 64 + 4 * 2 * 64)


@pytest.mark.system
def test_flush(run):
    code, out, err = run("bench", "flush", "--shape", "tiny-int8", "--repeats", 2, "--gamma", 3, "--layers", 1, "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["rows"]
    assert row["error"] == "" and row["layers"] == 1 and row["gamma"] == 3
    due, not_due = row["due"]["median_us"], row["not_due"]["median_us"]
    assert due > 0 and not_due > 0
    assert row["share_of_round"] == pytest.approx((4 / 64 * due + 60 / 64 * not_due) / row["attention_us"])


def test_flush_table(run, monkeypatch):
    def measured(row, shape, repeats):
        due, not_due = (timing.Timing(us, us, us, 1, 1, 1, "") for us in (30.0, 4.0))
        return dataclasses.replace(row, due=due, not_due=not_due, attention_us=250.0, share_of_round=0.0123)

    monkeypatch.setattr(flush, "_measured", measured)
    code, out, _ = run("bench", "flush", "--shape", "tiny-int8", "--gamma", 1, "--layers", 2)
    assert code == 0 and "Flush on" in out
    (line,) = (line.split() for line in out.splitlines() if line.startswith("tiny-int8-T3-ragged"))
    megabytes = f"{2 * flush.bytes_moved(SHAPES[line[0]]) / 1e6:.1f}"
    assert line[1:] == ["2", "30.0", "15.0", megabytes, "4.0", "1", "250", "1.23%"]


def test_flush_bad_flags(fails):
    fails(["bench", "flush", "--shape", "tiny-bf16"], "tiny-bf16", "nothing is flushed")
    fails(["bench", "flush", "--shape", "tiny-int4", "--gamma", 16], "--gamma 16", "1 to 15")
    fails(["bench", "flush", "--shape", "huge"], "huge")
