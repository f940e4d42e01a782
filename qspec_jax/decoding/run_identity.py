"""What identifies a run over the lines of a file: its input, its settings and its checkpoints, for its journal."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qspec_jax.checkpoints import hub
from qspec_jax.checkpoints.converted import MANIFEST, is_converted, stored_files
from qspec_jax.checkpoints.gguf_file import is_gguf, shards
from qspec_jax.checkpoints.weight_files import WeightFiles, weight_files
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.journal import REVISION, run_hashes
from qspec_jax.decoding.prepare import Prepared
from qspec_jax.drafts.draft import checkpoints_of
from qspec_jax.drafts.int4 import has_stored_int4
from qspec_jax.drafts.registry import AUTO, parse_draft
from qspec_jax.errors import InputError
from qspec_jax.files import read_bytes


class Checkpoints:
    """The checkpoints of a run, as they were before they were loaded.

    Args:
        model: the target's: a directory, or a name on the Hub.
        config: the settings, whose draft may have checkpoints of its own.
        local: returns the directory of a checkpoint.

    Attributes:
        directory: the target's.
        contents: `of_checkpoint` of each, those of the draft first.
    """

    def __init__(self, model: str, config: GenerationConfig, local: Callable[[Any], Path]):
        self.directory = local(model)
        of_draft = checkpoints_of(parse_draft(config.draft)) if config.has_drafts and config.draft != AUTO else ()
        self._directories = [*((name, local(name)) for name in of_draft), (model, self.directory)]
        self.contents = self._read()

    def check_unchanged(self) -> None:
        """Raises InputError where one has changed since, while it was loaded."""
        changed = [name for (name, _), before, now in zip(self._directories, self.contents, self._read(), strict=True) if before != now]
        if changed:
            raise InputError(f"{changed[0]}: its files changed while they were loaded; start again once they are as they should be")

    def _read(self) -> list[list[bytes]]:
        return [of_checkpoint(directory) for _, directory in self._directories]


def run_identity(
    inputs: Sequence[bytes], prepared: Prepared, checkpoints: Checkpoints, settings: tuple[Any, ...], version: str
) -> dict[str, str]:
    """Hashes of all that the results of a run depend on, for its journal.

    Args:
        inputs: the contents of the input, and of the files that its lines name.
        prepared: the requests of all lines.
        checkpoints: the run's.
        settings: more of the run that has a text.
        version: of this program.
    """
    model = prepared.model
    config = dataclasses.replace(model.checkpoint_config, dtype="")
    of_model = repr((config, has_stored_int4(checkpoints.directory, model.dtype.name))).encode()
    of_files = [of_model, *(part for parts in checkpoints.contents for part in parts)]
    of_run = repr((prepared.identity(), model.dtype.name, *settings)).encode()
    return run_hashes(prompts=inputs, settings=[of_run], checkpoint=of_files, version=[version.encode(), REVISION])


def of_checkpoint(directory: Path) -> list[bytes]:
    """What results depend on of a checkpoint: the contents of its small files; of its weights, which are too large to be read for this, the
    names, sizes and times of files."""
    if is_gguf(directory):
        return [repr([(path.name, *_state(path)) for path in shards(directory)]).encode()]
    if is_converted(directory):
        listed, names = {directory / MANIFEST}, sorted(stored_files(directory))
    else:
        try:
            files = weight_files(directory)
        except InputError:  # loading says what is wrong with them
            files = WeightFiles(())
        listed, names = {directory / files.index} if files.index else set(), files.names
    # Some tokenizers have files for certain versions of transformers beside those with well-known names.
    small = {*(directory / name for name in hub.SMALL_FILES), *directory.glob("*token*.json"), *directory.glob(hub.TEMPLATES)}
    contents = {path.relative_to(directory).as_posix(): read_bytes(path) for path in small | listed if path.is_file()}
    weights = [(name, *_state(directory / name)) for name in names]
    return [*(part for name in sorted(contents) for part in (os.fsencode(name), contents[name])), repr(weights).encode()]


def _state(path: Path) -> tuple[int, ...]:
    """Size and times of a file, its last change included, which no tool sets back as it does that of the content; none where it is not
    there, or cannot be."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # loading says what is wrong with it
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns
