"""The tokens that a tokenizer puts around a text, such as BOS and EOS, as a post-processor of the package tokenizers."""

from collections.abc import Callable, Sequence
from typing import Any


def post_processor(before: Sequence[str], after: Sequence[str], id_of: Callable[[str], int]) -> Any:
    """The post-processor that puts tokens around a text, and around both of a pair of texts.

    Args:
        before: the tokens before a text.
        after: those after it.
        id_of: the id of a token.
    """
    from tokenizers.processors import TemplateProcessing

    single, second = ([*(f"{t}:{i}" for t in before), f"${'AB'[i]}:{i}", *(f"{t}:{i}" for t in after)] for i in (0, 1))
    ids = [(token, id_of(token)) for token in dict.fromkeys([*before, *after])]
    return TemplateProcessing(single=single, pair=[*single, *second], special_tokens=ids)
