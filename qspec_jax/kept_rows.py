"""Finished rows of an unfinished report, which are kept beside its file, so that the same command goes on from them.

They are in OUTPUT.partial, in JSON Lines. The first line says what they are of: the command with its options, and the machine, the versions
and the day. A row has a label, such as "sparse, 4,096 tokens, gamma 4", by which the command finds it again.
"""

import contextlib
import dataclasses
import logging
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from qspec_jax.errors import InputError, writing
from qspec_jax.files import check_writable, is_replaced
from qspec_jax.partial_file import PartialFile
from qspec_jax.progress import tell_row, working
from qspec_jax.reports import this_run

log = logging.getLogger(__name__)

HEADER = "unfinished_report"  # the key of the first line
ROW, VALUE = "row", "value"  # the keys of the others
COMMAND, OPTIONS, RUN = "command", "options", "run"  # the keys of the header

Row = typing.TypeVar("Row")


class KeptRows:
    """The finished rows of a report, by their labels. Without a file, see `beside`, it has none and keeps none.

    Attributes:
        path: the file; None without one.
        earlier: labels of the rows that an earlier run had measured, in the order in which they were asked for.
    """

    def __init__(self):
        self.path: Path | None = None
        self.earlier: list[str] = []
        self._file: PartialFile | None = None
        self._header: dict[str, Any] = {}
        self._found: dict[str, Any] = {}
        self._whole = self._added = 0  # bytes of whole lines in the file; rows that this run has added
        self._begun = False

    @classmethod
    @contextlib.contextmanager
    def beside(cls, output: Path | None, command: str, options: Mapping[str, Any]) -> Iterator[Self]:
        """Yields the rows that this command has left beside its output, and keeps more there.

        When the block ends they are removed; if an exception or a signal ends it, they stay.

        Args:
            output: the file of the report; beside standard output, a pipe or a device nothing is kept.
            command: its name.
            options: all that its rows depend on, as values of JSON, by the names that a message calls them.

        Raises:
            InputError: as `PartialFile` does, and if the file is of anything but this command with these options.
        """
        kept = cls()
        if output is None or not is_replaced(output):
            yield kept
            return
        with writing(output):
            check_writable(output)
        kept._file = file = PartialFile(output, "is not an unfinished report; move it away, or choose another output", needs_lock=False)
        kept.path, ended = file.path, False
        try:
            with writing(file.path):
                before = kept._read()
            if before is not None and (difference := _difference(before, command, options)):
                raise InputError(f"{file.path}: has the rows of {difference}; move it away, or choose another output")
            kept._header = {COMMAND: command, OPTIONS: dict(options), RUN: before and before[RUN]}
            yield kept
            ended = True
        finally:
            file.close(remove=ended or not file.size)

    def _read(self) -> dict[str, Any] | None:
        """Reads the rows, and returns the header; None without one."""
        if not self._file.size:
            return None
        lines, self._whole = self._file.read(HEADER)
        if not lines:
            return None
        try:
            header, *rows = lines
            if header.keys() != {HEADER} or header[HEADER].keys() != {COMMAND, OPTIONS, RUN}:
                raise self._file.foreign()
            self._found = {row[ROW]: row[VALUE] for row in rows}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self._file.foreign() from None
        return header[HEADER]

    def _begin(self) -> None:
        """Compares where the rows were measured with where this runs; later than the command, since it starts JAX's backend."""
        if self._begun or self._file is None:
            return
        self._begun, here, before = True, this_run(), self._header[RUN]
        self._header[RUN] = here
        if before == here:
            with writing(self.path):
                self._file.truncate(self._whole)  # a last line that was cut short goes
            if self._found:
                log.warning("%s: %s measured already", self.path, _rows(len(self._found)))
            return
        if self._found:
            changed = " and ".join(name for name, value in here.items() if (before or {}).get(name) != value)
            log.warning("%s: %s measured again, since the %s changed", self.path, _rows(len(self._found)), changed)
        self._found = {}
        with writing(self.path):
            self._file.truncate(0)

    def __contains__(self, label: str) -> bool:
        """Whether an earlier run has measured a row."""
        self._begin()
        return label in self._found

    def measured(
        self,
        label: str,
        kind: type[Row],
        measure: Callable[[], Row],
        described: Callable[[Row], str] | None = None,
        stays: Callable[[Row], bool] = lambda row: True,
    ) -> Row:
        """A row: what an earlier run had, or what is measured now, which is kept.

        Args:
            label: of the row; what is measured is stated as this.
            kind: of the row: a dataclass, or what JSON has, such as `dict[str, float]`.
            measure: makes the row.
            described: what is said of a row that was measured; None: nothing.
            stays: whether a row is kept, and not one that failed, for example.

        Raises:
            InputError: if the row of the earlier run is of another kind.
        """
        if label in self:
            self.earlier.append(label)
            try:
                return _restored(kind, self._found[label])
            except (AttributeError, KeyError, TypeError, ValueError):
                raise self._file.foreign() from None
        with working(label):
            row = measure()
        if described is not None:
            tell_row(f"{label}: {described(row)}")
        if self._file is not None and stays(row):
            with writing(self.path):
                if not self._file.size:
                    self._file.write({HEADER: self._header})
                self._file.write({ROW: label, VALUE: _as_json(row)})
            self._added += 1
        return row

    @property
    def goes_on(self) -> str:
        """The end of a message about a command that was cut short."""
        return f"; the same command goes on from {self.path}" if self._added or self._found else ""


NOT_KEPT = KeptRows()  # for a run that has no file; it has no state


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count:,} rows are"


def _difference(before: dict[str, Any], command: str, options: Mapping[str, Any]) -> str:
    """How the command of a header is another than this one; empty if it is the same."""
    if before[COMMAND] != command:
        return f"another command, {before[COMMAND]}"
    others = before[OPTIONS]
    changed = [name for name in {**others, **options} if others.get(name) != options.get(name)]
    return f"this command with another {' and '.join(changed)}" if changed else ""


def _as_json(value: Any) -> Any:
    """A row as JSON has it. What is no finite number, which JSON lacks, is a text."""
    if dataclasses.is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _restored(kind: Any, value: Any) -> Any:
    """The value of this kind that `_as_json` was given."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: _restored(kinds[name], each) for name, each in value.items()})
    if origin in (types.UnionType, typing.Union):
        (other,) = (each for each in arguments if each is not types.NoneType)
        return None if value is None else _restored(other, value)
    if origin is dict:
        return {name: _restored(arguments[1], each) for name, each in value.items()}
    if origin is list:
        return [_restored(arguments[0], each) for each in value]
    if origin is tuple:
        return tuple(map(_restored, arguments, value))
    return float(value) if kind is float else value
