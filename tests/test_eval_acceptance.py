"""`qspec eval acceptance`: acceptance against gamma, what is left out and said so, its plot."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from rich.console import Console
from runs import random_model, random_prompts
from test_trace import data_of
from tiers import in_system

from qspec_jax import demo, plots
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.registry import parse_draft, unbudgeted, with_budget
from qspec_jax.evaluate import acceptance, acceptance_report
from qspec_jax.evaluate.texts import cut, token_stream
from qspec_jax.quantization.weights import quantize_linears
from qspec_jax.reports import TABLE_WIDTH, show, this_run

SIZES = ["--prompt-tokens", 40, "--max-new-tokens", 60, "--no-calibrate"]


def report_of(rows):
    """A report with these rows."""
    about = dict(model="a model", dtype="float32", seed=0, scheme="int8_first", group_size=64, calibration=True, texts=1, skipped=[])
    return acceptance_report.AcceptanceReport(**this_run(), **about, results=rows)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(f"value_{i} = {i}\n" for i in range(40)))
    return path


@pytest.mark.system
def test_gammas_in_one_run_are_as_alone(run, directory, file):
    base = ["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--temperature", 0, "--json"]
    code, out, err = run(*base, "--gamma", "1,3")
    assert (code, err) == (0, "")
    together = json.loads(out)
    assert (together["texts"], together["skipped"]) == (1, [])
    rows = together["results"]
    modes = ("teacher-forced", "free-running")
    assert [(row["gamma"], row["temperature"], row["mode"]) for row in rows] == [(g, 0, m) for g in (1, 3) for m in modes]
    alone = json.loads(run(*base, "--num-speculative-tokens", 3)[1])
    assert alone["results"] == rows[2:]
    for row in rows:
        assert row["new_tokens"] == 60 and 0 < row["drafted"] <= row["gamma"] * row["rounds"]
        assert row["acceptance_rate"] == row["accepted"] / row["drafted"]
        assert row["mean_acceptance_length"] == 1 + row["accepted"] / row["rounds"]
    one, free, three, _ = rows
    assert free["conditional_rate"] is None
    # Nothing stands before the one draft of a round.
    assert 0 < one["conditional_rate"] == one["acceptance_rate"] < 1
    # A round rejects one draft, and up to two behind it are drafted in vain.
    rejected = three["accepted"] / three["conditional_rate"] - three["accepted"]
    assert rejected == pytest.approx(round(rejected), abs=1e-6)
    assert 0 < rejected < three["drafted"] - three["accepted"] <= 3 * rejected


def test_drafts_side_by_side(run, directory, file):
    """Each by its name."""
    drafts = ["quantspec:weight_bits=16,cache=int8", "sparse:budget=0.5,weight_bits=16"]
    base = ["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--temperature", 0, "--gamma", 2]
    code, out, _ = run(*base, "--draft", drafts[0], "--draft", drafts[1], "--mode", "teacher-forced", "--json")
    rows = json.loads(out)["results"]
    assert code == 0 and [row["draft"] for row in rows] == drafts
    assert rows[0]["acceptance_rate"] == 1
    report = report_of(rows)
    console = Console(width=TABLE_WIDTH, file=io.StringIO())
    table = report.table()
    assert len({column.header for column in table.columns}) == len(table.columns) == 13
    console.print(table)
    parts = ["quantspec:weight_bits=16,", "cache=int8", "sparse:budget=0.5,", "weight_bits=16\n"]  # long names break behind a comma
    lines = "".join(line.strip().partition(" ")[0] + "\n" for line in console.file.getvalue().splitlines())
    assert [lines.count(part) for part in parts] == [1, 1, 1, 1]


@pytest.mark.system
def test_budgets_contexts_and_what_they_read(run, directory, file, tmp_path):
    """A draft with a budget once for each, others once; more of a budget reads and covers more, and the plot has a panel for a context."""
    drafts = ["--draft", "quantspec:weight_bits=16", "--draft", "exact-topk:unit=token,weight_bits=16"]
    base = ["eval", "acceptance", "--model", directory, "--file", file, "--temperature", 0, "--no-calibrate"]
    more = ["--context", 110, "--context", 100, "--max-new-tokens", 8, "--mode", "teacher-forced", "--texts", 1, "--group-size", 16]
    code, out, _ = run(*base, *more, *drafts, "--budget", 1, "--budget", 0.1, "--json", "--plot", tmp_path / "bytes.png")
    rows = json.loads(out)["results"]
    name = "exact-topk:unit=token,weight_bits=16,budget="
    assert code == 0
    assert [(row["context"], row["draft"]) for row in rows] == [
        (context, draft) for context in (110, 100) for draft in ("quantspec:weight_bits=16", name + "1", name + "0.1")
    ]
    for dense, all, few in (rows[:3], rows[3:]):
        assert dense["conditional_rate"] == all["conditional_rate"] and dense["step_bytes"] == all["step_bytes"] > few["step_bytes"]
        assert dense["cache_share"] == all["cache_share"] == 1 > few["cache_share"] > 0.1
        assert dense["covered"] is None and all["covered"] == pytest.approx(1, abs=1e-5) and 0 < few["covered"] < 1
        assert dense["conditional_error"] is None and dense["texts"] == 1
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.system
def test_what_drafts_with_caches_of_their_own_cover():
    """All of the attention where they hold everything; and sinks count where the text has them, wherever the draft numbers them."""
    model, texts = random_model(jnp.float32, num_hidden_layers=1), random_prompts([60, 48])
    config, found = GenerationConfig(draft="quantspec", max_new_tokens=8, group_size=4), {}
    for draft in ("streaming-llm:budget=60", "snapkv:budget=60", "streaming-llm:budget=20", "streaming-llm:budget=20,positions=kept"):
        found[draft] = acceptance.teacher_forced(model, make_draft(draft, model), texts, config, jax.random.key(0)).covered
    everything, chosen, window, kept = found.values()
    assert everything == pytest.approx(1, abs=2e-3) and chosen == pytest.approx(1, abs=2e-3)
    # A token in its own position or in none: the target's keys are the same, up to the rounds that were drafted.
    assert 0.1 < kept < 0.9 and window == pytest.approx(kept, abs=0.02)


def test_budgets_below_the_min_groups_are_named(run, directory, file, monkeypatch):
    """A quarter of 4 groups is one, and 75 % are three: with at least two of them the table says which budget was raised, and to what."""
    measured = acceptance.Acceptance(0.5, 1.5, None, 1, 2, 1, 4, 0.0)
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", lambda runs: (measured for _ in runs))
    base = ["eval", "acceptance", "--model", directory, "--file", file, "--temperature", 0, "--no-calibrate", "--mode", "teacher-forced"]
    base += ["--context", 80, "--max-new-tokens", 3, "--texts", 1, "--group-size", 16, "--draft", "sparse:min_groups=2,weight_bits=16"]
    code, out, _ = run(*base, "--budget", 0.25, "--budget", 0.75)
    note = "At 80 tokens these read 2 groups (min_groups), more than their budgets ask for: "
    assert code == 0 and note + "sparse:min_groups=2,weight_bits=16,budget=0.25." in " ".join(out.split())


@pytest.mark.parametrize(
    ("draft", "budget", "said"),
    [
        ("sparse", "nan", "budget nan should be a share"),
        ("sparse", "inf", "budget inf should be a share"),
        ("sparse", "1e400", "budget inf should be a share"),
        ("exact-topk", "-inf", "budget -inf should be a share"),
        ("snapkv", "nan", "nan"),
        ("streaming-llm", "inf", "inf"),
        ("chunk-means", "nan", "nan"),
    ],
)
def test_budgets_that_are_no_numbers_of_tokens(fails, directory, file, draft, budget, said):
    fails(["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--draft", draft, "--budget", budget], said)


def test_a_budget_is_given_once(fails, directory, file):
    fails(["eval", "acceptance", "--model", directory, "--file", file, "--draft", "sparse:budget=0.1", "--budget", 0.2], "names its budget")


def test_budgets_in_the_texts_of_drafts():
    """Drafts that have a budget are given it: a comma may stand in a value, and `combine` has the texts of others."""
    assert with_budget("sparse", 0.1) == "sparse:budget=0.1" and with_budget("sparse:newest=0.5", 64) == "sparse:newest=0.5,budget=64"
    assert unbudgeted("sparse:budget=0.1") == "sparse" and unbudgeted("sparse:budget=0.1,newest=0.5") == "sparse:newest=0.5"
    for text in ("quantspec", "sparse:newest=0.5", "small-model:model=a\\,budget=b", "combine:(sparse:newest=0.5,budget=0.1)+quantspec"):
        assert unbudgeted(text) == text


def test_bad_drafts_are_found_before_any_is_measured(fails, file, tmp_path, monkeypatch):
    """Whatever is wrong, with their settings, for the model, or in one of the contexts."""
    measured = lambda *arguments: pytest.fail("a draft was measured")
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", measured)
    monkeypatch.setattr(acceptance, "free_running", measured)
    short = write_checkpoint(tmp_path / "short", hf_config(vocab_size=4096, max_position_embeddings=40))
    target = write_checkpoint(tmp_path / "target", hf_config(vocab_size=4096, max_position_embeddings=512), tokenizer=demo.MODEL)
    base = ["eval", "acceptance", "--model", target, "--file", file, "--no-calibrate", "--max-new-tokens", 4, "--draft", "quantspec"]
    for sizes, draft, said in (
        ([20], "sparse:dense_layers=9", "dense_layers 9"),
        ([140, 20], "streaming-llm:budget=150", "draft budget 150 should be at most 128"),
        ([20, 60], f"small-model:model={short}", "the draft's 40 positions"),
    ):
        fails([*base, *(word for size in sizes for word in ("--context", size)), "--draft", draft], said)


def test_a_draft_is_made_once(run, directory, file, monkeypatch):
    """And anew for each context where its INT4 weights are calibrated for that."""
    made, settings = [], parse_draft("quantspec")
    make = type(settings).make
    monkeypatch.setattr(type(settings), "make", lambda self, *rest: made.append(self.weight_bits) or make(self, *rest))
    measured = acceptance.Acceptance(0.5, 1.5, None, 1, 2, 1, 4, 0.0)
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", lambda runs: (measured for _ in runs))
    texts = []
    monkeypatch.setattr(
        acceptance_report, "int4_model", lambda model, *, calibration, progress: texts.append(calibration) or quantize_linears(model)
    )
    base = ["eval", "acceptance", "--model", directory, "--file", file, "--mode", "teacher-forced", "--temperature", 0]
    base += ["--max-new-tokens", 4, "--context", 20, "--context", 30, "--gamma", "1,2", "--seed", 5, "--json"]
    for draft in ("quantspec", "quantspec:head_bits=16", "quantspec:weight_bits=16"):
        base += ["--draft", draft]
    code, out, _ = run(*base)
    report = json.loads(out)
    assert code == 0 and made == [4, 4, 16, 4, 4] and [len(text[0]) for text in texts] == [20, 30]
    of_run = {"model": str(directory), "dtype": "float32", "seed": 5, "scheme": "int8_first", "group_size": 64, "calibration": True}
    assert of_run.items() <= report.items()
    assert [row["context"] for row in report["results"]] == [20] * 6 + [30] * 6
    made.clear()
    assert run(*base, "--no-calibrate")[0] == 0 and made == [4, 4, 16] and texts[2:] == [None]


def test_texts_are_cut_from_joined_files(run, fails, directory, file, monkeypatch):
    """Longer than either file, and each behind its BOS token; this number of them."""
    measured, texts = acceptance.Acceptance(0.5, 1.5, None, 1, 2, 1, 4, 0.0), []
    take = lambda runs: (texts.append(run[2]) or measured for run in runs)
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", take)
    size = len(load_tokenizer(directory)(file.read_text())["input_ids"])
    base = ["eval", "acceptance", "--model", directory, "--file", file, "--file", file, "--joined", "--no-calibrate", "--temperature", 0]
    base += ["--mode", "teacher-forced", "--max-new-tokens", 4]
    code, out, _ = run(*base, "--context", 20, "--texts", 3, "--json")
    assert code == 0 and json.loads(out)["texts"] == 3 and [len(text) for text in texts[0]] == [24] * 3
    stream = token_stream(load_tokenizer(directory), [file.read_text()] * 2)
    assert texts[0] == [list(text) for text in cut(stream, 24, 3)]
    fails([*base, "--context", 2 * size], "--file")
    fails([*base, "--context", -4], "prompt_tokens -4")
    fails([*base[:4], "--joined", "--needles", "names"], "--joined")


# Of the same draft: test_gammas_in_one_run_are_as_alone.
@pytest.mark.system
def test_measurements_compiled_together_are_as_alone(monkeypatch):
    """More of them than are compiled together, of several drafts and temperatures."""
    monkeypatch.setattr(acceptance, "COMPILED_TOGETHER", 2)
    model, texts = random_model(jnp.float32, num_hidden_layers=1), random_prompts([60, 48])
    few, many = (make_draft(f"sparse:budget={budget},weight_bits=16", model) for budget in (0.1, 1))
    runs = [
        (model, draft, texts, GenerationConfig(draft="quantspec", max_new_tokens=8, group_size=4, temperature=heat), jax.random.key(1))
        for draft, heat in ((few, 0.0), (few, 1.0), (many, 0.0))
    ]
    assert list(acceptance.teacher_forced_in_turn(runs)) == [acceptance.teacher_forced(*run) for run in runs]


@pytest.mark.system
def test_traced_measurements_are_those_without_a_trace(run, fails, directory, file, tmp_path):
    """One entry of the page for each measurement, whose sums are those of the report; along a text its own tokens follow each round."""
    base = ["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--temperature", 0, "--gamma", 3, "--json"]
    rows = json.loads(run(*base)[1])["results"]
    code, out, _ = run(*base, "--trace", tmp_path / "trace.html")
    assert code == 0 and json.loads(out)["results"] == rows
    text = load_tokenizer(directory)(file.read_text())["input_ids"]
    traces = data_of((tmp_path / "trace.html").read_text())
    assert len(traces) == len(rows) == 2 and len({trace["settings"]["name"] for trace in traces}) == 2
    for row, trace in zip(rows, traces):
        (one,) = trace["rows"]
        sums = {name: sum(each[name] for each in one["rounds"]) for name in ("drafted", "accepted")}
        assert sums == {name: row[name] for name in sums} and len(one["rounds"]) == row["rounds"]
        forced = row["mode"] == "teacher-forced"
        assert trace["forced"] == forced and trace["phases"] == (["round"] if forced else ["draft", "verify", "commit"])
        assert trace["greedy"] == (row["temperature"] == 0) and len(one["token_ids"]) == row["new_tokens"]
        if forced:
            assert one["token_ids"] in (text[i : i + 60] for i in range(len(text)))
            rejected = sum(each["judged_accepted"] < len(each["drafts"]) for each in one["rounds"])
            assert row["conditional_rate"] == pytest.approx(row["accepted"] / (row["accepted"] + rejected))
    fails([*base, "--output", tmp_path / "same", "--trace", tmp_path / "same"], "file of its own")


@pytest.mark.parametrize("temperature", [0.0, *in_system(1.0)])
def test_what_the_middle_of_a_cascade_accepts_of_its_first_draft(temperature):
    """Those that the trace ascribes to the first draft; with the same draft on both levels all that it drafts."""
    model, texts, traces = random_model(jnp.float32, num_hidden_layers=1), random_prompts([60, 48]), []
    config = GenerationConfig(draft="quantspec", max_new_tokens=24, group_size=4, num_speculative_tokens=5, temperature=temperature)

    def measured(draft, **trace):
        return acceptance.teacher_forced(model, make_draft(draft, model), texts, config, jax.random.key(1), **trace)

    draft = "cascade:first=quantspec,middle=(sparse:budget=0.1)"
    found = measured(draft)
    assert found == measured(draft, on_trace=traces.append)
    by_first = sum(token.by == 0 for row in traces[0].rows for each in row.rounds for token in each.drafts)
    assert 0 < found.inner_accepted == by_first < found.inner_drafted
    assert found.inner_accepted / found.inner_drafted < found.inner_rate < 1 and found.inner_error > 0
    same = measured("cascade:first=quantspec,middle=quantspec")
    assert same.inner_rate == 1 and same.inner_accepted == same.inner_drafted > 0
    plain = measured("sparse")
    assert plain.inner_rate is plain.inner_drafted is None


def test_errors_are_over_texts():
    """Not over tokens: a rate of three texts, with an error written down by hand."""
    rate, error = acceptance.ratio(np.array([8, 5, 9]), np.array([10, 10, 12]))
    off = np.array([8, 5, 9]) - 22 / 32 * np.array([10, 10, 12])
    assert rate == 22 / 32 and error == pytest.approx((1.5 * (off**2).sum()) ** 0.5 / 32)
    assert acceptance.ratio(np.array([3]), np.array([4])) == (0.75, None)
    assert acceptance.ratio(np.array([0, 0]), np.array([0, 0])) == (None, None)


def test_drafts_are_drawn_by_what_they_read():
    rows = [
        {"draft": draft, "context": context, "gamma": 4, "temperature": 0.0, "mode": "teacher-forced", "step_bytes": size}
        | {"conditional_rate": rate, "conditional_error": 0.01}
        for context in (4096, 8192)
        for draft, size, rate in (("sparse:budget=0.2", 3e6, 0.9), ("sparse:budget=0.1", 2e6, 0.8), ("lookup", None, 0.4))
    ]
    figure = report_of(rows).figure()
    assert [axes.get_title() for axes in figure.axes] == [f"context of {n:,} tokens, temperature 0" for n in (4096, 8192)]
    for axes in figure.axes:
        (drawn,) = axes.containers
        assert drawn.get_label() == "sparse" and drawn.lines[0].get_xydata().tolist() == [[2, 0.8], [3, 0.9]]
        assert [line.get_ydata()[0] for line in axes.lines if line.get_label() == "lookup"] == [0.4]


def test_plot(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), figure.savefig(path)))
    lines = [(temperature, mode) for temperature in (0.0, 1.0) for mode in ("teacher-forced", "free-running")]
    rows = [
        {
            "draft": "quantspec",
            "gamma": gamma,
            "temperature": temperature,
            "mode": mode,
            "acceptance_rate": 0.1 * i + gamma / 100,
            "mean_acceptance_length": gamma + i,
        }
        for gamma in (6, 1)
        for i, (temperature, mode) in enumerate(lines)
    ]
    show(lambda: report_of(rows), tmp_path / "report", as_json=True, plot=tmp_path / "gamma.png")
    assert (tmp_path / "gamma.png").read_bytes().startswith(b"\x89PNG")
    accepted, tokens = figures[0].axes
    points = lambda axes: [line.get_xydata().tolist() for line in axes.lines]
    assert points(accepted) == [[[1, 0.1 * i + 0.01], [6, 0.1 * i + 0.06]] for i in range(4)]
    assert points(tokens) == [[[1, 1 + i], [6, 6 + i]] for i in range(4)]
    assert [line.get_label() for line in tokens.lines] == [f"quantspec, temperature {temperature:g}, {mode}" for temperature, mode in lines]


ROWS = [acceptance.Acceptance(0.25 * i, 1.5, None, i, 4, 2, 8, 0.0) for i in range(1, 5)]
SHORT = ["--context", 20, "--max-new-tokens", 4, "--mode", "teacher-forced", "--gamma", "1,2", "--no-calibrate"]  # rows at two temperatures


def test_rows_are_said_and_kept_as_they_come(run, directory, file, tmp_path, monkeypatch):
    """Each before the next is measured; a run that is ended leaves them, and the next one measures the others alone."""
    output, partial, seen = tmp_path / "report.json", tmp_path / "report.json.partial", []
    output.write_text("an older report")

    def measured(runs, rows=ROWS, ended_after=4):
        runs = list(runs)
        for row in rows[:ended_after]:
            seen.append(partial.read_text().splitlines() if partial.exists() else [])
            yield row
        if ended_after < len(runs):
            raise KeyboardInterrupt

    base = ["eval", "acceptance", "--model", directory, "--file", file, *SHORT, "--seed", 3, "--output", output]
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", lambda runs: measured(runs, ended_after=3))
    code, out, err = run(*base)
    assert (code, out, output.read_text()) == (130, "", "an older report")
    *lines, last = err.splitlines()
    assert [line.split(": ")[2] for line in lines] == [f"accepted / drafted {rate:.3f}, 1.50 tokens a round" for rate in (0.25, 0.5, 0.75)]
    assert lines[2].startswith("qspec: quantspec, 20 tokens, gamma 2, temperature 0, teacher-forced: ")
    assert last == f"qspec: interrupted; the same command goes on from {partial}"
    assert [len(lines) for lines in seen] == [0, 2, 3]
    header, *rows = map(json.loads, partial.read_text().splitlines())
    assert header["unfinished_report"]["command"] == "qspec eval acceptance"
    assert [(row["value"]["gamma"], row["value"]["temperature"], row["value"]["acceptance_rate"]) for row in rows] == [
        (1, 0, 0.25), (1, 1, 0.5), (2, 0, 0.75)
    ]  # fmt: skip

    seen.clear()
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", lambda runs: measured(runs, ROWS[3:]))
    code, out, err = run(*base, "--json")
    assert (code, out, err) == (0, "", "") and not partial.exists()
    assert len(seen) == 1 and len(seen[0]) == 4
    report = json.loads(output.read_text())
    assert report["results"][:3] == [row["value"] for row in rows] and len(report["results"]) == 4
    assert report["earlier"] == [row["row"] for row in rows] and report["results"][3]["acceptance_rate"] == 1
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", measured)
    assert run(*base[:-2], "--json")[1].startswith("{") and list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("output", ["no such folder/out", "x" * 250])
def test_rows_that_cannot_be_kept_are_found_before_any(fails, directory, file, tmp_path, monkeypatch, output):
    """A name may have room for itself and none for the ending of the file beside it."""
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", lambda runs: pytest.fail("a draft was measured"))
    fails(["eval", "acceptance", "--model", directory, "--file", file, *SHORT, "--output", tmp_path / output], "cannot be written")
    assert not list(tmp_path.iterdir())


def test_a_single_text_has_no_error(tmp_path):
    """Neither a sign nor a bar of length 0 is shown where there is nothing to compute an error from."""
    row = {"draft": "sparse", "context": 64, "gamma": 4, "temperature": 0.0, "mode": "teacher-forced", "acceptance_rate": 0.5}
    row |= {"mean_acceptance_length": 2.0, "drafted": 8, "repeated_ngrams": 0.0, "step_bytes": 1e6, "conditional_rate": 0.5}
    for error, shown in ((None, False), (0.01, True)):
        rows = [row | {"conditional_error": error}, row | {"conditional_error": error, "step_bytes": 2e6}]
        report = report_of(rows)
        console = Console(width=TABLE_WIDTH, file=io.StringIO())
        console.print(report.table())
        assert ("+-" in console.file.getvalue()) == shown
        (drawn,) = acceptance_report._against_bytes(rows).axes[0].containers
        assert drawn.has_yerr == shown


def test_at_several_contexts_acceptance_is_drawn_against_them():
    """With more than two of them; a cascade has a line for its first draft too."""
    rows = [
        {"draft": draft, "context": context, "gamma": 4, "temperature": 0.0, "mode": "teacher-forced"}
        | {"conditional_rate": rate, "conditional_error": 0.01, "inner_rate": inner, "inner_error": None}
        for draft, rate, inner in (("sparse", 0.9, None), ("cascade", 0.8, 0.6))
        for context in (4096, 1024, 64000)
    ]
    (axes,) = report_of(rows).figure().axes
    lines = {name: line[0] for line, name in zip(*axes.get_legend_handles_labels())}
    found = {name: line.get_ydata().tolist() for name, line in lines.items()}
    expected = {"sparse": 0.9, "cascade": 0.8, "cascade, its first draft by its middle": 0.6}
    assert found == {f"{name}, temperature 0": [rate] * 3 for name, rate in expected.items()}
    assert [line.get_xdata().tolist() for line in lines.values()] == [[1024, 4096, 64000]] * 3
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1k", "4k", "64,000"]
    budgets = [row | {"draft": f"sparse:budget={budget}", "step_bytes": 1.0} for row in rows[:3] for budget in (0.1, 0.2)]
    freely = [row | {"mode": "free-running", "acceptance_rate": 0.5, "mean_acceptance_length": 2.0} for row in rows[:3]]
    assert len(report_of(budgets).figure().axes) == 3 and len(report_of(freely).figure().axes) == 2


def test_the_target_as_its_own_draft(run, directory, file, tmp_path):
    """Whatever is counted is accepted. A text that is too short is named, in one line and in the JSON."""
    short, again = tmp_path / "short.txt", tmp_path / "again.txt"
    short.write_text("x = 1\n")
    again.write_text(file.read_text())
    texts = ["--file", file, "--file", short, "--file", again]
    own = ["--draft", "quantspec:weight_bits=16,cache=int8", "--temperature", 0]
    code, out, _ = run("eval", "acceptance", "--model", directory, *texts, *SIZES, *own, "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["texts"], result["skipped"]) == (2, [str(short)])
    assert [(row["gamma"], row["mode"]) for row in result["results"]] == [(4, "teacher-forced"), (4, "free-running")]
    assert [row["acceptance_rate"] for row in result["results"]] == [1.0, 1.0]
    assert result["results"][0]["conditional_rate"] == 1.0


def test_texts_too_short_are_logged(run, directory, file, tmp_path, caplog, monkeypatch):
    measured = acceptance.Acceptance(0.5, 1.5, None, 1, 2, 1, 4, 0.0)
    monkeypatch.setattr(acceptance, "teacher_forced_in_turn", lambda runs: (measured for _ in runs))
    monkeypatch.setattr(acceptance, "free_running", lambda *arguments, **settings: measured)
    short = tmp_path / "short.txt"
    short.write_text("x = 1\n")
    flags = ["--gamma", 1, "--temperature", 0]
    code, out, _ = run("eval", "acceptance", "--model", directory, "--file", short, "--file", file, *SIZES, *flags)
    assert code == 0
    assert [record.getMessage() for record in caplog.records] == [f"1 of 2 texts have fewer than 100 tokens and are left out: {short}"]
    assert "teacher-forced" in out and "free-running" in out and "a round" in out


@pytest.mark.parametrize(
    ("gammas", "word"),
    [
        ("0", "--gamma 0 should be at least 1"),
        ("2,0", "--gamma 0 should be at least 1"),
        ("-1", "--gamma -1 should be at least 1"),
        ("1,x", "'1,x'"),
        ("", "''"),
        ("1,,2", "'1,,2'"),
        ("1.5", "'1.5'"),
        ("2,1,2", "twice"),
    ],
)
def test_bad_lists(fails, directory, file, gammas, word):
    fails(["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--gamma", gammas], word)


def test_no_drafts_are_refused_before_texts_are_read(fails, tmp_path):
    base = ["eval", "acceptance", "--file", tmp_path / "nowhere"]
    fails([*base, "--gamma", 0], "--gamma 0")
    fails([*base, "--draft", "auto"], "name the drafts whose acceptance eval should measure")
    fails([*base, "--draft", "none"], "--draft none: there is nothing to accept without a draft")


def test_bad_plot_and_texts(fails, directory, file, tmp_path):
    base = ["eval", "acceptance", "--model", directory, "--file", file, *SIZES]
    fails([*base, "--plot", tmp_path / "plot.txt"], "plot.txt")
    fails([*base, "--plot", tmp_path / "no" / "plot.png"], "no such folder")
    fails([*base, "--prompt-tokens", 2000], "no text has the 2060 tokens")
