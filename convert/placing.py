"""Directories that are written whole or not at all: beside their place, which they take when all is there."""

import contextlib
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
def written(directory: Path, needed: int) -> Iterator[Path]:
    """Where to write what becomes this directory if nothing fails; it takes about so many bytes. directory: resolved.

    Raises InputError where it cannot be written or there is no room.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory)
        if (free := shutil.disk_usage(directory.parent).free) < needed:
            raise InputError(f"{directory}: needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
        with _beside(directory, "unfinished") as folder:
            (folder / UNFINISHED).touch()
            unfinished = folder / directory.name
            unfinished.mkdir()
            yield unfinished
            _put_in_place(unfinished, directory)
    except Exception as error:
        if isinstance(error, OSError) or "No space left" in str(error):  # TensorStore has errors of its own
            raise InputError(f"{directory}: cannot be written ({' '.join(str(error).split())[:300]})") from None
        raise


@contextlib.contextmanager
def _beside(directory: Path, what: str) -> Iterator[Path]:
    """A new directory of that kind beside this one, which in the end is gone."""
    folder = Path(tempfile.mkdtemp(prefix=f".{directory.name[:100]}.", suffix=f".{what}", dir=directory.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(directory: Path) -> None:
    """What conversions to this directory have left that were killed."""
    for path in directory.parent.glob(f".{glob.escape(directory.name[:100])}.*.unfinished"):
        if path.is_dir() and not path.is_symlink() and (path / UNFINISHED).is_file():
            shutil.rmtree(path)


def _put_in_place(new: Path, directory: Path) -> None:
    if not directory.exists():
        os.replace(new, directory)
        return
    with _beside(directory, "old") as folder:
        os.replace(directory, folder / directory.name)
        try:
            os.replace(new, directory)
        except BaseException:
            os.replace(folder / directory.name, directory)
            raise
