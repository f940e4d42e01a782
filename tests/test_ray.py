"""Batches on a Ray cluster of this machine: the output of one undisturbed process, whoever is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import sharing
from ray.data import block

from qspec_jax.cli import batch as batch_command
from qspec_jax.decoding import ray_data
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.jsonl import Columns, as_line, read_lines
from qspec_jax.errors import InputError
from qspec_jax.files import to_json

pytestmark = pytest.mark.system

ROOT = Path(__file__).parent.parent


def environment() -> dict[str, str]:
    """The environment of a process that starts Ray, and shares what the tests compile."""
    # The workers are nice by 15 otherwise, and would wait for the other tests.
    of_ray = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return os.environ | sharing.environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | of_ray


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    """Greedy and sampled prompts, some with an id, a seed and log-probabilities, and one that is wrong."""
    r, path = random.Random(0), tmp_path_factory.mktemp("ray") / "in.jsonl"
    said = [
        {"prompt": "import os\n" * r.choice([1, 3]), "max_new_tokens": r.choice([4, 9, 20]), "temperature": r.choice([0, 0.8])}
        for _ in range(60)
    ]
    said[3] |= {"id": "a", "seed": 7, "temperature": 1.0}
    said[4] |= {"top_logprobs": 2, "output_logprobs": True}
    said[5] = {"prompt": 3}
    body = {"prompt": "import os", "max_tokens": 5, "logprobs": 1}
    said[6] = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body, "from": "a set"}
    path.write_text("".join(json.dumps(line) + "\n" for line in said))
    return path


def command(source: Path, output: Path, model: Path, *flags: object) -> list[str]:
    settings = ["--model", model, "--dtype", "float32", "--batch-size", 2, "--draft", "quantspec", "--on-error", "skip"]
    settings += ["--pass-columns", "from", *flags]
    return [sys.executable, "-m", "qspec_jax.cli", "batch", *map(str, (source, output, *settings))]


def workers() -> list[int]:
    """The processes of predictors, by the titles that Ray gives them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::") and b"_CountedPredictor" in title:
            found.append(int(process.name))
    return found


def _within(seconds: float, holds: Callable[[], object]) -> bool:
    until = time.monotonic() + seconds
    while not (held := bool(holds())) and time.monotonic() < until:
        time.sleep(0.1)
    return held


def test_an_actor_that_is_killed(lines, directory, tmp_path):
    """The output is, byte for byte, that of one process without Ray."""
    alone, ours = tmp_path / "alone.jsonl", tmp_path / "ours.jsonl"
    own = environment() | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}  # where who is killed may leave half a program
    subprocess.run(command(lines, alone, directory), env=own, check=True, capture_output=True, timeout=300)
    process = subprocess.Popen(
        command(lines, ours, directory, "--ray", "local", "--ray-actors", 2), env=own, stderr=subprocess.PIPE, text=True
    )
    assert _within(120, lambda: workers() or process.poll() is not None)
    time.sleep(random.uniform(0, 4))  # of some 10 that they take
    os.kill(random.choice(workers()), signal.SIGKILL)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert ours.read_bytes() == alone.read_bytes() and "line 6" in err
    assert not ours.with_name("ours.jsonl.partial").exists()
    # A worker notices that its cluster is gone, and ends, after the command itself.
    assert _within(60, lambda: not workers()), workers()


