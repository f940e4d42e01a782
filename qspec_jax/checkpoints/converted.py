"""Reads converted checkpoints: a manifest, an Orbax checkpoint of the target, perhaps one of the draft, and small files."""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pallas_kernels.formats.weights import FAR_STEPS, NEAREST_STEPS, Int4Weight, NestedWeight, upper_plane
from qspec_jax.errors import InputError, listed, reading, with_type
from qspec_jax.files import UNFINISHED, read_json
from qspec_jax.models.placement import Placement
from qspec_jax.models.sharding import weight_sharding

Entry = TypeVar("Entry")

MANIFEST = "qspec.json"
FORMAT = 3
TARGET, DRAFT = "target", "draft"
PARTS = {"codes", "scale", "zero"}  # arrays of an INT4 weight
LOWER = {"lower": NEAREST_STEPS, "lower8": FAR_STEPS}  # what a nested one has besides, by the steps of its lower plane
BATCH_BYTES = 1 << 28  # read or written at once: with fewer, Orbax's own work takes longer
LOADED_BYTES = 1 << 30  # moved to the device at once
_STORED = ("uint8", "int16", "float16", "bfloat16", "float32")  # dtypes of arrays of packed weights
_PLAIN = re.compile(r"[\w/.,=+@~ -]*")  # paths that Orbax can use: it finds files by patterns, and reads \ as /


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a converted checkpoint.

    Attributes:
        source: the directory, or ORG/NAME@COMMIT, that was converted.
        dtype: of the stored weights.
        draft_bits: 4, or 16 if no draft is stored.
        shapes: of each weight in the source, by its path in the model.
        packed: the stored arrays of each weight that is in INT4, by its path: the shape and the dtype of codes, scale and zero, and of the
            codes of the lower plane where it is nested.
        sha256: hashes of each weight in the source (see `digest`).
        written: hashes of the stored weights, by `TARGET` and `DRAFT`.
        files: bytes of each file that Orbax wrote.
        versions: of the packages that wrote it.
        format: of the manifest.
    """

    source: str
    dtype: str
    draft_bits: int
    shapes: Mapping[str, Sequence[int]]
    packed: Mapping[str, Mapping[str, Sequence[Any]]]
    sha256: Mapping[str, str]
    written: Mapping[str, Mapping[str, str]]
    files: Mapping[str, int]
    versions: Mapping[str, str]
    format: int = FORMAT

    def stored_shapes(self, dtype: Any) -> dict[str, Any]:
        """Shapes for `restore` of all weights of the target, of which those that are not packed are to have a dtype."""
        plain = {path: jax.ShapeDtypeStruct(tuple(shape), dtype) for path, shape in self.shapes.items()}

        def packed(path: str, arrays: Mapping[str, Sequence[Any]]) -> Int4Weight | NestedWeight:
            found = {name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(kind)) for name, (shape, kind) in arrays.items()}
            return _from_dict(found, 2 * math.prod(found["codes"].shape[1:]) - self.shapes[path][1])

        return plain | {path: packed(path, arrays) for path, arrays in self.packed.items()}

    @property
    def is_nested(self) -> bool:
        """Whether weights are nested."""
        return any(LOWER.keys() & arrays.keys() for arrays in self.packed.values())


def described(weight: Int4Weight | NestedWeight) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and the dtype of each array of a weight, as a manifest has them."""
    return {name: (array.shape, np.dtype(array.dtype).name) for name, array in _as_dict(weight).items()}


