"""Needle in a haystack: prompts that are what they should be, answers that are scored exactly, and the command."""

import json
import re
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from qspec_jax import demo, plots
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.results import Result
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.quantspec import QuantSpecDraft
from qspec_jax.errors import InputError
from qspec_jax.evaluate import answers, needle
from qspec_jax.evaluate.acceptance import Acceptance, teacher_forced
from qspec_jax.reports import this_run


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo.MODEL)


def parts(prompt: needle.NeedlePrompt, style: str) -> tuple[str, str, str]:
    """The haystack before and behind the needle; and the header."""
    form = needle.FORMATS[style]
    header, rest = prompt.text.split("\n", 1)
    assert rest.endswith(form.question)
    before, behind = rest.removesuffix(form.question).split(form.needle(prompt.value))
    return before, behind, header


@pytest.mark.parametrize("style", needle.FORMATS)
@pytest.mark.parametrize("length", [150, 1000])
def test_prompts(tokenizer, style, length):
    haystacks = set()
    for depth in (0, 0.25, 0.5, 1):
        prompt = needle.make_prompt(tokenizer, length, depth, style=style, seed=3, sample=0)
        assert prompt.tokens == tokenizer(prompt.text)["input_ids"]
        assert len(prompt.tokens) == length
        assert prompt.text.count(prompt.value) == 1 and re.fullmatch(r"\d{5}|[a-z]+(_[a-z]+){1,3}", prompt.value)
        before, behind, _ = parts(prompt, style)
        lines = len(before + behind) / (3 if length < 200 else 30)  # about one of them
        assert len(before) == pytest.approx(depth * len(before + behind), abs=lines)
        assert (before == "") == (depth == 0) and (behind == "") == (depth == 1)
        haystacks.add((before + behind, prompt.value))
    # The depth changes nothing else.
    assert len(haystacks) == 1


def test_prompts_follow_the_seed(tokenizer):
    make = lambda seed, sample: needle.make_prompt(tokenizer, 300, 0.5, style="python", seed=seed, sample=sample)
    assert make(0, 0) == make(0, 0)
    assert len({make(*of).value for of in ((0, 0), (0, 1), (1, 0), (1, 1))}) == 4
    # Other functions return values too, so that the answer is not the only number of its kind.
    before = parts(needle.make_prompt(tokenizer, 1000, 1, style="python", seed=0, sample=0), "python")[0]
    assert 0 < before.count("():\n    return ") < before.count("(value):\n    return ")


@pytest.mark.parametrize("style", needle.FORMATS)
def test_texts_to_learn_from_end_with_the_answer(style):
    form, sizes = needle.FORMATS[style], []
    for seed in range(60):
        text = needle.training_text(style, seed)
        assert text == needle.training_text(style, seed)
        question, answer = text[: -len(form.ending)].rsplit(form.question, 1)
        value = answer.strip()
        assert answer == form.before + value and answer in form.needle(value)
        assert text.endswith(answer + form.ending) and needle.is_right(answer, value) and form.needle(value) in question
        sizes.append(len(text))
    assert min(sizes) < 3_000 < 20_000 < max(sizes)


def test_too_short_for_a_haystack(tokenizer):
    with pytest.raises(InputError, match="no room for a haystack"):
        needle.make_prompt(tokenizer, 25, 0.5, style="python", seed=0, sample=0)


def test_answers_that_cross_to_the_long_rope_factors_are_refused_before_the_work(tokenizer, monkeypatch):
    monkeypatch.setattr(needle, "make_draft", lambda *_, **__: pytest.fail("the work has begun"))
    model = SimpleNamespace(config=SimpleNamespace(max_length=4096, short_length=400))
    with pytest.raises(InputError, match=r"a prompt of 3.. tokens and 10 new ones cross the 400 tokens"):
        needle.run(model, tokenizer, lengths=[150, 398], depths=[0.5], samples=1)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("48213", True),
        (" 48213.\n", True),
        ("\n48213\n\n\ndef", True),
        ("482130", False),
        ("48214", False),
        ("4821", False),
        ("is 48213", False),
        ("", False),
    ],
)
def test_is_right(answer, right):
    assert needle.is_right(answer, "48213") is right


