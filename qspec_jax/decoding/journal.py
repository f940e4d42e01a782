"""The journal of a run: results that are there already, so that a run that was killed goes on."""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from qspec_jax.errors import InputError, one_line, writing
from qspec_jax.files import PARTIAL, check_writable, is_replaced, output_to, real, to_json

# Raised with every change after which a run may have other results: no run goes on with the results of another program.
REVISION = b"2"
# What the results of a run depend on, and how a message calls what is not as it was.
DEPENDS_ON = {
    "prompts": "other prompts",
    "settings": "other settings",
    "checkpoint": "another checkpoint, or one whose files were copied or touched since",
    "version": "another version of this program",
}


class Journal:
    """The results that a run has so far, in a file next to the output, with one line for each.

    A result is an object with its line's number as `line`, which is what is written to the output; see `kept` for one of another form.
    If the output is a symbolic link, the file is next to the file that it leads to. A pipe or a device has no journal: then `path` is None,
    and the output is opened here, so that one that cannot be written is refused before the work.
    """

    def __init__(self, output: Path, run: dict[str, str], *, overwrite: bool):
        """run: `run_hashes` of all that results depend on. Raises InputError where the output exists, or is being made, or belongs to
        another run; unless overwrite says that it may go."""
        self.output, self.path, self.done, self._file = output, None, {}, None
        self._result = contextlib.ExitStack()  # what the output is opened in, where no new file takes its place
        if not is_replaced(output):
            self._write_result = self._result.enter_context(output_to(output))
            return
        with writing(output):
            place = real(output)
            if output.is_dir():
                raise InputError(f"{output}: is a folder; OUTPUT should be a file")
            self._check_not_there(overwrite)
            check_writable(place)  # only written at the end, so it fails here
        self.path = place.with_name(place.name + PARTIAL)
        with writing(self.path):
            self._file = self._locked()
            try:
                self._check_not_there(overwrite)  # another process may have made it since
                self.done = self._read(run, overwrite)
            except BaseException:
                if not os.fstat(self._file.fileno()).st_size:
                    self.path.unlink()  # it was made here
                self._file.close()
                raise

    def _check_not_there(self, overwrite: bool) -> None:
        if self.output.exists() and not overwrite:
            raise InputError(f"{self.output}: exists already; --overwrite replaces it")

    def _locked(self) -> BinaryIO:
        """The journal's file, opened and locked. Raises OSError, or InputError where another process has it or it is no regular file."""
        while True:
            if os.path.lexists(self.path) and not stat.S_ISREG(self.path.lstat().st_mode):
                raise self._foreign()
            # Something else may come there in between: it is neither followed nor waited for.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.path, flags, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise self._foreign()
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise InputError(f"{self.output}: is being written by another process") from None
                with contextlib.suppress(FileNotFoundError):  # a process that had it has finished, and removed it
                    if os.path.samestat(os.fstat(descriptor), self.path.lstat()):
                        return os.fdopen(os.dup(descriptor), "ab+")
            finally:
                os.close(descriptor)

    def _foreign(self) -> InputError:
        return InputError(f"{self.path}: not what a run has left, so --overwrite does not touch it; move it away")

    def _read(self, run: dict[str, str], overwrite: bool) -> dict[int, dict]:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        whole = sum(len(line) + 1 for line in lines[:-1])  # a last line that was cut short is written again
        try:
            header, *results = [json.loads(line) for line in lines[:-1]] or [None]
            done = {result["line"]: result for result in results}
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._foreign() from None
        if header is not None and header != {"run": run}:
            if done and not overwrite:
                raise InputError(f"{self.path}: {_difference(header, run)}; --overwrite drops the {len(done):,} lines that are done there")
            whole, done, header = 0, {}, None
        self._file.truncate(whole)
        if header is None:
            self._write({"run": run})
        return done

    def add(self, result: dict) -> None:
        if self._file:
            self._write(result)
        self.done[result["line"]] = result

    def _write(self, value: dict) -> None:
        try:
            self._file.write(to_json(value).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({one_line(error)}){self.goes_on}") from None

    def finish(self) -> None:
        """Writes the output, in the order of the input, and removes the journal."""
        try:
            if self.path:
                self._write_result = self._result.enter_context(output_to(self.output))
            with self._result:
                for number in sorted(self.done):
                    self._write_result(to_json(written(self.done[number])) + "\n")
        except InputError as error:
            raise InputError(f"{error}{self.goes_on}") from None
        if self._file:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Lets another process have the journal. One without any result goes: there is nothing to go on from."""
        with contextlib.suppress(OSError, InputError):  # of a write that failed, and said so
            self._result.close()
        if self._file and not self._file.closed:
            with contextlib.suppress(OSError):
                if not self.done:
                    self.path.unlink()
            with contextlib.suppress(OSError):
                self._file.close()

    @property
    def goes_on(self) -> str:
        """The end of a message about a run that was cut short."""
        return f"; the same command, with the same input, goes on from {self.path}" if self.path and self.done else ""


def kept(number: int, output: dict) -> dict:
    """A line of the output as a `Journal` takes it: with its number, which OpenAI's form has no place for."""
    return output if "line" in output else {"line": number, "output": output}


def written(result: dict) -> dict:
    """The line of the output that `kept` was given."""
    return result["output"] if result.keys() == {"line", "output"} else result


def run_hashes(**parts: Sequence[bytes]) -> dict[str, str]:
    """A hash of each of the `DEPENDS_ON`."""
    found = {}
    for name in DEPENDS_ON:
        whole = hashlib.sha256()
        for part in parts[name]:
            whole.update(len(part).to_bytes(8, "little") + part)
        found[name] = whole.hexdigest()
    return found


def _difference(header: Any, run: dict[str, str]) -> str:
    """How the run of a journal differs from this one."""
    before = header.get("run") if isinstance(header, dict) else None
    if not isinstance(before, dict) or before.keys() != run.keys():
        return "is of another run, by another version of this program"
    differing = [name for name in DEPENDS_ON if before[name] != run[name]]
    # Another version hashes other things, of which nothing can be said.
    names = ["version"] if "version" in differing else differing
    return f"is of a run with {' and '.join(DEPENDS_ON[name] for name in names)}"
