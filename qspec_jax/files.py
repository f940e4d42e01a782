"""Files that commands read and write: standard streams, files and folders that appear whole or not at all, and JSON."""

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

STANDARD = Path("-")  # standard input or standard output
UNFINISHED, UNLOCKED = "UNFINISHED", "UNLOCKED"  # markers in a folder in which something is being written
SUFFIX = ".unfinished"  # of such a folder's name
OLD = "old"  # a folder in it, with the directory that is being replaced
_POINTER = b"version https://git-lfs.github.com/spec/"
IS_POINTER = "is a git-lfs pointer and not the file itself; `git lfs pull` in its folder fetches that"
half_written: set[Path] = set()  # such folders of this process; `qspec_jax.cli.process` waits until they are removed


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, or of standard input if the path is `-`. Raises InputError if it cannot be read."""
    with reading(name_of(path)):
        if path != STANDARD:
            if _is_stream(path, 0):
                os.read(0, 0)  # fails if standard input is closed
            return path.read_bytes()
        if sys.stdin is None:
            raise InputError("standard input: cannot be read (it is closed)")
        return sys.stdin.buffer.read()


def read_text(path: Path) -> str:
    """The text of a file, or of standard input, without its byte order mark. Raises InputError if it is not text in UTF-8."""
    try:
        return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8-sig").read()
    except UnicodeDecodeError:
        raise InputError(f"{name_of(path)}: not a text file in UTF-8") from None


def read_texts(option: str, paths: Sequence[Path]) -> list[str]:
    """The texts of the files of an option. Raises InputError as `read_text` does, and if standard input is named twice."""
    if paths.count(STANDARD) > 1:
        raise InputError(f"{option} - is given twice, but standard input can be read only once")
    return [read_text(path) for path in paths]


def name_of(path: Path) -> str:
    """The name of a file, or of standard input, in messages."""
    return "standard input" if path == STANDARD else str(path)


def is_same_file(source: Path, output: Path) -> bool:
    """Whether writing the output would replace the source."""
    try:
        read, written = (os.fstat(stream) if path == STANDARD else path.stat() for stream, path in enumerate((source, output)))
        return stat.S_ISREG(written.st_mode) and os.path.samestat(read, written)
    except OSError:
        return False


def is_replaced(path: Path) -> bool:
    """Whether output to a path makes a new file: pipes, devices and standard output are written to directly."""
    if path == STANDARD or _is_stream(path, 1):
        return False
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing exists there yet; or nothing can, and writing will fail
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _is_stream(path: Path, descriptor: int) -> bool:
    """Whether a path leads to the file of a standard stream, which may have content already."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


