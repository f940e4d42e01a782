"""The config and the tokenizer's files, which are copied with the weights."""

import codecs
from collections.abc import Callable
from pathlib import Path

from qspec_jax.checkpoints.hub import SMALL_FILES
from qspec_jax.errors import reading


def write_small_files(directory: Path, content_of: Callable[[str], bytes | None]) -> None:
    """Writes the config and the tokenizer's files. `content_of` gives the contents of each name, or None if there is no such file."""
    for name in SMALL_FILES:
        if (content := content_of(name)) is not None:
            (directory / name).write_bytes(content)


def small_file(directory: Path, name: str) -> bytes | None:
    """The bytes of a file without a byte order mark, which many readers of JSON refuse; None if there is no such file.

    Raises:
        InputError: if the file cannot be read.
    """
    with reading(directory / name):
        return (directory / name).read_bytes().removeprefix(codecs.BOM_UTF8) if (directory / name).is_file() else None
