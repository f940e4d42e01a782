"""The files of a Hugging Face directory's weights, chosen as transformers chooses them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from qspec_jax.errors import InputError, listed
from qspec_jax.files import read_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_NAME = 255  # bytes, of a file or a folder
_EXPLICIT = "transformers_weights"  # the key of config.json that names the file, or the index, to read


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The files that hold a directory's weights.

    Attributes:
        names: their paths in the directory, with / between folder and file.
        index: the index that names them, by its own path there; None where one file is read without an index.
        weight_map: the file of each tensor, as the index has it; empty without one.
        dtype: the dtype of all of them, if the index states one.
        passed_over: other safetensors and their index, which look like the same model's and are not read.
    """

    names: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtype: str | None = None
    passed_over: tuple[str, ...] = ()


def weight_files(directory: Path) -> WeightFiles:
    """The files that a directory's weights are read from, whether they exist or not.

    A file or an index that config.json names takes precedence, then model.safetensors, then its index.

    Raises:
        InputError: if config.json cannot be read, a name is outside the directory, or the index is no index.
    """
    config = directory / "config.json"
    explicit = read_json(config).get(_EXPLICIT) if config.is_file() else None
    if explicit is not None:
        if not isinstance(explicit, str) or not _is_below(explicit) or not explicit.endswith((".safetensors", INDEX_SUFFIX)):
            raise InputError(f"{config}: {_EXPLICIT} should name a safetensors file or an index in this directory, not {explicit!r}")
        found = _by_index(directory, explicit) if explicit.endswith(INDEX_SUFFIX) else WeightFiles((explicit,))
    elif not (directory / WHOLE).is_file() and (directory / INDEX).exists():
        return _by_index(directory, INDEX)
    else:
        found = WeightFiles((WHOLE,))
    return dataclasses.replace(found, passed_over=_others(directory, found))


def _by_index(directory: Path, name: str) -> WeightFiles:
    """The files that an index names."""
    index = directory / name
    raw = read_json(index)
    named, metadata = raw.get("weight_map"), raw.get("metadata")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise InputError(f"{index}: weight_map should map tensors to files, and does not")
    if outside := sorted(repr(file) for file in set(named.values()) if not _is_below(file)):
        raise InputError(f"{index}: weight_map should name files beside it or in a folder beside it, not {listed(outside, 1)}")
    dtype = metadata.get("dtype") if isinstance(metadata, dict) else None
    return WeightFiles(tuple(sorted(set(named.values()))), name, named, dtype if isinstance(dtype, str) else None)


def _is_below(name: Any) -> bool:
    """Whether a relative path names a file in its directory or in a folder there."""
    # A character that is not printable may be half a surrogate pair, which no file's name can have.
    if not name or not name.isprintable() or "\\" in name or PurePosixPath(name).is_absolute():
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= MAX_NAME for part in name.split("/"))


def _others(directory: Path, chosen: WeightFiles) -> tuple[str, ...]:
    """Files that look like weights of the same model and were not chosen."""
    if (directory / INDEX).is_file() and chosen.index != INDEX:
        try:
            named = _by_index(directory, INDEX).names
        except InputError:  # it does not matter if an index that is not used is wrong
            named = ()
        index = () if named and set(named) <= set(chosen.names) else (INDEX,)
    else:
        named = index = ()
    beside = {path.name for pattern in (WHOLE, "model-*-of-*.safetensors") for path in directory.glob(pattern)}
    shards = sorted((beside | {name for name in named if (directory / name).is_file()}) - set(chosen.names))
    return (*index, *shards)
