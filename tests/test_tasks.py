"""Tasks on held-out text: samples that are what the text has, scores by hand, and the command."""

import dataclasses
import itertools
import json
import random

import pytest

from qspec_jax import plots
from qspec_jax.decoding.results import Result
from qspec_jax.decoding.text import text_of
from qspec_jax.errors import InputError
from qspec_jax.evaluate import answers, needle, tasks
from qspec_jax.evaluate.answers import Method
from qspec_jax.evaluate.tasks import Sample, Settings, make_samples, score, similarity
from qspec_jax.evaluate.texts import split_tokens

SMALL = Settings(64, 5, 16, depths=(0, 0.5, 1))
LARGE = Settings(300, 5, 24, depths=(0.2, 0.8), seed=1)
KEYS = {"method", "cache", "task", "samples", "score", "standard_error", "exact_match", "same_tokens", "relative"}


def function(name: str, r: random.Random) -> str:
    first, second = r.sample(needle.WORDS, 2)
    return f"def {name}_{first}({second}, size):\n    return {second} * size + {r.randint(100, 999)} * {first}\n\n\n"


@pytest.fixture(scope="module")
def texts():
    """Three of them, none as long as the larger prompts; a line seldom occurs twice."""
    r = random.Random(0)
    return ["".join(function(f"{name}_{i}", r) for i in range(count)) for name, count in (("read", 9), ("write", 7), ("close", 8))]


