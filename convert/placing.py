"""Directories that are written whole or not at all: beside their place, which they take when all is there."""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qspec_jax.converted import UNFINISHED
from qspec_jax.errors import InputError


def check_apart(source: Path, directory: Path) -> None:
    """Raises InputError where one is within the other. directory: resolved."""
    outer = source.resolve()
    if directory == outer or outer in directory.parents or directory in outer.parents:
        raise InputError(f"{directory}: should be neither within {source} nor around it")


@contextlib.contextmanager
def written(directory: Path, needed: int, *, replace: bool = False) -> Iterator[Path]:
    """Where to write what becomes this directory if nothing fails; it takes about so many bytes. directory: resolved.

    replace: what is there may be replaced; otherwise it is absent or empty. Raises InputError where it cannot be written or there is no
    room.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory)
        if (free := shutil.disk_usage(directory.parent).free) < needed:
            raise InputError(f"{directory}: needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
        folder = _beside(directory, "unfinished")
        try:
            with (folder / UNFINISHED).open("w") as marker:
                fcntl.flock(marker, fcntl.LOCK_EX)  # held until this process ends, however it does
                unfinished = folder / directory.name
                unfinished.mkdir()
                yield unfinished
                _put_in_place(unfinished, directory, replace)
        finally:
            _remove(folder, directory.name)
    except Exception as error:
        if isinstance(error, OSError) or "No space left" in str(error):  # TensorStore has errors of its own
            raise InputError(f"{directory}: cannot be written ({' '.join(str(error).split())[:300]})") from None
        raise


def _beside(directory: Path, what: str) -> Path:
    """A new directory of that kind."""
    return Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=f".{what}", dir=directory.parent))


def _remove(folder: Path, name: str) -> None:
    """The marker last: what is killed meanwhile stays marked."""
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(directory: Path) -> None:
    """What writing to this directory has left that was killed, and is not under way."""
    for path in directory.parent.glob(f".{glob.escape(directory.name)}.????????.unfinished"):
        with contextlib.suppress(OSError):  # another's, or no directory of ours, or locked
            if not path.is_symlink():
                with (path / UNFINISHED).open("r+") as marker:
                    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path, directory.name)


def _put_in_place(new: Path, directory: Path, replace: bool) -> None:
    if not (replace and directory.exists()):
        os.replace(new, directory)  # fails where something has come there
        return
    old = _beside(directory, "old")
    os.replace(directory, old / directory.name)
    try:
        os.replace(new, directory)
    except BaseException:
        os.replace(old / directory.name, directory)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)
