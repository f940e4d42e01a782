"""Which token ids a tokenizer has. A model's vocabulary may be padded beyond them, and two models of one family padded differently."""

import functools
from typing import Any


@functools.lru_cache(maxsize=8)
def known_ids(tokenizer: Any) -> int:
    """The largest id that a tokenizer has, plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def padding_from(tokenizer: Any, vocab_size: int) -> int | None:
    """The first id of a model's vocabulary that is padding: no text has it, and nothing should be generated of it.

    Args:
        tokenizer: of the model; None, or one that does not say which ids it has, knows no padding.
        vocab_size: of the model.

    Returns:
        The id, or None where the tokenizer has every id, or is not known.
    """
    if not hasattr(tokenizer, "get_vocab") or len(tokenizer) >= vocab_size:
        return None
    return known if (known := known_ids(tokenizer)) < vocab_size else None