@pytest.fixture(scope="module")
def files(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(texts):
        (folder / f"{i}.py").write_text(text)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("asked", [SMALL, LARGE], ids=["small", "large"])
def test_samples_are_the_texts_own(tokenizer, texts, asked):
    found = make_samples(tokenizer, texts, asked)
    assert [sample.task for sample in found] == [task for task in tasks.TASKS for _ in range(asked.samples)]
    circle = "".join(texts) * 2
    for number, sample in enumerate(found):
        # The first token stands for the beginning of a text.
        assert len(sample.prompt) == asked.length and sample.prompt[0] == tokenizer.bos_token_id
        prompt, answer = (text_of(tokenizer, tokens) for tokens in (sample.prompt[1:], sample.answer))
        assert answer.strip() == sample.text and 0 < len(sample.answer) <= asked.max_new_tokens
        if sample.task != tasks.RETRIEVAL:
            assert prompt + answer in circle
            rest = circle.split(prompt, 1)[1]
        if sample.task == tasks.COMPLETION:
            assert rest.lstrip().partition("\n")[0] == sample.text and (prompt + answer).endswith(f"\n{answer.strip(chr(10))}")
        elif sample.task == tasks.CONTINUATION:
            assert len(sample.answer) == asked.max_new_tokens
        else:
            context, _, begun = prompt.rpartition("\n")
            assert context in circle and len(begun + answer) >= tasks.MIN_RETRIEVED
            # Once, and so is its beginning; it could not be told from its end alone which line is meant.
            assert context.count(begun + answer) == context.count(begun.strip()) == 1
            lines = context.split("\n")
            at, depth = lines.index(begun + answer), asked.depths[number % asked.samples % len(asked.depths)]
            behind = len(tokenizer(context)["input_ids"]) - asked.max_new_tokens  # among these the depth is meant
            assert at / (len(lines) - 1) == pytest.approx(depth, abs=1.5 / len(lines) + (1 - behind / asked.length) * (1 - depth))
    # Large prompts are longer than any of the texts.
    assert asked == SMALL or all(tokenizer.bos_token_id in sample.prompt[1:] for sample in found)


def test_samples_follow_the_seed(tokenizer, texts):
    make = lambda **changes: make_samples(tokenizer, texts, dataclasses.replace(SMALL, **changes))
    assert make() == make() and len({tuple(sample.prompt) for sample in make()}) == 15
    assert make(seed=7) != make()
    # What is asked of one task does not depend on the others.
    assert make(tasks=["retrieval"]) == make()[10:]


def test_texts_without_places(tokenizer, texts):
    ask = lambda texts, **changes: make_samples(tokenizer, texts, dataclasses.replace(SMALL, **changes))
    with pytest.raises(InputError, match="the texts have 0 tokens"):
        ask(["", "\n"])
    with pytest.raises(InputError, match=r"a prompt with its answer 9,0"):
        ask(texts, length=9_000)
    with pytest.raises(InputError, match="retrieval: the texts have places for 0 of 5 prompts of 64 tokens"):
        ask(["the_same = this line is of some forty characters\n" * 60], tasks=["retrieval"])
    with pytest.raises(InputError, match="completion: the texts have places for 0 of 5"):
        ask(["a\nb\n" * 60], tasks=["completion"])
    with pytest.raises(InputError, match=r"task 'summary' should be one of completion, continuation, retrieval"):
        ask(texts, tasks=["summary"])
    with pytest.raises(InputError, match=r"completion: the texts have [\d,]+ lines to cut at, too few for 100,000,000 prompts"):
        ask(texts, samples=100_000_000)
    with pytest.raises(InputError, match="samples 0"):
        ask(texts, samples=0)


def test_split_tokens_where_the_second_begins(tokenizer):
    before, after = split_tokens(tokenizer, "def f(x):\n", "    return x")
    # A token has both the end of a line and blanks.
    assert text_of(tokenizer, before) == "def f(x):" and text_of(tokenizer, after) == "\n    return x"
    assert before + after == tokenizer("def f(x):\n    return x")["input_ids"]


def test_similarity():
    assert similarity("return x", "return x") == similarity([], []) == 1
    assert similarity("", "abc") == similarity([1, 2], [3]) == 0
    assert similarity("abc", "axc") == similarity("axc", "abc") == 2 * 2 / 6
    assert similarity([5, 6, 7, 8], [8, 5, 7]) == 2 * 2 / 7
    r = random.Random(0)
    subsequences = lambda text: {"".join(part) for n in range(len(text) + 1) for part in itertools.combinations(text, n)}
    for _ in range(20):
        one, other = ("".join(r.choices("abc", k=r.randint(1, 7))) for _ in range(2))
        assert similarity(one, other) == 2 * max(map(len, subsequences(one) & subsequences(other))) / len(one + other)


@pytest.mark.parametrize(
    ("task", "answer", "expected"),
    [
        ("completion", "\n    return x\n", (1, True)),
        ("completion", "return x\n\nmore", (1, True)),
        ("completion", "return y", (14 / 16, False)),
        ("completion", "\n\n", (0, False)),
        ("completion", "return x + 1", (16 / 20, False)),
        ("retrieval", "return x\nreturn", (1, True)),
        ("retrieval", "return x + 1\n", (0, False)),
        ("retrieval", "\nreturn x", (0, False)),  # the line was begun
    ],
)
def test_score_of_a_line(task, answer, expected):
    assert score(Sample(task, [1], [2], "return x"), Result(0, [3], answer, "length", {})) == expected


def answering(samples, tokenizer, seen):
    """A `run_batch` that knows the answers with a full cache, and gets one in two wrong with another."""
    known = {tuple(sample.prompt): sample for sample in samples}

    def run_batch(model, requests, *, batch_size, tokenizer=tokenizer):
        seen.append([request.tokens for request in requests])
        for index, request in reversed(list(enumerate(requests))):
            ids = known[tuple(request.tokens)].answer
            if request.config.cache != "full" and index % 2:
                ids = tokenizer(" wrong")["input_ids"] + ids[2:]
            yield Result(index, ids, text_of(tokenizer, ids), "length", {})

    return run_batch


def test_who_knows_the_answers_scores_one(model, tokenizer, texts, monkeypatch):
    samples, seen = make_samples(tokenizer, texts, dataclasses.replace(SMALL, samples=4)), []
    monkeypatch.setattr(answers, "run_batch", answering(samples, tokenizer, seen))
    methods = [Method("autoregressive", "specache:bits=1"), Method("autoregressive", "full"), Method("autoregressive", "kivi")]
    run = lambda methods: tasks.run("tiny", model, tokenizer, texts, dataclasses.replace(SMALL, samples=4), methods).results
    rows = run(methods)
    assert seen == [[sample.prompt for sample in samples if sample.task == task] for task in tasks.TASKS] * 3
    assert [(row.method, row.cache, row.task) for row in rows] == [(m.method, m.cache, task) for m in methods for task in tasks.TASKS]
    for row in rows[3:6]:
        assert (row.score, row.standard_error, row.exact_match, row.same_tokens, row.relative) == (1, 0, 1, 1, 1)
    for row in rows[:3] + rows[6:]:
        assert 0.5 <= row.score < 1 and row.relative == row.score and row.standard_error > 0
        assert (row.exact_match, row.same_tokens, row.samples) == (0.5, 0.5, 4)
    assert rows[2].score == 0.5
    assert all((row.same_tokens, row.relative) == (None, None) for row in run(methods[2:]))


def test_a_single_sample_has_no_error(run, directory, files, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    base = ["eval", "tasks", *files, "--model", directory, "--length", 64, "--max-new-tokens", 16, "--task", "continuation"]
    code, out, _ = run(*base, "--cache", "full", "--samples", 1, "--plot", tmp_path / "one.png")
    assert code == 0 and "continuation" in out and "±" not in out
    assert [bars.errorbar for bars in figures[0].axes[0].containers] == [None]
    assert json.loads(run(*base, "--cache", "full", "--samples", 1, "--json")[1])["results"][0]["standard_error"] is None


def test_the_command(run, directory, files, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), figure.savefig(path)))
    caches = ["full", "kivi:bits=1,residual=32"]
    base = ["eval", "tasks", *files, "--model", directory, "--length", 64, "--samples", 2, "--max-new-tokens", 16]
    base += [word for cache in caches for word in ("--cache", cache)]
    code, out, err = run(*base, "--json", "--plot", tmp_path / "tasks.png")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert set(report) == {"device", "date", "versions", "earlier", "model", "dtype", "settings", "texts", "results"}
    assert report["settings"] == dataclasses.asdict(Settings(64, 2, 16)) | {"tasks": list(tasks.TASKS), "depths": list(tasks.DEPTHS)}
    assert (report["texts"], report["dtype"]) == (3, "float32")
    assert all(set(row) == KEYS for row in report["results"])
    assert [(row["cache"], row["task"]) for row in report["results"]] == [(cache, task) for cache in caches for task in tasks.TASKS]
    assert all(row["same_tokens"] == 1 for row in report["results"][:3])
    assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([100 * row["score"] for row in report["results"]])

    table = tmp_path / "table.txt"
    code, out, _ = run(*base, "--task", "completion", "--task", "retrieval", "--output", table)
    shown = table.read_text()
    assert (code, out) == (0, "") and "completion" in shown and "retrieval" in shown and "2 prompts of 64 tokens" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("none, full "))
    assert f"{100 * report['results'][0]['score']:.1f} ± " in line and "100.0%" in line and "ROUGE-L" in shown


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--length", "113"], "length 113 should be from 1 to 112"),
        (["--length", "0"], "length 0"),
        (["--length", "4"], "places for 0 of 2"),
        (["--samples", "0"], "--samples"),
        (["--samples", "2000"], "too few for 2,000 prompts"),
        (["--task", "summary"], "summary"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--depths", "0,1.5"], "depth 1.5"),
        (["--cache", "int2"], "int2"),
        (["--cache", "full:host=all"], "leave host=all out"),
        (["--draft", "quantspec", "--cache", "specache"], "specache"),
        (["--draft", "sparse", "--cache", "kivi"], "draft sparse reads groups"),
        (["--plot", "tasks.txt"], "tasks.txt"),
        (["--output", "no/such/folder/file"], "no/such/folder/file"),
        (["no/such/text"], "no/such/text"),
    ],
)
def test_bad_input(fails, directory, files, flags, word):
    task = [] if "--task" in flags else ["--task", "retrieval"]
    fails(["eval", "tasks", files[0], "--model", directory, "--length", 64, "--samples", 2, "--max-new-tokens", 16, *task, *flags], word)


def test_a_text_that_is_too_short(fails, directory, tmp_path):
    (tmp_path / "short.py").write_text("import os\n")
    sizes = ["--length", 64, "--max-new-tokens", 16]
    fails(["eval", "tasks", tmp_path / "short.py", "--model", directory, *sizes], "the texts have 4 tokens")
