"""Texts of any length from several files: one stream of tokens, and what is cut from it."""

from collections.abc import Iterable, Sequence

import numpy as np

from qspec_jax.errors import InputError


def token_stream(tokenizer, texts: Iterable[str]) -> list[int]:
    """The tokens of these texts one after the other, each behind the tokenizer's BOS token, if it has one."""
    stream = []
    for text in texts:
        tokens = tokenizer(text)["input_ids"]
        if tokenizer.bos_token_id is not None and tokens[:1] != [tokenizer.bos_token_id]:
            stream.append(tokenizer.bos_token_id)
        stream += tokens
    return stream


class Texts:
    """Texts in a circle: a prompt ends in the second half of one of them, and what it lacks comes from those before it."""

    def __init__(self, tokenizer, texts: Sequence[str]):
        self.tokenizer = tokenizer
        self.lines = [text.split("\n") for text in texts]
        self.tokens = [token_stream(tokenizer, [text]) for text in texts]

    def places(self) -> list[tuple[int, int]]:
        """Where a prompt may end: the number of a text, and that of a line in its second half."""
        return [(number, at) for number, lines in enumerate(self.lines) for at in range(len(lines) // 2, len(lines))]

    def cut_at_line(self, number: int, at: int) -> tuple[str, str]:
        """A text cut at the beginning of a line: all before it, and the line without what ends it."""
        lines = self.lines[number]
        return "".join(f"{line}\n" for line in lines[:at]), lines[at].rstrip()

    def prompt(self, number: int, own: Sequence[int], length: int) -> list[int] | None:
        """The last `length` tokens up to the end of `own`, with which text `number` begins; None where there are not so many. The first one
        is the tokenizer's BOS token, if it has one."""
        bos = self.tokenizer.bos_token_id
        found = [*([] if bos is None or own[:1] == [bos] else [bos]), *own]
        for back in range(1, len(self.tokens)):
            if len(found) < length:
                found = self.tokens[number - back] + found
        if len(found) < length:
            return None
        return [found[-length] if bos is None else bos, *found[len(found) - length + 1 :]]


def split_tokens(tokenizer, before: str, after: str) -> tuple[list[int], list[int]]:
    """The tokens of two texts, one behind the other, divided where the second begins.

    Where the tokenizer joins the end of the one with the beginning of the other, that is before the token which has both.
    """
    alone, whole = (tokenizer(text)["input_ids"] for text in (before, before + after))
    same = next((i for i, pair in enumerate(zip(alone, whole)) if pair[0] != pair[1]), len(alone))
    return whole[:same], whole[same:]


def check_lengths(prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises InputError for a text whose prompt, or whose tokens after it, are none."""
    for what, value in (("prompt_tokens", prompt_tokens), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise InputError(f"{what} {value} should be at least 1")


def cut(stream: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Cuts `count` texts of this length from the stream, or as many as it has: evenly spread, without overlap.

    Raises InputError for a stream that is shorter.
    """
    count = min(count, len(stream) // length)
    if count == 0:
        raise InputError(
            f"the text has {len(stream):,} tokens, and {length:,} are needed for context and new tokens; give more with --file"
        )
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    return [list(stream[start : start + length]) for start in starts]
