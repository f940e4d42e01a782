"""Rows that are kept beside the output: a command that was interrupted goes on, and measures nothing twice."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from bench_commands import FAST

from qspec_jax import kept_rows
from qspec_jax.bench import all_reduce, attention, batch, decode, drafts, end_to_end, flush, matmul, states
from qspec_jax.bench.decode_rows import DecodeRow
from qspec_jax.bench.kernels import KernelRow
from qspec_jax.bench.timing import Timing
from qspec_jax.cli import measuring
from qspec_jax.decoding.results import BatchStats, Result
from qspec_jax.errors import InputError
from qspec_jax.evaluate import answers, quantizers, scoring
from qspec_jax.evaluate.acceptance import Acceptance
from qspec_jax.kept_rows import NOT_KEPT, KeptRows

ACCEPTANCE = Acceptance(0.25, 1.5, None, 1, 4, 2, 8, 0.0)
TIMING = Timing(2.5, 2.0, 3.0, 1, 1, 1, "none")


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float | None
    counts: list[int]


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    steps: dict[str, Inner]
    place: tuple[int, str]
    loss: float = 0.0


ROW = Outer("a", Inner(None, [1]), {"draft": Inner(0.1, [])}, (3, "b"), math.inf)


def beside(tmp_path, command="qspec eval x", **options):
    return KeptRows.beside(tmp_path / "out", command, options)


def left(tmp_path, rows=1, **options):
    """An interrupted run that leaves rows."""
    with pytest.raises(KeyboardInterrupt), beside(tmp_path, **options) as kept:
        for i in range(rows):
            kept.measured(f"row {i}", Outer, lambda: ROW)
        raise KeyboardInterrupt
    return tmp_path / "out.partial"


def test_rows_come_back_as_they_were(tmp_path):
    """Values of nested dataclasses, and numbers that JSON lacks."""
    path = left(tmp_path)
    with beside(tmp_path) as kept:
        assert "row 0" in kept and "row 1" not in kept
        assert kept.measured("row 0", Outer, lambda: pytest.fail("measured again")) == ROW
        assert kept.earlier == ["row 0"] and path.exists()
    assert not path.exists()
    assert NOT_KEPT.measured("row 0", Outer, lambda: ROW) is ROW and "row 0" not in NOT_KEPT and NOT_KEPT.earlier == []


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_line_that_was_cut_short_is_written_again(tmp_path, lines):
    """As a process leaves it that is killed while it writes."""
    path = left(tmp_path, rows=2)
    whole = path.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(whole) if byte == ord("\n"))]
    for cut in range(ends[lines] + (lines == 0), ends[lines + 1], 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(KeyboardInterrupt), beside(tmp_path) as kept:
            assert [f"row {i}" in kept for i in range(2)] == [i < lines - 1 for i in range(2)]
            for i in range(2):
                kept.measured(f"row {i}", Outer, lambda: ROW)
            raise KeyboardInterrupt
        assert path.read_bytes() == whole


def test_rows_that_failed_are_not_kept(tmp_path):
    path = tmp_path / "out.partial"
    with pytest.raises(KeyboardInterrupt), beside(tmp_path) as kept:
        kept.measured("a row", dict, lambda: {"error": "x"}, None, lambda row: not row["error"])
        raise KeyboardInterrupt
    assert not path.exists()


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("qspec bench y", {"--seed": 0}, "has the rows of another command, qspec eval x; move it away"),
        ("qspec eval x", {"--seed": 1}, "has the rows of this command with another --seed; move it away"),
        ("qspec eval x", {"--seed": 1, "--gamma": 2}, "another --seed and --gamma;"),
        ("qspec eval x", {}, "another --seed;"),
    ],
)
def test_rows_of_something_else_stay(tmp_path, command, options, words):
    path = left(tmp_path, **{"--seed": 0})
    content = path.read_bytes()
    with pytest.raises(InputError, match=f"out.partial: .*{words}"), KeptRows.beside(tmp_path / "out", command, options):
        pytest.fail("it began")
    assert path.read_bytes() == content


@pytest.mark.parametrize("changed", ["device", "date", "versions"])
def test_rows_of_another_day_or_machine_are_measured_again(tmp_path, monkeypatch, caplog, changed):
    path, here = left(tmp_path, rows=2), kept_rows.this_run()
    monkeypatch.setattr(kept_rows, "this_run", lambda: here | {changed: "another"})
    with pytest.raises(KeyboardInterrupt), beside(tmp_path) as kept:
        assert "row 0" not in kept and kept.measured("row 1", Outer, lambda: ROW) is ROW and kept.earlier == []
        raise KeyboardInterrupt
    assert f"2 rows are measured again, since the {changed} changed" in caplog.text
    header, row = map(json.loads, path.read_text().splitlines())
    assert header["unfinished_report"]["run"][changed] == "another" and row["row"] == "row 1"


@pytest.mark.parametrize(
    "content",
    [
        '{"run": {"prompts": "0"}}\n',  # the journal of a `batch` with the same output
        "notes\n",
        "notes",
        '{"unfinished_notes": ',
        "[1]\n",
        '{"unfinished_report": {}}\n',
        '{"unfinished_report": {}, "more": 1}\n',
    ],
)
def test_what_no_command_has_left_stays(tmp_path, content):
    path = tmp_path / "out.partial"
    path.write_text(content)
    with pytest.raises(InputError, match=r"out\.partial: is not an unfinished report; move it away"), beside(tmp_path):
        pytest.fail("it began")
    assert path.read_text() == content


def test_rows_of_another_kind_are_refused(tmp_path):
    left(tmp_path)
    with beside(tmp_path) as kept, pytest.raises(InputError, match="is not an unfinished report"):
        kept.measured("row 0", Inner, lambda: None)


def test_rows_of_another_process_stay(tmp_path):
    with beside(tmp_path) as kept:
        kept.measured("row 0", Outer, lambda: ROW)
        content = (tmp_path / "out.partial").read_text()
        with pytest.raises(InputError, match="another process is writing it"), beside(tmp_path):
            pytest.fail("it began")
        assert (tmp_path / "out.partial").read_text() == content and len(content.splitlines()) == 2
    assert not list(tmp_path.iterdir())


def test_nothing_is_kept_beside_a_device(tmp_path):
    with KeptRows.beside(None, "qspec eval x", {}) as kept:
        assert kept.measured("row 0", Outer, lambda: ROW) is ROW and kept.path is None and kept.goes_on == ""


# Commands -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """Counts the calls of a function of a module, and interrupts the second one if asked to."""

    def count(module, name, result=None):
        real, calls = getattr(module, name), []

        def call(*args, **settings):
            if call.interrupts and calls:
                raise KeyboardInterrupt
            calls.append(args)
            return real(*args, **settings) if result is None else result(*args, **settings)

        call.interrupts, call.calls = False, calls
        monkeypatch.setattr(module, name, call)
        return call

    return count


def without_times(report: dict) -> dict:
    return {name: value for name, value in report.items() if name not in ("earlier", "date", "prefill_alone_s")}


def check_goes_on(run, tmp_path, call, arguments, rows):
    """The command, interrupted as soon as it has a row, and again. rows: how many it measures in all."""
    output, partial = tmp_path / "report.json", tmp_path / "report.json.partial"
    whole = json.loads(run(*arguments, "--json")[1])
    assert len(call.calls) == rows and whole["earlier"] == []
    call.calls.clear()
    call.interrupts = True
    code, out, err = run(*arguments, "--json", "--output", output)
    assert (code, out) == (130, "") and not output.exists() and partial.exists()
    assert err == f"qspec: interrupted; the same command goes on from {partial}\n"
    before = len(partial.read_text().splitlines()) - 1
    assert before >= 1
    call.calls.clear()
    call.interrupts = False
    code, out, err = run(*arguments, "--output", tmp_path / "other")  # whose rows are its own
    assert code == 0 and "\nqspec: " in "\n" + err and len(call.calls) == rows
    call.calls.clear()
    assert run(*arguments, "--json", "--output", output)[:2] == (0, "")
    assert len(call.calls) == rows - 1 and not partial.exists()
    report = json.loads(output.read_text())
    assert len(report["earlier"]) == before and without_times(report) == without_times(whole)
    return report


KERNEL_ROW = dict(peer=False, status="measured", note="", bytes=1000, timing=TIMING)


@pytest.mark.parametrize(("module", "shape"), [(attention, "tiny-int4-T1"), (matmul, "tiny-down")])
def test_kernels(run, tmp_path, monkeypatch, counted, module, shape):
    monkeypatch.setattr("qspec_jax.bench.kernels.read_bandwidth", lambda *, repeats: 20.0)
    call = counted(module, "measure", lambda shape, name, **_: KernelRow(shape.name, name, **KERNEL_ROW))
    arguments = ["bench", module.__name__.rpartition(".")[2], "--shape", shape, "--no-peers"]
    report = check_goes_on(run, tmp_path, call, arguments, 2)
    assert report["earlier"][0] == "read bandwidth"


def test_flush(run, tmp_path, counted):
    figures = dict(due=TIMING, not_due=TIMING, attention_us=1.0, share_of_round=0.1)
    call = counted(flush, "_measured", lambda row, shape, repeats: dataclasses.replace(row, **figures))
    check_goes_on(run, tmp_path, call, ["bench", "flush", "--shape", "tiny-int4-T1"], 2)


def test_failed_rows_are_measured_again(run, tmp_path, counted):
    """Since what failed may not fail again."""
    call = counted(flush, "_measured", lambda row, shape, repeats: 1 / 0)
    arguments = ["bench", "flush", "--shape", "tiny-int4-T1", "--output", tmp_path / "out"]
    call.interrupts = True
    code, _, err = run(*arguments)
    assert code == 130 and "ZeroDivisionError" in err and not (tmp_path / "out.partial").exists()


def test_all_reduce(tmp_path, counted):
    mesh = jax.make_mesh((1,), ("model",))
    call = counted(all_reduce, "_measured", lambda mesh, row, options, repeats: dataclasses.replace(row, timing=TIMING, gb_per_s=1.0))
    call.interrupts = True
    with pytest.raises(KeyboardInterrupt), beside(tmp_path) as kept:
        all_reduce.run(mesh, [1, 8], 4, kept=kept, progress=False)
    call.interrupts = False
    with beside(tmp_path) as kept:
        assert [row.rows for row in all_reduce.run(mesh, [1, 8], 4, kept=kept, progress=False).rows] == [1, 8]
        assert [args[1].rows for args in call.calls] == [1, 8] and kept.earlier == ["1 rows, XLA"]


def test_bench_decode(run, tmp_path, one_layer, short_loops, monkeypatch, counted):
    """Two methods at two batch sizes: no draft is made for a case that is measured at all sizes already."""
    made = counted(decode, "make_draft")

    def results(model, made, prompts, settings, batch_size):
        for case, _ in made:
            yield measured(case, batch_size)

    def row(case, batch_size):
        return DecodeRow(case.method.name, 200, case.gamma, "measured", batch_size=batch_size, tokens_per_second=4.0, ms_per_token=3.0)

    monkeypatch.setattr(decode, "_results", results)
    holder = SimpleNamespace(measured=row)
    measured = counted(holder, "measured")
    sizes = ["--batch-size", 1, "--batch-size", 4, "--draft", "prompt-lookup"]
    report = check_goes_on(run, tmp_path, measured, [*FAST, "--simulate-ratio", 0.5, *sizes], 4)
    assert report["earlier"] == ["bandwidth", "200 tokens, batch size 1, temperature 0, autoregressive, gamma 0"]
    assert [row["speedup"] for row in report["rows"]] == [1.0] * 4 and made.calls


def test_bench_end_to_end(run, tmp_path, directory, texts, monkeypatch, counted):
    rows = SimpleNamespace(
        measured=lambda case, batch_size: DecodeRow(
            case.method.name, 64, case.gamma, "measured", temperature=case.temperature, tokens_per_second=4.0, ms_per_token=3.0
        )
    )
    call = counted(rows, "measured")

    def walked(model, make, texts, asked, key):
        for draft, config in asked:
            gamma = config.num_speculative_tokens
            yield end_to_end.TeacherForced(64, config.temperature, draft, gamma, len(texts), "measured", acceptance=ACCEPTANCE)

    monkeypatch.setattr(decode, "_results", lambda model, made, *_: (call(case, 1) for case, _ in made))
    monkeypatch.setattr(end_to_end, "_walked", walked)
    sizes = ["--context", 64, "--max-new-tokens", 32, "--gamma", 2, "--temperature", 0, "--texts", 1, "--draft", "prompt-lookup"]
    report = check_goes_on(run, tmp_path, call, ["bench", "end-to-end", "--model", directory, "--file", texts[0], *sizes], 2)
    assert report["teacher_forced"][0]["acceptance"]["accepted"] == ACCEPTANCE.accepted


def test_bench_drafts(run, tmp_path, one_layer, monkeypatch, counted):
    """Each decode of each turn is kept; warming up does not count, and is left out where nothing is to be measured."""
    stats = SimpleNamespace(stats=SimpleNamespace(mean_acceptance_length=1.5, tokens_per_second=2.0))
    call = counted(drafts, "generate", lambda model, prepared: stats)
    sizes = ["--context", 12, "--max-new-tokens", 6, "--repeats", 2, "--draft", "prompt-lookup"]
    arguments, output = ["bench", "drafts", "--arch", "tiny", *sizes, "--json"], tmp_path / "out"
    whole = json.loads(run(*arguments)[1])
    assert len(call.calls) == 9  # three ways, three turns
    call.calls.clear()
    monkeypatch.setattr(drafts, "generate", lambda *args: interrupted() if len(call.calls) == 4 else call(*args))
    assert run(*arguments, "--output", output)[0] == 130
    call.calls.clear()
    monkeypatch.setattr(drafts, "generate", call)
    assert run(*arguments, "--output", output)[0] == 0
    assert len(call.calls) == 8  # of the nine the first decode of the first turn is there
    report = json.loads(output.read_text())
    assert without_times(report) == without_times(whole) and len(report["earlier"]) == 1


def test_bench_batch(run, tmp_path, one_layer, monkeypatch, counted):
    """What was decoded is not decoded again; its tokens are compared with. Ways take turns, and the median of each is given."""
    seconds = {2: 1.0, 4: 5.0, 5: 9.0, 6: 6.0, 7: 2.0, 8: 4.0}  # of each decode but those to warm up

    class Decoded:
        def __init__(self, model, prepared, **settings):
            decode_s = 1.0 if "--repeats" not in arguments else seconds.get(len(call.calls), 0.0)
            self.stats = BatchStats(prompts=2, new_tokens=6, rounds=3, decode_s=decode_s, prefill_s=1.0)

        def __iter__(self):
            differs = len(call.calls) == 6 and "--repeats" in arguments
            for index in (1, 0):
                yield Result(index, [index, 6 if differs and index else 5], "", "length", None)

    call = counted(batch, "run_batch", Decoded)
    monkeypatch.setattr(batch, "_prefill_seconds", lambda prepared, strategy: 0.5)
    sizes = ["--prompts", 2, "--batch-size", 2, "--prompt-tokens", "4-9", "--new-tokens", "3-12"]
    arguments, output = ["bench", "batch", "--arch", "tiny", *sizes, "--json"], tmp_path / "out"
    whole = json.loads(run(*arguments)[1])
    assert len(call.calls) == 4  # each once to warm up
    call.calls.clear()
    monkeypatch.setattr(batch, "run_batch", lambda *args, **settings: interrupted() if len(call.calls) == 3 else call(*args, **settings))
    assert run(*arguments, "--output", output)[0] == 130
    call.calls.clear()
    monkeypatch.setattr(batch, "run_batch", call)
    assert run(*arguments, "--output", output)[0] == 0 and len(call.calls) == 2
    report = json.loads(output.read_text())
    assert without_times(report) == without_times(whole) and report["earlier"] == ["refilled"]
    assert [row["same_tokens"] for row in report["rows"]] == [1.0, 1.0]
    call.calls.clear()
    arguments += ["--repeats", 3]
    rows = json.loads(run(*arguments)[1])["rows"]
    assert len(call.calls) == 8 and [row["stats"]["decode_s"] for row in rows] == [2.0, 5.0]
    assert [row["same_tokens"] for row in rows] == [1.0, pytest.approx(5 / 6)]  # one prompt of one decode of the second way has others
    assert [row["all_tokens_per_second"] for row in rows] == [[3, 0.6, 2], [1, 6 / 7, 1.2]]


def interrupted():
    raise KeyboardInterrupt


def test_bench_states(run, tmp_path, one_layer, monkeypatch, counted):
    rows = SimpleNamespace(row=lambda task, way: states.StatesRow(task, way, 40, 1, 1.0, 1.0, 8, 0.5))
    call = counted(rows, "row")
    pairs = [(states.FIRST_TOKEN, way) for way in (states.STATE, states.AGAIN)]
    monkeypatch.setattr(states._Measured, "tasks", lambda self: ((*pair, functools.partial(call, *pair)) for pair in pairs))
    check_goes_on(run, tmp_path, call, ["bench", "states", "--arch", "tiny", "--context", 40, "--draft", "none"], 2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("texts") / f"{i}.txt" for i in range(2)]
    for i, path in enumerate(paths):
        path.write_text("".join(f"value_{i}_{j} = {j}  # of the text and its lines\n" for j in range(60)))
    return paths


def scores(model, prompts, continuations, views, **settings) -> scoring.Scores:
    shape = len(views), len(prompts), len(continuations[0])
    logprobs = np.log(np.linspace(0.1, 0.9, math.prod(shape), dtype=np.float32)).reshape(shape)
    logprobs[-1, 0, 0] = -np.inf
    return scoring.Scores(logprobs, np.abs(logprobs) / 3, logprobs > -1, logprobs > -0.5)


def test_perplexity(run, tmp_path, directory, texts, monkeypatch, counted):
    """A batch of texts at a time; the figures of all of them are the same to the last digit."""
    monkeypatch.setattr(scoring, "ROWS", 1)
    call = counted(scoring, "score", scores)
    sizes = ["--prompt-tokens", 20, "--max-new-tokens", 8, "--cache", "full", "--cache", "int8"]
    check_goes_on(run, tmp_path, call, ["eval", "perplexity", *texts, "--model", directory, *sizes], 2)


def test_quantizers(run, tmp_path, directory, texts, monkeypatch, counted):
    errors = counted(quantizers, "reading_errors", lambda model, prompts, chosen, **_: np.full((len(chosen), 2, 2), 0.1))
    call = counted(quantizers, "_acceptance", lambda *_: (3, 4))
    monkeypatch.setattr(quantizers, "measure", lambda model, chosen, views, *, max_new_tokens, progress: scores(
        model, chosen, [[0] * max_new_tokens], views
    ))  # fmt: skip
    sizes = ["--prompt-tokens", 40, "--max-new-tokens", 8, "--group-size", 16, "--variant", "paper", "--variant", "truncation"]
    report = check_goes_on(run, tmp_path, call, ["eval", "quantizers", *texts, "--model", directory, *sizes], 2)
    assert report["earlier"] == ["errors of keys and values", "paper"] and len(errors.calls) == 3


def answering(model, requests, *, batch_size, tokenizer):
    for index, _ in reversed(list(enumerate(requests))):
        yield Result(index, [index, 5], "an answer", "length", None)


def test_needle(run, tmp_path, directory, counted):
    call = counted(answers, "run_batch", answering)
    sizes = ["--lengths", 90, "--depths", "0,1", "--samples", 2, "--format", "two-names", "--draft", "none"]
    arguments = ["eval", "needle", "--model", directory, *sizes, "--cache", "full", "--cache", "int8"]
    report = check_goes_on(run, tmp_path, call, arguments, 2)
    assert report["agreement"]["same_tokens"] == 4 and report["earlier"] == ["autoregressive, full cache, 90 tokens"]


def test_tasks(run, tmp_path, directory, texts, counted):
    call = counted(answers, "run_batch", answering)
    sizes = ["--length", 64, "--samples", 2, "--max-new-tokens", 16, "--task", "continuation", "--cache", "full", "--cache", "int8"]
    report = check_goes_on(run, tmp_path, call, ["eval", "tasks", *texts, "--model", directory, *sizes], 2)
    assert report["results"][1]["same_tokens"] == 1


def test_harness(run, tmp_path, directory, monkeypatch, counted):
    harness_report = pytest.importorskip("qspec_jax.evaluate.harness_report")

    def evaluated(lm, *, tasks, **settings):
        return {"results": {tasks[0]: {"acc,none": 0.25, "acc_stderr,none": 0.1, "sample_len": 4}}}

    call = counted(harness_report.lm_eval, "simple_evaluate", evaluated)
    known = SimpleNamespace(all_tasks=[], match_tasks=list)
    monkeypatch.setattr(harness_report, "TaskManager", lambda **_: known)  # it takes seconds to read all tasks there are
    names = ["qspec_last", "qspec_rolling"]
    arguments = ["eval", "harness", *names, "--model", directory]
    report = check_goes_on(run, tmp_path, call, arguments, 2)
    assert [row["task"] for row in report["results"]] == names


def test_a_changed_text_or_checkpoint_is_something_else(run, fails, tmp_path, directory, counted):
    """By its content, since its name is the same."""
    text = tmp_path / "text.txt"
    text.write_text("value = 1\n" * 60)
    call = counted(scoring, "score", scores)
    arguments = [
        "eval",
        "perplexity",
        text,
        "--model",
        directory,
        "--prompt-tokens",
        20,
        "--max-new-tokens",
        8,
        "--output",
        tmp_path / "out",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qspec_jax.evaluate.perplexity.by_distance", lambda *_: interrupted())
        assert run(*arguments)[0] == 130 and len(call.calls) == 1
    text.write_text("value = 2\n" * 60)
    fails(arguments, tmp_path / "out.partial", "has the rows of this command with another content of file")
    fails([*arguments, "--cache", "int8"], "another --cache and content of file")
    text.write_text("value = 1\n" * 60)
    assert run(*arguments)[0] == 0 and len(call.calls) == 1
    assert "Measured by an earlier run of this command, on the same day: text 1 of 1." in (tmp_path / "out").read_text()


def test_a_gguf_file_is_not_read_whole_to_know_it(tmp_path, monkeypatch):
    """Its shards are looked at instead: their sizes and times."""
    first, second = (tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(b"GGUF"), second.write_bytes(b"GGUF")
    monkeypatch.setattr(Path, "read_bytes", lambda path: 1 // 0)
    before = measuring._content(first)
    second.write_bytes(b"GGUF and more")
    assert before and measuring._content(first) != before
