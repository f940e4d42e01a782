"""`qspec bench drafts`: what runs in each turn, and what is made of its times."""

import json

import pytest

from qspec_jax.bench import drafts
from qspec_jax.decoding.generate import generate

SIZES = ["--context", 12, "--max-new-tokens", 6]


@pytest.mark.system
def test_medians_over_turns(monkeypatch, run, one_layer):
    """Ratios are of decodes of one turn; what compiles, the first turn, does not count."""
    asked, speeds = [], {"none, full": 10.0, "none, int8": 5.0, "auto, int8": 5.0, "quantspec, int8": 2.0}

    def timed(model, prepared):
        out = generate(model, prepared)
        names = ["none" if prepared.draft is None else "quantspec", prepared.config.cache_config.kind]
        turn = len(asked) // len(speeds)
        asked.append(", ".join(names))
        # A machine that is twice as fast in every other turn, and a first turn that is far slower.
        rate = speeds[asked[-1]] * (1 + turn % 2) * (0.01 if turn == 0 else 1)
        object.__setattr__(out.stats, "tokens_per_second", rate)
        return out

    monkeypatch.setattr(drafts, "generate", timed)
    code, out, err = run("bench", "drafts", "--arch", "tiny", *SIZES, "--draft", "auto", "--draft", "quantspec", "--repeats", 3, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["dtype"], report["context"], report["max_new_tokens"], report["turns"]) == ("bfloat16", 12, 6, 3)
    rows = {(row["draft"], row["cache"]): row for row in report["rows"]}
    assert list(rows) == [("none", "full"), ("none", "int8"), ("auto", "int8"), ("quantspec", "int8")]
    assert [row["settled"] for row in rows.values()] == ["none", "none", "none", "quantspec"]
    assert [row["gamma"] for row in rows.values()] == [0, 0, 0, 4]
    assert [row["to_none"] for row in rows.values()] == [1.0, 0.5, 0.5, 0.2]
    assert [row["to_same_cache"] for row in rows.values()] == [1.0, 1.0, 1.0, 0.4]
    assert rows["none", "full"]["tokens_per_second"] == [20.0, 10.0, 20.0] and rows["none", "full"]["median"] == 20.0
    assert len(asked) == 4 * len(rows)
    begun = [asked[i] for i in range(0, len(asked), len(rows))]
    assert len(set(begun)) > 1  # each is first at times


def test_the_table(run, shallow, caplog):
    drafts_of = ["--draft", "auto", "--draft", "prompt-lookup"]
    code, out, err = run("bench", "drafts", "--model", shallow, *SIZES, *drafts_of, "--cache", "full", "--repeats", 1)
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[:2] for line in lines if line[:1] == ["none"]] == [["none", "full"]]
    assert any(line[:3] == ["auto", "(none)", "full"] for line in lines) and any(line[:2] == ["prompt-lookup", "full"] for line in lines)
    assert sum(message.startswith("draft auto: none") for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--arch", "tiny", "--file", "x"], "leave out --model and --file"),
        (["--draft", "sparse", "--cache", "full"], "compatible caches: int8"),
        (["--context", 8190], "exceed the model's 8192 positions"),
        (["--gamma", 0], "--gamma 0 should be from 1"),
        (["--draft", "medusa"], "draft 'medusa' should be one of"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(fails, flags, words):
    fails(["bench", "drafts", *flags], words)
