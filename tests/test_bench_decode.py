"""`qspec bench decode` on a model that a CPU decodes at once: what it simulates, counts and reports. No figure of speed is tested."""

import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import types

import jax
import numpy as np
import pytest
from bench_commands import FAST
from tiers import in_system

from qspec_jax import plots
from qspec_jax.bench import decode, decode_case, decode_report, decode_rows, decode_steps, timing
from qspec_jax.bench.architectures import ARCHITECTURES, architecture, random_model
from qspec_jax.bench.simulated import rate_of_ratio, ratio_of_rate
from qspec_jax.drafts.step_bytes import bytes_of, weight_bytes

pytestmark = pytest.mark.usefixtures("short_loops")


@pytest.fixture(scope="module")
def model():
    return random_model(architecture("tiny"))


@pytest.fixture(scope="module")
def small_model():
    """A model of one layer."""
    return random_model(architecture("tiny", layers=1))


@pytest.mark.parametrize("speculative", ["quantspec", pytest.param("quantspec-weights-only", marks=pytest.mark.system)])
def test_json(run, speculative):
    names = ["autoregressive", speculative]
    flags = ["--layers", 1, "--simulate-ratio", 0.8, "--methods", ",".join(names)]
    code, out, err = run(*FAST, *flags, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["model"] == "tiny, 1 of 2 layers"
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == names
    for name, row in rows.items():
        method = decode_rows.METHODS[name]
        assert (row["status"], row["note"]) == ("measured", "")
        assert row["gamma"] == (3 if method.speculative else 0)
        assert row["simulated_ratio"] == (pytest.approx(0.8) if method.speculative else None)
        assert row["simulated_rate"] == (pytest.approx(rate_of_ratio(0.8, 3)) if method.speculative else None)
        assert row["decode_s"] > 0 and row["prefill_s"] > 0 and row["compile_s"] > 0
        assert row["ms_per_token"] == pytest.approx(1e3 * row["decode_s"] / row["new_tokens"])
        assert row["speedup"] == pytest.approx(rows["autoregressive"]["ms_per_token"] / row["ms_per_token"])
        assert set(row["steps"]) == {"target", "sampling"} | ({"draft"} if method.speculative else set()) | (
            {"flush due", "flush not due"} if method.cache == "int8" else set()
        )
        assert row["peak_memory_bytes"] > row["cache_bytes"] > 0
        if method.speculative:
            assert 0.6 < row["acceptance_ratio"] < 0.95
            assert row["rounds"] < row["new_tokens"]
        # 200 tokens of the prompt and 150 new ones: the group's boundaries at 256 and 320.
        assert row["flushes"] == (2 if method.cache == "int8" else 0)
    baseline, both = rows["autoregressive"], rows[speculative]
    tokens = both["new_tokens"] / both["rounds"]
    limit = baseline["steps"]["target"]["bytes"] * tokens / (both["steps"]["target"]["bytes"] + 3 * both["steps"]["draft"]["bytes"])
    assert both["byte_limit"] == pytest.approx(limit)
    assert speculative != "quantspec" or both["cache_bytes"] < baseline["cache_bytes"]  # the other has the baseline's cache


@pytest.fixture(scope="module")
def decoded_batches(small_model):
    """Rows of batches of 1 and 4, each with the state behind its decode. Half of the drafts are accepted."""
    cases = [decode_rows.Case(decode_rows.METHODS["autoregressive"], 0), decode_rows.Case(decode_rows.METHODS["quantspec-kv-only"], 3)]
    states, whole = [], decode_case.MeasuredCase._decoded

    def recorded(self, *args):
        run, state = whole(self, *args)
        states.append(jax.device_get((state.emitted, state.counts, state.cache.lengths.total)))
        return run, state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_case.MeasuredCase, "_decoded", recorded)
        patch.setattr(timing, "LOOP_TRIPS", (2, 2))
        patch.setattr(timing, "BATCH_SECONDS", 1e-3)
        settings = decode.Settings(100, rate=0.5, bandwidth=decode.Bandwidth(20.0), repeats=1)
        rows = decode.measure(small_model, lambda: small_model, cases, [list(range(100))], settings, batch_sizes=(1, 4))
        return list(zip(decode_rows.compared(list(rows)), states, strict=True))


