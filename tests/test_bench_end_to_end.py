"""`qspec bench end-to-end` on a model that a CPU decodes at once: its texts and its reports. No figure of speed is tested."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import pytest
from checkpoints import hf_config, write_checkpoint

from qspec_jax import demo, drafts, plots
from qspec_jax.bench import decode_case, end_to_end
from qspec_jax.bench.decode_rows import DecodeRow, select_methods
from qspec_jax.checkpoints import loading
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.sampling import prompt_keys
from qspec_jax.errors import InputError
from qspec_jax.evaluate import acceptance
from qspec_jax.evaluate.texts import cut, token_stream
from qspec_jax.training import corpus

CONTEXT, NEW, GAMMA = 100, 48, 2
ROWS = [
    (CONTEXT, temperature, method, gamma) for temperature in (0.0, 1.0) for method, gamma in (("autoregressive", 0), ("quantspec", GAMMA))
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A random model of 256 positions and one layer, which compiles fastest, with the embedded model's tokenizer."""
    config = hf_config(vocab_size=4096, max_position_embeddings=256, num_hidden_layers=1)
    return write_checkpoint(tmp_path_factory.mktemp("model"), config, tokenizer=demo.MODEL)


@pytest.fixture(scope="module")
def file() -> Path:
    return corpus.held_out_files()[0]


@pytest.fixture(scope="module")
def stream(directory, file) -> list[int]:
    return token_stream(load_tokenizer(directory), [file.read_text(encoding="utf-8")])


@pytest.fixture(scope="module")
def report(directory, stream) -> end_to_end.EndToEndReport:
    model = loading.load_model(directory, progress=False)
    settings = dict(max_new_tokens=NEW, texts=2, calibrate=False, progress=False)
    return end_to_end.run("random", model, stream, [CONTEXT], [0.0, 1.0], [GAMMA], select_methods([], ["quantspec"]), **settings)


def named(rows: list[DecodeRow]) -> list[tuple]:
    return [(row.context, row.temperature, row.method, row.gamma) for row in rows]


def test_a_stream_has_a_beginning_for_every_text(directory):
    tokenizer = load_tokenizer(directory)
    one, other = (tokenizer(text)["input_ids"] for text in ("import os", "x = 1"))
    assert token_stream(tokenizer, ["import os", "x = 1"]) == [0, *one, 0, *other]
    tokenizer.bos_token = None
    assert token_stream(tokenizer, ["import os", "x = 1"]) == [*one, *other]


def test_texts_are_spread_and_do_not_overlap():
    assert cut(range(35), 10, 2) == [list(range(10)), list(range(25, 35))]
    assert [text[0] for text in cut(range(35), 10, 9)] == [0, 12, 25]
    with pytest.raises(InputError, match=r"35 tokens, and 36 .* --file"):
        cut(range(35), 36, 2)


@pytest.mark.system
def test_rows(report):
    assert named(report.rows) == ROWS
    assert {(row.status, row.note) for row in report.rows} == {("measured", "")}
    for i in (0, 2):
        baseline, quantspec = report.rows[i : i + 2]
        assert baseline.acceptance_ratio is None and 0 < quantspec.acceptance_ratio <= 1
        assert (baseline.speedup, quantspec.speedup) == (1, pytest.approx(baseline.ms_per_token / quantspec.ms_per_token))
        # Of both texts; the first token is prefill's, and two rounds warm up.
        assert baseline.new_tokens == baseline.rounds == 2 * (NEW - 3)
        assert quantspec.rounds < quantspec.new_tokens < 2 * (NEW - 3)
        assert quantspec.ms_per_token == pytest.approx(1e3 * quantspec.decode_s / quantspec.new_tokens)
        # At 128 tokens a group is full, and so is the next.
        assert (baseline.flushes, quantspec.flushes) == (0, 2)
        assert baseline.steps == quantspec.steps == {} and baseline.byte_limit is None
    greedy, sampled = report.rows[0], report.rows[2]
    assert sampled.repeated_ngrams == 0 and greedy.repeated_ngrams is not None


@pytest.mark.system
def test_teacher_forced_acceptance_is_that_of_the_evaluation(report, directory, stream):
    model = loading.load_model(directory, progress=False)
    texts = [stream[: CONTEXT + NEW], stream[-CONTEXT - NEW :]]
    for temperature, walk in zip((0.0, 1.0), report.teacher_forced, strict=True):
        config = GenerationConfig(draft="quantspec", max_new_tokens=NEW, num_speculative_tokens=GAMMA, temperature=temperature)
        expected = acceptance.teacher_forced(model, drafts.quantspec(model), texts, config, jax.random.key(0))
        assert walk == end_to_end.TeacherForced(CONTEXT, temperature, "quantspec", GAMMA, 2, "measured", acceptance=expected)
        assert expected.drafted > 0


