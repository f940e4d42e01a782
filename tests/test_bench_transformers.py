"""`qspec bench decode` beside transformers."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from bench_commands import FAST

from qspec_jax.bench import decode, decode_rows, transformers_decode
from qspec_jax.bench.architectures import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("short_loops")


def test_transformers_beside(run, monkeypatch, directory):
    """Rows of a process that is not started here; those of a failed one say why."""
    asked = []

    def start(command, *, input, **_):
        asked.append(json.loads(input))
        found = {"status": "measured", "prefill_s": 0.5, "compile_s": 1.0, "decode_s": 2.0, "ms_per_token": 1e3, "new_tokens": 2}
        return subprocess.CompletedProcess(command, code, json.dumps(found), "Traceback\nRuntimeError: no room\n")

    monkeypatch.setattr(transformers_decode, "check", lambda: None)
    monkeypatch.setattr(transformers_decode.subprocess, "run", start)
    baseline = decode_rows.DecodeRow("autoregressive", 200, 0, "measured", ms_per_token=2.0)
    monkeypatch.setattr(decode, "measure", lambda *args, **settings: [baseline])
    flags = ["--context", 200, "--methods", "autoregressive", "--transformers", "--json"]  # twice the same context
    for code, status, note in (0, "measured", ""), (1, "failed", "RuntimeError: no room"), (-9, "failed", "killed by signal 9"):
        exit_code, out, _ = run(*FAST, *flags)
        ours, theirs = json.loads(out)["rows"]
        assert exit_code == 0 and (ours["method"], theirs["method"], theirs["context"]) == ("autoregressive", "transformers", 200)
        assert (theirs["status"], theirs["note"]) == (status, note)
        assert theirs["speedup"] == (pytest.approx(2e-3) if code == 0 else None)
    assert asked == [{"config": ARCHITECTURES["tiny"], "context": 200, "dtype": "bfloat16", "way": "one by one", "seed": 0}] * 3
    code, _, err = run("bench", "decode", "--model", directory, "--max-new-tokens", 16, "--context", 64, *flags[2:])
    assert code == 0, err
    assert asked[3]["directory"] == str(directory.resolve())


def test_a_checkpoint_for_transformers_is_never_a_shape_of_ours(monkeypatch, tmp_path):
    asked = []

    def start(command, *, input, **_):
        asked.append(json.loads(input))
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers_decode.subprocess, "run", start)
    row = transformers_decode.measure(Path("tiny"), 64, dtype="float32")
    assert (row.status, row.note) == ("failed", "exit code 1")
    assert asked == [{"directory": str(tmp_path / "tiny"), "context": 64, "dtype": "float32", "way": "one by one", "seed": 0}]


def test_ways_of_transformers(run, fails, monkeypatch, directory):
    """Each is a row: with drafts, and with a quantized cache."""
    asked = []

    def measure(source, context, *, dtype, way, seed):
        asked.append((context, way))
        return decode_rows.DecodeRow(way, context, 0, "measured", ms_per_token=1.0)

    monkeypatch.setattr(transformers_decode, "check", lambda: None)
    monkeypatch.setattr(transformers_decode, "measure", measure)
    monkeypatch.setattr(decode, "measure", lambda *args, **settings: [])
    ways = ["--transformers-draft", "prompt-lookup", "--transformers-draft", directory, "--transformers-quantized"]
    code, out, err = run(*FAST, "--context", 200, "--methods", "autoregressive", *ways, "--json")
    assert code == 0, err
    assert asked == [(200, way) for way in ("one by one", "prompt-lookup", str(directory), "quantized cache")]
    assert [row["method"] for row in json.loads(out)["rows"]] == [way for _, way in asked]
    fails(["bench", "decode", "--arch", "tiny", "--transformers-draft", "lookup"], "--transformers-draft lookup: should be prompt-lookup")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("way", ["one by one", "prompt-lookup", "assisted"])
def test_transformers_tokens_are_timed(way, directory):
    is_assisted = way == "assisted"  # by itself: both need the same tokens
    model = transformers_decode.load(str(directory) if is_assisted else ARCHITECTURES["tiny"], "float32")
    options, _ = transformers_decode._options(model, str(directory) if is_assisted else way)
    times, counts, tokens = transformers_decode.decode_times(model, [1, 2, 3], 5, **options)
    assert min(times) > 0 and len(times) == len(counts) and sum(counts) == len(tokens) == 5


def test_transformers_needs_torch(fails, monkeypatch):
    monkeypatch.setattr(transformers_decode.importlib.util, "find_spec", lambda name: None)
    fails(["bench", "decode", "--arch", "tiny", "--transformers"], "pip install torch")
