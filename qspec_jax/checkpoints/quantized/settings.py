"""Reads the settings that config.json has of a quantized checkpoint; every error names the file and the values that are right."""

from collections.abc import Mapping
from typing import Any

from qspec_jax.errors import InputError, either, flat


class Settings:
    """A JSON object of settings, or one within it.

    Args:
        raw: the object.
        source: the file that it is from, for messages.
        method: the name of the quantization, for messages.
    """

    def __init__(self, raw: Mapping[str, Any], source: str, method: str):
        self.raw, self.source, self.method = raw, source, method

    def refused(self, what: str) -> InputError:
        """The error that a kind of quantization is not supported."""
        return InputError(f"{self.source}: {flat(what)}")

    def number(self, *names: str, allowed: tuple[int, ...] | None = None) -> int:
        """A whole number above 0, or -1 for all, under the first of its names that is there; one of the allowed ones."""
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        value = self.raw.get(name)
        good = isinstance(value, int) and not isinstance(value, bool) and (value > 0 or value == -1)
        if not good or (allowed and value not in allowed):
            wanted = "a whole number above 0, or -1 for all" if allowed is None else either(allowed)
            raise self.refused(f"{name} of the {self.method} quantization is {value!r}, should be {wanted}")
        return value

    def choice(self, name: str, allowed: tuple[Any, ...]) -> Any:
        """A value that is one of the allowed ones; an absent key counts as None. Texts are compared in lower case."""
        value = self.raw.get(name)
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(each) and value == each for each in allowed):
            known = ", ".join(str(each) for each in allowed if each is not None)
            raise self.refused(f"{name} {self.raw.get(name)!r} of the {self.method} quantization is not supported; supported: {known}")
        return value

    def within(self, name: str) -> "Settings | None":
        """The object under a key; None if there is none."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refused(f"{name} of the {self.method} quantization is {value!r}, should be an object")
        return Settings(value, self.source, self.method)
