"""Loads a model and its tokenizer from a Hugging Face directory, the Hub, or a converted directory."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.gguf_file import is_gguf
from qspec_jax.checkpoints.gguf_source import GgufSource
from qspec_jax.checkpoints.hub import local
from qspec_jax.checkpoints.huggingface import Source, load_config
from qspec_jax.checkpoints.source import WeightSource
from qspec_jax.checkpoints.tensor_names import weight_shapes
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama, Origin
from qspec_jax.models.placement import Placement

log = logging.getLogger(__name__)
_LOADED_AS = ("bfloat16", "float32", "float64")


def load_model(directory: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None, progress: bool | None = None) -> Llama:
    """Loads a model, a tensor at a time.

    Args:
        directory: a Hugging Face directory (config.json and safetensors), ORG/NAME on the Hub, a GGUF file or the folder of one, or a
            converted directory.
        dtype: bfloat16, float32 or float64; None: the checkpoint's own (float16 becomes bfloat16).
        mesh: devices to divide the model over, with one axis, "model" (see `models.sharding`); None: the default device.
        progress: whether a bar is shown; None: where standard error is a terminal.

    Raises:
        InputError: for missing, unexpected or misshapen tensors, which it lists, for an unfinished conversion, for devices that the model
            cannot be divided over, and for a model that does not fit them.
    """
    directory = local(directory, progress=progress)
    is_converted = converted.is_converted(directory)
    model = _load_converted(directory, dtype, mesh) if is_converted else _load_source(directory, dtype, mesh, progress)
    model.origin = Origin(directory.resolve())
    return model


def open_source(checkpoint: str | Path) -> WeightSource:
    """Opens an unconverted checkpoint; its headers alone are read.

    Args:
        checkpoint: a Hugging Face directory, its name on the Hub, or a GGUF file.

    Raises:
        InputError: for a directory without a checkpoint, and for missing, unexpected or misshapen tensors.
    """
    path = local(checkpoint)
    return GgufSource(path) if is_gguf(path) else Source(path)


def _load_source(directory: Path, dtype: str | None, mesh: Mesh | None, progress: bool | None) -> Llama:
    source = open_source(directory)
    source.check_contents()
    wanted = jnp.dtype(as_loaded(dtype or stored_dtype(source.config)))
    placement = Placement(source.config, mesh)
    _check_fits(directory, placement, wanted)
    with tqdm(total=len(source.places), desc="load", unit="tensor", disable=None if progress is None else not progress) as bar:

        def make(path: str, shape: tuple[int, ...]) -> jax.Array:
            array = source.read(path)
            bar.update()
            # Cast on the host, so that the device never holds two copies.
            array = array.astype(wanted, copy=False)
            source.examine(path, array)
            return placement.put(path, array)

        model = placement.model(make)
    source.warn_of_not_finite()
    return model


def _load_converted(directory: Path, dtype: str | None, mesh: Mesh | None) -> Llama:
    config, manifest = config_and_manifest(directory)
    wanted, placement = jnp.dtype(as_loaded(dtype or manifest.dtype)), Placement(config, mesh)
    _check_fits(directory, placement, wanted)
    shapes = {path: jax.ShapeDtypeStruct(shape, wanted) for path, shape in weight_shapes(config).items()}
    weights = converted.restore(directory, converted.TARGET, shapes, placement)
    return placement.model(lambda path, shape: placement.spread(path, weights[path]))


def _check_fits(directory: Path, placement: Placement, dtype: jnp.dtype) -> None:
    """Raises InputError if a device of this process has less memory than its share of the weights takes."""
    mesh = placement.mesh
    own = jax.local_devices() if mesh is None else [each for each in mesh.devices.flat if each.process_index == jax.process_index()]
    room = (own[0].memory_stats() or {}).get("bytes_limit") if own else None  # None on a CPU
    needed = placement.bytes_on_device(weight_shapes(placement.config), dtype.itemsize)
    if room is not None and needed > room:
        share = "" if mesh is None else " a device"
        raise InputError(
            f"{directory}: its weights take {needed / 1e9:.1f} GB{share} in {dtype.name}, {(needed - room) / 1e9:.1f} GB more than the "
            f"{room / 1e9:.1f} GB that JAX may take of {own[0].device_kind}; up to {room / 2e9:.1f} billion parameters fit in bfloat16"
        )


def config_and_dtype(directory: str | Path) -> tuple[LlamaConfig, str]:
    """The config of a checkpoint, and the dtype that it is loaded as by default; no weight is read. Raises InputError as `load_model`."""
    directory = local(directory)
    if converted.is_converted(directory):
        config, manifest = config_and_manifest(directory)
        return dataclasses.replace(config, dtype=manifest.dtype), manifest.dtype
    config = open_source(directory).config
    return config, stored_dtype(config)


def config_and_manifest(directory: Path) -> tuple[LlamaConfig, converted.Manifest]:
    """The config and the manifest of a converted directory. Raises InputError if it is none, or if the two do not fit each other."""
    manifest = converted.read_manifest(directory)
    config = load_config(directory, dtype=manifest.dtype)
    converted.check_shapes(directory, manifest, weight_shapes(config))
    return config, manifest


def as_loaded(dtype: str) -> str:
    """Returns the dtype. Raises InputError if nothing can be loaded as it."""
    if dtype not in _LOADED_AS:
        raise InputError(f"dtype {dtype} cannot be loaded; it should be one of {', '.join(_LOADED_AS)}")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise InputError("float64 needs 64-bit JAX: set JAX_ENABLE_X64=1 or jax.config.update('jax_enable_x64', True)")
    return dtype


def load(directory: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None) -> tuple[Llama, Any]:
    """The model and the tokenizer of a checkpoint directory, see `load_model`. Raises InputError."""
    return load_model(directory, dtype=dtype, mesh=mesh), load_tokenizer(directory)


def stored_dtype(config: LlamaConfig) -> str:
    """The dtype that a checkpoint is loaded as by default."""
    if config.dtype == "float16":
        log.warning("the checkpoint is float16; loading it as bfloat16 (--dtype float32 keeps every bit)")
        return "bfloat16"
    return config.dtype
