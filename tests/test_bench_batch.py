"""`qspec bench batch`: every way the same tokens, and how busy the slots are."""

import json
import re

import jax
import numpy as np
import pytest

from qspec_jax.bench import batch
from qspec_jax.bench.batch import make_requests
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.state import DecodeState
from qspec_jax.errors import InputError

SIZES = ["--prompts", 5, "--batch-size", 2, "--prompt-tokens", "4-9", "--new-tokens", "3-12"]


@pytest.mark.system
def test_json(run, one_layer, monkeypatch):
    waited_for, wait = [], jax.block_until_ready
    monkeypatch.setattr(batch.jax, "block_until_ready", lambda tree: waited_for.append(tree) or wait(tree))
    flags = ["--arch", "tiny", *SIZES, "--simulate-ratio", 0.8, "--gamma", 2, "--one-by-one", "--json"]
    code, out, err = run("bench", "batch", *flags)
    report = json.loads(out)
    assert (code, err, report["prompts"], report["batch_size"], report["gamma"]) == (0, "", 5, 2, 2)
    assert (report["draft"], report["cache"]) == ("quantspec", "int8")
    assert 0.8 < report["simulated_rate"] < 1  # given those before, so more than the share of all
    full, fixed, alone = report["rows"]
    assert [row["way"] for row in report["rows"]] == ["refilled", "fixed", "one by one"]
    assert len({row["stats"]["busy_rounds"] for row in report["rows"]}) == 1 and alone["busy_slots"] == 1
    assert full["stats"]["rounds"] <= fixed["stats"]["rounds"] <= alone["stats"]["rounds"]
    assert [row["same_tokens"] for row in report["rows"]] == [1, 1, 1]
    assert full["stats"]["compile_s"] == fixed["stats"]["compile_s"] == 0
    assert report["speedup"] == pytest.approx(full["tokens_per_second"] / fixed["tokens_per_second"])
    stats, took = full["stats"], full["stats"]["prefill_s"] + full["stats"]["decode_s"]
    assert 0 < stats["full_rounds"] < stats["rounds"] and 0 < stats["full_decode_s"] < stats["decode_s"]
    assert report["decode_alone_s"] == pytest.approx(stats["busy_rounds"] / 2 * stats["full_decode_s"] / stats["full_rounds"])
    assert report["prefill_alone_s"] > 0 and sum(isinstance(tree, DecodeState) for tree in waited_for) >= 2
    assert report["share_of_parts"] == pytest.approx((report["prefill_alone_s"] + report["decode_alone_s"]) / took)
    held = [row["stats"]["held_bytes"] for row in report["rows"]]
    assert held[0] == held[1] == 2 * held[2] > 0 and report["held_bytes"] > held[0] and report["peak_bytes"] is None
    for row in report["rows"]:
        stats = row["stats"]
        assert stats["prompts"] == 5 and row["tokens_per_second"] == pytest.approx(
            stats["new_tokens"] / (stats["prefill_s"] + stats["decode_s"])
        )


