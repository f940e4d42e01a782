"""The configurations of kernels that measured best: a JSON file for each device, written by `qspec bench ... --tune`.

A file maps kernels to entries {"problem": {...}, "config": {...}}. A problem is what the best configuration depends on, by the
kernel's own account; one without an entry gets the kernel's default.
"""

import dataclasses
import functools
import json
import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pallas_kernels import dispatch

log = logging.getLogger(__name__)

Made = TypeVar("Made")

FOLDER = Path(__file__).parent


def path(device_kind: str | None = None) -> Path:
    """The file of a device by what JAX calls its kind; None is the one that is traced for."""
    kind = dispatch.device().device_kind if device_kind is None else device_kind
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', kind.lower())}.json"


def problems(kernel: str, device_kind: str) -> list[dict[str, int | None]]:
    """The problems of a kernel that a device has a measured configuration for."""
    return [entry["problem"] for entry in _entries(path(device_kind)).get(kernel, [])]


def lookup(kernel: str, problem: Mapping[str, int | None]) -> dict | None:
    """The configuration that measured best for this problem on the device that is traced for, if any."""
    return next((entry["config"] for entry in _entries(path()).get(kernel, []) if entry["problem"] == dict(problem)), None)


def tuned(kernel: str, problem: Mapping[str, int | None], make: Callable[[dict], Made]) -> Made | None:
    """Makes something of the configuration that measured best, by `make`; None where there is none or where `make` raises an error.

    The error is logged: a file of another version, or one that was edited, costs speed and nothing else.
    """
    found = lookup(kernel, problem)
    if found is None:
        return None
    try:
        return make(found)
    except (TypeError, ValueError) as error:
        _warn_once(f"{path()}: the configuration {json.dumps(found)} of {kernel} cannot work, the default takes its place: {error}")
        return None


def check_counts(config: Any) -> None:
    """Raises ValueError unless every field of a configuration is a whole number, at least 1."""
    for name, value in dataclasses.asdict(config).items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}, should be a whole number, at least 1")


def store(kernel: str, problem: Mapping[str, int | None], config: Mapping[str, int], file: Path) -> None:
    """Adds an entry to a file, replacing the one for the same problem; not for two processes at a time.

    Raises OSError where the file cannot be read or written, and ValueError where it is no such file; it is then as it was.
    """
    entries = _read(file)
    others = [entry for entry in entries.get(kernel, []) if entry["problem"] != dict(problem)]

    def order(entry):
        return [(name, value or 0) for name, value in entry["problem"].items()]

    entries[kernel] = sorted([*others, {"problem": dict(problem), "config": dict(config)}], key=order)

    # A line for each entry.
    def lines(rows):
        return ",\n".join(f"  {json.dumps(row)}" for row in rows)

    text = "{\n" + ",\n".join(f" {json.dumps(name)}: [\n{lines(rows)}\n ]" for name, rows in sorted(entries.items())) + "\n}\n"
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        new = Path(folder) / file.name
        new.write_text(text)
        if file.exists():
            new.chmod(file.stat().st_mode & 0o777)
        new.replace(file)
    _entries.cache_clear()


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


@functools.cache
def _entries(file: Path) -> dict:
    try:
        return _read(file)
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used, defaults take its place: %s", file, error)
        return {}


def _read(file: Path) -> dict:
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(entries, dict) or not all(isinstance(rows, list) and all(map(_is_entry, rows)) for rows in entries.values()):
        raise ValueError("not an object of lists of problems and configurations")
    return entries


def _is_entry(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(part), dict) for part in ("problem", "config")):
        return False
    return all(value is None or type(value) is int for value in row["problem"].values())