def test_cells_count_right_answers(monkeypatch, directory):
    """A model that finds the needle in the second half only; with quantspec it gives a last digit too many at the very end."""
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    seen = []

    def answer(model, requests, *, batch_size, tokenizer):
        name = "quantspec" if isinstance(requests[0].config.draft, QuantSpecDraft) else requests[0].config.draft
        seen.append(({len(request.tokens) for request in requests}, name, requests[0].config.cache))
        # In any order, as they come.
        for index, request in reversed(list(enumerate(requests))):
            text = tokenizer.decode(request.tokens)
            value = text.split("def secret_key():\n    return ")[1].split("\n")[0]
            at = text.index(value) / len(text)
            found = value if at > 0.4 else "10000"
            found += "7" if at > 0.8 and name == "quantspec" else ""
            yield Result(index, tokenizer(found)["input_ids"], found, "length", {})

    monkeypatch.setattr(answers, "run_batch", answer)
    report = needle.run(model, tokenizer, lengths=[100, 118], depths=[0, 0.5, 1], samples=3)
    assert seen == [({n}, method, cache) for method, cache in (("none", "full"), ("quantspec", "int8")) for n in (100, 118)]
    full, int8 = [cell for cell in report.results if cell.cache == "full"], [cell for cell in report.results if cell.cache == "int8"]
    assert [(cell.length, cell.tokens, cell.depth, cell.correct) for cell in full] == [
        *((100, 100, 0, 0), (100, 100, 0.5, 3), (100, 100, 1, 3)),
        *((118, 118, 0, 0), (118, 118, 0.5, 3), (118, 118, 1, 3)),
    ]
    at_the_end = [int(cell.correct == 0) for cell in int8]
    assert at_the_end == [1, 0, 1, 1, 0, 1]
    assert report.agreement == needle.Agreement(prompts=18, same_tokens=12, same_score=12)


@pytest.fixture(scope="module")
def embedded():
    return load_model(demo.MODEL, dtype="float32")


@pytest.mark.system
def test_the_embedded_model_finds_some(embedded, tokenizer):
    """With each cache one token at a time: what quantspec emits over int8 is the same (test_exactness.py), and its program takes far longer
    to compile."""
    methods = answers.methods_of([], ["full", "int8"])
    report = needle.run(embedded, tokenizer, lengths=[192], depths=[0.5, 0.75], samples=2, methods=methods)
    assert (report.format, report.seed, report.dtype) == ("python", 0, "float32")
    cells = report.results
    assert [(c.method, c.cache, c.depth) for c in cells] == [
        ("autoregressive", cache, depth) for cache in ("full", "int8") for depth in (0.5, 0.75)
    ]
    assert all(cell.samples == 2 and cell.tokens == cell.length == 192 for cell in cells)
    assert cells[0].correct + cells[1].correct >= 2
    agreement = report.agreement
    assert 3 <= agreement.same_tokens <= agreement.same_score <= agreement.prompts == 4


@pytest.mark.system
def test_who_reads_the_needle_drafts_the_answer(embedded, tokenizer):
    """The model itself finds 9 of 10 needles, or nothing would be shown; StreamingLLM, which has left them behind, drafts few answers.

    Both draft with the model's own weights, and sparse reads no more, 4 of 9 groups, so that they differ in what they choose. StreamingLLM
    has a cache of its own, whatever the target's: over the full one its program is half as large.
    """
    found = needle.answered(embedded, tokenizer, length=320, depths=[0.1, 0.2], samples=3, style="two-names")
    assert len(found.texts) == 6 and found.right >= needle.MIN_RIGHT * 6 and not found.void
    rates = {}
    for draft, cache in (("sparse:budget=0.25,weight_bits=16", "int8"), ("streaming-llm:budget=0.5", "full")):
        config = GenerationConfig(max_new_tokens=found.answer_tokens, group_size=32, cache=cache)
        made = make_draft(draft, embedded)
        rates[draft.partition(":")[0]] = teacher_forced(embedded, made, found.texts, config, jax.random.key(0)).conditional_rate
    assert rates["streaming-llm"] < 0.5, rates
    assert rates["sparse"] > 0.9, rates


