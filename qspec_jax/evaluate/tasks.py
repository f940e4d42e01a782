"""Tasks of LongBench's kinds made from held-out text: code completion, continuation and retrieval, for several caches and drafts.

SpeCache (arXiv 2503.16163) compares lossy caches on LongBench (arXiv 2308.14508), whose texts are not included. Completion corresponds to
its tasks LCC and RepoBench-P: the next line of a file that comes after others. Continuation replaces its summaries: the text after a token.
Retrieval repeats the beginning of a line of the prompt at its end and asks for the rest; unlike a needle the line is the text's own.

Everything follows from a seed, answers are greedy, and every method reads the same prompts. Prefill attends in full precision, so the
first token of an answer is the same with every cache. A small model scores low; the comparison between methods counts.
"""

import dataclasses
import functools
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Group

from qspec_jax import plots
from qspec_jax.decoding.config import AUTOREGRESSIVE
from qspec_jax.decoding.requests import check_length
from qspec_jax.decoding.text import text_of
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.registry import NONE
from qspec_jax.errors import InputError
from qspec_jax.evaluate.answers import Method, answers_of, by_method, check, method_name
from qspec_jax.evaluate.cache_views import FULL
from qspec_jax.evaluate.texts import Texts, split_tokens
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import Run, grid, page, this_run

TASKS = COMPLETION, CONTINUATION, RETRIEVAL = "completion", "continuation", "retrieval"
MIN_COMPLETED, MIN_RETRIEVED = 8, 32  # characters of a line without indentation: shorter lines are too easy, or occur twice
PLACES = 100  # maximum number of places tried for each sample: many lines are too short, or occur twice
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to ask.

    Attributes:
        length: tokens of a prompt.
        samples: prompts of each task.
        max_new_tokens: maximum tokens of an answer.
        tasks: of TASKS.
        depths: positions of the lines to retrieve among the prompt's, from 0 to 1, which samples use in turn.
    """

    length: int
    samples: int
    max_new_tokens: int
    tasks: Sequence[str] = TASKS
    depths: Sequence[float] = DEPTHS
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt and the text's own answer, as token ids, and as text without blanks around it."""

    task: str
    prompt: list[int]
    answer: list[int]
    text: str


def _completion(texts: Texts, number: int, at: int, asked: Settings, depth: float) -> Sample | None:
    before, line = texts.cut_at_line(number, at)
    if len(line.strip()) < MIN_COMPLETED:
        return None
    own, answer = split_tokens(texts.tokenizer, before, line)
    prompt = texts.prompt(number, own, asked.length)
    return Sample(COMPLETION, prompt, answer, line.strip()) if prompt and len(answer) <= asked.max_new_tokens else None


def _continuation(texts: Texts, number: int, at: int, asked: Settings, depth: float) -> Sample | None:
    tokens, new = texts.tokens[number], asked.max_new_tokens
    end = len(tokens) * at // len(texts.lines[number])
    prompt, answer = texts.prompt(number, tokens[:end], asked.length), tokens[end : end + new]
    return Sample(CONTINUATION, prompt, answer, text_of(texts.tokenizer, answer).strip()) if prompt and len(answer) == new else None


def _retrieval(texts: Texts, number: int, at: int, asked: Settings, depth: float) -> Sample | None:
    before, _ = texts.cut_at_line(number, at)
    context = texts.prompt(number, texts.tokenizer(before)["input_ids"], asked.length)
    # The repeated beginning of the line, at most max_new_tokens, pushes as many tokens out at the front.
    lines = text_of(texts.tokenizer, (context or [])[asked.max_new_tokens :]).split("\n")[1:-1]
    line = lines[round(depth * (len(lines) - 1))].rstrip() if lines else ""
    if len(line.strip()) < MIN_RETRIEVED:
        return None
    own, tokens = split_tokens(texts.tokenizer, before, line)
    half = math.ceil(len(tokens) / 2)
    prompt, begun, answer = texts.prompt(number, own + tokens[:half], asked.length), tokens[:half], tokens[half:]
    # Two occurrences: the line itself, and its repeated beginning.
    once = text_of(texts.tokenizer, prompt).count(text_of(texts.tokenizer, begun).strip()) == 2
    return Sample(RETRIEVAL, prompt, answer, text_of(texts.tokenizer, answer).strip()) if half <= asked.max_new_tokens and once else None