@pytest.mark.parametrize(
    "draft",
    [
        "cascade:first=(eagle3:model=random,window=20),middle=(quantspec:weight_bits=16)",
        *in_system("eagle3:model=random,window=20", "cascade:first=prompt-lookup,middle=(sparse:budget=0.2)"),
    ],
)
def test_heads_of_random_weights_and_cascades_are_measured(small_model, draft):
    """Whole decodes, and the steps of heads and middles."""
    cases = [decode_rows.Case(decode_rows.DecodeMethod(draft, "int8", draft), 4)]
    bandwidth = decode.Bandwidth(20.0)
    settings = decode.Settings(60, rate=0.8, inner_rate=0.6 if "cascade" in draft else None, bandwidth=bandwidth, repeats=1)
    (row,) = decode.measure(small_model, lambda: small_model, cases, [list(range(100))], settings)
    assert (row.status, row.note, row.simulated_inner_rate) == ("measured", "", settings.inner_rate)
    assert 0.4 < row.acceptance_ratio < 0.8 and row.rounds < row.new_tokens < 60
    of_draft = {name: step for name, step in row.steps.items() if name in ("draft", "middle", "head")}
    assert {*of_draft} == {name for name, part in (("middle", "cascade"), ("head", "eagle3")) if part in draft}
    # On a busy machine a short step may have taken less than no time: that of a batch of one is subtracted.
    assert all(np.isfinite(step.timing.median_us) and step.timing.calls > 1 and step.bytes > 0 for step in of_draft.values())
    if "head" in of_draft:  # a layer whose first matmul has twice the inputs, what makes the logits, norms, and 24 pairs of keys and values
        c, item = small_model.config, small_model.dtype.itemsize
        layer = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim * 2 * c.hidden_size + c.num_heads * c.head_dim * c.hidden_size
        numbers = layer + 3 * c.hidden_size * c.intermediate_size + c.vocab_size * c.hidden_size + 4 * c.hidden_size
        assert of_draft["head"].bytes == item * (numbers + 24 * 2 * c.num_kv_heads * c.head_dim)


@pytest.mark.system
def test_batches_are_measured_at_each_size(decoded_batches):
    rows = [row for row, _ in decoded_batches]
    assert [(row.batch_size, row.method, row.status, row.note) for row in rows] == [
        (size, method, "measured", "") for size in (1, 4) for method in ("autoregressive", "quantspec-kv-only")
    ]
    for row, (emitted, counts, _) in decoded_batches:
        assert emitted.shape == (row.batch_size,)
        # Without the first token, which prefill chooses, and the two rounds of the warm-up.
        assert row.batch_size * 2 == counts.rounds.sum() - row.rounds
        assert row.new_tokens < (emitted - 1).sum() == (counts.accepted + counts.rounds).sum()
        assert row.tokens_per_second == pytest.approx(row.new_tokens / row.decode_s)
        assert row.ms_per_token == pytest.approx(1e3 * row.batch_size / row.tokens_per_second)
    for baseline, row in (rows[:2], rows[2:]):  # at the same batch size
        assert baseline.speedup == 1
        assert row.speedup == pytest.approx(row.tokens_per_second / baseline.tokens_per_second)


@pytest.mark.system
def test_rows_of_a_batch_accept_independently_and_all_run(decoded_batches):
    (_, _), (_, _), (_, (emitted, one_by_one, _)), (_, (ended, counts, lengths)) = decoded_batches
    assert len(set(counts.accepted.tolist())) > 1 and len(set(lengths.tolist())) > 1
    assert emitted.tolist() == [100] * 4 and one_by_one.rounds.tolist() == [99] * 4
    # Until the first row has all of its tokens.
    assert len(set(counts.rounds.tolist())) == 1 and ended.max() == 100 > ended.min()


