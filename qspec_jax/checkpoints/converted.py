"""Converted checkpoints: a directory with a manifest, an Orbax checkpoint of the target, perhaps one of the draft, and the small files of
the source. What `convert` writes is read here."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.errors import InputError, reading, with_type
from qspec_jax.files import UNFINISHED, read_json, write_json
from qspec_jax.models.placement import Placement
from qspec_jax.models.sharding import weight_sharding

Entry = TypeVar("Entry")

MANIFEST = "qspec.json"
FORMAT = 2
TARGET, DRAFT = "target", "draft"
BATCH_BYTES = 1 << 28  # read or written at once: fewer, and Orbax's own work takes longer than that
LOADED_BYTES = 1 << 30  # on their way to the device at once
_PLAIN = re.compile(r"[\w/.,=+@~ -]*")  # paths that Orbax takes as they are: it looks for files by patterns, and reads \ as /


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a converted checkpoint holds and came from.

    source: the directory, or ORG/NAME@COMMIT, that was converted. dtype: what the weights are stored in. draft_bits: 4, or 16 where no
    draft is stored. shapes, sha256: each weight as the source has it, by its path in the model. written: hashes of what became of them
    (see `digest`), by `TARGET` and `DRAFT`. files: bytes of each file that Orbax wrote. versions: the packages that wrote it.
    """

    source: str
    dtype: str
    draft_bits: int
    shapes: Mapping[str, Sequence[int]]
    sha256: Mapping[str, str]
    written: Mapping[str, Mapping[str, str]]
    files: Mapping[str, int]
    versions: Mapping[str, str]
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Writes it into a directory. Raises OSError."""
        write_json(directory / MANIFEST, dataclasses.asdict(self))


def is_converted(directory: Path) -> bool:
    """Whether a directory holds a conversion. Raises InputError for one that is not finished, or cannot be read."""
    with reading(directory, RuntimeError):  # a loop of links is an OSError or a RuntimeError
        if (directory.resolve().parent / UNFINISHED).exists():
            raise InputError(f"{directory}: an unfinished conversion; convert again")
        return (directory / MANIFEST).exists()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a converted checkpoint. Raises InputError for one that this version cannot read, and where files that it names are
    not there whole."""
    raw = read_json(directory / MANIFEST)
    if not _is_manifest(raw):
        raise InputError(f"{directory / MANIFEST}: not a manifest of format {FORMAT}; convert the checkpoint again with this version")
    sizes = stored_files(directory)
    if lost := [name for name, size in raw["files"].items() if sizes.get(name) != size]:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise InputError(f"{directory}: {lost[0]}{more} of it is not there, or not whole; copy it again, or convert again")
    return Manifest(**raw)


def _is_manifest(raw: Mapping[str, Any]) -> bool:
    if raw.keys() != {field.name for field in dataclasses.fields(Manifest)} or raw["format"] != FORMAT:
        return False
    whole = lambda number: isinstance(number, int) and not isinstance(number, bool) and number >= 0
    holds = lambda found, fits: isinstance(found, dict) and all(map(fits, found.values()))
    texts = lambda found: holds(found, lambda value: isinstance(value, str))
    return (
        isinstance(raw["source"], str)
        and raw["dtype"] in ("bfloat16", "float32")
        and raw["draft_bits"] in (4, 16)
        and holds(raw["shapes"], lambda shape: isinstance(shape, list) and all(map(whole, shape)))
        and holds(raw["written"], texts)
        and raw["written"].keys() == {TARGET, DRAFT}
        and holds(raw["files"], whole)
        and texts(raw["sha256"])
        and texts(raw["versions"])
    )


def digest(weight: Any) -> str:
    """SHA-256, in hexadecimal, of the bytes of a weight: an array's, or an Int4Weight's codes, scale and zero."""
    whole = hashlib.sha256()
    for part in jax.tree.leaves(weight):
        whole.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    return whole.hexdigest()


def stored_files(directory: Path) -> dict[str, int]:
    """Sizes in bytes of the files that Orbax wrote, by their paths in the directory. Links that lead nowhere are none."""
    folders = (found for name in (TARGET, DRAFT) for found in os.walk(directory / name, followlinks=True))
    paths = (Path(folder) / file for folder, _, files in folders for file in files)
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths if os.path.isfile(path)}


