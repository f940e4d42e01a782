"""What commands read and write: files or standard input, results that appear whole or not at all, JSON."""

import contextlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError

STANDARD_INPUT = Path("-")


def read_bytes(path: Path) -> bytes:
    """All of a file, or of standard input where the path is `-`. Raises InputError where it cannot be read."""
    try:
        if path != STANDARD_INPUT:
            return path.read_bytes()
        if sys.stdin is None:
            raise InputError("standard input: cannot be read (it is closed)")
        return sys.stdin.buffer.read()
    except OSError as error:
        raise InputError(f"{name_of(path)}: cannot be read ({error.strerror})") from None


def read_text(path: Path) -> str:
    """A text without its byte order mark. Raises InputError for what is no text file in UTF-8."""
    try:
        return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8-sig").read()
    except UnicodeDecodeError:
        raise InputError(f"{name_of(path)}: not a text file in UTF-8") from None


def read_texts(option: str, paths: Sequence[Path]) -> list[str]:
    if paths.count(STANDARD_INPUT) > 1:
        raise InputError(f"{option} - stands there twice, and standard input can be read once")
    return [read_text(path) for path in paths]


def name_of(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


def is_same_file(source: Path, output: Path) -> bool:
    """Whether writing the output would replace what is read."""
    try:
        read = os.fstat(0) if source == STANDARD_INPUT else source.stat()
        return output.is_file() and os.path.samestat(read, output.stat())
    except OSError:
        return False


def is_replaced(path: Path) -> bool:
    """Whether a new file takes this place. Pipes and devices are written to as they are, and so is /dev/stdout, whatever that is."""
    return not (_is_standard_output(path) or (path.exists() and not path.is_file() and not path.is_dir()))


def _is_standard_output(path: Path) -> bool:
    """Whether this is the path of the file that standard output goes to, which has perhaps something before it already."""
    try:
        return path.is_file() and os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


@contextlib.contextmanager
def output_to(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Where the result goes: standard output, or a file that appears whole or not at all. Fails before the work begins.

    A symbolic link stays, and the file that it names is replaced. Until all is written nothing lies on the disk: a process that is killed
    leaves nothing.
    """
    if path is None or _is_standard_output(path):
        yield sys.stdout.write
        return
    try:
        if not is_replaced(path):
            with path.open("w", encoding="utf-8") as device:
                yield device.write
            return
        path = real(path)
        # In place of an old file with its permissions, or with those of any new one.
        if path.exists():
            path.open("a").close()
        tempfile.TemporaryFile(dir=path.parent).close()  # may something be written there?
        text = io.StringIO()
        yield text.write
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            draft = Path(folder) / path.name
            draft.write_text(text.getvalue(), encoding="utf-8")
            if path.exists():
                draft.chmod(path.stat().st_mode & 0o777)
            draft.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def real(path: Path) -> Path:
    """What symbolic links lead to. Raises InputError for a loop of them."""
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise InputError(f"{path}: cannot be written (a loop of symbolic links)")
    return found


def to_json(value: Any) -> str:
    """In one line. JSON has no infinities and no NaN, which become null: the log-probability of a token that cannot come is -inf."""
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError when it cannot be read or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: should hold a JSON object")
    return value