MAKERS = {COMPLETION: _completion, CONTINUATION: _continuation, RETRIEVAL: _retrieval}


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """The figures of a method in a task.

    Attributes:
        score: mean over the samples, from 0 to 1: the edit similarity of the first line (completion), ROUGE-L (continuation), or whether
            the line is right (retrieval).
        standard_error: of the score; None for a single sample.
        exact_match: share of answers that are the text's own.
        same_tokens: share of samples with the tokens of the first method with a full cache; None without such a method.
        relative: the score divided by that method's; None without such a method, or if its score is 0.
    """

    method: str
    cache: str
    task: str
    samples: int
    score: float
    standard_error: float | None
    exact_match: float
    same_tokens: float | None
    relative: float | None


@dataclasses.dataclass(frozen=True)
class TasksReport(Run):
    """What `qspec eval tasks` measured: results by method and task, with prompts made of `texts` texts."""

    model: str
    dtype: str
    settings: Settings
    texts: int
    results: list[TaskScore]

    def table(self) -> Group:
        """A line for each method: its scores in hundredths, as LongBench has them, their mean, and how it compares with the full cache."""
        tasks = list(dict.fromkeys(row.task for row in self.results))
        columns = grid("method", *tasks, "exact completions", "mean", "of full", "same tokens", left=("method",))
        methods = by_method(self.results, _name)
        means = {name: statistics.fmean(row.score for row in rows) for name, rows in methods.items()}
        full = next((means[name] for name, rows in methods.items() if rows[0].cache == FULL), None)
        for name, rows in methods.items():
            errors = ["" if row.standard_error is None else f" ± {100 * row.standard_error:.1f}" for row in rows]
            cells = [f"{100 * row.score:.1f}{error}" for row, error in zip(rows, errors)]
            exact = "".join(f"{100 * row.exact_match:.1f}" for row in rows if row.task == COMPLETION)
            same = "" if full is None else f"{statistics.fmean(row.same_tokens for row in rows):.1%}"
            columns.add_row(name, *cells, exact, f"{100 * means[name]:.1f}", f"{means[name] / full:.1%}" if full else "", same)
        asked = self.settings
        new, number, texts = _plural(asked.max_new_tokens, "new token"), _plural(asked.samples, "prompt"), _plural(self.texts, "text")
        prompts = f"{number} of {asked.length:,} tokens a task, from {texts}; up to {new}."
        scores = (
            "completion: edit similarity of the next line, and how often it is exact; continuation: ROUGE-L; retrieval: the line is exact."
        )
        notes = prompts, scores, "A small model scores low; what counts is how the caches compare."
        notes = (*notes, "±: standard errors.") if asked.samples > 1 else notes
        return page(f"Tasks on held-out text of {self.model}", f" in {self.dtype} on {self.device}", columns, notes=notes)

    def figure(self) -> Any:
        """Bars of every method's score with standard errors, by task."""
        methods = by_method(self.results, _name)
        figure, (axes,) = plots.panels((9, 4.5))
        width = 0.8 / len(methods)
        for number, (label, rows) in enumerate(methods.items()):
            places = [i + (number - (len(methods) - 1) / 2) * width for i in range(len(rows))]
            errors = None if self.settings.samples == 1 else [100 * row.standard_error for row in rows]
            axes.bar(places, [100 * row.score for row in rows], width, yerr=errors, capsize=2, label=label)
        axes.set_xticks(range(len(rows)), [row.task for row in rows])
        axes.set(ylabel="score", title=f"{self.model}: prompts of {self.settings.length:,} tokens")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8)
        return figure


@working("making prompts")
def make_samples(tokenizer, texts: Sequence[str], asked: Settings) -> list[Sample]:
    """The samples of each task. Raises InputError for an unknown task, samples below 1, and texts with too few places for the samples."""
    if unknown := [task for task in asked.tasks if task not in TASKS]:
        raise InputError(f"task {unknown[0]!r} should be one of {', '.join(TASKS)}")
    if asked.samples < 1:
        raise InputError(f"samples {asked.samples} should be at least 1")
    source, found = Texts(tokenizer, [text for text in texts if text.strip()]), []
    if (total := sum(map(len, source.tokens))) < (needed := asked.length + asked.max_new_tokens):
        raise InputError(f"the texts have {total:,} tokens, and a prompt with its answer {needed:,}; give more text, or a smaller --length")
    for task in asked.tasks:
        places, of_task = source.places(), []
        if asked.samples > len(places):
            more = "give more text, or a smaller --samples"
            raise InputError(f"{task}: the texts have {len(places):,} lines to cut at, too few for {asked.samples:,} prompts; {more}")
        random.Random(f"{asked.seed} {asked.length} {task}").shuffle(places)
        for number, at in places[: PLACES * asked.samples]:
            made = MAKERS[task](source, number, at, asked, asked.depths[len(of_task) % len(asked.depths)])
            of_task += [made] if made and made not in of_task else []
            if len(of_task) == asked.samples:
                break
        else:
            places = f"the texts have places for {len(of_task)} of {asked.samples} prompts of {asked.length} tokens"
            raise InputError(f"{task}: {places}; give more text, or a smaller --length, --max-new-tokens or --samples")
        found += of_task
    return found


