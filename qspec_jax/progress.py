"""What a program says of its work while it runs: bars, finished rows, and statements of what it is doing.

    with shown(None):                          # a command does this once; Python callers may
        for i, text in enumerate(texts, 1):
            with working(f"text {i} of {len(texts)}"), working("prefilling"):
                ...
            tell_row(f"text {i}: 3.2 s")

On a terminal the statements are a line that is updated, `qspec: 12 s: text 2 of 4: prefilling`; into a file or a pipe they are a plain line
a minute. Statements are of the thread that shows them; those of others are left out.
"""

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tqdm import TqdmWarning
from tqdm.std import tqdm as terminal_bar

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # of a notebook without ipywidgets, where bars are of text
    from tqdm.auto import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm  # which imports tqdm.auto

TERMINAL_SECONDS, FILE_SECONDS = 1.0, 60.0  # between two statements
Item = TypeVar("Item")
SPEAKER = "statements"  # the name of the thread
WIDTH, ROWS = 80, 24  # of a terminal that does not say them


class _OfThread(threading.local):
    """What a thread is doing, and where that is shown."""

    def __init__(self):
        self.statements: list[str] = []
        self.bars: list[tqdm] = []
        self.is_shown = False


_here = _OfThread()


class _Bar(tqdm):
    """A bar whose description is what the thread is doing, unless `shown` says that on a line of its own."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        if not self.disable:
            self._own = self.desc
            _here.bars.append(self)

    def describe(self) -> None:
        self.set_description_str(": ".join(_here.statements) or self._own)

    def close(self) -> None:
        _here.bars = [bar for bar in _here.bars if bar is not self]  # bars are equal where they lie on one line
        super().close()


def progress_bar(cases: Iterable[Any] | None = None, *, progress: bool | None, leave: bool = False, **settings: Any) -> tqdm:
    """A bar on standard error, or in a notebook.

    Args:
        cases: what the bar goes through; None if the caller updates it.
        progress: whether it is shown; None: where standard error is a terminal, and in notebooks with ipywidgets.
        leave: whether it stays when the work is done.
        settings: others of `tqdm`.
    """
    return _Bar(cases, leave=leave, disable=None if progress is None else not progress, **settings)


@contextlib.contextmanager
def working(doing: str) -> Iterator[None]:
    """States what is done in the block, within what is stated around it. Where nothing is shown it costs next to nothing."""
    statements, before = _here.statements, len(_here.statements)
    if not (_here.is_shown or _here.bars) or statements[-1:] == [doing]:
        yield
        return
    statements.append(doing)
    _describe()
    try:
        yield
    finally:
        del statements[before:]
        _describe()


def awaited(items: Iterable[Item], noun: str, total: int, size: Callable[[Item], int] = lambda item: 1) -> Iterator[Item]:
    """Yields items that take long to come, and states which one is awaited, such as "prompt 3 of 20".

    Args:
        items: what is yielded.
        noun: what is counted.
        total: their number.
        size: how many an item counts for.
    """
    remaining, done = iter(items), 0
    while True:
        with working(f"{noun} {min(done + 1, total)} of {total}"):
            try:
                item = next(remaining)
            except StopIteration:
                return
        yield item
        done += size(item)


def _describe() -> None:
    if not _here.is_shown and _here.bars:
        _here.bars[-1].describe()


def tell_row(row: str) -> None:
    """Says what a finished row has, in a line on standard error, wherever statements or bars are shown."""
    if _here.is_shown or _here.bars:
        terminal_bar.write(f"qspec: {row}\n", file=sys.stderr, end="")  # in one piece, above bars and statements


@contextlib.contextmanager
def shown(progress: bool | None, *, terminal_seconds: float = TERMINAL_SECONDS, file_seconds: float = FILE_SECONDS) -> Iterator[None]:
    """Shows on standard error what this thread is doing in the block, until it ends.

    Args:
        progress: False shows nothing.
        terminal_seconds: between two updates of the line on a terminal.
        file_seconds: between two lines elsewhere.
    """
    if progress is False or _here.is_shown:
        yield
        return
    began, ended, file, statements = time.monotonic(), threading.Event(), sys.stderr, _here.statements

    def statement() -> str:
        doing = list(statements) or ["working"]
        return ": ".join(["qspec", f"{time.monotonic() - began:.0f} s", *doing])

    def on_lines() -> None:
        while not ended.wait(file_seconds):
            file.write(statement() + "\n")
            file.flush()

    def on_terminal() -> None:
        while not ended.wait(terminal_seconds):
            line.set_description_str(_cut(statement(), _columns(file)))

    is_terminal = file.isatty()
    # The first of all bars, above the others, or what is printed after it would not begin a line. It is shown with its first text.
    # A terminal that says no size, such as one of a container, has this one; tqdm would show nothing on it.
    size = {} if not is_terminal or _said_columns(file) else dict(ncols=WIDTH, nrows=ROWS)
    line = terminal_bar(bar_format="{desc}", leave=False, file=file, delay=1e-9, disable=not is_terminal, **size)
    speaker = threading.Thread(target=on_terminal if is_terminal else on_lines, name=SPEAKER, daemon=True)
    with logging_redirect_tqdm() if is_terminal else contextlib.nullcontext():  # or a log line would begin after a bar
        _here.is_shown = True
        speaker.start()
        try:
            yield
        finally:
            _here.is_shown = False
            ended.set()
            speaker.join()
            line.close()


def _columns(file: Any) -> int:
    return _said_columns(file) or WIDTH


def _said_columns(file: Any) -> int:
    """The columns that a terminal says it has; 0 if it says nothing."""
    try:
        return os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):
        return 0


def _cut(text: str, columns: int) -> str:
    """The text in one line of a terminal: its middle goes, since its end is what is done at present."""
    room = columns - 1
    return text if len(text) <= room else f"{text[: room // 2 - 3]}...{text[-(room - room // 2) :]}"
