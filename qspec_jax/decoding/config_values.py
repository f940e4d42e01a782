"""Values of `GenerationConfig` as they may be given and as they are kept.

Numbers of numpy, lists, a single id or text, and None for the default are taken, as Hugging Face takes them; everything else is refused in
one sentence.
"""

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from qspec_jax.drafts.draft import Draft, DraftSettings
from qspec_jax.errors import InputError


def whole(name: str, value: Any) -> int:
    """A whole number. Raises InputError for any other value, a bool and 2.0 among them."""
    return int(_index(value, f"{name} should be a whole number, not {value!r:.60}"))


def number(name: str, value: Any) -> float:
    """A number: an int stays one, and other kinds are floats. Raises InputError for any other value, a bool and a text among them."""
    if getattr(value, "ndim", None) == 0:  # of JAX or numpy
        value = value.item()
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise InputError(f"{name} should be a number, not {value!r:.60}")
    try:
        as_float = float(value)
    except OverflowError:  # of an int
        raise InputError(f"{name} is too large a number") from None
    return value if isinstance(value, int) else as_float


def flag(name: str, value: Any) -> bool:
    """True or False. Raises InputError for any other value."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name} should be true or false, not {value!r:.60}")
    return bool(value)


def text(name: str, value: Any) -> str:
    """A text. Raises InputError for any other value."""
    if not isinstance(value, str):
        raise InputError(f"{name} should be a text, not {value!r:.60}")
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Texts, or a single one. Raises InputError for any other value."""
    value = (value,) if isinstance(value, str) else _listed(value)
    if value is None or not all(isinstance(each, str) for each in value):
        raise InputError(f"{name} should be a text or a list of them")
    return value


def ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids, or a single one. Raises InputError for any other value."""
    wrong = f"{name} should be a token id or a list of them, not {value!r:.60}"
    listed = _listed(value)
    return tuple(_index(each, wrong) for each in ((value,) if listed is None else listed))


def sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids; a single id is a sequence of one. Raises InputError for any other value."""
    wrong = f"{name} should be a list of token ids and of lists of them, not {value!r:.60}"
    listed = (value,) if (found := _listed(value)) is None else found
    of_each = ((each,) if (parts := _listed(each)) is None else parts for each in listed)
    return tuple(tuple(_index(token, wrong) for token in each) for each in of_each)


def biases(name: str, value: Any) -> dict[int, float]:
    """Numbers by token id. Raises InputError for any other value."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name} should be a dictionary with a number for each token id, not {value!r:.60}")
    key = lambda token: _index(token, f"{name} should have token ids as its keys, not {token!r}")
    return {key(token): number(f"{name} of token {token}", bias) for token, bias in value.items()}


def draft(name: str, value: Any) -> str | DraftSettings | Draft:
    """A draft: its text, its settings, or one that is made already. Raises InputError for any other value."""
    if not isinstance(value, str | Draft) and (isinstance(value, type) or not hasattr(value, "make")):
        raise InputError(f"{name} should be a text or a draft, not {value!r:.60}")
    return value


Reader = Callable[[str, Any], Any]


def optional(read: Reader) -> Reader:
    """The reader, which also takes None and keeps it."""
    return lambda name, value: None if value is None else read(name, value)


def _index(value: Any, wrong: str) -> int:
    if isinstance(value, bool | np.bool_):
        raise InputError(wrong)
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(wrong) from None


def _listed(value: Any) -> tuple | None:
    """The items of a list, tuple, set or array; None for what is none of these."""
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        value = np.asarray(value).tolist()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else None
