"""`qspec eval acceptance`: acceptance against gamma, what is left out and said so, its plot."""

import io
import json

import pytest
from rich.console import Console

from qspec_jax import plots
from qspec_jax.evaluate import acceptance

SIZES = ["--prompt-tokens", 40, "--max-new-tokens", 60, "--no-calibrate"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(f"value_{i} = {i}\n" for i in range(40)))
    return path


@pytest.mark.slow
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


@pytest.mark.slow
def test_drafts_side_by_side(run, directory, file):
    """Each by its name, and the old options for quantspec alone."""
    drafts = ["quantspec:weight_bits=16,cache=int8", "sparse:budget=0.5,weight_bits=16"]
    base = ["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--temperature", 0, "--gamma", 2]
    code, out, _ = run(*base, "--draft", drafts[0], "--draft", drafts[1], "--json")
    rows = json.loads(out)["results"]
    assert code == 0 and [row["draft"] for row in rows] == [drafts[0]] * 2 + [drafts[1]] * 2
    assert [row["acceptance_rate"] for row in rows[:2]] == [1.0, 1.0]
    report = acceptance.AcceptanceReport(1, [], rows)
    console = Console(width=200, file=io.StringIO())
    table = acceptance.table(report)
    assert len({column.header for column in table.columns}) == len(table.columns) == 9
    console.print(table)
    assert all(console.file.getvalue().count(draft) == 2 for draft in drafts)


def test_old_options_are_for_quantspec(fails, directory, file):
    fails(
        ["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--draft", "sparse", "--draft-planes", "2"], "--draft-planes"
    )


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
    acceptance.plot(acceptance.AcceptanceReport(1, [], rows), tmp_path / "gamma.png")
    assert (tmp_path / "gamma.png").read_bytes().startswith(b"\x89PNG")
    accepted, tokens = figures[0].axes
    points = lambda axes: [line.get_xydata().tolist() for line in axes.lines]
    assert points(accepted) == [[[1, 0.1 * i + 0.01], [6, 0.1 * i + 0.06]] for i in range(4)]
    assert points(tokens) == [[[1, 1 + i], [6, 6 + i]] for i in range(4)]
    assert [line.get_label() for line in tokens.lines] == [f"quantspec, temperature {temperature:g}, {mode}" for temperature, mode in lines]


def test_the_target_as_its_own_draft(run, directory, file, tmp_path):
    """Whatever is counted is accepted. A text that is too short is named, in one line and in the JSON."""
    short, again = tmp_path / "short.txt", tmp_path / "again.txt"
    short.write_text("x = 1\n")
    again.write_text(file.read_text())
    texts = ["--file", file, "--file", short, "--file", again]
    own = ["--draft-bits", 16, "--draft-planes", 2, "--temperature", 0]
    code, out, _ = run("eval", "acceptance", "--model", directory, *texts, *SIZES, *own, "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["texts"], result["skipped"]) == (2, [str(short)])
    assert [(row["gamma"], row["mode"]) for row in result["results"]] == [(4, "teacher-forced"), (4, "free-running")]
    assert [row["acceptance_rate"] for row in result["results"]] == [1.0, 1.0]
    assert result["results"][0]["conditional_rate"] == 1.0


def test_texts_too_short_are_logged(run, directory, file, tmp_path, caplog):
    short = tmp_path / "short.txt"
    short.write_text("x = 1\n")
    flags = ["--gamma", 1, "--temperature", 0]
    code, out, _ = run("eval", "acceptance", "--model", directory, "--file", short, "--file", file, *SIZES, *flags)
    assert code == 0
    assert [record.getMessage() for record in caplog.records] == [f"1 of 2 texts have fewer than 100 tokens and are left out: {short}"]
    assert "teacher-forced" in out and "free-running" in out and "tokens a round" in out


@pytest.mark.parametrize(
    ("gammas", "word"),
    [
        ("0", "gamma"),
        ("2,0", "gamma"),
        ("-1", "-1"),
        ("1,x", "'1,x'"),
        ("", "''"),
        ("1,,2", "'1,,2'"),
        ("1.5", "'1.5'"),
        ("2,1,2", "twice"),
    ],
)
def test_bad_lists(fails, directory, file, gammas, word):
    fails(["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--gamma", gammas], word)


def test_bad_plot_and_texts(fails, directory, file, tmp_path):
    base = ["eval", "acceptance", "--model", directory, "--file", file, *SIZES]
    fails([*base, "--plot", tmp_path / "plot.txt"], "plot.txt")
    fails([*base, "--plot", tmp_path / "no" / "plot.png"], "no such folder")
    fails([*base, "--prompt-tokens", 2000], "no text has the 2060 tokens")
