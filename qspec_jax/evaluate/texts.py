"""The texts of measurements: streams of tokens, texts and prompts cut from them, and texts that are too short."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.progress import working
from qspec_jax.reports import Run, page, this_run


@working("tokenizing")
def token_stream(tokenizer, texts: Iterable[str]) -> list[int]:
    """The tokens of the texts one after the other, each after the tokenizer's BOS token, if it has one."""
    stream = []
    for text in texts:
        tokens = tokenizer(text)["input_ids"]
        if tokenizer.bos_token_id is not None and tokens[:1] != [tokenizer.bos_token_id]:
            stream.append(tokenizer.bos_token_id)
        stream += tokens
    return stream


class Texts:
    """Texts in a circle: a prompt ends in the second half of one of them, and begins in the texts before it if that one is too short."""

    def __init__(self, tokenizer, texts: Sequence[str]):
        self.tokenizer = tokenizer
        self.lines = [text.split("\n") for text in texts]
        self.tokens = [token_stream(tokenizer, [text]) for text in texts]

    def places(self) -> list[tuple[int, int]]:
        """Where a prompt may end: the index of a text, and that of a line in its second half."""
        return [(number, at) for number, lines in enumerate(self.lines) for at in range(len(lines) // 2, len(lines))]

    def cut_at_line(self, number: int, at: int) -> tuple[str, str]:
        """A text cut at the beginning of a line: all before it, and the line without blanks at its end."""
        lines = self.lines[number]
        return "".join(f"{line}\n" for line in lines[:at]), lines[at].rstrip()

    def prompt(self, number: int, own: Sequence[int], length: int) -> list[int] | None:
        """The last `length` tokens up to the end of `own`, the beginning of text `number`; None if the texts have fewer.

        The first token is the tokenizer's BOS token, if it has one.
        """
        bos = self.tokenizer.bos_token_id
        found = [*([] if bos is None or own[:1] == [bos] else [bos]), *own]
        for back in range(1, len(self.tokens)):
            if len(found) < length:
                found = self.tokens[number - back] + found
        if len(found) < length:
            return None
        return [found[-length] if bos is None else bos, *found[len(found) - length + 1 :]]


def split_tokens(tokenizer, before: str, after: str) -> tuple[list[int], list[int]]:
    """The tokens of `before + after`, divided where `after` begins.

    If a token has the end of the first text and the beginning of the second, they are divided before it.
    """
    alone, whole = (tokenizer(text)["input_ids"] for text in (before, before + after))
    same = next((i for i, pair in enumerate(zip(alone, whole)) if pair[0] != pair[1]), len(alone))
    return whole[:same], whole[same:]


def check_lengths(prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises InputError for a length below 1."""
    for what, value in (("prompt_tokens", prompt_tokens), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise InputError(f"{what} {value} should be at least 1")


def cut(stream: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Cuts at most `count` texts of this length from the stream, evenly spread and without overlap.

    Raises:
        InputError: for a stream that is shorter than one text.
    """
    count = min(count, len(stream) // length)
    if count == 0:
        raise InputError(
            f"the text has {len(stream):,} tokens, and {length:,} are needed for context and new tokens; give more with --file"
        )
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    return [list(stream[start : start + length]) for start in starts]


@dataclasses.dataclass(frozen=True)
class TooShort:
    """A text that was left out, and its number of tokens."""

    name: str
    tokens: int


def long_enough(texts: Mapping[str, Sequence[int]], prompt_tokens: int, max_new_tokens: int) -> tuple[list[Sequence[int]], list[TooShort]]:
    """The first prompt_tokens + max_new_tokens tokens of each text that is long enough, and the names of the others.

    Raises:
        InputError: if no text is long enough.
    """
    check_lengths(prompt_tokens, max_new_tokens)
    length = prompt_tokens + max_new_tokens
    chosen = [text[:length] for text in texts.values() if len(text) >= length]
    if not chosen:
        longest = max(map(len, texts.values()), default=0)
        raise InputError(
            f"no text has the {length} tokens of --prompt-tokens and --max-new-tokens together (the longest has {longest}); "
            "give longer texts, or ask for fewer tokens"
        )
    return chosen, [TooShort(name, len(text)) for name, text in texts.items() if len(text) < length]


def count_bytes(tokenizer, texts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Bytes, in UTF-8, of the last `max_new_tokens` tokens of the texts."""

    def size(ids: Sequence[int]) -> int:
        return len(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).encode())

    # Decoded alone, the last tokens may give less: some tokenizers drop a space that a text begins with.
    return sum(size(text) - size(text[:-max_new_tokens]) for text in texts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredTexts(Run):
    """The model and the texts of a report.

    Attributes:
        group_size: tokens in a group of the cache.
        prompt_tokens: tokens of each text before the first scored one.
        max_new_tokens: scored tokens of each text.
        tokens: scored tokens of all texts.
        bytes: of the scored text, in UTF-8.
    """

    model: str
    dtype: str
    group_size: int
    prompt_tokens: int
    max_new_tokens: int
    texts: int
    tokens: int
    bytes: int
    too_short: list[TooShort]

    @property
    def scored_text(self) -> str:
        """A note on how much text was scored."""
        size = f"{self.tokens:,} tokens ({self.bytes:,} bytes)"
        return f"{size}: {self.max_new_tokens:,} after {self.prompt_tokens:,} of each of {self.texts} texts."

    def page(self, title: str, table: Table, notes: Sequence[str]) -> Group:
        """The report as people read it; the last of its notes is on the texts that were left out."""
        notes = list(notes)
        if self.too_short:
            longest = max(self.too_short, key=lambda text: text.tokens)
            count = "1 text" if len(self.too_short) == 1 else f"{len(self.too_short)} texts"
            notes.append(f"{count} left out, too short; the longest of them is {longest.name}, {longest.tokens:,} tokens.")
        return page(f"{title} of {self.model}", f" in {self.dtype} on {self.device}", table, notes=notes)


def scored_texts(
    name: str, model: Llama, tokenizer, texts: Sequence[Sequence[int]], max_new_tokens: int, *, group_size: int, too_short: list[TooShort]
) -> dict[str, Any]:
    """The fields of `ScoredTexts`.

    Args:
        texts: token ids; all have one length.
        max_new_tokens: tokens at the end of each text that are scored.
        group_size: tokens in a group of the cache.
    """
    return dict(
        **this_run(),
        model=name,
        dtype=model.dtype.name,
        group_size=group_size,
        prompt_tokens=len(texts[0]) - max_new_tokens,
        max_new_tokens=max_new_tokens,
        texts=len(texts),
        tokens=len(texts) * max_new_tokens,
        bytes=count_bytes(tokenizer, texts, max_new_tokens),
        too_short=too_short,
    )
