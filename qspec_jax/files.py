"""What commands read and write: files or standard input, files and folders that appear whole or not at all, JSON."""

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError, reading, writing

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

STANDARD = Path("-")  # standard input, or standard output, in place of a file
UNFINISHED, UNLOCKED = "UNFINISHED", "UNLOCKED"  # markers in a folder of something that is being written
SUFFIX = ".unfinished"  # of such a folder's name
PARTIAL = ".partial"  # of the name of a file beside an output, with what is finished of it
UNFINISHED_REPORT = "unfinished_report"  # the key of the first line of such a file, where it keeps the rows of a report
OLD = "old"  # a folder in that one: what stood in the place of a directory
_POINTER = b"version https://git-lfs.github.com/spec/"
IS_POINTER = "is a git-lfs pointer and not the file itself; `git lfs pull` in its folder fetches that"
half_written: set[Path] = set()  # such folders of this process; by them `qspec_jax.cli.process` knows that they are being removed


def read_bytes(path: Path) -> bytes:
    """All of a file, or of standard input where the path is `-`. Raises InputError where it cannot be read."""
    with reading(name_of(path)):
        if path != STANDARD:
            if _is_stream(path, 0):
                os.read(0, 0)  # fails where standard input is closed
            return path.read_bytes()
        if sys.stdin is None:
            raise InputError("standard input: cannot be read (it is closed)")
        return sys.stdin.buffer.read()


def read_text(path: Path) -> str:
    """The text of a file, or of standard input, without its byte order mark. Raises InputError for what is no text file in UTF-8."""
    try:
        return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8-sig").read()
    except UnicodeDecodeError:
        raise InputError(f"{name_of(path)}: not a text file in UTF-8") from None


def read_texts(option: str, paths: Sequence[Path]) -> list[str]:
    """The texts of several files. option: what gave them. Raises InputError as `read_text`, and where standard input is named twice."""
    if paths.count(STANDARD) > 1:
        raise InputError(f"{option} - stands there twice, and standard input can be read once")
    return [read_text(path) for path in paths]


def name_of(path: Path) -> str:
    """How messages call a file, or standard input."""
    return "standard input" if path == STANDARD else str(path)


def is_same_file(source: Path, output: Path) -> bool:
    """Whether writing the output would replace what is read."""
    try:
        read, written = (os.fstat(stream) if path == STANDARD else path.stat() for stream, path in enumerate((source, output)))
        return stat.S_ISREG(written.st_mode) and os.path.samestat(read, written)
    except OSError:
        return False


