"""`qspec bench decode` over caches in host memory, lossy caches, and caches that are not the draft's usual one."""

import json

import pytest
from bench_commands import FAST

from qspec_jax import host
from qspec_jax.bench import decode, decode_report, decode_rows
from qspec_jax.bench.architectures import architecture

pytestmark = pytest.mark.usefixtures("short_loops")


def test_what_is_in_host_memory_is_copied(run, one_layer, monkeypatch):
    flags = ["--method", "autoregressive", "--baseline-cache", "full:host=all"]
    reports, table = [], decode_report.DecodeReport.table
    monkeypatch.setattr(decode_report.DecodeReport, "table", lambda report: reports.append(report) or table(report))
    code, out, err = run(*FAST, *flags)
    (report,) = reports
    (row,) = report.rows
    assert (code, row.status, row.speedup) == (0, "measured", 1.0), err
    held, step = (200 + 150 + 1) * 2 * 2 * 64 * 2, row.steps["target"]
    assert step.host_bytes == row.cache_bytes >= held
    floor_us = max(step.bytes / report.read_bandwidth_gb_per_s, step.host_bytes / report.copy_bandwidth_gb_per_s) / 1e3
    assert step.floor_us == pytest.approx(floor_us)
    assert "GB/s of host memory" in " ".join(out.split()) and "MB copied" in out


@pytest.mark.system
def test_a_baseline_that_host_memory_cannot_hold(run, one_layer, monkeypatch):
    """Its step copies as many bytes as that of one that is there; another method over such a cache has a row that says so."""
    flags = [*FAST, "--draft", "none", "--cache", "full:host=all", "--baseline-cache", "full:host=all,resident=0", "--json"]
    found = {}
    for free in (1 << 40, 1000):
        monkeypatch.setattr(host, "free_bytes", lambda free=free: free)
        code, out, err = run(*flags)
        found[free] = json.loads(out)["rows"]
        assert code == 0, err
    (_, there), (step, without) = found.values()
    assert (there["status"], step["status"], without["status"]) == ("measured", "measured", "failed")
    assert "GB of host memory for these prompts" in without["note"] and without["speedup"] is None
    assert "host memory cannot hold its cache" in step["note"] and "of 1 layers, from the arrays of 1, again" in step["note"]
    assert step["large_operations"] is None and there["large_operations"] is not None and there["cache"] == "full:host=all,resident=0"
    for name in ("bytes", "host_bytes"):
        assert step["steps"]["target"][name] == there["steps"]["target"][name] > 0
    assert step["cache_bytes"] == there["cache_bytes"] and step["ms_per_token"] == step["steps"]["target"]["timing"]["median_us"] / 1e3


@pytest.mark.system
def test_lossy_caches(run, one_layer, caplog):
    """What a pass over them reads is counted, and what it fetches from host memory, the guess included."""
    caches = ("kivi:bits=1,residual=64", "specache:bits=1,residual=64,k=8,host=store", "specache:bits=1,residual=64,k=8,fetch=now")
    flags = [flag for cache in caches for flag in ("--cache", cache)]
    code, out, err = run(*FAST, "--draft", "none", *flags, "--json")
    rows = {(row["method"], row["gamma"]): row for row in json.loads(out)["rows"]}
    assert (code, {row["status"] for row in rows.values()}) == (0, {"measured"}), err
    assert list(rows) == [("autoregressive", 0), *((f"none, {cache}", 0) for cache in caches)]
    for row in rows.values():
        assert row["byte_limit"] > 0 and row["tokens_per_second"] < row["tokens_per_second_limit"]
    kivi, host, now = list(rows.values())[1:]
    due, other = (kivi["steps"][name]["timing"]["median_us"] for name in ("flush due", "flush not due"))
    assert due > 2 * other
    shape = architecture("tiny")
    read = lambda row: (row["steps"]["target"]["bytes"], row["steps"]["target"]["host_bytes"])
    fetched = shape.num_layers * 8 * shape.num_kv_heads * 2 * shape.head_dim * 2
    assert read(kivi)[1] == read(now)[1] == 0
    assert read(now)[0] == read(kivi)[0] + 2 * fetched
    assert 0 < read(host)[0] - read(kivi)[0] - fetched < 5000 and read(host)[1] == fetched  # besides, the guess's own key and value


@pytest.mark.system
def test_a_draft_over_a_lossy_cache(run, one_layer):
    """With the weights of the target it reads what one step of the target over the same cache reads."""
    code, out, err = run(*FAST, "--draft", "none", "--draft", "quantspec:weight_bits=16", "--cache", "kivi:bits=1,residual=64", "--json")
    _, without, drafting = (row["steps"] for row in json.loads(out)["rows"])
    assert code == 0 and drafting["draft"]["bytes"] == without["target"]["bytes"] < drafting["target"]["bytes"], err


@pytest.mark.parametrize(
    "asked", [["--methods", "autoregressive"], ["--draft", "none", "--cache", "kivi"], ["--draft", "none", "--cache", "specache"]]
)
def test_few_new_tokens_are_enough_where_nothing_is_drafted(run, one_layer, monkeypatch, caplog, asked):
    """Nor is there anything to accept, of which the report could warn."""
    measured = lambda model, int4, cases, *_, **__: [decode_rows.DecodeRow("", 4096, case.gamma, "failed") for case in cases]
    monkeypatch.setattr(decode, "measure", measured)
    command = ["bench", "decode", "--arch", "tiny", *asked, "--max-new-tokens", 16, "--json"]
    code, out, err = run(*command)
    assert code == 0 and {row["gamma"] for row in json.loads(out)["rows"]} == {0}, err
    assert "acceptance" not in caplog.text and "--gamma" not in caplog.text
    assert run(*command, "--gamma", 4)[0] == 0 and "--gamma makes no difference" in caplog.text


def test_methods_over_other_caches(fails):
    found = decode_rows.select_methods([], ["quantspec", "none"], ["int8:host=lower", "int8"], baseline_cache="full:host=all")
    assert [(method.name, method.cache, method.draft) for method in found] == [
        ("autoregressive", "full:host=all", "none"),
        ("quantspec, int8:host=lower", "int8:host=lower", "quantspec"),
        ("quantspec, int8", "int8", "quantspec"),
        ("none, int8:host=lower", "int8:host=lower", "none"),
        ("none, int8", "int8", "none"),
    ]
    over_kivi = decode_rows.select_methods([], ["sparse", "snapkv"], ["kivi", "int8"])[1:]
    assert [method.name for method in over_kivi] == ["sparse, int8", "snapkv, kivi", "snapkv, int8"]
    without = decode_rows.select_methods([], ["quantspec"], ["full", "kivi", "specache"])[1:]
    assert [method.name for method in without] == ["quantspec, full", "quantspec, kivi"]
    fails([*FAST, "--draft", "sparse", "--cache", "kivi"], "draft sparse reads groups")
    fails([*FAST, "--draft", "quantspec", "--draft", "magic"], "draft 'magic' should be one of")
    fails([*FAST, "--cache", "int8"], "--cache is the cache of drafts; give one with --draft")
    fails([*FAST, "--draft", "quantspec", "--cache", "int9"], "cache 'int9' should be one of full, ")
    fails([*FAST, "--baseline-cache", "full:guest"], "'guest' should be one of host=none|all, resident=...")
    fails([*FAST, "--method", "quantspec", "--baseline-cache", "full:host=all"], "--baseline-cache is of the method autoregressive")
