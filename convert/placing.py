"""Where a conversion may go, and whether there is room for it."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from qspec_jax.errors import InputError, writing
from qspec_jax.files import whole_folder


def check_apart(source: Path, directory: Path) -> None:
    """Raises InputError where source and directory are one within the other, or nothing can take the place of the directory.

    directory: resolved.
    """
    outer = source.resolve()
    if directory == outer or outer in directory.parents or directory in outer.parents:
        raise InputError(f"{directory}: should be neither within {source} nor around it")
    if os.path.ismount(directory):
        raise InputError(f"{directory}: is a mount point, which cannot be renamed to; give a directory within it")


@contextlib.contextmanager
def written(directory: Path, needed: int, check: Callable[[], None]) -> Iterator[Path]:
    """Yields where to write what becomes this directory if nothing fails (see `whole_folder`). needed: about how many bytes it takes.

    directory: resolved. check: raises InputError unless what is there may be replaced. Raises InputError where it cannot be written or
    there is no room.
    """
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(directory, check) as unfinished:
            if (free := shutil.disk_usage(directory.parent).free) < needed:
                raise InputError(f"{directory}: needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
            yield unfinished