def test_a_predictor_of_columns(directory):
    """Rows of a dataset with columns, as users of map_batches have them."""
    predictor = ray_data.Predictor(
        str(directory), GenerationConfig(draft="quantspec", max_new_tokens=6, group_size=8), batch_size=2, dtype="float32"
    )
    columns = {
        "prompt": ["import os", "def", "class", "x"],
        "temperature": [None, 0.9, 0.9, 0.9],
        # As Ray has numbers of which some are missing.
        "max_new_tokens": np.array([3, np.nan, np.nan, np.nan]),
        "line": np.array([np.nan, 5, np.nan, np.nan]),
        "seed": [None, None, 11, None],
    }
    found = predictor(columns)
    assert [json.loads(result).get("token_ids", [None] * 9).__len__() for result in found["result"]] == [3, 6, 6, 9]
    assert found["error"][:3] == [None] * 3 and "should have a seed, or its number as line" in found["error"][3]
    hot = predictor({"prompt": ["a", "b"], "temperature": ["hot", 0], "id": ["x", "y"]})
    assert "temperature should be a number" in hot["error"][0] and json.loads(hot["result"][0])["id"] == "x" and hot["error"][1] is None
    alone = predictor({name: values[1:3][::-1] for name, values in columns.items()})
    assert found["line"] == [None, 5, None, None]
    assert alone["text"] == found["text"][1:3][::-1]


def test_a_row_is_a_line_of_batch(directory, model, tokenizer):
    """As Arrow and Ray hand over what a file says, with what rows lack filled by None and NaN."""
    body = {"prompt": [5, 6], "max_tokens": 3, "logit_bias": {"7": 1}}
    said = [
        {"prompt": "import", "stop_token_ids": [[1, 2], [3]], "logit_bias": {"5": 2.0}, "id": {"a": 1, "of": {"b": 1}}, "level": 3},
        {"prompt": "import", "logit_bias": {"9": 100}, "id": {"c": 1.5}, "banned_token_ids": [9], "answer": "x"},
        {"token_ids": [1, 2], "stop": ["x", "y"], "min_new_tokens": 2, "id": {"of": {"d": "e"}}},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body, "level": 4},
        {"prompt": "import", "temperature": 1.0, "level": 5},
        {"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": body | {"temperature": 1, "seed": 3, "n": 2}},
    ]
    config = GenerationConfig(max_new_tokens=4, draft="none")
    columns = Columns(ignore=True, passed=("level",))
    names = dict.fromkeys(name for row in said for name in row)
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in said])
    rows = block.BlockAccessor.for_block(table).to_numpy()
    predictor = ray_data.Predictor(str(directory), config, ignore_columns=True, pass_columns=["level"])
    found = predictor(rows)
    lines = read_lines("\n".join(map(json.dumps, said)).encode(), model, tokenizer, config, 0, columns=columns)
    results = {result.index: result for result in run_batch(model, [line.request for line in lines[:4]], tokenizer=tokenizer)}
    expected = [as_line(line, [results[i]], tokenizer) for i, line in enumerate(lines[:4])]
    for output in expected:
        output.update({"line": None} if "line" in output else {})
    assert found["result"][:4] == list(map(to_json, expected)) and found["level"] is rows["level"]
    assert found["error"] == [None] * 4 + ["a sampled row should have a seed, or its number as line", None]
    samples = json.loads(found["result"][5])["response"]["body"]["choices"]
    own = sorted(run_batch(model, lines[5].requests(shared=False)), key=lambda result: result.index)
    assert [sample["text"] for sample in samples] == [tokenizer.decode(result.token_ids) for result in own] and len(samples) == 2
    assert found["text"][3] == expected[3]["response"]["body"]["choices"][0]["text"] and found["finish_reason"][3] == "length"
    held = predictor({"prompt": ["a"], "id": [b"bytes"]})
    numbered = predictor({"prompt": ["a", "b"], "line": ["x", "0"]})
    assert numbered["error"][0] == "line should be a whole number from 1, not 'x'" and numbered["line"] == [None, None]
    assert "a column cannot be read (Object of type bytes" in held["error"][0]
    assert "unknown key 'level'" in ray_data.Predictor(str(directory), config)({"prompt": ["a"], "level": [1]})["error"][0]