def is_replaced(path: Path) -> bool:
    """Whether a new file takes this place. Pipes and devices are written to as they are, and so is standard output, whatever that is."""
    if path == STANDARD or _is_stream(path, 1):
        return False
    try:
        mode = path.stat().st_mode
    except OSError:  # there is nothing yet; or nothing can be there, which writing will say
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _is_stream(path: Path, descriptor: int) -> bool:
    """Whether a path leads to the file that a standard stream is, which may hold something already."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


@contextlib.contextmanager
def output_to(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Yields a function that writes the result: to standard output, or to a file that appears whole or not at all (see `whole_file`).

    path: None or `-` is standard output. Until all is written nothing lies on the disk: a process that is killed leaves nothing. Raises
    InputError where the file cannot be written, before the work begins if that is known by then; opening a pipe waits for its reader.
    """
    if path is None or path == STANDARD or _is_stream(path, 1):
        _check_standard_output()
        yield sys.stdout.write
        return
    with writing(path):
        if not is_replaced(path):
            with path.open("w", encoding="utf-8", errors="backslashreplace") as device:
                yield device.write
            return
        check_writable(path)
        text = io.StringIO()
        yield text.write
        with whole_file(path) as draft:
            draft.write_text(text.getvalue(), encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def rows_kept(output: Path | None, about: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that keeps a finished row of a report until the whole report is in its file, in JSON Lines in OUTPUT.partial.

    The first line says what the rows are of. The file goes when the block ends, and stays where an exception or a signal ends it before;
    the next run with the same output replaces it with its own first row.

    Args:
        output: where the report will be; beside standard output, a pipe or a device nothing is kept.
        about: what the rows are of.

    Raises:
        InputError: where the file cannot be written, and, before any work, for a file of that name that no unfinished report has left.
    """
    if output is None or not is_replaced(output):
        yield lambda row: None
        return
    place = real(output)
    path, lines = place.with_name(place.name + PARTIAL), contextlib.ExitStack()
    with writing(path):
        if os.path.lexists(path) and not _is_partial(path):
            raise InputError(f"{path}: not what an unfinished report has left; move it away, or choose another output")
        check_writable(path)
    file = None

    def keep(row: dict[str, Any]) -> None:
        nonlocal file
        with writing(path):
            if file is None:
                file = lines.enter_context(path.open("w", encoding="utf-8"))
                file.write(to_json({UNFINISHED_REPORT: about}) + "\n")
            file.write(to_json(row) + "\n")
            file.flush()

    with lines:
        yield keep
    if file is not None:
        with contextlib.suppress(OSError):
            path.unlink()


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
    return isinstance(header, dict) and header.keys() == {UNFINISHED_REPORT}


def _check_standard_output() -> None:
    """Raises InputError where standard output is closed, full or only to be read."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, ValueError):  # no file of the system's stands behind it
        return
    with writing("standard output"):
        os.write(descriptor, b"")


def check_writable(path: Path) -> None:
    """Raises OSError where `whole_file` could not put a file in this place, and InputError for a loop of symbolic links."""
    path = real(path)
    if path.exists():
        path.open("a").close()
    with _folder_beside(path) as folder:  # all that the file will need: a name, or the whole path, may be too long
        (folder / path.name).open("a").close()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields where to write what becomes this file when the block ends: the file appears whole, or stays as it was.

    A symbolic link stays, and the file that it names is replaced. A file that was there leaves its permissions to the new one; otherwise
    those are of any new file. A pipe or a device, which nothing can replace, is itself what is yielded. Raises OSError where the file
    cannot be written, and InputError for a loop of symbolic links.
    """
    if not is_replaced(path):
        yield path
        return
    check_writable(path)
    path = real(path)
    _remove_unfinished(path)
    with _folder_beside(path) as folder:
        ordinary = (folder / UNFINISHED).stat().st_mode
        draft = folder / path.name
        yield draft
        mode = (path.stat().st_mode if path.exists() else ordinary) & 0o777
        if draft.stat().st_mode & 0o777 != mode:  # some file systems have no permissions to change
            draft.chmod(mode)
        os.replace(draft, path)


@contextlib.contextmanager
def whole_folder(directory: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Yields an empty folder, which becomes this directory when the block ends: the directory is whole, or what it was.

    Where the process is killed just as the new folder takes the place of an old one, the directory is absent until the next call puts the
    old one back. directory: resolved. check: raises an exception unless what is there may be replaced; it is asked before anything is
    written, and again when all is. Raises OSError where the directory cannot be written.
    """
    _remove_unfinished(directory)
    check()
    with _folder_beside(directory) as folder:
        draft = folder / directory.name
        draft.mkdir()
        yield draft
        check()
        if directory.exists():
            (folder / OLD).mkdir()
            os.replace(directory, folder / OLD / directory.name)
        os.replace(draft, directory)


@contextlib.contextmanager
def _folder_beside(place: Path) -> Iterator[Path]:
    """Yields a new folder beside a place, which is removed at the end.

    A marker in it is locked until this process ends, however it does: `_remove_unfinished` leaves a folder alone while it is. The marker
    has another name until it is locked, or a process that looks just then would take the folder for one that a killed process left.
    """
    folder = Path(tempfile.mkdtemp(prefix=unfinished_prefix(place), suffix=SUFFIX, dir=place.parent))
    half_written.add(folder)
    try:
        with (folder / UNLOCKED).open("w") as marker:
            if fcntl:
                with contextlib.suppress(OSError):  # a file system without locks; there nothing that is left is removed
                    fcntl.flock(marker, fcntl.LOCK_EX)
            (folder / UNLOCKED).rename(folder / UNFINISHED)
            yield folder
    finally:
        try:
            _remove(folder, place)
        except KeyboardInterrupt:
            _remove(folder, place)
            raise
        finally:
            half_written.discard(folder)


def unfinished_prefix(place: Path) -> str:
    """How the names of folders beside a place begin: not with its own name, which may leave no room for anything else."""
    return f".{hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16]}."


def _remove(folder: Path, place: Path) -> None:
    """Removes a folder beside a place, or goes on where that was interrupted. What stood in the place before goes back there, unless the
    new one took it. The marker goes last, so that what cannot be removed stays marked."""
    draft, old = folder / place.name, folder / OLD / place.name
    if old.exists() and draft.exists():
        os.replace(old, place)  # fails where something has come there
    if draft.is_file():
        with contextlib.suppress(OSError):
            draft.unlink()
    shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(folder / OLD, ignore_errors=True)
    if folder.exists() and {path.name for path in folder.iterdir()} <= {UNFINISHED, UNLOCKED}:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(place: Path) -> None:
    """Removes what processes that were killed while they wrote to this place have left; not what another process is writing now."""
    for path in place.parent.glob(f"{unfinished_prefix(place)}????????{SUFFIX}") if fcntl else ():
        with contextlib.suppress(OSError):  # another's, or no directory of ours, or locked
            if not path.is_symlink():
                with (path / UNFINISHED).open("r+") as marker:
                    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path, place)


def real(path: Path) -> Path:
    """The path that symbolic links lead to. Raises InputError for a loop of them."""
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise InputError(f"{path}: cannot be written (a loop of symbolic links)")
    return found


def write_json(path: Path, value: Any) -> None:
    """Writes a file of indented JSON, whole or not at all. Raises OSError."""
    with whole_file(path) as draft:
        draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def to_json(value: Any) -> str:
    """A value as one line of JSON. Infinities and NaN, which JSON lacks, become null: a token that cannot come has a log-probability of
    -inf."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_pointer(content: bytes) -> bool:
    """Whether a file's first bytes are those of a git-lfs pointer, which lies in a clone in place of a large file."""
    return content.startswith(_POINTER)


def refuse_pointer(path: Path, content: bytes) -> None:
    """Raises InputError where what a file holds is a git-lfs pointer.

    Args:
        path: the file.
        content: its first bytes at least.
    """
    if is_pointer(content):
        raise InputError(f"{path}: {IS_POINTER}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError where it cannot be read, or is no object."""
    with reading(path):
        content = path.read_bytes()
    refuse_pointer(path, content)
    try:
        value = json.loads(content.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: should hold a JSON object")
    return value