@pytest.mark.system
def test_free_running_tokens_are_those_of_generate(report, directory, stream, monkeypatch):
    """The same prompts, sampler and keys: the same share of repeated 8-grams and acceptance over the whole of a text."""
    model = loading.load_model(directory, progress=False)
    prompts = [stream[:CONTEXT], stream[-CONTEXT - NEW : -NEW]]
    keys = prompt_keys(jax.random.key(0), 2)
    # One at a time, as they are timed: no loop is compiled for both.
    monkeypatch.setattr(sys.modules["qspec_jax.decoding.prepare"], "prompt_keys", lambda key, prompts: key[None])
    config = GenerationConfig(draft="quantspec", max_new_tokens=NEW, num_speculative_tokens=GAMMA, temperature=1.0)
    draft, row = drafts.quantspec(model), report.rows[3]
    found = [acceptance.free_running(model, draft, [prompt], config, key) for prompt, key in zip(prompts, keys)]
    accepted, drafted, rounds = (sum(getattr(free, name) for free in found) for name in ("accepted", "drafted", "rounds"))
    assert row.repeated_ngrams == pytest.approx(sum(free.repeated_ngrams for free in found) / 2)
    # Two rounds of each text are warm-up.
    assert row.rounds == rounds - 4 and row.acceptance_ratio == pytest.approx(accepted / drafted, abs=8 / drafted)


@pytest.mark.system
def test_table(report, run, directory, file):
    flags = ["--model", directory, "--file", file, "--context", CONTEXT, "--gamma", GAMMA, "--max-new-tokens", NEW, "--texts", 2]
    code, out, _ = run("bench", "end-to-end", *flags, "--no-calibrate")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.split()[2:3] in (["autoregressive"], ["quantspec"])]
    assert [(int(a), float(b), c, int(d.replace("-", "0"))) for a, b, c, d, *_ in lines] == ROWS
    # speed-up, accepted, repeated, teacher-forced
    assert [line[6] for line in lines[::2]] == ["1.00x", "1.00x"]
    for line, row, walk in zip(lines[1::2], report.rows[1::2], report.teacher_forced, strict=True):
        rates = f"{row.acceptance_ratio:.3f}", f"{row.repeated_ngrams:.1%}", f"{walk.acceptance.acceptance_rate:.3f}"
        assert tuple(line[7:10]) == rates
    assert "rounded to nearest" in out and "2 texts of 100 tokens" in out


