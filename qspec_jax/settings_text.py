"""The settings of drafts and caches: how they are declared and checked, and the text NAME[:SETTING=VALUE,...] that gives them.

A value ends at the next comma. A comma that is part of a value has a backslash before it, or the value is in parentheses: `skip=(3,5a)`,
`middle=(retrieval:budget=8192,chunk=4)`. Parentheses count where a value begins with one; elsewhere they are letters like others.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from qspec_jax.errors import InputError

TYPES = {int: "a whole number", float: "a number"}


@dataclasses.dataclass(frozen=True)
class Values:
    """The values that a setting takes: those of `choices`, if there are any, else numbers in a range.

    Attributes:
        minimum: the smallest number.
        maximum: the largest number.
        below: all numbers are smaller than this one.
        choices: the values, one by one.
        also: more values, which are no numbers.
    """

    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    also: tuple[Any, ...] = ()

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        return value in self.also or (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.choices:
            *others, last = map(str, self.choices)
            return f"{', '.join(others)} or {last}"
        if self.maximum is not None:
            return f"from {self.minimum} to {self.maximum}"
        ends = (("at least", self.minimum), ("less than", self.below))
        return " and ".join(f"{words} {end}" for words, end in ends if end is not None)


def setting(
    default: Any,
    description: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] = (),
    parse: Callable[[str], Any] | None = None,
    takes: str | None = None,
    example: str | None = None,
    kw_only: bool = False,
) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: the value if none is given.
        description: what the setting does, in a plain sentence, for the docs.
        minimum, maximum, below, choices: see `Values`.
        parse: makes a value of its text, and raises ValueError where it is none; by default the field's type.
        takes: for messages, the texts that `parse` takes.
        example: for messages, how a value with commas is written.
        kw_only: as of `dataclasses.field`.
    """
    values = Values(minimum, maximum, below, tuple(choices), (default,) if parse is not None else ())
    metadata = dict(description=description, values=values, parse=parse, takes=takes, example=example)
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata)


def check_settings(owner: str, settings: Any) -> None:
    """Raises InputError for a setting that is none of its values. owner: the beginning of the message: "draft", or "cache NAME:"."""
    for field in dataclasses.fields(settings):
        value, values, takes = getattr(settings, field.name), field.metadata.get("values", Values()), field.metadata.get("takes")
        shown = f"{value:g}" if isinstance(value, float) else f"{value!r:.60}"
        numbers = {int: Integral, float: Real}.get(field.type)
        if numbers and value not in values.also and (isinstance(value, bool) or not isinstance(value, numbers)):
            raise InputError(f"{owner} {field.name} {shown} should be {takes or TYPES[field.type]}")
        if value not in values:
            raise InputError(f"{owner} {field.name} {shown} should be {takes or values}")


def described(settings: type) -> Iterator[tuple[str, str, str]]:
    """The name of each setting of a class, the text of its default, and its description with the values that it takes, in Markdown."""
    for field in ordered_fields(settings):
        default, values = field.default, field.metadata.get("values", Values())
        shown = default if isinstance(default, str) else f"{default:g}" if isinstance(default, int | float) else ""
        choices = [f"`{choice}`" for choice in values.choices]
        takes = field.metadata.get("takes") or str(dataclasses.replace(values, choices=tuple(choices)))
        description = field.metadata.get("description", "")
        yield field.name, shown, f"{description} {takes[0].upper()}{takes[1:]}." if takes else description


def ordered_fields(settings: type | None) -> list[dataclasses.Field]:
    """The fields of a class of settings, those that are keywords only, which several classes share, after the others."""
    return [] if settings is None else sorted(dataclasses.fields(settings), key=lambda field: field.kw_only)


def split_text(kind: str, text: str) -> tuple[str, list[str]]:
    """The name in a text, and its settings, not read yet. kind: "draft" or "cache", for messages. Raises InputError as `split` does."""
    name, colon, rest = text.partition(":")
    return name, split(kind, text, rest, ",") if colon else []


def split(kind: str, text: str, part: str, mark: str) -> list[str]:
    """The parts of a part of a text between marks that are neither in parentheses nor have a backslash before them. Raises InputError for
    parentheses that are not in pairs."""
    parts, depth, before = [""], 0, mark
    for character in part:
        depth += character == "(" and (depth > 0 or before in (mark, "="))
        depth -= character == ")" and depth > 0
        if character == mark and depth == 0 and before != "\\":
            parts.append("")
        else:
            parts[-1] += character
        before = character
    if depth:
        raise InputError(f"{kind} {text!r}: its parentheses should be in pairs")
    return parts


def without_parentheses(text: str) -> str:
    """The text without the parentheses around it, if there are any. Raises InputError where they are not in pairs."""
    if text.startswith("(") and text.count("(") != text.count(")"):
        raise InputError("the parentheses should be in pairs")
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def nested_text(value: str) -> str:
    """The text in a value that is itself a text of this grammar: it is in parentheses, or has backslashes before its commas."""
    return without_parentheses(value) if value.startswith("(") else _unescaped(value)


def _unescaped(value: str) -> str:
    return re.sub(r"\\([,+])", r"\1", value)


def read_settings(
    kind: str,
    text: str,
    parts: Sequence[str],
    settings: type | None,
    *,
    readers: Mapping[Any, Callable[[str], Any]] | None = None,
    more: Mapping[str, type] | None = None,
) -> dict[str, Any]:
    """The values that the settings of a text have, by their names.

    Args:
        kind: "draft" or "cache", for messages.
        text: the whole text, for messages.
        parts: the settings, from `split_text`.
        settings: the class that they are fields of; None for a draft or cache without any.
        readers: functions that make a value of its text, for fields of these types; they raise InputError.
        more: settings that are no fields of the class, and their types.

    Raises:
        InputError: for an unknown setting, one that is given twice, and a text that is no value of its type.
    """
    fields, more, readers, given = {field.name: field for field in ordered_fields(settings)}, more or {}, readers or {}, {}
    for part in parts:
        name, equals, value = part.partition("=")
        if (name not in fields and name not in more) or not equals:
            raise InputError(f"{kind} {text!r}: {_unknown(text, part, fields, more)}")
        if name in given:
            raise InputError(f"{kind} {text!r}: {name} is given twice")
        metadata, of_type = (fields[name].metadata, fields[name].type) if name in fields else ({}, more[name])
        try:
            given[name] = readers[of_type](value) if of_type in readers else (metadata.get("parse") or of_type)(_unescaped(value))
        except InputError as error:
            raise InputError(f"{kind} {text!r}: {name}: {error}") from None
        except ValueError:
            takes = metadata.get("takes") or TYPES[of_type]
            raise InputError(f"{kind} {text!r}: {name} should be {takes}, not {value!r}") from None
    return given


def _unknown(text: str, part: str, fields: Mapping[str, dataclasses.Field], more: Mapping[str, type]) -> str:
    """What is wrong with a part that gives no setting of these."""

    def shown(name: str, metadata: Mapping[str, Any]) -> str:
        choices = metadata["values"].choices if "values" in metadata else ()
        return f"{name}={'|'.join(map(str, choices)) or '...'}"

    if not fields and not more:
        return f"{text.partition(':')[0]} has no settings"
    known = ", ".join([*(shown(name, field.metadata) for name, field in fields.items()), *(f"{name}=..." for name in more)])
    examples = [field.metadata["example"] for field in fields.values() if field.metadata.get("example")]
    hint = f"; commas in a value need parentheses, as in {' or '.join(examples)}" if examples else ""
    return f"{part!r} should be one of {known}{hint}"
