"""Needle in a haystack: the end of a synthetic text asks for a value that the text has once, at some depth.

Everything follows from a seed. The same sample has the same haystack and value at every depth. Answers are greedy, and right if they begin
with the value. Prefill attends in full precision, so the first token of an answer is the same with every cache: what a quantized cache can
lose are the tokens after it. (Greg Kamradt's LLMTest_NeedleInAHaystack; the pass key of arXiv 2305.16300.)
"""

import bisect
import dataclasses
import functools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qspec_jax import plots
from qspec_jax.decoding.requests import check_length
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.answers import METHODS, Method, answers_of, by_method, check, method_name
from qspec_jax.evaluate.texts import split_tokens
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import Run, this_run

MIN_RIGHT = 0.9  # share of right answers with a full cache; below, acceptance along answers says nothing about drafts
MIN_LINE_TOKENS = 4  # any line of a haystack has more
DISTRACTORS = 0.1  # share of the functions in a haystack that return a value themselves

ADJECTIVES = ("active", "backup", "cached", "current", "default", "global", "initial", "local", "pending", "primary", "remote", "total")
NOUNS = ("budget", "count", "cursor", "depth", "height", "index", "limit", "margin", "offset", "padding", "quota", "retries", "width")
PLACES = ("bakery", "bridge", "garden", "harbour", "library", "market", "museum", "station", "theatre", "valley")
WORDS = (
    *("apple", "castle", "chair", "circle", "cloud", "copper", "doctor", "driver", "engine", "farmer"),
    *("filter", "forest", "garden", "harbor", "hunter", "island", "letter", "loader", "market", "matrix", "mirror", "number", "ocean"),
    *("orange", "paper", "parser", "pencil", "planet", "purple", "reader", "river", "rocket", "signal", "silver", "singer", "socket"),
    *("square", "station", "stone", "summer", "table", "tensor", "thread", "tunnel", "valley", "vector", "window", "winter", "writer"),
)
THINGS = ("a bench", "a bicycle", "a lamp", "a letter", "a piano", "a red door", "an old map", "an umbrella", "some bread", "some flowers")
TIMES = ("At noon", "Before dawn", "Every evening", "In the morning", "In winter", "Last summer", "On Sunday", "Yesterday")


@dataclasses.dataclass(frozen=True)
class Format:
    """The parts of a haystack.

    Attributes:
        header: the first line, with this number of extra words to reach a size.
        line: a filler, which does not have the value.
        needle: the line with the value.
        question: the end of the prompt, which the value should continue.
        value: draws a value.
        before: text between question and value.
        ending: text after the value.
        new_tokens: maximum tokens of an answer, its ending included.
    """

    header: Callable[[int], str]
    line: Callable[[random.Random, str], str]
    needle: Callable[[str], str]
    question: str
    value: Callable[[random.Random], str]
    before: str
    ending: str
    new_tokens: int


def _value(r: random.Random) -> str:
    return str(r.randint(10_000, 99_999))


def _function(r: random.Random, value: str) -> str:
    name = f"{r.choice(ADJECTIVES)}_{r.choice(NOUNS)}_{r.randint(1, 99)}"
    other = _value(r)
    if r.random() < DISTRACTORS and other != value:
        return f"def {name}():\n    return {other}\n\n\n"
    return f"def {name}(value):\n    return value {r.choice('+-*')} {r.randint(1, 9)}\n\n\n"


def _sentence(r: random.Random, value: str) -> str:
    where = f"{r.choice(THINGS)} near the {r.choice(PLACES)}, and {r.choice(THINGS)} behind the {r.choice(PLACES)}"
    return f"{r.choice(TIMES)} there was {where}. "


# Easier than numbers: the more of a needle the question repeats, the better a small model finds it, and copies what follows.
NAMES_QUESTION = 'def bridge_buffer_desert():\n    """The secret name of the harbor."""\n    return \''


