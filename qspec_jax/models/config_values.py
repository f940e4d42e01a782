"""Values of a config.json: numbers and flags, each checked; every error names the file."""

import math
from collections.abc import Mapping
from typing import Any

from qspec_jax.errors import InputError, flat


class Values:
    """The values of a config.json.

    Args:
        raw: the values by their keys, without nulls.
        source: the name of the file in messages.
    """

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw, self.source = raw, source

    def error(self, what: str) -> InputError:
        return InputError(f"{self.source}: {flat(what)}")

    def number(
        self, name: str, default=None, *, of: Mapping[str, Any] | None = None, kind=int, above: float = 0, maximum: float = math.inf
    ):
        """The number of a key.

        Args:
            name: the key.
            default: the value of a key that is absent; None: such a key is refused.
            of: the mapping that has the key; None: the config.json itself.
            kind: int or float.
            above: the bound that the number exceeds.
            maximum: the largest number.

        Raises:
            InputError: for a value that is absent, no such number, or outside the bounds.
        """
        value = (self.raw if of is None else of).get(name, default)
        if value is None:
            raise self.error(f"{name} is missing")
        try:
            # transformers, which reads the file for the tokenizer, does not take 48.0 for a whole number.
            good = isinstance(value, (int, kind)) and not isinstance(value, bool) and math.isfinite(value) and kind(value) == value
        except OverflowError:
            good = False
        if not good:
            raise self.error(f"{name} is {value!r}, not {'a whole number' if kind is int else 'a finite number'}")
        if value <= above:
            raise self.error(f"{name} is {value}, should be more than {above}")
        if value > maximum:
            raise self.error(f"{name} is {value}, should be at most {maximum:g}")
        return kind(value)

    def flag(self, name: str, default: bool = False, *, of: Mapping[str, Any] | None = None) -> bool:
        """The flag of a key, see `number`. Raises InputError for a value that is neither true nor false."""
        value = (self.raw if of is None else of).get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, not true or false")
        return value