def test_needles_that_the_model_does_not_find_are_void(run, directory, caplog, monkeypatch):
    measured = Acceptance(0.5, 1.5, None, 1, 2, 1, 4, 0.0)
    monkeypatch.setattr("qspec_jax.evaluate.acceptance.teacher_forced_in_turn", lambda runs: (measured for _ in runs))
    base = ["eval", "acceptance", "--model", directory, "--needles", "python", "--context", 100, "--samples", 1, "--depths", "0.3"]
    code, out, _ = run(*base, "--temperature", 0, "--gamma", 2, "--no-calibrate", "--json")
    (row,) = json.loads(out)["results"]
    assert code == 0 and (row["right"], row["texts"], row["mode"], row["context"]) == (0, 1, "teacher-forced", 100)
    said = [record.getMessage() for record in caplog.records if record.name != "qspec_jax.decoding.requests"]  # of its EOS, once a process
    assert said == ["void: with a full cache the model finds 0 of 1 needles of 100 tokens, so that acceptance there says little of drafts"]


def test_needles_are_texts_of_their_own(fails, directory, tmp_path):
    base = ["eval", "acceptance", "--model", directory]
    for more in (["--mode", "free-running"], ["--texts", 2], ["--file", tmp_path / "text.txt"], ["--max-new-tokens", 512]):
        fails([*base, "--needles", "names", *more], "--needles", more[0])
    for more in (["--depths", "0.2,0.5"], ["--samples", 8]):
        fails([*base, *more], f"{more[0]} is only for --needles")


def test_one_method_and_its_table(run, directory):
    base = ["eval", "needle", "--model", directory, "--lengths", "118", "--depths", "0.3", "--samples", 1]
    code, out, _ = run(*base, "--draft", "none", "--cache", "int8")
    assert code == 0
    assert "autoregressive, int8 cache" in out and "118 tokens" in out and "0/1" in out and "0 of 1 right" in out
    assert "quantspec" not in out and "both gave" not in out


def test_methods_are_each_draft_over_each_cache():
    found = lambda drafts, caches: [(method.draft, method.cache) for method in answers.methods_of(drafts, caches)]
    assert found([], ["kivi:bits=1", "specache:bits=1", "specache:fetch=now", "full", "full"]) == [
        *(("none", "kivi:bits=1"), ("none", "specache:bits=1"), ("none", "specache:fetch=now"), ("none", "full"))
    ]
    assert found(["quantspec", "none"], []) == [("quantspec", "int8"), ("none", "full")]
    assert found(["snapkv", "none"], ["int8", "kivi"]) == [(draft, cache) for draft in ("snapkv", "none") for cache in ("int8", "kivi")]


def test_methods_that_do_not_go_together(caplog):
    methods = answers.methods_of(["sparse", "snapkv"], ["int8", "kivi", "h2o"])
    assert [(method.draft, method.cache) for method in methods] == [("sparse", "int8"), ("snapkv", "int8"), ("snapkv", "kivi")]
    assert [record.getMessage().partition(" the ")[0] for record in caplog.records] == [
        *["left out: draft sparse reads groups of"] * 2,
        "left out: draft snapkv takes single tokens from",
    ]
    caplog.clear()
    methods = answers.methods_of(["quantspec"], ["full", "kivi:bits=1", "specache"])
    assert [(method.draft, method.cache) for method in methods] == [("quantspec", "full"), ("quantspec", "kivi:bits=1")]
    assert [record.getMessage() for record in caplog.records] == [
        "left out: draft quantspec: the only draft that is compatible with cache specache is none"
    ]
    for drafts, caches, words in (
        (["sparse"], ["kivi", "full"], "draft sparse reads groups"),
        (["quantspec", "magic"], ["full"], "draft 'magic' should be one of"),
        (["quantspec", "auto"], ["full"], "auto is for generate and batch"),
        (["quantspec"], ["int8:host=lower"], "cache 'int8:host=lower' gives the same tokens as on the device: leave host=lower out"),
        ([], ["specache:bits=1,host=store"], "leave host=store out"),
        (["quantspec"], ["int4"], "cache 'int4' should be one of full, int8, kivi, specache, streaming-llm, h2o"),
        (["quantspec"], [""], "cache '' should be one of full, int8"),
        (["magic"], [], "'magic' should be one of"),
    ):
        with pytest.raises(InputError, match=words):
            answers.methods_of(drafts, caches)