def check_shapes(directory: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises InputError where these shapes, which config.json asks for, are not those that were converted."""
    stored = {path: tuple(shape) for path, shape in manifest.shapes.items()}
    if wrong := sorted(path for path in stored.keys() | shapes.keys() if stored.get(path) != shapes.get(path)):
        path, more = wrong[0], f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        say = lambda shape: list(shape) if shape else "none"
        raise InputError(
            f"{directory}: its config.json is not the one that was converted: {path} is {say(stored.get(path))} in it, and "
            f"{say(shapes.get(path))} by config.json{more}"
        )


def restore(directory: Path, name: str, shapes: Mapping[str, Any], placement: Placement | None = None) -> dict[str, Any]:
    """The weights of `TARGET` or `DRAFT` by their paths, straight to the default device, or to where `Placement.stored` says.

    shapes: for each wanted weight, by its path, a ShapeDtypeStruct or an Int4Weight of them; arrays are cast to their dtypes. Raises
    InputError where it cannot be read.
    """
    return dict(restored(directory, name, shapes, placement, LOADED_BYTES))


def restored(
    directory: Path, name: str, shapes: Mapping[str, Any], placement: Placement | None = None, most: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields what `restore` returns, one weight after the other. most: bytes to read at once, at least a weight; None is BATCH_BYTES."""
    size = lambda entry: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(entry[1]))
    for batch in batches(shapes.items(), size, most or BATCH_BYTES):
        yield from jax.block_until_ready(_restore(directory, name, dict(batch), placement)).items()


def _restore(directory: Path, name: str, shapes: Mapping[str, Any], placement: Placement | None) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    wanted = {path: _as_dict(shape) for path, shape in shapes.items()}
    where = functools.partial(weight_sharding, mesh=None) if placement is None else placement.stored
    place = lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(path, x.shape))
    placed = {path: jax.tree.map(functools.partial(place, path), shape) for path, shape in wanted.items()}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context, for_orbax(directory.resolve()) as folder:  # Orbax takes no relative path
            found = ocp.load(folder / name, unflatten_dict(placed, sep="."))
    except Exception as error:  # whatever Orbax and TensorStore make of a broken checkpoint
        raise InputError(f"{directory / name}: cannot be restored ({with_type(error)})") from None
    whole = flatten_dict(found, sep=".", is_leaf=lambda path, _: ".".join(path) in shapes)
    # Of what is not stored, loading in part gives back the description that it was asked for.
    stored = lambda path: path in whole and all(isinstance(part, jax.Array) for part in jax.tree.leaves(whole[path]))
    if lost := sorted(path for path in shapes if not stored(path)):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise InputError(f"{directory / name}: {lost[0]}{more} of it is not stored; copy it again, or convert again")
    return {path: _as_weight(whole[path], shape) for path, shape in shapes.items()}


@contextlib.contextmanager
def for_orbax(directory: Path) -> Iterator[Path]:
    """Yields a path by which Orbax can read and write in a directory: a link to it where its own path has characters such as [ or ?.

    directory: absolute. Raises InputError where the folder of temporary files has such a name too.
    """
    if _PLAIN.fullmatch(str(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="qspec-") as folder:
        if not _PLAIN.fullmatch(folder):
            raise InputError(f"{directory}: Orbax cannot use a path with such characters; give another, or set TMPDIR to one without them")
        link = Path(folder, "checkpoint")
        link.symlink_to(directory, target_is_directory=True)
        yield link


def batches(entries: Iterable[Entry], size: Callable[[Entry], int], most: int) -> Iterator[list[Entry]]:
    """Groups entries, in order, into lists whose sizes are at most `most` together, or of one entry that is larger."""
    batch, filled = [], 0
    for entry in entries:
        if batch and filled + size(entry) > most:
            yield batch
            batch, filled = [], 0
        batch.append(entry)
        filled += size(entry)
    if batch:
        yield batch


def _as_dict(weight):
    return {"codes": weight.codes, "scale": weight.scale, "zero": weight.zero} if isinstance(weight, Int4Weight) else weight


def _as_weight(found, shape):
    return Int4Weight(**found, padding=shape.padding) if isinstance(shape, Int4Weight) else found


def as_tree(weights: Mapping[str, Any]) -> dict:
    """Weights by their paths, as the nested dictionaries that are stored."""
    return unflatten_dict({path: _as_dict(weight) for path, weight in weights.items()}, sep=".")