@pytest.mark.system
def test_table_of_a_checkpoint(run, directory, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("import os\nfor name in os.listdir():\n    print(name)\n" * 3)
    few = ["--prompts", 2, "--batch-size", 8, *SIZES[4:]]
    code, out, _ = run("bench", "batch", "--model", directory, "--file", text, *few, "--dtype", "float32", "--gamma", 2, "--exact", "bits")
    assert "With exact bits" in out
    assert code == 0 and all(word in out for word in ("refilled", "fixed", "slots busy", "times as fast")) and "simulated" not in out
    assert (
        "Batch size 2" in out
        and "exact tokens" not in out
        and next(line for line in out.splitlines() if line.startswith("refilled")).split()[6] == "0.0"
    )


@pytest.mark.system
def test_exact_bits_beside_exact_tokens_in_one_run(run, directory, tmp_path):
    """In whatever order they are given; each way has the tokens that it has alone, and had its programs compiled before."""
    text = tmp_path / "text.txt"
    text.write_text("import os\nfor name in os.listdir():\n    print(name)\n" * 3)
    base = ["bench", "batch", "--model", directory, "--file", text, "--prompts", 3, *SIZES[2:], "--dtype", "bfloat16", "--no-fixed"]
    code, out, _ = run(*base, "--exact", "tokens", "--exact", "bits", "--json")
    report = json.loads(out)
    refilled, usual = report["rows"]
    assert (code, report["exact"], refilled["way"], usual["way"]) == (0, "bits", "refilled", "exact tokens")
    assert refilled["stats"]["compile_s"] == usual["stats"]["compile_s"] == 0
    assert report["bits_speedup"] == pytest.approx(refilled["tokens_per_second"] / usual["tokens_per_second"])
    assert refilled["stats"]["new_tokens"] == usual["stats"]["new_tokens"]
    alone = json.loads(run(*base, "--exact", "tokens", "--json")[1])
    assert (alone["exact"], alone["bits_speedup"], len(alone["rows"])) == ("tokens", None, 1)
    assert alone["rows"][0]["stats"]["rounds"] == usual["stats"]["rounds"]
    code, _, err = run(*base, "--exact", "bit")
    assert code == 2 and "bit" in err and "tokens" in err


@pytest.mark.system
def test_memory_in_use_is_told_where_the_device_says(run, one_layer, monkeypatch):
    says = type("Device", (), {"memory_stats": lambda self: {"peak_bytes_in_use": 3_210_000_000}, "device_kind": "GPU"})
    monkeypatch.setattr(batch.jax, "local_devices", lambda: [says()])
    code, out, _ = run("bench", "batch", "--arch", "tiny", "--prompts", 2, *SIZES[2:], "--simulate-ratio", 0.8)
    words = " ".join(out.split())
    assert code == 0 and re.search(r"In use at most 3\.21 GB, of which weights, draft and what refilled rows held 0\.0\d GB\.", words)


def test_requests_are_log_uniform_and_of_their_seed():
    source = list(range(3000))
    make = lambda seed: make_requests([source], 400, (16, 2048), (16, 512), GenerationConfig(draft="quantspec"), seed=seed)
    requests = make(0)
    same = make(0)
    assert [r.tokens for r in requests] == [r.tokens for r in same] != [r.tokens for r in make(1)]
    for lengths, low, high in (
        ([len(r.tokens) for r in requests], 16, 2048),
        ([r.config.max_new_tokens for r in requests], 16, 512),
    ):
        assert low <= min(lengths) and max(lengths) <= high
        middle = np.sqrt(low * high)
        assert 0.4 < np.mean(np.array(lengths) < middle) < 0.6
    assert all(r.tokens == source[r.tokens[0] : r.tokens[0] + len(r.tokens)] for r in requests)
    with pytest.raises(InputError, match="no text has 2048 tokens"):
        make_requests([source[:100]], 1, (16, 2048), (16, 512), GenerationConfig(draft="quantspec"), seed=0)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--model"),
        (["--arch", "tiny", "--model", "x"], "--model"),
        (["--arch", "huge"], "huge"),
        (["--arch", "tiny", "--prompt-tokens", "9-4"], "9-4"),
        (["--arch", "tiny", "--new-tokens", "1-4"], "1-4"),
        (["--arch", "tiny", "--prompt-tokens", "0-4"], "0-4"),
        (["--arch", "tiny", "--new-tokens", "many"], "many"),
        (["--arch", "tiny", "--prompt-tokens", "1-99999999"], "positions"),
        (["--arch", "tiny", "--file", "x"], "--file"),
        (["--arch", "tiny", "--dtype", "float32"], "--dtype"),
        (["--arch", "tiny", "--gamma", "0"], "--gamma"),
        (["--arch", "tiny", "--draft", "auto"], "name a draft here"),
        (["--arch", "tiny", "--simulate-ratio", "0.9", "--temperature", "1"], "--simulate-ratio"),
    ],
)
def test_bad_flags(fails, flags, word):
    fails(["bench", "batch", *flags], word)
