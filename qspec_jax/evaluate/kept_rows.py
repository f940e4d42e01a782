"""Rows of a report that is not finished, kept beside its file: a long measurement that is ended leaves what it has measured."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError, writing
from qspec_jax.files import PARTIAL, check_writable, fcntl, is_replaced, real, to_json

HEADER = "unfinished_report"  # the key of the first line


@contextlib.contextmanager
def rows_kept(output: Path | None, about: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a finished row of a report to OUTPUT.partial, in JSON Lines, until the report is in its own file.

    The first line says what the rows are of. The file is removed when the block ends, and stays if an exception or a signal ends it; the
    first row of the next run with the same output replaces it. It is locked meanwhile.

    Args:
        output: where the report will be; beside standard output, a pipe or a device nothing is kept.
        about: what the rows are of.

    Raises:
        InputError: if the file cannot be written, if another process is writing it, or if a file of that name is no unfinished report.
    """
    if output is None or not is_replaced(output):
        yield lambda row: None
        return
    place = real(output)
    path, begun = place.with_name(place.name + PARTIAL), False
    with writing(path):
        if os.path.lexists(path) and not _is_partial(path):
            raise InputError(f"{path}: is not an unfinished report; move it away, or choose another output")
        check_writable(path)
        file = path.open("a", encoding="utf-8")

    def keep(row: dict[str, Any]) -> None:
        nonlocal begun
        with writing(path):
            if not begun:
                file.truncate(0)
                file.write(to_json({HEADER: about}) + "\n")
                begun = True
            file.write(to_json(row) + "\n")
            file.flush()

    with file:
        _lock(file.fileno(), path)
        try:
            yield keep
        finally:
            if not begun and not path.stat().st_size:
                path.unlink()
        if begun:
            with contextlib.suppress(OSError):
                path.unlink()


def _lock(descriptor: int, path: Path) -> None:
    """Locks the file until it is closed. Raises InputError if another process has locked it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another process is writing it; wait for that, or choose another output") from None
    except OSError:  # a file system without locks
        return


def _is_partial(path: Path) -> bool:
    """Whether a file is one of `rows_kept`."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline()
    try:
        header = json.loads(first)
    except ValueError:
        return not first
    return isinstance(header, dict) and header.keys() == {HEADER}
