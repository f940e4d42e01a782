"""Where a conversion may go, and whether there is room for it."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from qspec_jax.errors import InputError, writing
from qspec_jax.files import whole_folder


def check_apart(source: Path, directory: Path) -> None:
    """Raises InputError if source or the resolved directory contains the other, or the directory cannot be replaced."""
    outer = source.resolve()
    if directory == outer or outer in directory.parents or directory in outer.parents:
        raise InputError(f"{directory}: should be neither within {source} nor around it")
    if os.path.ismount(directory):
        raise InputError(f"{directory}: is a mount point, which cannot be renamed to; give a directory within it")


@contextlib.contextmanager
def written(directory: Path, needed: int, check: Callable[[], None]) -> Iterator[Path]:
    """Yields a folder that becomes the directory if nothing fails (see `whole_folder`).

    Args:
        directory: a resolved path.
        needed: about how many bytes are written.
        check: raises InputError unless the directory may be replaced.

    Raises:
        InputError: if it cannot be written, or there is no room.
    """
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(directory, check) as unfinished:
            if (free := shutil.disk_usage(directory.parent).free) < needed:
                raise InputError(f"{directory}: needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
            yield unfinished