@pytest.mark.system
def test_a_map_for_every_cache(run, directory, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    caches = ["kivi:bits=1,residual=32", "specache:bits=1", "full"]
    base = ["eval", "needle", "--model", directory, "--lengths", 100, "--depths", "0.3", "--samples", 1, "--json"]
    code, out, _ = run(*base, *(word for cache in caches for word in ("--cache", cache)), "--plot", tmp_path / "map.png")
    report = json.loads(out)
    assert code == 0 and (report["format"], report["seed"], report["dtype"], report["agreement"]) == ("python", 0, "float32", None)
    assert all(needle.Cell(**row).samples == 1 for row in report["results"])
    assert [(row["method"], row["cache"]) for row in report["results"]] == list(zip(("autoregressive",) * 3, caches, strict=True))
    assert [axes.get_title() for axes in figures[0].axes[:3]] == [
        *("autoregressive, kivi:bits=1,residual=32 cache", "autoregressive, specache:bits=1 cache", "autoregressive, full cache")
    ]


def test_table_and_plot_have_every_cell(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), figure.savefig(path)))
    asked = [(method, length, depth) for method in needle.METHODS for length in (512, 1024) for depth in (0, 0.5)]
    cells = [needle.Cell(m.method, m.cache, length, depth, length - 2, i, 9) for i, (m, length, depth) in enumerate(asked)]
    report = needle.NeedleReport(
        **this_run(), format="text", seed=0, dtype="float32", results=cells, agreement=needle.Agreement(72, 35, 34)
    )
    console = Console(width=150)
    with console.capture() as captured:
        console.print(report.table())
    rows = [[word for word in line.split() if "/9" in word] for line in captured.get().splitlines() if "/9" in line]
    assert rows == [["0/9", "2/9"], ["1/9", "3/9"], ["4/9", "6/9"], ["5/9", "7/9"]]
    assert "6 of 36 right; some prompts are up to 2 tokens shorter" in captured.get()
    assert "Of 72 prompts, both gave the same tokens for 35 and the same score for 34." in captured.get()
    plots.save(report.figure(), tmp_path / "needle.png")
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
    # A row for each depth, a column for each length.
    images = [axes.images[0].get_array() * 9 for axes in figures[0].axes[:2]]
    assert [image.round().tolist() for image in images] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--lengths", "119"], "from 1 to 118"),
        (["--lengths", "0"], "length 0"),
        (["--lengths", "25"], "no room"),
        (["--lengths", "x"], "--lengths 'x'"),
        (["--lengths", ""], "--lengths ''"),
        (["--lengths", "100,100"], "100 is given twice"),
        (["--depths", "1.5"], "depth 1.5"),
        (["--depths", "-0.1"], "depth -0.1"),
        (["--depths", "nan"], "depth nan"),
        (["--depths", "0,half"], "--depths '0,half'"),
        (["--samples", "0"], "--samples"),
        (["--batch-size", "0"], "--batch-size"),
        (["--format", "xml"], "--format"),
        (["--cache", "int2"], "int2"),
        (["--cache", "full", "--cache", "kivi:bytes=1"], "'bytes=1' should be one of"),
        (["--cache", "full:host=all"], "leave host=all out"),
        (["--cache", "specache", "--draft", "quantspec"], "the only draft that is compatible with cache specache is none"),
        (["--cache", "full", "--draft", "sparse"], "int8 cache"),
        (["--plot", "needle.txt"], "needle.txt"),
    ],
)
def test_bad_flags(fails, directory, flags, word):
    fails(["eval", "needle", "--model", directory, "--lengths", "100", *flags], word)