@contextlib.contextmanager
def output_to(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Yields a function that writes a result: to standard output, or to a file that appears whole or not at all (see `whole_file`).

    Until the block ends nothing is on the disk: a process that is killed leaves nothing. Opening a pipe waits for its reader.

    Args:
        path: None or `-` is standard output.

    Raises:
        InputError: if the file cannot be written, before the work begins if that is known by then.
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
        with whole_file(path) as unfinished:
            unfinished.write_text(text.getvalue(), encoding="utf-8", errors="backslashreplace")


def _check_standard_output() -> None:
    """Raises InputError if standard output is closed, full or read-only."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, ValueError):  # it is no file of the operating system
        return
    with writing("standard output"):
        os.write(descriptor, b"")


def check_writable(path: Path) -> None:
    """Raises OSError if `whole_file` cannot write this file, and InputError for a loop of symbolic links."""
    path = real(path)
    if path.exists():
        path.open("a").close()
    with _folder_beside(path) as folder:  # the names that writing needs may be too long
        (folder / path.name).open("a").close()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, whose file replaces `path` when the block ends: the file appears whole, or stays as it was.

    A symbolic link stays, and the file that it names is replaced; the new file gets the permissions of the old one. For a pipe or a device
    the path itself is yielded.

    Raises:
        OSError: if the file cannot be written.
        InputError: for a loop of symbolic links.
    """
    if not is_replaced(path):
        yield path
        return
    check_writable(path)
    path = real(path)
    _remove_unfinished(path)
    with _folder_beside(path) as folder:
        ordinary = (folder / UNFINISHED).stat().st_mode
        unfinished = folder / path.name
        yield unfinished
        mode = (path.stat().st_mode if path.exists() else ordinary) & 0o777
        if unfinished.stat().st_mode & 0o777 != mode:  # some file systems have no permissions
            unfinished.chmod(mode)
        os.replace(unfinished, path)


@contextlib.contextmanager
def whole_folder(directory: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Yields an empty folder, which replaces the directory when the block ends: the directory is whole, or as it was.

    If the process is killed just as the new folder replaces an old one, the directory is missing until the next call puts the old one back.

    Args:
        directory: a resolved path.
        check: raises an exception unless the directory may be replaced; called before anything is written, and again at the end.

    Raises:
        OSError: if the directory cannot be written.
    """
    _remove_unfinished(directory)
    check()
    with _folder_beside(directory) as folder:
        unfinished = folder / directory.name
        unfinished.mkdir()
        yield unfinished
        check()
        if directory.exists():
            (folder / OLD).mkdir()
            os.replace(directory, folder / OLD / directory.name)
        os.replace(unfinished, directory)


@contextlib.contextmanager
def _folder_beside(place: Path) -> Iterator[Path]:
    """Yields a new folder in the folder of `place`, which is removed at the end.

    A marker in it is locked until this process ends, even if it is killed, and `_remove_unfinished` ignores folders with a locked marker.
    The marker has another name until it is locked, or another process could take the folder for one of a killed process.
    """
    folder = Path(tempfile.mkdtemp(prefix=unfinished_prefix(place), suffix=SUFFIX, dir=place.parent))
    half_written.add(folder)
    try:
        with (folder / UNLOCKED).open("w") as marker:
            if fcntl:
                with contextlib.suppress(OSError):  # a file system without locks, on which unfinished folders are never removed
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
    """The prefix of the names of a place's folders: a hash, since the place's own name may be as long as a name can be."""
    return f".{hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16]}."


def _remove(folder: Path, place: Path) -> None:
    """Removes a folder of `_folder_beside`, or resumes that after an interruption.

    A directory that was to be replaced goes back to its place unless the new one is there. The marker is removed last, so that a folder
    that cannot be removed stays marked.
    """
    unfinished, old = folder / place.name, folder / OLD / place.name
    if old.exists() and unfinished.exists():
        os.replace(old, place)  # fails if something else is there now
    if unfinished.is_file():
        with contextlib.suppress(OSError):
            unfinished.unlink()
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(folder / OLD, ignore_errors=True)
    if folder.exists() and {path.name for path in folder.iterdir()} <= {UNFINISHED, UNLOCKED}:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(place: Path) -> None:
    """Removes folders of killed processes that wrote to this place; those of running processes are locked and stay."""
    for path in place.parent.glob(f"{unfinished_prefix(place)}????????{SUFFIX}") if fcntl else ():
        with contextlib.suppress(OSError):  # locked, or no folder of ours
            if not path.is_symlink():
                with (path / UNFINISHED).open("r+") as marker:
                    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path, place)


def real(path: Path) -> Path:
    """The path that symbolic links lead to. Raises InputError for a loop of links."""
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise InputError(f"{path}: cannot be written (a loop of symbolic links)")
    return found


def write_json(path: Path, value: Any) -> None:
    """Writes a file of indented JSON, whole or not at all. Raises OSError."""
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def to_json(value: Any) -> str:
    """A value as one line of JSON, with null for infinities and NaN, which JSON lacks: an impossible token has log-probability -inf."""
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
    """Whether a file's first bytes are those of a git-lfs pointer, which a clone may have instead of a large file."""
    return content.startswith(_POINTER)


def refuse_pointer(path: Path, content: bytes) -> None:
    """Raises InputError if a file, whose first bytes are given, is a git-lfs pointer."""
    if is_pointer(content):
        raise InputError(f"{path}: {IS_POINTER}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError if it cannot be read or is no object."""
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
