"""A file beside an output, with the finished part of it in JSON Lines: work that ends early leaves what it has done."""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from qspec_jax.errors import InputError, writing
from qspec_jax.files import fcntl, real, to_json

# Something else may come to the path while it is opened: it is neither followed nor waited for.
FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class PartialFile:
    """OUTPUT.partial, which is locked until it is closed. If the output is a symbolic link, it is beside the file that the link leads to.

    Args:
        output: a file that is replaced, see `files.is_replaced`.
        foreign: the end of the message about a file of that name that has something else.
        needs_lock: whether a file system without locks is refused.

    Raises:
        InputError: if the file cannot be written, if another process is writing it, or if it is no regular file.
    """

    def __init__(self, output: Path, foreign: str, *, needs_lock: bool):
        place = real(output)
        self.path, self._foreign = place.with_name(f"{place.name}.partial"), foreign
        with writing(self.path):
            self._file = self._locked(needs_lock)

    def _locked(self, needs_lock: bool) -> BinaryIO:
        while True:
            if os.path.lexists(self.path) and not stat.S_ISREG(self.path.lstat().st_mode):
                raise self.foreign()
            with contextlib.ExitStack() as opened:
                file = opened.enter_context(os.fdopen(os.open(self.path, FLAGS, 0o666), "ab+"))
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise self.foreign()
                try:
                    if fcntl:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise InputError(f"{self.path}: another process is writing it; wait for that, or choose another output") from None
                except OSError:
                    if needs_lock:
                        raise
                with contextlib.suppress(FileNotFoundError):  # a process that had it has finished, and removed it
                    if os.path.samestat(os.fstat(file.fileno()), self.path.lstat()):
                        opened.pop_all()
                        return file

    def foreign(self) -> InputError:
        """The error for a file that has something else."""
        return InputError(f"{self.path}: {self._foreign}")

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, key: str) -> tuple[list[Any], int]:
        """The values of whole lines, and the bytes of these lines: the last one may be cut short.

        Args:
            key: the first in the first line, by which that is known where it is cut short.

        Raises:
            InputError: `foreign`, if they are no lines of JSON, or the beginning of a line with another key.
        """
        self._file.seek(0)
        *lines, rest = self._file.read().split(b"\n")
        begun = to_json({key: 0}).encode()[:-2]
        if not lines and rest[: len(begun)] != begun[: len(rest)]:
            raise self.foreign()
        try:
            return [json.loads(line) for line in lines], sum(len(line) + 1 for line in lines)
        except (ValueError, RecursionError):
            raise self.foreign() from None

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def write(self, value: Any) -> None:
        """Adds a line. Raises OSError if it cannot be written."""
        self._file.write(to_json(value).encode() + b"\n")
        self._file.flush()

    def close(self, *, remove: bool) -> None:
        """Lets another process have the file, or removes it; a second call does nothing."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                if remove:
                    self.path.unlink()
            with contextlib.suppress(OSError):  # of a write that failed, and said so
                self._file.close()
