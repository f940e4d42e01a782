"""`qspec bench states`: what runs in each way, and what is made of its times."""

import json

import pytest

from qspec_jax.bench import states
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.generate import generate

SIZES = ["--question-tokens", 8, "--answer-tokens", 6, "--sample-tokens", 6, "--repeats", 2]
FAST = ["bench", "states", "--arch", "tiny", "--context", 300, *SIZES]


@pytest.mark.system
def test_what_is_read_and_generated(monkeypatch, run, one_layer):
    """A document is read once from a state, and for each question else; warming up is not timed."""
    batches, generated = [], []

    def batch_of(model, requests, **settings):
        batches.append([(tuple(request.tokens[:300]), len(request.tokens), request.prefix) for request in requests])
        return run_batch(model, requests, **settings)

    def generate_of(model, prompts, *, config, **settings):
        generated.append((type(prompts[0]).__name__, len(prompts[0]), config.max_new_tokens, config.num_return_sequences))
        return generate(model, prompts, config=config, **settings)

    monkeypatch.setattr(states, "run_batch", batch_of)
    monkeypatch.setattr(states, "generate", generate_of)
    draft = ["--draft", "quantspec", "--gamma", 3, "--simulate-ratio", 0.5]
    more = ["--documents", 3, "--questions", 2, "--samples", 3, "--read-again", 2, *draft]
    code, out, err = run(*FAST, *more, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["draft"], report["cache"], report["gamma"], report["dtype"]) == ("quantspec", "int8", 3, "bfloat16")
    rows = {(row["task"], row["way"]): row for row in report["rows"]}
    assert [row["count"] for row in rows.values()] == [2, 2, 6, 2, 3, 3] and list(rows)[::2] == [(task, states.STATE) for task in TASKS]
    assert [row["new_tokens"] for row in rows.values()] == [2, 2, 36, 12, 18, 18]
    assert all(row["seconds_each"] == pytest.approx(row["seconds"] / row["count"]) for row in report["rows"][2:])
    ratios = [rows[task, states.AGAIN]["seconds_each"] / rows[task, states.STATE]["seconds_each"] for task in TASKS]
    assert report["speedups"] == [[300, task, pytest.approx(ratio)] for task, ratio in zip(TASKS, ratios, strict=True)]
    assert generated == [("State", 308, 1, 1)] * 3 + [("list", 308, 1, 1)] * 3 + [("list", 300, 6, 3)] * 2
    _, of_states, _, again, *samples = batches
    assert [prefix for _, _, prefix in of_states] == [300] * 6 and [row[1:] for row in again] == [(308, 0)] * 2
    documents = [document for document, _, _ in of_states]
    assert len(set(documents)) == 3 and documents[::2] == documents[1::2] and [row[0] for row in again] == [documents[0], documents[3]]
    assert [row[1:] for row in samples[1]] == [(300, 0)] * 3
    # 300 tokens are 3 groups of 64 and a buffer. Pages that 3 samples share count once: INT8 of a layer and 2 heads, and their scales.
    shared, apart = (rows[states.SAMPLES, way]["kv_bytes"] for way in (states.STATE, states.AGAIN))
    page = 2 * 2 * 64 * 64
    assert 1.0 < (apart - shared) / (2 * 3 * page) < 1.2
    assert rows[states.QUESTIONS, states.STATE]["acceptance_rate"] > 0.1


TASKS = (states.FIRST_TOKEN, states.QUESTIONS, states.SAMPLES)


@pytest.mark.system
def test_the_table_and_the_plot(run, one_layer, tmp_path):
    flags = ["--context", 40, "--questions", 2, "--samples", 0, "--draft", "none", "--batch-size", 2, "--plot", tmp_path / "a.svg"]
    code, out, err = run(*FAST, *flags)
    assert code == 0, err
    assert err.count(" tokens, questions, from a state: ") == err.count(" tokens, first token, read again: ") == 2
    lines = [line.split() for line in out.splitlines()]
    assert [line[:3] for line in lines if line[1:3] == ["first", "token"]] == [[n, "first", "token"] for n in ("300", "300", "40", "40")]
    assert "samples" not in [line[1] for line in lines if len(line) > 6 and line[0].isdecimal()]
    assert "cache full" in out and "seconds a question and its answer" not in out
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()[:400]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--arch", "tiny", "--file", "x"], "leave out --model, --file and --dtype"),
        (["--arch", "tiny", "--simulate-ratio", 0.5], "--simulate-ratio needs a --draft whose number of drafts is known, not auto"),
        (["--simulate-ratio", 0.5, "--temperature", 1, "--draft", "quantspec"], "leave out --temperature"),
        (["--draft", "sparse", "--cache", "full"], "compatible caches: int8"),
        (["--context", 8190], "exceed the model's 8192 positions"),
        (["--gamma", 0], "--gamma 0 should be from 1"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(fails, flags, words):
    fails(["bench", "states", *flags], words)