@pytest.mark.system
def test_floors_of_batches_count_weights_once_and_every_rows_cache(decoded_batches, small_model):
    weights, layers = weight_bytes(small_model), small_model.config.num_layers
    one, four = ({row.method: row for row, _ in decoded_batches if row.batch_size == size} for size in (1, 4))
    assert one.keys() == four.keys() == {"autoregressive", "quantspec-kv-only"}
    for method, row in four.items():
        for step in ("target", *["draft"] * bool(row.gamma)):
            of_cache = one[method].steps[step].bytes - weights
            assert of_cache > 0 and row.steps[step].bytes == weights + 4 * of_cache
        assert row.cache_bytes == 4 * one[method].cache_bytes
        tokens = row.new_tokens / row.rounds
        seconds = (row.steps["target"].bytes + (3 * row.steps["draft"].bytes if row.gamma else 0)) / 20e9
        assert row.tokens_per_second_limit == pytest.approx(4 * tokens / seconds)
        assert row.byte_limit == pytest.approx(row.tokens_per_second_limit / four["autoregressive"].tokens_per_second_limit)
    # 100 tokens and the one that is appended, in 2 heads of 64 values of 2 bytes for keys, and as much for values.
    assert one["autoregressive"].steps["target"].bytes == weights + layers * 101 * 2 * 2 * 64 * 2


def test_peak_memory_counts_the_making_of_a_batch(monkeypatch, model):
    """The program that repeats a row is given no weights, which stay where they are; prefill and decode are given them."""
    monkeypatch.setattr(decode_case, "_working_bytes", lambda size: size)
    measured = types.SimpleNamespace(engine=types.SimpleNamespace(target=model, draft=None))
    weights = bytes_of(model)
    assert decode_case.MeasuredCase._peak_bytes(measured, {"prefill": weights + 10}, 30, weights + 20, None) == weights + 30
    assert decode_case.MeasuredCase._peak_bytes(measured, {"prefill": weights + 10}, None, weights + 20, None) == weights + 20


def test_more_rows_than_did_not_fit_are_skipped_and_not_compiled(monkeypatch, model):
    tried = []

    class Fails:
        """Autoregressive decoding has room for 1 row, which it finds out when it runs; with an int8 cache for 4, found out before."""

        def __init__(self, model, draft, case, prompts, settings, pool, batch_size, began):
            tried.append((case.method.name, batch_size))
            self.name, self.batch_size = case.method.name, batch_size
            if (self.name, batch_size) == ("autoregressive-int8", 16):
                raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory")

        def row(self, bandwidth, repeats):
            if (self.name, self.batch_size) == ("autoregressive", 4):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.\nstack")
            if self.name == "quantspec-kv-only":
                raise ValueError("no kernel")
            return decode_rows.DecodeRow(self.name, 3, 0, "measured", batch_size=self.batch_size)

    monkeypatch.setattr(decode, "MeasuredCase", Fails)
    names = ["autoregressive", "autoregressive-int8", "quantspec-kv-only"]
    cases = [decode_rows.Case(decode_rows.METHODS[name], 0) for name in names]
    found = list(decode.measure(model, lambda: model, cases, [[1, 2, 3]], decode.Settings(32), batch_sizes=(1, 4, 16, 64)))
    assert [(row.method, row.batch_size) for row in found] == [(name, size) for size in (1, 4, 16, 64) for name in names]
    outcome = {(row.method, row.batch_size): (row.status, row.note) for row in found}
    assert [outcome[names[0], size] for size in (1, 4, 16, 64)] == [
        ("measured", ""),
        ("failed", "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."),
        ("skipped", "batch size 4 did not fit"),
        ("skipped", "batch size 4 did not fit"),
    ]
    assert [outcome[names[1], size][0] for size in (1, 4, 16, 64)] == ["measured", "measured", "failed", "skipped"]
    # What fails for another reason may not fail with more rows.
    assert [outcome[names[2], size] for size in (1, 4, 16, 64)] == [("failed", "ValueError: no kernel")] * 4
    assert tried == [(name, size) for size in (1, 4, 16, 64) for name in names if outcome[name, size][0] != "skipped"]