def similarity(found: Sequence[Any], true: Sequence[Any]) -> float:
    """Twice the length of the longest common subsequence divided by the sum of the lengths, from 0 to 1.

    Of tokens it is the F1 of ROUGE-L (Lin 2004), of characters the edit similarity with which LongBench scores code (`fuzz.ratio`).
    """
    longest = [0] * (len(true) + 1)  # common subsequences of the items of `found` so far and each beginning of `true`
    for item in found:
        diagonal = 0
        for i, other in enumerate(true, 1):
            diagonal, longest[i] = longest[i], diagonal + 1 if item == other else max(longest[i], longest[i - 1])
    return 2 * longest[-1] / (len(found) + len(true)) if found or true else 1.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a method answered."""

    token_ids: list[int]
    text: str


def score(sample: Sample, answer: Answer) -> tuple[float, bool]:
    """The score of an answer, and whether it is the text's own: its tokens, or its first line; a completion may begin with blank ones."""
    if sample.task == CONTINUATION:
        return similarity(answer.token_ids, sample.answer), answer.token_ids == sample.answer
    line = (answer.text.lstrip() if sample.task == COMPLETION else answer.text).partition("\n")[0].strip()
    exact = line == sample.text
    return similarity(line, sample.text) if sample.task == COMPLETION else float(exact), exact


def run(
    name: str,
    model: Llama,
    tokenizer,
    texts: Sequence[str],
    settings: Settings,
    methods: Sequence[Method],
    *,
    batch_size: int = 4,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> TasksReport:
    """Scores every method on the same samples.

    Args:
        kept: the answers of an earlier run, a row for each method and task.
        progress: see `progress_bar`.

    Raises:
        InputError: as `make_samples`, `make_draft` and `answers.check` do.
    """
    new = settings.max_new_tokens
    check(model, [settings.length], settings.depths, new)
    check_length(model, "a prompt", settings.length, new)
    asked = make_samples(tokenizer, texts, settings)
    answers: dict[Method, list[Answer]] = {method: [] for method in methods}
    with progress_bar(total=len(methods) * len(asked), progress=progress, desc="tasks", unit="prompt") as bar:
        for method in methods:
            draft = functools.cache(functools.partial(make_draft, method.draft, model))  # made for the first task that is measured
            for task in settings.tasks:
                mine = [sample for sample in asked if sample.task == task]

                def answered(mine=mine, method=method, draft=draft) -> list[Answer]:
                    prompts, places = [sample.prompt for sample in mine], dict(batch_size=batch_size, draft=draft(), bar=bar)
                    results = answers_of(model, tokenizer, prompts, method, new, **places)
                    return [Answer(result.token_ids, result.text) for result in results]

                def scored(found: list[Answer], mine=mine) -> str:
                    return f"score {100 * statistics.fmean(score(*pair)[0] for pair in zip(mine, found)):.1f}"

                label = f"{method_name(method)}, {task}"
                bar.update(len(mine) if label in kept else 0)
                answers[method] += kept.measured(label, list[Answer], answered, scored)
    scores = {method: [score(*pair) for pair in zip(asked, answers[method])] for method in methods}
    full = next((method for method in methods if method.cache == FULL), None)
    results = []
    for method, task in itertools.product(methods, settings.tasks):
        mine = [i for i, sample in enumerate(asked) if sample.task == task]
        figures, exact = zip(*(scores[method][i] for i in mine))
        mean, same, relative = statistics.fmean(figures), None, None
        error = statistics.stdev(figures) / math.sqrt(len(mine)) if len(mine) > 1 else None
        if full is not None:
            same = statistics.fmean(answers[method][i].token_ids == answers[full][i].token_ids for i in mine)
            of_full = statistics.fmean(scores[full][i][0] for i in mine)
            relative = mean / of_full if of_full else None
        results.append(TaskScore(method.method, method.cache, task, len(mine), mean, error, statistics.fmean(exact), same, relative))
    return TasksReport(**this_run(), model=name, dtype=model.dtype.name, settings=settings, texts=len(texts), results=results)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _name(row: TaskScore) -> str:
    """The name of a row's method, as in `bench decode` over several caches."""
    return f"{NONE if row.method == AUTOREGRESSIVE else row.method}, {row.cache}"
