"""Directories that are written whole or not at all: beside their place, which they take when all is there."""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from qspec_jax.checkpoints.converted import UNFINISHED
from qspec_jax.errors import InputError

OLD = "old"  # a directory in that of an unfinished one: what stood in its place


def check_apart(source: Path, directory: Path) -> None:
    """Raises InputError where one is within the other, or nothing can take the place of the directory. It is resolved."""
    outer = source.resolve()
    if directory == outer or outer in directory.parents or directory in outer.parents:
        raise InputError(f"{directory}: should be neither within {source} nor around it")
    if os.path.ismount(directory):
        raise InputError(f"{directory}: is a mount point, which cannot be renamed to; give a directory within it")


@contextlib.contextmanager
def written(directory: Path, needed: int, check: Callable[[], None]) -> Iterator[Path]:
    """Where to write what becomes this directory if nothing fails; it takes about so many bytes. directory: resolved.

    check: raises InputError unless what is there may be replaced. It is asked before anything is written, and again when all is.
    Raises InputError where it cannot be written or there is no room.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory)
        check()
        if (free := shutil.disk_usage(directory.parent).free) < needed:
            raise InputError(f"{directory}: needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
        folder = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".unfinished", dir=directory.parent))
        try:
            with (folder / UNFINISHED).open("w") as marker:
                fcntl.flock(marker, fcntl.LOCK_EX)  # held until this process ends, however it does
                unfinished = folder / directory.name
                unfinished.mkdir()
                yield unfinished
                check()
                if directory.exists():
                    (folder / OLD).mkdir()
                    os.replace(directory, folder / OLD / directory.name)
                os.replace(unfinished, directory)
        finally:
            _remove(folder, directory)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({' '.join(str(error).split())[:300]})") from None


def _remove(folder: Path, directory: Path) -> None:
    """Puts back what was there before, if the new one is not. The marker goes last: what is left stays marked."""
    old = folder / OLD / directory.name
    if old.exists() and (folder / directory.name).exists():
        os.replace(old, directory)  # fails where something has come there
    shutil.rmtree(folder / directory.name, ignore_errors=True)
    shutil.rmtree(folder / OLD, ignore_errors=True)
    if {path.name for path in folder.iterdir()} <= {UNFINISHED}:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(directory: Path) -> None:
    """Removes what writing to this directory has left that was killed, and is not under way."""
    for path in directory.parent.glob(f".{glob.escape(directory.name)}.????????.unfinished"):
        with contextlib.suppress(OSError):  # another's, or no directory of ours, or locked
            if not path.is_symlink():
                with (path / UNFINISHED).open("r+") as marker:
                    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path, directory)