def is_converted(directory: Path) -> bool:
    """Whether a directory has a conversion. Raises InputError for an unfinished one, and for a directory that cannot be read."""
    with reading(directory, RuntimeError):  # a loop of links is an OSError or a RuntimeError
        if (directory.resolve().parent / UNFINISHED).exists():
            raise InputError(f"{directory}: an unfinished conversion; convert again")
        return (directory / MANIFEST).exists()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a converted checkpoint.

    Raises InputError for a directory that is none, for another format, and for missing or truncated files.
    """
    if not is_converted(directory):
        raise InputError(f"{directory}: is not a converted checkpoint; `qspec convert` makes one")
    raw = read_json(directory / MANIFEST)
    if not _is_manifest(raw):
        raise InputError(f"{directory / MANIFEST}: is not a manifest of format {FORMAT}; convert the checkpoint again with this version")
    sizes = stored_files(directory)
    if lost := [name for name, size in raw["files"].items() if sizes.get(name) != size]:
        raise InputError(f"{directory}: {listed(lost, 1)} of it is not there, or not whole; copy it again, or convert again")
    return Manifest(**raw)


def _is_manifest(raw: Mapping[str, Any]) -> bool:
    if raw.keys() != {field.name for field in dataclasses.fields(Manifest)} or raw["format"] != FORMAT:
        return False

    def is_size(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    def has_values(found: Any, fits: Callable[[Any], bool]) -> bool:
        return isinstance(found, dict) and all(map(fits, found.values()))

    def is_array(found: Any) -> bool:
        return (
            isinstance(found, list)
            and len(found) == 2
            and isinstance(found[0], list)
            and all(map(is_size, found[0]))
            and found[1] in _STORED
        )

    def has_texts(found: Any) -> bool:
        return has_values(found, lambda value: isinstance(value, str))

    return (
        isinstance(raw["source"], str)
        and raw["dtype"] in ("bfloat16", "float32")
        and raw["draft_bits"] in (4, 16)
        and has_values(raw["shapes"], lambda shape: isinstance(shape, list) and all(map(is_size, shape)))
        and has_values(raw["packed"], lambda arrays: has_values(arrays, is_array) and arrays.keys() - LOWER.keys() == PARTS)
        and all(_is_packed(raw["shapes"].get(path), arrays) for path, arrays in raw["packed"].items())
        and has_values(raw["written"], has_texts)
        and raw["written"].keys() == {TARGET, DRAFT}
        and has_values(raw["files"], is_size)
        and has_texts(raw["sha256"])
        and has_texts(raw["versions"])
    )


def _is_packed(shape: Any, arrays: Mapping[str, Sequence[Any]]) -> bool:
    """Whether arrays have the shapes of the parts of an Int4Weight of this shape, or of a NestedWeight, whose last group may be short."""
    codes, scale, zero = (arrays[name][0] for name in ("codes", "scale", "zero"))
    if not (isinstance(shape, list) and len(shape) == 2 and len(codes) == 3 and codes[0] == shape[0] and codes[:2] == scale == zero):
        return False
    padding = 2 * codes[1] * codes[2] - shape[1]
    lower = [arrays[name][0] for name in LOWER.keys() & arrays.keys()]
    return 0 <= padding < 2 * codes[2] and lower == [codes] if lower else padding == 0


def digest(weight: Any) -> str:
    """SHA-256, in hexadecimal, of the bytes of a weight: an array's, or those of an Int4Weight or a NestedWeight."""
    whole = hashlib.sha256()
    for part in jax.tree.leaves(weight):
        whole.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    return whole.hexdigest()


def stored_files(directory: Path) -> dict[str, int]:
    """Sizes in bytes of the files that Orbax wrote, by their paths in the directory, without broken links."""
    folders = (found for name in (TARGET, DRAFT) for found in os.walk(directory / name, followlinks=True))
    paths = (Path(folder) / file for folder, _, files in folders for file in files)
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths if os.path.isfile(path)}


