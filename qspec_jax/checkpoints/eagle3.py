"""Loads an EAGLE-3 head for its target from safetensors, in the layouts of SpecForge (`midlayer.`) and of speculators (`layers.0.`)."""

import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from qspec_jax.checkpoints.eagle3_config import load_head_config
from qspec_jax.checkpoints.gguf_file import is_gguf
from qspec_jax.checkpoints.hub import local
from qspec_jax.checkpoints.huggingface import why_missing
from qspec_jax.checkpoints.loading import as_loaded
from qspec_jax.checkpoints.safetensors_file import FLOATS, Tensor, read_header
from qspec_jax.checkpoints.tensor_names import BASE, TABLES
from qspec_jax.checkpoints.weight_files import weight_files
from qspec_jax.errors import InputError, listed
from qspec_jax.models.block import Weight
from qspec_jax.models.eagle3 import Eagle3Config, Eagle3Head
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import mesh_of
from qspec_jax.quantization.outline import is_outline

_OLD_FC_NORMS = "aux_norm_low", "aux_norm_mid", "aux_norm_high"  # names of `fc_norm.0` and so on in older heads
_IDS = "d2t"  # for each of the head's tokens the target's id less the head's
# The same as a mask of the target's tokens, and buffers, which are computed here.
_IGNORED = re.compile(r"t2d$|(.*\.)?rotary_emb\.inv_freq$")
_INTEGERS = "I32", "I64"
STATE = "state.safetensors"  # of a run that trains a head, until it is completed


def load_head(directory: str | Path, target: Llama, *, dtype: str | None = None) -> Eagle3Head:
    """Loads a head, a tensor at a time, onto the target's devices; where those are several, whole onto each of them.

    An embedding or a head that the directory lacks, or has with the very numbers of the target's, is the target's array.

    Args:
        directory: a directory with config.json and safetensors, or ORG/NAME on the Hub.
        target: the model that the head drafts for; of one whose weights are shapes, the head has shapes too, and config.json alone is read.
        dtype: bfloat16, float32 or float64; None: the target's.

    Raises:
        InputError: for a config as `read_head_config` does, for missing, unexpected or misshapen tensors, which it lists, and for ids
            that the target's vocabulary does not have.
    """
    wanted, directory = jnp.dtype(as_loaded(dtype or target.dtype.name)), local(directory)
    if is_gguf(directory):
        raise InputError(f"{directory}: is a model in GGUF; a head is read from a directory with config.json and safetensors")
    if (directory / STATE).is_file() and not (directory / "config.json").exists():
        raise InputError(f"{directory}: its training is not completed; `qspec train head` goes on with it")
    settings = load_head_config(directory, target.checkpoint_config)
    targets = weights_of_target(settings, target, wanted)
    if is_outline(target):
        return Eagle3Head(settings, lambda path, shape: _outline(path, shape, wanted), **targets)
    tensors = _tensors(directory)
    names = _names(settings, tensors)
    _check(directory, settings, names, tensors, targets)
    ids = _target_ids(tensors[names["target_ids"]], settings) if names["target_ids"] in tensors else None

    def read(path: str) -> np.ndarray:
        # Cast on the host, so that the device never holds two copies.
        return tensors[names[path]].read().astype(wanted, copy=False)

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        return jnp.asarray(ids if path == "target_ids" else read(path))

    def is_shared(path: str) -> bool:
        return names[path] not in tensors or _has_bits(targets[path], read(path))

    shared = {path: weight for path, weight in targets.items() if is_shared(path)}
    head = Eagle3Head(settings, make, **shared)
    mesh = mesh_of(target.weights())
    return head if mesh is None else jax.device_put(head, NamedSharding(mesh, PartitionSpec()))


def weights_of_target(settings: Eagle3Config, target: Llama, dtype: jnp.dtype) -> dict[str, Weight]:
    """The target's embedding and head, by their paths, as far as a head with these settings may use them as its own."""
    if not settings.may_share_embedding:
        return {}
    embedding = target.embedding.get_value()
    found = {"embedding": embedding}
    if settings.may_share_head:
        found["head"] = embedding if target.head is None else target.head.get_value()
    return {path: _cast(weight, dtype) for path, weight in found.items()}


def _cast(weight: Weight, dtype: jnp.dtype) -> Weight:
    """The weight in a dtype, or the shape of that; one in codes stays as it is."""
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(weight.shape, dtype)
    return weight.astype(dtype) if isinstance(weight, jax.Array) and weight.dtype != dtype else weight


def _has_bits(weight: Weight, array: np.ndarray) -> bool:
    """Whether a weight of the target has the very numbers of an array of its shape and dtype."""
    if not isinstance(weight, jax.Array) or not weight.is_fully_addressable:
        return False
    bits = f"u{array.itemsize}"  # numpy compares bfloat16 slowly
    return np.array_equal(np.asarray(weight).view(bits), array.view(bits))


