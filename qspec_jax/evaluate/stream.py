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


def divided(tokenizer, before: str, after: str) -> tuple[list[int], list[int]]:
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