def check_shapes(directory: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises InputError if the shapes that config.json asks for are not those that were converted."""
    stored = {path: tuple(shape) for path, shape in manifest.shapes.items()}
    if wrong := sorted(path for path in stored.keys() | shapes.keys() if stored.get(path) != shapes.get(path)):
        path, more = wrong[0], f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        was, wanted = (list(shape) if shape else "none" for shape in (stored.get(path), shapes.get(path)))
        raise InputError(
            f"{directory}: its config.json is not the one that was converted: {path} is {was} in it, and {wanted} by config.json{more}"
        )


def restore(directory: Path, name: str, shapes: Mapping[str, Any], placement: Placement | None = None) -> dict[str, Any]:
    """The weights of a converted checkpoint by their paths.

    Args:
        directory: of the checkpoint.
        name: `TARGET` or `DRAFT`.
        shapes: for each wanted weight, by its path, a ShapeDtypeStruct, or an Int4Weight or NestedWeight of them; arrays are cast to their
            dtypes.
        placement: of the weights on devices; None: the default device.

    Raises:
        InputError: if it cannot be read.
    """
    return dict(restored(directory, name, shapes, placement, LOADED_BYTES))


def restored(
    directory: Path, name: str, shapes: Mapping[str, Any], placement: Placement | None = None, max_bytes: int = BATCH_BYTES
) -> Iterator[tuple[str, Any]]:
    """Yields the weights of `restore` one by one; at most `max_bytes`, or one weight, are read at once."""

    def size(entry: tuple[str, Any]) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(entry[1]))

    for batch in batches(shapes.items(), size, max_bytes):
        yield from jax.block_until_ready(_restore(directory, name, dict(batch), placement)).items()


def _restore(directory: Path, name: str, shapes: Mapping[str, Any], placement: Placement | None) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    wanted = {path: _as_dict(shape) for path, shape in shapes.items()}
    sharding = functools.partial(weight_sharding, mesh=None) if placement is None else placement.stored

    def placed(path: str, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(path, x.shape))

    asked = {path: jax.tree.map(functools.partial(placed, path), shape) for path, shape in wanted.items()}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context, for_orbax(directory.resolve()) as folder:  # Orbax takes no relative path
            found = ocp.load(folder / name, unflatten_dict(asked, sep="."))
    except Exception as error:  # Orbax and TensorStore raise many kinds for a broken checkpoint
        raise InputError(f"{directory / name}: cannot be restored ({with_type(error)})") from None
    whole = flatten_dict(found, sep=".", is_leaf=lambda path, _: ".".join(path) in shapes)

    def is_stored(path: str) -> bool:
        # For weights that are not stored, loading in part returns the descriptions that were asked for.
        return path in whole and all(isinstance(part, jax.Array) for part in jax.tree.leaves(whole[path]))

    if lost := sorted(path for path in shapes if not is_stored(path)):
        raise InputError(f"{directory / name}: {listed(lost, 1)} of it is not stored; copy it again, or convert again")
    return {path: _as_weight(whole[path], shape) for path, shape in shapes.items()}


@contextlib.contextmanager
def for_orbax(directory: Path) -> Iterator[Path]:
    """Yields a path by which Orbax can read and write in a directory: a link if the absolute path has characters such as [ or ?.

    Raises:
        InputError: if the folder of temporary files has such a name too.
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


def batches(entries: Iterable[Entry], size: Callable[[Entry], int], max_size: int) -> Iterator[list[Entry]]:
    """Groups entries, in order, into lists whose sizes add up to at most `max_size`, or of one larger entry."""
    batch, filled = [], 0
    for entry in entries:
        if batch and filled + size(entry) > max_size:
            yield batch
            batch, filled = [], 0
        batch.append(entry)
        filled += size(entry)
    if batch:
        yield batch


def _as_dict(weight):
    upper = upper_plane(weight)
    if not isinstance(upper, Int4Weight):
        return weight
    found = {"codes": upper.codes, "scale": upper.scale, "zero": upper.zero}
    if isinstance(weight, NestedWeight):
        found[next(name for name, steps in LOWER.items() if steps == weight.steps)] = weight.lower
    return found


def _from_dict(found: Mapping[str, Any], padding: int) -> Int4Weight | NestedWeight:
    """What `_as_dict` took apart. padding: see `Int4Weight`."""
    upper = Int4Weight(**{name: found[name] for name in ("codes", "scale", "zero")}, padding=padding)
    return next((NestedWeight(upper, found[name], steps) for name, steps in LOWER.items() if name in found), upper)


def _as_weight(found, shape):
    if isinstance(shape, Int4Weight | NestedWeight):
        return _from_dict(found, upper_plane(shape).padding)
    return found


def as_tree(weights: Mapping[str, Any]) -> dict:
    """Weights by their paths as the nested dictionaries that are stored."""
    return unflatten_dict({path: _as_dict(weight) for path, weight in weights.items()}, sep=".")