@pytest.mark.system
def test_plot(report, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "speed.png"
    plots.save(report.figure(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    baseline = dataclasses.replace(report, rows=report.rows[:1])
    with pytest.raises(InputError, match="nothing was measured"):
        baseline.figure()


def test_what_fails_is_a_row_that_says_so(monkeypatch, run, directory, file):
    def fail(*args, **settings):
        raise MemoryError("out of memory\nand more")

    monkeypatch.setattr(decode_case.MeasuredCase, "_compile", lambda *args: None)
    monkeypatch.setattr(decode_case.MeasuredCase, "row", fail)
    monkeypatch.setattr(acceptance, "teacher_forced", fail)
    monkeypatch.setattr(acceptance, "compile_side_by_side", list)
    flags = ["--model", directory, "--file", file, "--context", CONTEXT, "--gamma", GAMMA, "--max-new-tokens", NEW, "--no-calibrate"]
    code, out, err = run("bench", "end-to-end", *flags, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert [(row["context"], row["temperature"], row["method"], row["gamma"]) for row in report["rows"]] == ROWS
    assert {(row["status"], row["note"]) for row in report["rows"] + report["teacher_forced"]} == {("failed", "MemoryError: out of memory")}
    code, out, err = run("bench", "end-to-end", *flags)
    assert code == 0 and "failed: MemoryError: out of memory" in out
    assert err.count("qspec: 100 tokens, ") == err.count(": failed: MemoryError") == len(ROWS) + 2


def test_what_cannot_be_compiled_is_left_to_fail_in_its_turn(monkeypatch):
    class Failing:
        def __init__(self, *run):
            raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(acceptance, "_Forced", Failing)
    acceptance.compile_side_by_side([(), ()])


@pytest.mark.system
def test_drafts_side_by_side(monkeypatch, run, directory, file, report, tmp_path):
    """A row and a walk for each draft and gamma beside one baseline; each in the table with its own acceptance, and in the plot."""
    given = {"quantspec": 0.7, "sparse:budget=0.25": 0.6}
    measured = lambda self, *args: dataclasses.replace(report.rows[bool(self.gamma)], method=self.method.name, gamma=self.gamma)
    walked = lambda model, draft, texts, config, key: dataclasses.replace(
        report.teacher_forced[0].acceptance, conditional_rate=given["sparse:budget=0.25" if draft.observes else "quantspec"]
    )
    monkeypatch.setattr(decode_case.MeasuredCase, "_compile", lambda *args: None)
    monkeypatch.setattr(decode_case.MeasuredCase, "row", measured)
    monkeypatch.setattr(acceptance, "teacher_forced", walked)
    monkeypatch.setattr(acceptance, "compile_side_by_side", list)
    flags = ["--model", directory, "--file", file, "--context", CONTEXT, "--temperature", 0, "--max-new-tokens", NEW, "--no-calibrate"]
    flags += [word for draft in given for word in ("--draft", draft)] + ["--gamma", 2, "--gamma", 3]
    code, out, _ = run("bench", "end-to-end", *flags, "--json")
    found = json.loads(out)
    cases = [(draft, gamma) for draft in given for gamma in (2, 3)]
    assert code == 0 and [(row["method"], row["gamma"]) for row in found["rows"]] == [("autoregressive", 0), *cases]
    assert [(walk["draft"], walk["gamma"]) for walk in found["teacher_forced"]] == cases
    assert [walk["acceptance"]["conditional_rate"] for walk in found["teacher_forced"]] == [0.7, 0.7, 0.6, 0.6]
    code, out, _ = run("bench", "end-to-end", *flags)
    lines = [line for line in out.splitlines() if any(f" {draft} " in line for draft in given)]
    assert (
        code == 0
        and [[rate for rate in ("0.700 +-", "0.600 +-") if rate in line] for line in lines] == [["0.700 +-"]] * 2 + [["0.600 +-"]] * 2
    )
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    assert run("bench", "end-to-end", *flags, "--plot", tmp_path / "speed.png")[0] == 0
    labels = [f"{draft}, temperature 0, gamma {gamma}" for draft, gamma in cases]
    assert figures[0].axes[0].get_legend_handles_labels()[1] == labels


def test_without_a_draft_the_baseline_is_measured(monkeypatch, run, directory, file):
    def fail(*args, **settings):
        raise MemoryError("out of memory")

    measured = lambda self, *args: DecodeRow(self.method.name, self.context, self.gamma, "measured")
    monkeypatch.setattr(decode_case.MeasuredCase, "row", measured)
    monkeypatch.setattr(end_to_end, "int4_model", fail)
    flags = ["--model", directory, "--file", file, "--context", CONTEXT, "--gamma", GAMMA, "--temperature", 0, "--max-new-tokens", NEW]
    code, out, err = run("bench", "end-to-end", *flags, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["status"] for row in report["rows"] + report["teacher_forced"]] == ["measured", "failed", "failed"]


@pytest.mark.system
def test_a_trained_model(run, shallow):
    # Of one text and 64 tokens, since the walk's prefill is then the one that is compiled for the decode.
    flags = ["--context", 300, "--temperature", 0, "--gamma", 3, "--max-new-tokens", 64, "--texts", 1]
    code, out, _ = run("bench", "end-to-end", "--model", shallow, *flags, "--json")
    report = json.loads(out)
    assert code == 0 and report["calibrated"]
    assert [(row["context"], row["method"], row["gamma"], row["status"]) for row in report["rows"]] == [
        (300, "autoregressive", 0, "measured"),
        (300, "quantspec", 3, "measured"),
    ]
    (walk,) = report["teacher_forced"]
    assert all(row["repeated_ngrams"] is not None for row in report["rows"])
    # A trained model's drafts are good; those of another model's weights are not.
    assert 0.7 < walk["acceptance"]["acceptance_rate"] < 1 and walk["texts"] == 1
    assert report["rows"][1]["acceptance_ratio"] > 0.7


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--context", 250], ["256 positions", "250 tokens"]),
        (["--context", 100, "--temperature", -1], ["temperature -1"]),
        (["--gamma", 4, "--gamma", 16], ["--gamma 16"]),
        (["--gamma", 2, "--gamma", 12], ["--max-new-tokens 48", "52"]),
        (["--file", "no/such/file"], ["no/such/file"]),
        (["--plot", "speed.txt"], ["speed.txt", ".png"]),
        (["--texts", 0], ["--texts"]),
    ],
)
def test_bad_flags(fails, directory, file, flags, words):
    fails(["bench", "end-to-end", "--model", directory, "--file", file, "--max-new-tokens", NEW, *flags], *words)


def test_too_little_text(fails, directory, tmp_path):
    file = tmp_path / "short.py"
    file.write_text("import os\n")
    fails(["bench", "end-to-end", "--model", directory, "--file", file, "--context", CONTEXT], "--file", "740")
    fails(["bench", "end-to-end"], "--model")
    fails(["bench", "end-to-end", "--model", "no/such/folder"], "no/such/folder")


def test_a_draft_without_room_has_failed_rows_and_the_others_go_on(directory, stream, tmp_path):
    short = write_checkpoint(tmp_path / "short", hf_config(vocab_size=4096, max_position_embeddings=64), tokenizer=demo.MODEL)
    methods = select_methods([], ["prompt-lookup", f"small-model:model={short}"])
    settings = dict(max_new_tokens=NEW, texts=1, calibrate=False, progress=False)
    found = end_to_end.run("random", loading.load_model(directory, progress=False), stream, [CONTEXT], [0.0], [GAMMA], methods, **settings)
    notes = [row.note for row in (*found.rows, *found.teacher_forced) if row.status == "failed"]
    assert [row.status for row in found.rows] == ["measured", "measured", "failed"]
    assert [row.status for row in found.teacher_forced] == ["measured", "failed"]
    assert all("exceed the draft's 64 positions" in note for note in notes)