def _outline(path: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32 if path == "target_ids" else dtype)


def _tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of all files, by their names. Raises InputError where there are none."""
    files, found = weight_files(directory), {}
    for name in files.names:
        path = directory / name
        if not path.is_file():
            raise InputError(f"{path}: missing{why_missing(path, directory, files)}")
        found |= read_header(path)
    return found


def _names(settings: Eagle3Config, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The name of each weight's tensor, by the weight's path in `Eagle3Head`, in the layout that these tensors have."""
    first = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    old = any(f"{name}.weight" in tensors for name in _OLD_FC_NORMS) and len(settings.taps) == len(_OLD_FC_NORMS)
    norms = _OLD_FC_NORMS if old else [f"fc_norm.{i}" for i in range(len(settings.taps))]
    names = {f"fc_norms.{i}.weight": f"{norm}.weight" for i, norm in enumerate(norms)}
    names |= {"fc.weight": "fc.weight", "input_norm.weight": "input_norm.weight", "target_ids": _IDS}
    for i in range(settings.layers.num_layers):
        layer = f"layers.{i}" if i else first
        names |= {
            paths[0].replace("{i}", str(i)): name.removeprefix(BASE).replace("layers.{i}", layer)
            for name, paths in TABLES[settings.layers.architecture].items()
        }
    return names | {"hidden_norm.weight": f"{first}.hidden_norm.weight"}


def specforge_names(settings: Eagle3Config) -> dict[str, str]:
    """The name of each weight's tensor in SpecForge's layout, by the weight's path in `Eagle3Head`, also of those that this head lacks."""
    return _names(settings, dict.fromkeys(["midlayer."]))


def shapes_of_head(settings: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's weights, by their paths, all of them its own."""
    shapes = {}

    def make(path: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        shapes[path] = shape
        return _outline(path, shape, jnp.dtype(jnp.float32))

    Eagle3Head(settings, make)
    return shapes


def _check(
    directory: Path, settings: Eagle3Config, names: Mapping[str, str], tensors: Mapping[str, Tensor], targets: Mapping[str, Weight]
) -> None:
    """Raises one InputError for all wrong names, shapes and dtypes. targets: the weights that may be missing."""
    if "fc.weight" not in tensors:
        raise InputError(f"{directory}: no EAGLE-3 head: its tensors should have fc.weight, which fuses the target's hidden states")
    expected = {names[path]: shape for path, shape in shapes_of_head(settings).items()}
    free = {names[path] for path in targets}
    wrong = []
    if missing := sorted(expected.keys() - tensors.keys() - free):
        wrong.append(f"missing {listed(missing)}")
    expected |= {} if _IDS in expected else {_IDS: (settings.draft_vocab_size,)}
    if extra := sorted(name for name in tensors.keys() - expected.keys() if not _IGNORED.match(name)):
        wrong.append(f"unexpected {listed(extra)}")
    for name in sorted(expected.keys() & tensors.keys()):
        tensor, kinds = tensors[name], _INTEGERS if name == _IDS else tuple(FLOATS)
        if tensor.shape != expected[name]:
            why = f" (draft_vocab_size is {settings.draft_vocab_size})" if name in (_IDS, names["head"]) else ""
            wrong.append(f"{name} has shape {list(tensor.shape)}, should have {list(expected[name])}{why}")
        elif tensor.dtype not in kinds:
            wrong.append(f"{name} has dtype {tensor.dtype}, should be one of {', '.join(kinds)}")
    if wrong:
        raise InputError(f"{directory}: the head does not fit its config.json: {'; '.join(wrong)}")


def _target_ids(tensor: Tensor, settings: Eagle3Config) -> np.ndarray:
    """The target's id of each of the head's tokens. Raises InputError for ids that it does not have, or that two tokens share."""
    own, most = np.arange(settings.draft_vocab_size), settings.layers.vocab_size
    ids = own + tensor.read().astype(np.int64)
    where = f"{tensor.file}: {_IDS}, which is added to the head's ids,"
    if (outside := (ids < 0) | (ids >= most)).any():
        i = int(outside.argmax())
        raise InputError(f"{where} makes {ids[i]} of {i}; it should give ids of the target's vocabulary, below {most}")
    given, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise InputError(f"{where} makes {given[counts.argmax()]} of several; each should give another id")
    if settings.has_whole_vocabulary and (ids != own).any():
        raise InputError(f"{where} should be 0 everywhere, since draft_vocab_size is the target's whole vocabulary")
    return ids.astype(np.int32)
