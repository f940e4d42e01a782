"""Plain words: phrases that stopped readers are in no source file, help text, message, docstring, page or notebook."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("qspec_jax", "pallas_kernels", "convert") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [
    ROOT / "README.md",
    *(page for folder in (".", "kernels", "measurements") for page in sorted((ROOT / "docs" / folder).glob("*.md"))),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Each with a plain word for it.
PHRASES = {
    r"so many": "the number itself, or its name",
    r"as many as": "the number of, up to",
    r"behind": "after",
    r"stands?": "is",
    r"(goes|go) with": "is compatible with",
    r"whoever": "a noun",
    r"nobody('s)?": "a noun",
    r"(what )?came of": "the result of",
    r"told": "given, reported",
    r"anew": "again",
    r"in the mean": "on average",
    r"for want of": "without",
    r"in place of": "instead of",
    r"likeliest": "most likely",
    r"(least|most|fewest)_\w+": "min_, max_",
}
NAMES = ("least_accepted", "behind the {r.choice")  # a setting, and a place in the text of needle prompts
BANNED = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.IGNORECASE)


def found(text: str) -> list[str]:
    """The phrases in a text, also those that are divided over two lines, of a comment too, each with what surrounds it."""
    text = re.sub(r"\s*\n[\s#*|]*", " ", text)
    matches = (match for match in BANNED.finditer(text) if not text.startswith(NAMES, match.start()))
    return [text[max(0, match.start() - 40) : match.end() + 40] for match in matches]


@pytest.mark.parametrize("folder", ["qspec_jax", "pallas_kernels", "convert"])
def test_sources_are_in_plain_words(folder):
    """Names, docstrings, comments, help texts and messages."""
    hits = {path.relative_to(ROOT).as_posix(): found(path.read_text()) for path in SOURCES if path.is_relative_to(ROOT / folder)}
    assert {path: phrases for path, phrases in hits.items() if phrases} == {}


def test_pages_are_in_plain_words():
    hits = {page.relative_to(ROOT).as_posix(): found(page.read_text()) for page in PAGES}
    assert {page: phrases for page, phrases in hits.items() if phrases} == {}


def test_notebooks_are_in_plain_words():
    hits = {path.name: found("\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])) for path in NOTEBOOKS}
    assert {name: phrases for name, phrases in hits.items() if phrases} == {}


@pytest.mark.parametrize(
    "planted",
    [
        '"""Drafts so many tokens."""',
        "# as many as\n    # there are",
        "The groups behind the first.",
        "draft X goes with cache Y",
        "| nobody's |",
        "the rows are chosen anew",
        "MOST_TOKENS = 4",
        "def f(least_groups): ...",
        "what stands\nthere",
        "0.5 in the mean",
    ],
)
def test_a_planted_phrase_is_found(planted):
    assert len(found(f"All of this is plain.\n{planted}\nAnd this.")) == 1


@pytest.mark.parametrize(
    "plain", ["a standalone file", "almost_all", "the most likely token", "the beholder", "at least 4 groups", "a meantime"]
)
def test_plain_words_are_left_alone(plain):
    assert found(plain) == []