def test_columns_that_json_has_no_form_for(directory):
    """Left out or passed through they do no harm, and a column may have any name."""
    rows = {
        "prompt": np.array(["import"], object),
        "image": np.array([b"x"], object),
        "when": np.array(["2026-01-01"], "datetime64[D]"),
        "score": np.array([np.inf]),
        "request": np.array(["{}"], object),
    }
    config = GenerationConfig(max_new_tokens=2, draft="none")
    predictor = ray_data.Predictor(str(directory), config, ignore_columns=True, pass_columns=["image", "request"])
    found = predictor(rows)
    assert found["error"] == [None] and found["image"] is rows["image"] and json.loads(found["result"][0])["request"] == "{}"
    (error,) = ray_data.Predictor(str(directory), config)(rows)["error"]
    assert error.startswith("unknown key 'image'")


def test_a_predictor_settles_the_default_once(directory, monkeypatch, caplog):
    """By the device, and not by the rows, so that a row's result depends on the row alone."""
    settled, completed = [], ray_data.completed

    def watched(model, requests, **settings):
        settled.extend(each.config for each in requests)
        return completed(model, requests, **settings)

    monkeypatch.setattr(ray_data, "completed", watched)
    with caplog.at_level("INFO", "qspec_jax.decoding.resolve"):
        predictor = ray_data.Predictor(str(directory), GenerationConfig(max_new_tokens=6), dtype="float32")
        for prompts in (["a"], ["a" * 60, "b"]):
            predictor({"prompt": prompts})
    assert {(each.draft, each.cache_config.kind) for each in settled} == {("none", "int8")} and len(settled) == 3
    assert len(caplog.messages) == 1 and predictor.reader.config.draft == "none"


def test_layers_are_not_chosen_by_the_rows_of_a_block(directory):
    with pytest.raises(InputError, match="draft skip=auto chooses layers by the rows of a block"):
        ray_data.Predictor(str(directory), GenerationConfig(draft="quantspec:skip=auto"))


@pytest.mark.parametrize(("gpus", "draft"), [(0, "none"), (2, "quantspec")])
def test_a_run_on_a_cluster_is_known_by_the_draft_of_its_devices(run, directory, tmp_path, monkeypatch, caplog, gpus, draft):
    sent = []
    monkeypatch.setattr("jax.config.update", lambda *_: None)
    monkeypatch.setattr(batch_command, "connect", lambda address: None)
    monkeypatch.setattr(batch_command, "cluster_gpus", lambda: gpus)
    monkeypatch.setattr(batch_command, "decode_lines_on_ray", lambda todo, content, stored_at, config, *_, **__: sent.append(config) or 0.0)
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab"}\n')
    code, _, err = run(
        "batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", directory, "--max-new-tokens", 4, "--ray", "local"
    )
    assert code == 0, err
    assert [(each.draft, each.cache_config.kind) for each in sent] == [(draft, "int8")]
    (line,) = [line for line in caplog.messages if line.startswith("draft auto")]
    assert line.startswith(f"draft auto: {draft}")


def test_what_does_not_go_with_ray(fails, directory, tmp_path):
    asked = ["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", directory]
    fails([*asked, "--ray", "local", "--draft", "quantspec:skip=auto"], "name a draft and its layers")
    fails([*asked, "--ray", "local", "--adaptive"], "--adaptive needs --draft-cost")
    fails([*asked, "--ray", "local", "--devices", 1], "are for one machine")
    fails([*asked, "--ray-actors", 2], "--ray-actors is for --ray")


def test_no_ray(fails, directory, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("jax.config.update", lambda *_: None)
    (tmp_path / "in.jsonl").touch()
    fails(["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", directory, "--ray", "auto"], 'pip install "qspec-jax[ray]"')


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:1", "nothing answers there"), ("node0", "a host, a colon and a port"), ("ray://node0:port", "such as")],
)
def test_where_no_cluster_is(address, words):
    with pytest.raises(InputError, match=words):
        ray_data.connect(address)


def test_no_cluster(directory, lines, tmp_path):
    asked = command(lines, tmp_path / "out.jsonl", directory, "--ray", "auto")
    done = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and "--ray auto: no cluster can be used there" in done.stderr.splitlines()[-1]