def _functions(question: str, value: Callable[[random.Random], str], quote: str, new_tokens: int) -> Format:
    """A format of Python functions, one of which returns the value."""
    return Format(
        lambda words: f"# secret{' value' * words}\n",
        _function,
        lambda found: f"{question}{found}{quote}\n\n\n",
        question,
        value,
        "",
        quote or "\n",
        new_tokens,
    )


def _words(count: int) -> Format:
    """The format whose value has `count` words."""
    return _functions(NAMES_QUESTION, lambda r: "_".join(r.sample(WORDS, count)), "'", 4 * count)


FORMATS = {
    "python": _functions("def secret_key():\n    return ", _value, "", 10),  # a space, a value of single digits, and what ends it
    "names": _words(4),
    # As short as the part that SnapKV keeps around a token that the question attends to.
    "two-names": _words(2),
    "text": Format(
        lambda words: f"A pass key is hidden in this text. Find it and remember it: it is{' very' * words} important.\n",
        _sentence,
        lambda value: f"The pass key is {value}. Remember it. ",
        "\nWhat is the pass key? The pass key is",
        _value,
        " ",
        ".",
        10,
    ),
}


@dataclasses.dataclass(frozen=True)
class NeedlePrompt:
    """A haystack with its needle and the question; `tokens` are at most `length`, and at most a few less."""

    length: int
    depth: float
    value: str
    text: str
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Cell:
    """The number of samples that a method got right; `tokens` is the length of the shortest of their prompts."""

    method: str
    cache: str
    length: int
    depth: float
    tokens: int
    correct: int
    samples: int


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Agreement of two methods: the prompts for which they gave the same tokens, and for which both were right or both wrong."""

    prompts: int
    same_tokens: int
    same_score: int


@dataclasses.dataclass(frozen=True)
class NeedleReport(Run):
    """What `qspec eval needle` measured: cells by method, length and depth, and the agreement if there are two methods."""

    format: str
    seed: int
    dtype: str
    results: list[Cell]
    agreement: Agreement | None

    def table(self) -> Group:
        """A grid for every method, of the right answers by depth and length."""
        parts = []
        for name, cells in by_method(self.results).items():
            lengths = list(dict.fromkeys(cell.length for cell in cells))
            grid = Table()
            for label in ("depth", *(f"{length:,} tokens" for length in lengths)):
                grid.add_column(label, justify="right")
            for depth in dict.fromkeys(cell.depth for cell in cells):
                grid.add_row(f"{depth:g}", *(f"{cell.correct}/{cell.samples}" for cell in cells if cell.depth == depth))
            correct, asked = sum(cell.correct for cell in cells), sum(cell.samples for cell in cells)
            short = max(cell.length - cell.tokens for cell in cells)
            note = f"{correct} of {asked} right" + (f"; some prompts are up to {short} tokens shorter\n" if short else "\n")
            parts += [Text(f"Needle in a haystack ({self.format}): {name}", "bold"), grid, Text(note)]
        if both := self.agreement:
            agreed = f"the same tokens for {both.same_tokens} and the same score for {both.same_score}"
            parts.append(Text(f"Of {both.prompts} prompts, both gave {agreed}."))
        return Group(*parts)

    def figure(self) -> Any:
        """A heat map of the share of right answers, depth against length, for every method."""
        panels = by_method(self.results)
        figure, of_panels = plots.panels((1 + 4.5 * len(panels), 4), len(panels))
        for axes, (name, cells) in zip(of_panels, panels.items(), strict=True):
            lengths, depths = (sorted({getattr(cell, axis) for cell in cells}) for axis in ("length", "depth"))
            shares = {(cell.depth, cell.length): cell.correct / cell.samples for cell in cells}
            grid = [[shares[depth, length] for length in lengths] for depth in depths]
            image = axes.imshow(grid, vmin=0, vmax=1, aspect="auto")
            for y, row in enumerate(grid):
                for x, share in enumerate(row):
                    axes.text(x, y, f"{share:.0%}", ha="center", va="center", color="black" if share > 0.6 else "white")
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
            axes.set(xlabel="prompt (tokens)", ylabel="depth of the needle", title=name)
        figure.colorbar(image, ax=figure.axes, label="right")
        return figure


def _haystack(form: Format, lines: Sequence[str], value: str, depth: float, words: int) -> str:
    at = round(depth * len(lines))
    return "".join([form.header(words), *lines[:at], form.needle(value), *lines[at:]])


def training_text(style: str, seed: int) -> str:
    """A prompt with its answer, to train a model on: the needle is at any depth of 8 to 1,500 lines, and short texts are far more frequent.

    `style` is a key of FORMATS. No sample of `make_prompt` is drawn from such a seed.
    """
    form, r = FORMATS[style], random.Random(f"training {seed}")
    few, many = 8**-0.5, 1500**-0.5
    value, count = form.value(r), round((few + r.random() * (many - few)) ** -2)
    lines = [form.line(r, value) for _ in range(count)]
    return _haystack(form, lines, value, r.random(), r.randrange(20)) + form.question + form.before + value + form.ending


def make_prompt(tokenizer, length: int, depth: float, *, style: str, seed: int, sample: int) -> NeedlePrompt:
    """A prompt of at most `length` tokens, with its needle after a share `depth` of the haystack's lines.

    `style` is a key of FORMATS. Raises InputError for a length without room for a line beside the needle.
    """
    form = FORMATS[style]
    r = random.Random(f"{seed} {length} {sample}")
    value = form.value(r)
    lines = [form.line(r, value) for _ in range(length // MIN_LINE_TOKENS)]

    def text(count: int, words: int = 0) -> str:
        return _haystack(form, lines[:count], value, depth, words) + form.question

    def size(count: int, words: int = 0) -> int:
        return len(tokenizer(text(count, words))["input_ids"])

    count = bisect.bisect_right(range(len(lines) + 1), length, key=size) - 1
    if count < 1:
        raise InputError(f"length {length} has no room for a haystack: the needle and the question with one line are {size(1)} tokens")
    words = bisect.bisect_right(range(length - size(count) + 1), length, key=lambda words: size(count, words)) - 1
    whole = text(count, words)
    return NeedlePrompt(length, depth, value, whole, tokenizer(whole)["input_ids"])


def is_right(answer: str, value: str) -> bool:
    """Whether an answer begins with the value, and not with a longer one."""
    return re.match(rf"\s*{value}(?!\w)", answer) is not None


def run(
    model: Llama,
    tokenizer,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    style: str = "python",
    methods: Sequence[Method] = METHODS,
    seed: int = 0,
    batch_size: int = 4,
    int4: Llama | None = None,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> NeedleReport:
    """Scores every method on the same prompts.

    Args:
        lengths: of the prompts, in tokens.
        depths: of the needle, from 0 to 1.
        samples: prompts for each length and depth.
        style: a key of FORMATS.
        int4: the model with INT4 weights for drafts; None: made here.
        kept: the answers of an earlier run, a row for each method and length.
        progress: see `progress_bar`.

    Raises:
        InputError: as `check`, `make_prompt` and `make_draft` do, and for samples below 1.
    """
    prompts = _prompts(model, tokenizer, lengths, depths, samples, style, seed)
    cells, answers, new_tokens = [], [], FORMATS[style].new_tokens
    with progress_bar(total=len(methods) * len(prompts) * samples, desc="needle", unit="prompt", progress=progress) as bar:
        for method in methods:
            of_method = []
            draft = functools.cache(functools.partial(make_draft, method.draft, model, int4=int4))  # made for the first that is measured
            for length in lengths:
                # One length at a time, so that a short prompt has no longer a cache than it needs.
                asked = [prompt for depth in depths for prompt in prompts[length, depth]]

                def answered(asked=asked, method=method, draft=draft) -> list[_Answer]:
                    tokens, settings = [prompt.tokens for prompt in asked], dict(batch_size=batch_size, draft=draft(), bar=bar)
                    results = answers_of(model, tokenizer, tokens, method, new_tokens, **settings)
                    return [_Answer(is_right(result.text, prompt.value), result.token_ids) for prompt, result in zip(asked, results)]

                label = f"{method_name(method)}, {length:,} tokens"
                bar.update(len(asked) if label in kept else 0)
                of_method += (found := kept.measured(label, list[_Answer], answered, _described))
                for i, depth in enumerate(depths):
                    shortest = min(len(prompt.tokens) for prompt in prompts[length, depth])
                    correct = sum(answer.right for answer in found[i * samples : (i + 1) * samples])
                    cells.append(Cell(method.method, method.cache, length, depth, shortest, correct, samples))
            answers.append(of_method)
    agreement = None
    if len(methods) == 2:
        pairs = list(zip(*answers))
        same_tokens = sum(one.token_ids == other.token_ids for one, other in pairs)
        agreement = Agreement(len(pairs), same_tokens=same_tokens, same_score=sum(one.right == other.right for one, other in pairs))
    about = dict(format=style, seed=seed, dtype=model.dtype.name)
    return NeedleReport(**this_run(), **about, results=cells, agreement=agreement)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The tokens of an answer, and whether it is right."""

    right: bool
    token_ids: list[int]


