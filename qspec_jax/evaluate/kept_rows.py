"""Rows of a report that is not finished, kept beside its file: a long measurement that is ended leaves what it has measured."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qspec_jax.errors import writing
from qspec_jax.files import is_replaced
from qspec_jax.partial_file import PartialFile

HEADER = "unfinished_report"  # the key of the first line


@contextlib.contextmanager
def rows_kept(output: Path | None, about: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a finished row of a report to OUTPUT.partial, in JSON Lines, until the report is in its own file.

    The first line says what the rows are of. The file is removed when the block ends, and stays if an exception or a signal ends it; the
    first row of the next run with the same output replaces it.

    Args:
        output: where the report will be; beside standard output, a pipe or a device nothing is kept.
        about: what the rows are of.

    Raises:
        InputError: as `PartialFile` does, and if a file of that name is no unfinished report.
    """
    if output is None or not is_replaced(output):
        yield lambda row: None
        return
    file = PartialFile(output, "is not an unfinished report; move it away, or choose another output", needs_lock=False)
    begun = ended = False

    def keep(row: dict[str, Any]) -> None:
        nonlocal begun
        with writing(file.path):
            if not begun:
                file.truncate(0)
                file.write({HEADER: about})
                begun = True
            file.write(row)

    try:
        with writing(file.path):
            lines, _ = file.read()
            if file.size and not (lines and isinstance(lines[0], dict) and lines[0].keys() == {HEADER}):
                raise file.foreign()
        yield keep
        ended = begun
    finally:
        file.close(remove=ended or not file.size)
