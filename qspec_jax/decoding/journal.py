"""The journal of a run: results that are there already, so that a run that was killed goes on."""

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError, one_line, writing
from qspec_jax.files import check_writable, is_replaced, output_to, real, to_json
from qspec_jax.partial_file import PartialFile

# Raised with every change after which a run may have other results: no run goes on with the results of another program.
RUN = "run"  # the key of the first line
REVISION = b"3"
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
    A pipe or a device has no journal: then `path` is None, and the output is opened here, so that one that cannot be written is refused
    before the work.
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
            if output.is_dir():
                raise InputError(f"{output}: is a folder; OUTPUT should be a file")
            self._check_not_there(overwrite)
            check_writable(real(output))  # only written at the end, so it fails here
        foreign = "not what a run has left, so --overwrite does not touch it; move it away"
        self._file = PartialFile(output, foreign, needs_lock=True)
        self.path = self._file.path
        try:
            with writing(self.path):
                self._check_not_there(overwrite)  # another process may have made it since
                self.done = self._read(run, overwrite)
        except BaseException:
            self._file.close(remove=not self._file.size)  # without content it was made here
            raise

    def _check_not_there(self, overwrite: bool) -> None:
        if self.output.exists() and not overwrite:
            raise InputError(f"{self.output}: exists already; --overwrite replaces it")

    def _read(self, run: dict[str, str], overwrite: bool) -> dict[int, dict]:
        lines, whole = self._file.read(RUN)
        header, *results = lines or [None]
        try:
            done = {result["line"]: result for result in results}
        except (TypeError, KeyError):
            raise self._file.foreign() from None
        if header == {RUN: run}:
            self._file.truncate(whole)  # a last line that was cut short is written again
            return done
        if done and not overwrite:
            raise InputError(f"{self.path}: {_difference(header, run)}; --overwrite drops the {len(done):,} lines that are done there")
        self._file.truncate(0)
        self._write({RUN: run})
        return {}

    def add(self, result: dict) -> None:
        if self._file:
            self._write(result)
        self.done[result["line"]] = result

    def _write(self, value: dict) -> None:
        try:
            self._file.write(value)
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
            self._file.close(remove=True)
        self.close()

    def close(self) -> None:
        """Lets another process have the journal. One without any result goes: there is nothing to go on from."""
        with contextlib.suppress(OSError, InputError):  # of a write that failed, and said so
            self._result.close()
        if self._file:
            self._file.close(remove=not self.done)

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
    before = header.get(RUN) if isinstance(header, dict) else None
    if not isinstance(before, dict) or before.keys() != run.keys():
        return "is of another run, by another version of this program"
    differing = [name for name in DEPENDS_ON if before[name] != run[name]]
    # Another version hashes other things, of which nothing can be said.
    names = ["version"] if "version" in differing else differing
    return f"is of a run with {' and '.join(DEPENDS_ON[name] for name in names)}"