def _described(answers: list[_Answer]) -> str:
    return f"{sum(answer.right for answer in answers)} of {len(answers)} right"


@dataclasses.dataclass(frozen=True)
class Answered:
    """Prompts with their right answers, for acceptance along the answers.

    Attributes:
        texts: token ids of each prompt with the first `answer_tokens` of its answer.
        right: number of prompts that the model itself answers right, greedily and with a full cache.
    """

    texts: list[list[int]]
    answer_tokens: int
    right: int

    @property
    def void(self) -> bool:
        """Whether the model finds too few of the needles itself."""
        return self.right < MIN_RIGHT * len(self.texts)


def answered(
    model: Llama, tokenizer, *, length: int, depths: Sequence[float], samples: int, style: str, seed: int = 0, batch_size: int = 4
) -> Answered:
    """Prompts of a length, `samples` for each depth, with their answers. Raises InputError as `run` does."""
    asked = [prompt for of_cell in _prompts(model, tokenizer, [length], depths, samples, style, seed).values() for prompt in of_cell]
    form, tokens = FORMATS[style], [prompt.tokens for prompt in asked]
    answers = [split_tokens(tokenizer, prompt.text, form.before + prompt.value + form.ending) for prompt in asked]
    shortest = min(len(answer) for _, answer in answers)
    with progress_bar(progress=False) as bar:
        results = answers_of(model, tokenizer, tokens, METHODS[0], form.new_tokens, batch_size=batch_size, draft=None, bar=bar)
    right = sum(is_right(result.text, prompt.value) for prompt, result in zip(asked, results))
    return Answered([prompt + answer[:shortest] for prompt, answer in answers], shortest, right)


@working("making prompts")
def _prompts(
    model: Llama, tokenizer, lengths: Sequence[int], depths: Sequence[float], samples: int, style: str, seed: int
) -> dict[tuple[int, float], list[NeedlePrompt]]:
    """The prompts of each length and depth, all of which the model has room for."""
    new_tokens = FORMATS[style].new_tokens
    check(model, lengths, depths, new_tokens)
    if samples < 1:
        raise InputError(f"samples {samples} should be at least 1")
    prompts = {
        (length, depth): [make_prompt(tokenizer, length, depth, style=style, seed=seed, sample=sample) for sample in range(samples)]
        for length in lengths
        for depth in depths
    }
    for tokens in (len(prompt.tokens) for of_cell in prompts.values() for prompt in of_cell):
        check_length(model, "a prompt", tokens, new_tokens)
    return prompts
