"""`qspec eval acceptance`: acceptance against gamma, what is left out and said so, its plot."""

import json

import pytest

from qspec_jax import plots

SIZES = ["--prompt-tokens", 40, "--max-new-tokens", 24, "--no-calibrate"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(f"value_{i} = {i}\n" for i in range(40)))
    return path


def test_gammas_in_one_run_are_as_alone(run, directory, file, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), figure.savefig(path)))
    base = ["eval", "acceptance", "--model", directory, "--file", file, *SIZES, "--json"]
    code, out, err = run(*base, "--gamma", "1,3", "--plot", tmp_path / "gamma.png")
    assert (code, err) == (0, "")
    together = json.loads(out)
    assert (together["texts"], together["skipped"]) == (1, [])
    rows = together["results"]
    modes = ("teacher-forced", "free-running")
    assert [(row["gamma"], row["temperature"], row["mode"]) for row in rows] == [(g, t, m) for g in (1, 3) for t in (0, 1) for m in modes]
    alone = json.loads(run(*base, "--num-speculative-tokens", 3, "--temperature", 1)[1])
    assert alone["results"] == rows[6:]
    for row in rows:
        assert row["new_tokens"] == 24 and 0 < row["drafted"] <= row["gamma"] * row["rounds"]
        assert row["acceptance_rate"] == row["accepted"] / row["drafted"]
        assert row["mean_acceptance_length"] == 1 + row["accepted"] / row["rounds"]
        if row["mode"] == "free-running":
            assert row["conditional_rate"] is None
        elif row["gamma"] == 1:
            # Nothing stands before the one draft of a round.
            assert row["conditional_rate"] == row["acceptance_rate"]
        else:
            # A round rejects one draft, and up to two behind it are drafted in vain.
            rejected = row["accepted"] / row["conditional_rate"] - row["accepted"]
            assert rejected == pytest.approx(round(rejected), abs=1e-6)
            assert 0 < rejected < row["drafted"] - row["accepted"] <= 3 * rejected
    assert (tmp_path / "gamma.png").read_bytes().startswith(b"\x89PNG")
    accepted, tokens = figures[0].axes
    assert [line.get_xdata() for line in accepted.lines] == [[1, 3]] * 4
    of_line = lambda name: [[rows[i][name], rows[i + 4][name]] for i in range(4)]
    assert [line.get_ydata() for line in accepted.lines] == of_line("acceptance_rate")
    assert [line.get_ydata() for line in tokens.lines] == of_line("mean_acceptance_length")


def test_the_target_as_its_own_draft(run, directory, file, tmp_path):
    """Whatever is counted is accepted. A text that is too short is named, in one line and in the JSON."""
    short = tmp_path / "short.txt"
    short.write_text("x = 1\n")
    texts = ["--file", file, "--file", short, "--file", file]
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
    assert [record.getMessage() for record in caplog.records] == [f"1 of 2 texts have fewer than 64 tokens and are left out: {short}"]
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
    fails([*base, "--prompt-tokens", 2000], "no text has 2024 tokens")
