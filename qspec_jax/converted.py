"""Converted checkpoints: a directory with a manifest, an Orbax checkpoint of the target, perhaps one of the draft, and the small files of
the source. What `convert` writes is read here."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.weight_format import Int4Weight
from qspec_jax.config import read_json
from qspec_jax.errors import InputError

MANIFEST = "qspec.json"
UNFINISHED = "UNFINISHED"  # a file beside a directory that is being written
FORMAT = 1
TARGET, DRAFT = "target", "draft"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """source: the directory that was converted. dtype: of the weights. draft_bits: 4, or 16 where no draft is stored. sha256: of each
    weight as the source has it, by its path in the model. versions: of what wrote it."""

    source: str
    dtype: str
    draft_bits: int
    sha256: Mapping[str, str]
    versions: Mapping[str, str]
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        (directory / MANIFEST).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def is_converted(directory: Path) -> bool:
    """Raises InputError for one that is not finished."""
    try:
        if (directory.parent / UNFINISHED).exists():
            raise InputError(f"{directory}: an unfinished conversion; convert again")
        return (directory / MANIFEST).exists()
    except OSError as error:
        raise InputError(f"{directory}: cannot be read ({error.strerror})") from None


def read_manifest(directory: Path) -> Manifest:
    """Raises InputError for one that this version cannot read."""
    raw = read_json(directory / MANIFEST)
    names = {field.name for field in dataclasses.fields(Manifest)}
    known = raw.get("dtype") in ("bfloat16", "float32") and raw.get("draft_bits") in (4, 16) and isinstance(raw.get("sha256"), dict)
    if raw.get("format") != FORMAT or raw.keys() != names or not known:
        raise InputError(f"{directory / MANIFEST}: not a manifest of format {FORMAT}; convert the checkpoint again with this version")
    return Manifest(**raw)


def restore(directory: Path, name: str, shapes: Mapping[str, Any], mesh: Mesh | None = None) -> dict[str, Any]:
    """The weights of `TARGET` or `DRAFT` by their paths, straight to the default device, or sharded over a mesh.

    shapes: by path, a ShapeDtypeStruct or an Int4Weight of them, of all weights or some; arrays are cast to their dtypes. Raises
    InputError where it cannot be read.
    """
    from orbax.checkpoint import v1 as ocp

    directory = directory.resolve()  # Orbax takes no relative path
    wanted = {path: _as_dict(shape) for path, shape in shapes.items()}
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=weight_sharding(x.shape, mesh))
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            found = ocp.load(directory / name, unflatten_dict(jax.tree.map(place, wanted), sep="."))
    except Exception as error:  # whatever Orbax and TensorStore make of a broken checkpoint
        raise InputError(f"{directory / name}: cannot be restored ({type(error).__name__}: {' '.join(str(error).split())[:300]})") from None
    whole = flatten_dict(found, sep=".", is_leaf=lambda path, _: ".".join(path) in shapes)
    return {path: _as_weight(whole[path], shape) for path, shape in shapes.items()}


def weight_sharding(shape: tuple[int, ...], mesh: Mesh | None) -> jax.sharding.Sharding:
    """On the default device, or on a mesh: there the first axis of a matrix is divided along the mesh's first, where it can be, and
    everything else is on all devices."""
    if mesh is None:
        return jnp.zeros(()).sharding
    axis = mesh.axis_names[0]
    divided = len(shape) > 1 and shape[0] % mesh.shape[axis] == 0
    return NamedSharding(mesh, PartitionSpec(axis) if divided else PartitionSpec())


def _as_dict(weight):
    return {"codes": weight.codes, "scale": weight.scale, "zero": weight.zero} if isinstance(weight, Int4Weight) else weight


def _as_weight(found, shape):
    return Int4Weight(**found, in_features=shape.in_features) if isinstance(shape, Int4Weight) else found


def as_tree(weights: Mapping[str, Any]) -> dict:
    """As they are stored: weights by their paths, as nested dictionaries."""
    return unflatten_dict({path: _as_dict(weight) for path, weight in weights.items()}, sep=".")