def test_batches_in_table_plot_and_json(run, monkeypatch, tmp_path):
    """They are asked for in any order, with repetitions."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")

    def measured(model, drafts, cases, prompts, *args, batch_sizes, **settings):
        for size in batch_sizes:
            for case in cases:
                row_of = functools.partial(decode_rows.DecodeRow, case.method.name, len(prompts[0]), case.gamma, batch_size=size)
                if size == 8 and case.method.name == "autoregressive":
                    yield row_of("skipped", "batch size 2 did not fit")
                    continue
                figures = dict(prefill_s=0.1, compile_s=2.0, decode_s=0.5, new_tokens=100, rounds=40, tokens_per_second=200.0 * size)
                figures |= dict(ms_per_token=5.0 / (1 + case.gamma), cache_bytes=1000, peak_memory_bytes=2000)
                yield row_of("measured", tokens_per_second_limit=300.0 * size, **figures)

    figures, save = [], plots.save
    monkeypatch.setattr(decode, "measure", measured)
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    path, sizes = tmp_path / "batches.png", ["--batch-size", 8, "--batch-size", 1, "--batch-size", 2, "--batch-size", 8]
    code, out, _ = run(*FAST, "--context", 64, *sizes, "--plot", path)
    words = " ".join(out.split())
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and "Batch 1" not in words and "at the same context and as many rows" in words
    assert next(line for line in lines if line[:1] == ["context"])[:3] == ["context", "rows", "method"]
    assert [line[:2] for line in lines if "quantspec" in line] == [[n, size] for n in ("200", "64") for size in ("1", "2", "8")]
    quantspec = next(line for line in lines if line[:3] == ["64", "8", "quantspec"])
    assert quantspec[5:10] == ["1,600.0", "2,400.0", "67%", "1.25", "-"]
    skipped = [line for line in lines if line[:3] == ["64", "8", "autoregressive"]]
    assert len(skipped) == 1 and skipped[0][-1] == "skipped"
    assert "64 tokens, batch size 8, autoregressive, gamma 0: skipped: batch size 2 did not fit" in words
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert [axes.get_title().split()[0] for axes in figure.axes] == ["64", "200"]
    for axes in figure.axes:
        drawn = {(line.get_label(), line.get_linestyle()): line.get_xydata().tolist() for line in axes.lines}
        assert drawn["autoregressive", "-"] == [[1, 200], [2, 400]]
        assert drawn["quantspec", "-"] == [[1, 200], [2, 400], [8, 1600]]
        dotted = [points for (_, style), points in drawn.items() if style == ":"]
        assert dotted == [[[1, 300], [2, 600]], [[1, 300], [2, 600], [8, 2400]]]
    code, out, _ = run(*FAST, "--batch-size", 2, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and [(row["method"], row["batch_size"], row["speedup"]) for row in rows] == [
        ("autoregressive", 2, 1.0),
        ("quantspec", 2, 4.0),
    ]


def test_a_row_for_every_method_context_and_gamma(run, monkeypatch):
    def measured(model, drafts, cases, prompts, *args, **settings):
        return [decode_rows.DecodeRow(case.method.name, len(prompts[0]), case.gamma, "failed", "no room", 0.0) for case in cases]

    monkeypatch.setattr(decode, "measure", measured)
    flags = ["--gamma", 1, "--context", 64, "--methods", "autoregressive,quantspec", "--simulate-acceptance", 0.9, "--json"]
    code, out, _ = run(*FAST, *flags)
    report = json.loads(out)
    methods = [("autoregressive", 0), ("quantspec", 3), ("quantspec", 1)]
    assert code == 0
    assert [(row["context"], row["method"], row["gamma"]) for row in report["rows"]] == [(n, *rest) for n in (200, 64) for rest in methods]


def test_what_was_given_out_of_a_devices_memory(run, monkeypatch):
    """The most of any device, where JAX says so, as it does not of a CPU."""
    monkeypatch.setattr(decode, "measure", lambda *args, **settings: [decode_rows.DecodeRow("autoregressive", 200, 0, "failed", "no room")])
    for stats, found in (([None], None), ([{}, {"peak_bytes_in_use": 12_340_000_000}, {"peak_bytes_in_use": 5}], 12_340_000_000)):
        devices = [types.SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]
        monkeypatch.setattr(jax, "local_devices", lambda devices=devices: devices)
        assert json.loads(run(*FAST, "--json")[1])["allocated_bytes"] == found
        shown = "JAX had given out at most 12.3 GB of a device's memory at a time." in " ".join(run(*FAST)[1].split())
        assert shown == (found is not None)


@pytest.mark.system
@pytest.mark.parametrize("draft", ["streaming-llm", "snapkv:cache=int8,generated=1"])
def test_a_draft_with_a_cache_of_its_own_is_timed(run, one_layer, draft):
    code, out, _ = run(*FAST, "--draft", draft, "--simulate-ratio", 0.8, "--json")
    baseline, row = json.loads(out)["rows"]
    assert code == 0 and (row["status"], row["note"]) == ("measured", "")
    step = row["steps"]["draft"]
    # The same weights as the baseline's; of 200 tokens 64 or 65, in 2 heads of 256 bytes or less.
    assert step["timing"]["median_us"] > 0 and baseline["steps"]["target"]["bytes"] - step["bytes"] >= 135 * 2 * 256
    assert row["byte_limit"] > 0


@pytest.mark.system
def test_a_step_that_cannot_be_compiled_is_one_row_and_keeps_nothing(one_layer, monkeypatch):
    model = random_model(architecture("tiny"))

    class Broken:
        def compile(self, *args):
            raise MemoryError("no room")

    monkeypatch.setattr(
        decode, "loop", lambda function, trips: Broken() if function is decode_steps._flushed else timing.loop(function, trips)
    )
    monkeypatch.setattr(decode_steps, "loop_trips", lambda seconds: 2)
    cases = [decode_rows.Case(decode_rows.METHODS[name], gamma) for name, gamma in (("quantspec-kv-only", 3), ("autoregressive", 0))]
    held = lambda: sum(array.nbytes for array in jax.live_arrays())
    settings = decode.Settings(32, bandwidth=decode.Bandwidth(20.0), repeats=1)
    rows = decode.measure(model, lambda int4: model, cases, [[1] * 500], settings)
    gc.disable()
    try:
        before = held()
        first = next(rows)
        kept = held() - before
    finally:
        gc.enable()
    assert (first.status, first.note) == ("failed", "MemoryError: no room")
    assert kept < 100_000  # of a cache of 400 kB, which is not made
    (second,) = rows
    assert (second.method, second.status) == ("autoregressive", "measured")


@pytest.mark.system
def test_a_draft_beside_layers_with_a_window_is_timed(run, tmp_path):
    window = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}
    config = ARCHITECTURES["tiny"] | window | {"num_hidden_layers": 2, "max_window_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    flags = ["--random-weights", "--draft", "sparse:budget=0.5", "--gamma", 3, "--context", 200, "--max-new-tokens", 16, "--repeats", 1]
    code, out, _ = run("bench", "decode", "--model", tmp_path, *flags, "--simulate-ratio", 0.8, "--json")
    _, row = json.loads(out)["rows"]
    assert code == 0 and (row["status"], row["note"]) == ("measured", "") and row["steps"]["flush due"]["timing"]["median_us"] > 0


@pytest.mark.system
def test_random_weights_need_no_more_than_a_config(run, one_layer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURES["tiny"]), encoding="utf-8")
    flags = ["--random-weights", "--method", "autoregressive", "--context", 64, "--max-new-tokens", 32, "--repeats", 1, "--json"]
    target_bytes = {}
    for weights in ([], ["--weights", "packed"], ["--weights", "packed:head_bits=8"]):
        code, out, err = run("bench", "decode", "--model", tmp_path, *flags, *weights)
        (row,) = json.loads(out)["rows"]
        assert (code, err, row["status"]) == (0, "", "measured") and ("INT4" in json.loads(out)["model"]) == bool(weights)
        target_bytes["".join(weights)] = row["steps"]["target"]["bytes"]
        assert ("head in INT8" in json.loads(out)["model"]) == ("head" in "".join(weights))
    # 1.5 bytes less of each weight, but for two parameters in a group of 128.
    linears = 256 * (256 + 2 * 128 + 256) + 3 * 256 * 512  # of its one layer
    assert target_bytes[""] - target_bytes["--weightspacked"] == linears * 3 // 2 - linears // 128 * 4
    code, _, err = run("bench", "decode", "--model", tmp_path, *flags, "--weights", "dequantized")
    assert code == 2 and "--weights dequantized needs a quantized checkpoint" in err


@pytest.mark.system
def test_table_of_real_acceptance(run, one_layer, tmp_path, caplog):
    path = tmp_path / "decode.png"
    plot = ["--plot", path] if importlib.util.find_spec("matplotlib") else []
    code, out, _ = run(*FAST, "--method", "autoregressive", "--method", "quantspec-kv-only", *plot)
    assert code == 0 and path.exists() == bool(plot) and "Batch 1, greedy" in out
    assert "--simulate-ratio" in caplog.text
    assert "SIMULATED" not in out and "(sim.)" not in out
    assert "quantspec-kv-only" in out and "flush not due" in out and "1.00x" in out


def test_a_simulation_says_so(run, monkeypatch, tmp_path, caplog):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    timed = timing.Timing(10.0, 9.0, 11.0, 1, 1, 1, "")
    steps = {name: decode_rows.StepTiming(timed, 1000, 0.5) for name in ("target", "draft")} | {
        "sampling": decode_rows.StepTiming(timed, 0, 0.0)
    }

    def measured(model, drafts, cases, prompts, settings, **others):
        figures = dict(prefill_s=0.1, compile_s=2.0, decode_s=0.5, new_tokens=100, rounds=40, flushes=2, acceptance_ratio=0.8)
        figures |= dict(tokens_per_second=200.0, ms_per_token=5.0, cache_bytes=1000, peak_memory_bytes=2000, steps=steps)
        simulated = dict(simulated_rate=settings.rate, simulated_ratio=ratio_of_rate(settings.rate, 3))
        return [decode_rows.DecodeRow(case.method.name, len(prompts[0]), case.gamma, "measured", **simulated, **figures) for case in cases]

    monkeypatch.setattr(decode, "measure", measured)
    path = tmp_path / "decode.png"
    code, out, _ = run(*FAST, "--method", "quantspec", "--simulate-ratio", 0.8, "--plot", path)
    assert code == 0 and "on average 0.800 of those drafted" in " ".join(out.split())
    assert " 0.0000010 " in out and " 0.0000020 " in out  # GB
    assert decode_report._gigabytes(0) == "0.00" and decode_report._gigabytes(70_900_000_000) == "70.90"
    assert "SIMULATED" in out and out.count("0.800 (sim.)") == 1 and "--simulate-ratio" not in caplog.text
    assert path.read_bytes().startswith(b"\x89PNG")
    each = ["--context", 64, "--simulate-ratio", 0.8, "--simulate-ratio", 0.9]  # beside the first context's 200
    code, out, _ = run(*FAST, *each, "--method", "quantspec")
    lines = [" ".join(line.split()) for line in out.splitlines() if "SIMULATED" in line]
    assert [(line.split(":")[0], line.split("average ")[1][:5]) for line in lines] == [
        ("Acceptance is SIMULATED at 200 tokens", "0.800"),
        ("Acceptance is SIMULATED at 64 tokens", "0.900"),
    ]


@pytest.mark.parametrize(
    ("baselines", "speedups"),
    [({"bits": 4.0, "tokens": 3.0}, {"bits": 2.0, "tokens": 3.0}), ({"tokens": 3.0}, {"bits": 1.5, "tokens": 3.0})],
)
def test_a_row_is_compared_with_the_baseline_of_its_bits(baselines, speedups):
    """Or with the one that there is."""
    own = {"bits": 2.0, "tokens": 1.0}
    row = lambda method, exact, ms: decode_rows.DecodeRow(method, 64, 1, "measured", exact=exact, ms_per_token=ms)
    rows = [row("autoregressive", exact, ms) for exact, ms in baselines.items()] + [row("sparse", exact, ms) for exact, ms in own.items()]
    other = row("another program", None, 6.0)  # beside the baseline of exact tokens, which there is in both cases
    found = {each.exact: each.speedup for each in decode_rows.compared([*rows, other]) if each.method != "autoregressive"}
    assert found == speedups | {None: 0.5}


@pytest.mark.system
def test_exact_bits_and_tokens_in_one_run(run):
    code, out, _ = run(*FAST, "--methods", "autoregressive", "--exact", "bits", "--exact", "tokens")
    words = [line.split() for line in out.splitlines()]
    assert code == 0 and "With exact bits" not in out
    assert [line[3] for line in words if line[1:3] == ["autoregressive", "0"] and "target" not in line and "sampling" not in line] == [
        "bits",
        "tokens",
    ]


def test_long_drafts_leave_room_for_the_figures(run, monkeypatch):
    def measured(model, int4, cases, prompts, settings, **_):
        steps = {"target": decode_rows.StepTiming(timing.Timing(1000.0, 1000.0, 1000.0, 1, 1, 1, ""), 4000, 0.5)}
        figures = dict(decode_s=1.0, new_tokens=147, rounds=49, prefill_s=1.0, tokens_per_second=200.0, ms_per_token=5.0)
        figures |= dict(
            simulated_rate=settings.rate, simulated_ratio=0.75, acceptance_ratio=0.75, cache_bytes=1000, peak_memory_bytes=2000, steps=steps
        )
        exact = itertools.cycle(("bits", "tokens"))
        rows = [decode_rows.DecodeRow(case.method.name, len(prompts[0]), case.gamma, "measured", **figures) for case in cases]
        return [dataclasses.replace(row, exact=next(exact)) for row in rows]

    monkeypatch.setattr(decode, "measure", measured)
    draft = "cascade:first=(eagle3:model=random,window=1020,weight_bits=4),middle=(sparse:budget=0.1,weight_bits=16)"
    code, out, _ = run(*FAST, "--draft", draft, "--simulate-acceptance", 0.8)
    words = out.split()
    assert "With exact bits: autoregressive; the others with exact tokens." in " ".join(words)
    assert code == 0 and "0.750 (sim.)" in out and {"accepted", "tokens/s", "peak", "0.0000020", "1,000.0"} <= {*words}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--arch", "gpt"], ["gpt", "llama-3.1-8b"]),
        (["--arch", "tiny", "--model", "x"], ["--arch", "--model"]),
        ([], ["--arch", "--model"]),
        (["--arch", "tiny", "--method", "medusa"], ["medusa", "quantspec-kv-only"]),
        (["--arch", "tiny", "--gamma", 16], ["--gamma 16"]),
        (["--arch", "tiny", "--gamma", 7, "--max-new-tokens", 31], ["--max-new-tokens 31", "32, four rounds of --gamma 7"]),
        (["--arch", "tiny", "--simulate-ratio", 0.5, "--simulate-acceptance", 0.5], ["--simulate-ratio"]),
        (["--arch", "tiny", "--simulate-ratio", 1.5], ["--simulate-ratio"]),
        (["--arch", "tiny", "--simulate-inner-acceptance", 0.5], ["--simulate-inner-acceptance needs"]),
        (
            ["--arch", "tiny", "--context", 64, "--simulate-acceptance", 0.9, "--simulate-inner-acceptance", 0.5],
            ["themselves verify, such as cascade"],
        ),
        (["--arch", "tiny", "--simulate-ratio", 0.5, "--simulate-ratio", 0.6], ["--simulate-ratio", "2 times for 1 contexts"]),
        (["--arch", "tiny", "--context", 0], ["--context"]),
        (
            ["--arch", "tiny", "--context", 64, "--context", 1 << 20],
            ["--context of 1048576 tokens and 640 new ones", "model's 1048576 positions"],
        ),
        (["--arch", "tiny", "--layers", 3], ["3 layers of tiny should be from 1 to 2"]),
        (["--arch", "tiny", "--layers", 1, "--transformers"], ["--layers needs --arch"]),
        (["--model", "x", "--layers", 1], ["--layers needs --arch"]),
        (["--arch", "tiny", "--batch-size", 0], ["--batch-size"]),
        (["--arch", "tiny", "--batch-size", 1, "--batch-size", 4, "--transformers"], ["--transformers", "one row", "--batch-size"]),
        (["--arch", "tiny", "--simulate-ratio", 0.5, "--gamma", 2, "--gamma", 3], ["--simulate-ratio", "--gamma"]),
        (["--arch", "tiny", "--methods", "autoregressive,medusa"], ["medusa"]),
        (["--model", "no/such/folder"], ["no/such/folder"]),
        (["--model", "no/such/folder", "--random-weights"], ["no/such/folder"]),
        (["--model", "no/such/folder", "--random-weights", "--transformers"], ["--transformers", "--random-weights"]),
    ],
)
def test_bad_flags(fails, flags, words):
    fails(["bench", "decode", *flags], *words)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize("command", ["decode", "batch"])
def test_large_shapes_need_a_gpu(fails, command):
    said = "--arch llama-3.1-8b needs a GPU, and JAX finds none; --arch tiny runs anywhere"
    fails(["bench", command, "--arch", "llama-3.1-8b"], said)
