"""Loads a model and its tokenizer from a Hugging Face directory, the Hub, or a converted directory."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.formats.weights import FAR_STEPS, Int4Weight, NestedWeight, dequantize_weight
from pallas_kernels.matmul.support import GROUP_SIZES, unsupported
from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.gguf_file import is_gguf
from qspec_jax.checkpoints.gguf_source import GgufSource, gguf_quantization
from qspec_jax.checkpoints.hub import local
from qspec_jax.checkpoints.huggingface import Source, load_config
from qspec_jax.checkpoints.quantized.formats import quantized_format
from qspec_jax.checkpoints.source import WeightSource
from qspec_jax.checkpoints.tensor_names import weight_shapes
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.checkpoints.weights_text import AS_STORED, DEQUANTIZED, NESTED, PACKED, WeightsChoice
from qspec_jax.errors import InputError, more_memory, reading, warn_once
from qspec_jax.files import read_json
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama, Origin, Weight
from qspec_jax.models.placement import Placement
from qspec_jax.progress import progress_bar, working
from qspec_jax.quantization.calibration import MAX_TEXT_TOKENS, MAX_TOKENS, quantize_linears_for
from qspec_jax.quantization.weights import groups_are_cut, is_linear, nest_weight, quantize_embedding, quantize_head, quantize_nested

log = logging.getLogger(__name__)
FEW_TOKENS = 1000  # of a text to calibrate on
_LOADED_AS = ("bfloat16", "float32", "float64")


def load_model(
    directory: str | Path,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    mesh: Mesh | None = None,
    progress: bool | None = None,
) -> Llama:
    """Loads a model, a tensor at a time.

    Args:
        directory: a Hugging Face directory (config.json and safetensors), ORG/NAME on the Hub, a GGUF file or the folder of one, or a
            converted directory.
        dtype: bfloat16, float32 or float64; None: the checkpoint's own (float16 becomes bfloat16).
        weights: for a quantized checkpoint "packed", which keeps linear layers of 4 bits in INT4 where their groups allow it, or
            "dequantized"; None: see `packed_paths`, and a converted directory as it is stored. Of any checkpoint "nested" puts linear
            layers into 8 bits, whose upper 4 are a draft's weights (`NestedWeight`); with ":calibration=FILE" after it they are rounded for
            a text. ":head_bits=8" puts the head into INT8. Log lines say what changes the model.
        mesh: devices to divide the model over, with one axis, "model" (see `models.sharding`); None: the default device.
        progress: whether a bar is shown; None: where standard error is a terminal.

    Raises:
        InputError: for missing, unexpected or misshapen tensors, which it lists, for an unfinished conversion, for devices that the model
            cannot be divided over, and for a model that does not fit them.
    """
    directory = local(directory, progress=progress)
    is_converted = converted.is_converted(directory)
    choice = WeightsChoice.parse(weights)
    linears = DEQUANTIZED if choice.calibration else choice.linears
    texts = _calibration_texts(directory, choice.calibration, mesh) if choice.calibration else None
    model = _load_converted(directory, dtype, linears, mesh) if is_converted else _load_source(directory, dtype, linears, mesh, progress)
    if texts is not None:
        log_nested(directory)
        weights = quantize_linears_for(model, texts, quantize=quantize_nested, progress=progress).weights()
        model = Llama(dataclasses.replace(model.checkpoint_config, nested_weights=True), lambda path, shape: weights[path])
    model = quantize_tables(model, choice, directory)
    for name, bits in (("embedding", choice.embedding_bits), ("head", choice.head_bits)):
        if bits == 8:
            log.info("%s: its %s is put into INT8, which changes logits slightly", directory, name)
    model.origin = Origin(directory.resolve())
    return model


def _calibration_texts(directory: Path, file: str, mesh: Mesh | None) -> list[list[int]]:
    """The token ids of the text in a file, in pieces; of a long one as many, spread over it, as calibration uses whole.

    Raises InputError where a model cannot be calibrated on it.
    """
    if mesh is not None:
        raise InputError("weights nested: calibration is for a model on one device; convert it so, and load that on several")
    if converted.is_converted(directory) and converted.read_manifest(directory).is_nested:
        raise InputError(f"{directory}: its weights are nested already; calibrate its source")
    with reading(Path(file), UnicodeDecodeError):
        text = Path(file).read_text(encoding="utf-8")
    tokens = load_tokenizer(directory)(text)["input_ids"]
    pieces = [tokens[i : i + MAX_TEXT_TOKENS] for i in range(0, len(tokens), MAX_TEXT_TOKENS)]
    if not pieces:
        raise InputError(f"{file}: has no tokens to calibrate on; give a text of some thousand tokens")
    used = min(len(pieces), MAX_TOKENS // MAX_TEXT_TOKENS)
    chosen = [pieces[i * len(pieces) // used] for i in range(used)]
    log.info("%s: weights are rounded for %d of its %d tokens", file, sum(map(len, chosen)), len(tokens))
    if len(tokens) < FEW_TOKENS:
        log.warning("%s: %d tokens are few to calibrate on; with some thousand weights err less on other texts", file, len(tokens))
    return chosen


def open_source(checkpoint: str | Path) -> WeightSource:
    """Opens an unconverted checkpoint; its headers alone are read.

    Args:
        checkpoint: a Hugging Face directory, its name on the Hub, or a GGUF file.

    Raises:
        InputError: for a directory without a checkpoint, and for missing, unexpected or misshapen tensors.
    """
    path = local(checkpoint)
    return GgufSource(path) if is_gguf(path) else Source(path)


def packed_paths(source: WeightSource, dtype: jnp.dtype, weights: str | None, mesh: Mesh | None = None) -> frozenset[str]:
    """The paths of the weights of a quantized checkpoint that stay in INT4, as they are stored.

    Without a choice they stay in INT4 if kernels can multiply by all of them: a model in bfloat16, groups of 128, 64 or 32 inputs, and
    scales in bfloat16 or float16. Weights whose groups would be cut by the devices are dequantized.

    Args:
        source: the checkpoint.
        dtype: of the model.
        weights: see `WeightsChoice.linears`.
        mesh: the devices of the model.

    Raises:
        InputError: for packed weights if there are none.
    """
    linears = [path for path in source.places if is_linear(path)]
    packable = [] if weights in (DEQUANTIZED, NESTED) else [path for path in linears if source.can_pack(path)]
    if mesh is not None:
        packable = [path for path in packable if not groups_are_cut(path, _packed_outline(source, path), mesh)]
    if weights == PACKED and not packable:
        raise InputError(
            f"{source.directory}: no linear layer of it is stored in whole groups of 4-bit codes; load it without {PACKED} weights"
        )
    if weights is None:
        suits = dtype == jnp.bfloat16 and len(packable) == len(linears)
        packable = packable if suits and all(_has_kernels(_packed_outline(source, path)) for path in packable) else []
    return frozenset(packable)


def log_packed(source: WeightSource, packed: Set[str], dtype: jnp.dtype) -> None:
    """Logs how many linear layers of a quantized checkpoint stay in INT4."""
    if source.quantization:
        what = f"{len(packed)} of {sum(map(is_linear, source.places))} stay in INT4" if packed else f"they are dequantized to {dtype.name}"
        hint = " (--dtype float32 keeps every bit)" if dtype == jnp.bfloat16 and not packed else ""
        log.info("%s: its linear layers are quantized (%s); %s%s", source.directory, source.quantization, what, hint)


def with_packed(config: LlamaConfig, packed: Set[str], group_size: int | None) -> LlamaConfig:
    """The config of a model of which these weights are in INT4. group_size: inputs of a group of them."""
    every = bool(packed) and packed >= set(filter(is_linear, weight_shapes(config)))
    return dataclasses.replace(config, int4_weights=every, int4_group_size=_config_group_size(group_size) if every else None)


def log_nested(checkpoint: object) -> None:
    """Logs that linear layers are put into 8 bits."""
    log.info("%s: its linear layers are put into 8 bits, which changes logits slightly; drafts in INT4 read the upper 4", checkpoint)


def _config_group_size(group_size: int | None) -> int | None:
    """`LlamaConfig.int4_group_size` of weights with groups of this size: None for 128, the default, and for sizes that no kernel takes."""
    return group_size if group_size in GROUP_SIZES[1:] else None


def _group_size(source: WeightSource, packed: Set[str]) -> int | None:
    """The inputs of a group of a packed weight; those of other weights are taken to be the same number."""
    return 2 * _packed_outline(source, min(packed)).codes.shape[-1] if packed else None


def _stored_group_size(manifest: converted.Manifest) -> int | None:
    """`_group_size` of a converted directory."""
    return 2 * manifest.packed[min(manifest.packed)]["codes"][0][-1] if manifest.packed else None


def _stored_as(config: LlamaConfig, manifest: converted.Manifest, weights: str | None) -> tuple[LlamaConfig, frozenset[str]]:
    """The config of the model that a converted directory is loaded as, and the weights that stay as their codes are stored. weights: see
    `WeightsChoice.linears`."""
    kept = weights == NESTED if manifest.is_nested else weights == PACKED
    packed = frozenset(manifest.packed) if kept or weights is None else frozenset()
    in_int4 = frozenset() if manifest.is_nested else packed
    nested = weights == NESTED or (manifest.is_nested and bool(packed))
    return dataclasses.replace(with_packed(config, in_int4, _stored_group_size(manifest)), nested_weights=nested), packed


def _check_stored(directory: Path, manifest: converted.Manifest, weights: str | None) -> None:
    """Raises InputError for packed weights of a converted directory that has none."""
    if weights == PACKED and (manifest.is_nested or not manifest.packed):
        how = NESTED if manifest.is_nested else DEQUANTIZED
        raise InputError(f"{directory}: its weights are stored {how}; convert the checkpoint again with {PACKED} weights")


def _has_kernels(weight: Int4Weight) -> bool:
    """Whether kernels for bfloat16 can multiply by a weight."""
    return unsupported(jax.ShapeDtypeStruct((1, weight.in_features), jnp.bfloat16), [weight], group_sizes=GROUP_SIZES) is None


def _packed_outline(source: WeightSource, path: str) -> Int4Weight:
    """The shapes of a packed weight; its scales alone are read."""
    scale, zero = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in source.read_parameters(path))
    out, groups = scale.shape
    return Int4Weight(jax.ShapeDtypeStruct((out, groups, source.places[path].shape[1] // groups // 2), jnp.uint8), scale, zero)


def _load_source(directory: Path, dtype: str | None, weights: str | None, mesh: Mesh | None, progress: bool | None) -> Llama:
    source = open_source(directory)
    source.check_contents()
    wanted = jnp.dtype(as_loaded(dtype or default_dtype(source.config, source.directory)))
    packed = packed_paths(source, wanted, weights, mesh)
    log_packed(source, packed, wanted)
    is_nested = weights == NESTED
    if is_nested:
        log_nested(directory)
    config = dataclasses.replace(with_packed(source.config, packed, _group_size(source, packed)), nested_weights=is_nested)
    placement = Placement(config, mesh)
    _check_fits(directory, placement, wanted, packed)
    settings = dict(total=len(source.places), desc="load", unit="tensor", leave=True)
    with progress_bar(progress=progress, **settings) as bar, working("loading weights"):

        def make(path: str, shape: tuple[int, ...]) -> Weight:
            if path in packed:
                weight = source.read_packed(path)
                bar.update()
                source.examine(path, weight.scale)
                return jax.tree.map(functools.partial(placement.put, path), weight)
            array = source.read(path)
            bar.update()
            # Cast on the host, so that the device never holds two copies.
            array = array.astype(wanted, copy=False)
            source.examine(path, array)
            weight = placement.put(path, array)
            return nest_weight(path, weight) if is_nested else weight

        model = placement.model(make)
    source.warn_of_not_finite()
    return model


def _load_converted(directory: Path, dtype: str | None, weights: str | None, mesh: Mesh | None) -> Llama:
    config, manifest = config_and_manifest(directory)
    wanted = jnp.dtype(as_loaded(dtype or manifest.dtype))
    _check_stored(directory, manifest, weights)
    config, packed = _stored_as(config, manifest, weights)
    is_nested = weights == NESTED and not packed
    if is_nested:
        log_nested(directory)
    placement = Placement(config, mesh)
    shapes = manifest.stored_shapes(wanted)
    if mesh is not None and (cut := [path for path in packed if groups_are_cut(path, shapes[path], mesh)]):
        raise InputError(f"{directory}: {mesh.size} devices would cut groups of {sorted(cut)[0]}; load it with {DEQUANTIZED} weights")
    _check_fits(directory, placement, wanted, packed)
    codes = {path: shapes.pop(path) for path in manifest.packed.keys() - packed}

    def finished(path: str, weight: Weight) -> Weight:
        return nest_weight(path, weight) if is_nested else weight

    # One by one, as what they become may be smaller.
    found = converted.restored(directory, converted.TARGET, shapes, placement, converted.LOADED_BYTES)
    restored = {path: finished(path, placement.spread(path, weight)) for path, weight in found}

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        if path not in codes:
            return restored.pop(path)
        weight = converted.restore(directory, converted.TARGET, {path: codes[path]})[path]
        return finished(path, placement.put(path, np.asarray(dequantize_weight(weight, jnp.float32).astype(wanted))))

    return placement.model(make)


def _check_fits(directory: Path, placement: Placement, dtype: jnp.dtype, packed: Set[str]) -> None:
    """Raises InputError if a device of this process has less memory than its share of the weights takes, without scales of groups."""
    mesh = placement.mesh
    own = jax.local_devices() if mesh is None else [each for each in mesh.devices.flat if each.process_index == jax.process_index()]
    room = (own[0].memory_stats() or {}).get("bytes_limit") if own else None  # None on a CPU
    shapes = weight_shapes(placement.config)
    nested = set(filter(is_linear, shapes)) if placement.config.nested_weights else set()
    needed = placement.bytes_on_device({path: shape for path, shape in shapes.items() if path not in packed | nested}, dtype.itemsize)
    needed += placement.bytes_on_device({path: shapes[path] for path in packed - nested}, 1) // 2
    needed += placement.bytes_on_device({path: shapes[path] for path in nested}, 1)
    if room is not None and needed > room:
        share = "" if mesh is None else " a device"
        raise InputError(
            f"{directory}: its weights take {needed / 1e9:.1f} GB{share} in {dtype.name}, {(needed - room) / 1e9:.1f} GB more than the "
            f"{room / 1e9:.1f} GB that JAX may take of {own[0].device_kind}; up to {room / 2e9:.1f} billion parameters fit in "
            f"bfloat16{more_memory()}"
        )


def config_and_dtype(directory: str | Path) -> tuple[LlamaConfig, str]:
    """The config of a checkpoint's model, and the dtype that it is loaded as by default.

    No weight is read but the scales of those that may stay in INT4. Raises InputError as `load_model`.
    """
    plan = load_plan(directory)
    return plan.config, plan.dtype


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What `load_model` makes of a checkpoint by default, without the numbers of the weights.

    Attributes:
        config: of the model; its dtype is the one that the checkpoint is stored in.
        dtype: that the model is loaded as.
        quantization: see `WeightSource`; None for a converted directory.
        weights: the shapes of the weights, by their paths.
    """

    config: LlamaConfig
    dtype: str
    quantization: str | None
    weights: Mapping[str, jax.ShapeDtypeStruct | Int4Weight | NestedWeight]

    def described_linears(self) -> str | None:
        """How linear layers are stored and loaded, for a table; None if they are neither quantized nor in INT4."""
        linears = [weight for path, weight in self.weights.items() if is_linear(path)]
        packed = sum(isinstance(weight, Int4Weight) for weight in linears)
        if self.config.nested_weights:
            return f"{self.quantization + ', ' if self.quantization else ''}nested in 8 bits"
        if not packed:
            return self.quantization and f"{self.quantization}, dequantized to {self.dtype}"
        return f"{self.quantization + ', ' if self.quantization else ''}{packed} of {len(linears)} stay in INT4"


def load_plan(directory: str | Path, *, dtype: str | None = None, weights: str | None = None) -> LoadPlan:
    """What `load_model` would make of a checkpoint; no weight is read but the scales of those that may stay in INT4.

    Args:
        directory, dtype, weights: see `load_model`; the head is as it is stored.

    Raises:
        InputError: as `load_model`, for what can be seen without weights.
    """
    directory, choice = local(directory), WeightsChoice.parse(weights)
    linears = DEQUANTIZED if choice.calibration else choice.linears
    if converted.is_converted(directory):
        config, manifest = config_and_manifest(directory)
        wanted = as_loaded(dtype or manifest.dtype)
        stored = manifest.stored_shapes(jnp.dtype(wanted))
        plain = {path: jax.ShapeDtypeStruct(shape, jnp.dtype(wanted)) for path, shape in weight_shapes(config).items()}
        config, packed = _stored_as(config, manifest, linears)
        found = {path: stored[path] if path in packed else plain[path] for path in stored}
        plan = LoadPlan(dataclasses.replace(config, dtype=manifest.dtype), wanted, None, found)
        return plan if packed else _nested_plan(plan, choice)
    source = open_source(directory)
    dtype = jnp.dtype(as_loaded(dtype or default_dtype(source.config, source.directory)))
    packed = packed_paths(source, dtype, linears)

    plain = {path: jax.ShapeDtypeStruct(place.shape, dtype) for path, place in source.places.items()}
    config = with_packed(source.config, packed, _group_size(source, packed))
    weights = plain | {path: _packed_outline(source, path) for path in packed}
    return _nested_plan(LoadPlan(config, dtype.name, source.quantization, weights), choice)


def _nested_plan(plan: LoadPlan, choice: WeightsChoice) -> LoadPlan:
    """The plan with nested linear layers, if these are chosen."""
    if choice.linears != NESTED:
        return plan

    def nested(weight: jax.ShapeDtypeStruct) -> NestedWeight:
        made = jax.eval_shape(quantize_nested, weight)
        return dataclasses.replace(made, steps=FAR_STEPS) if choice.calibration else made

    weights = {path: nested(weight) if is_linear(path) else weight for path, weight in plan.weights.items()}
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, nested_weights=True), weights=weights)


def outline_model(directory: str | Path, *, dtype: str | None = None, weights: str | None = None) -> Llama:
    """The model that `load_model` gives on one device, with shapes for its weights; programs can be compiled for it.

    For the arguments see `load_model`. Raises InputError as that does, for what can be seen without weights.
    """
    if not converted.is_converted(directory := local(directory)):
        open_source(directory).check_contents()
    found = load_plan(directory, dtype=dtype, weights=weights)
    model = Llama(found.config, lambda path, shape: found.weights[path])
    choice = WeightsChoice.parse(weights)
    return jax.eval_shape(lambda model: quantize_tables(model, choice, directory), model)


def planned_config(directory: str | Path, choice: WeightsChoice = AS_STORED) -> LlamaConfig:
    """The config of the model that is loaded from a checkpoint, by its settings alone: its weights need not be there.

    A log line says of a quantized one whether it is planned in INT4.

    Args:
        directory: see `load_model`.
        choice: how its weights are loaded.

    Raises:
        InputError: as `load_config`, and for packed weights of a checkpoint whose settings do not say that it has any.
    """
    config, directory = load_config(directory), local(directory)
    if converted.is_converted(directory):
        manifest = converted.read_manifest(directory)
        _check_stored(directory, manifest, choice.linears)
        config = _stored_as(config, manifest, choice.linears)[0]
    else:
        in_gguf = is_gguf(directory)
        form = None if in_gguf else quantized_format(directory, read_json(directory / "config.json"))
        size = form.kernel_group_size if form is not None and config.dtype in ("bfloat16", "float16") else None
        if choice.linears == PACKED and size is None:
            raise InputError(f"{directory}: it is not known before its weights are read which stay in INT4; plan without {PACKED} weights")
        in_int4 = size is not None and choice.linears in (None, PACKED)
        _log_planned(directory, gguf_quantization(directory) if in_gguf else form and form.name, in_int4, choice)
        size = _config_group_size(size) if in_int4 else None
        config = dataclasses.replace(config, int4_weights=in_int4, int4_group_size=size, nested_weights=choice.linears == NESTED)
    return with_tables(config, choice, directory)


def with_tables(config: LlamaConfig, choice: WeightsChoice, name: str | Path) -> LlamaConfig:
    """The config of a model whose embedding and head are as is chosen, see `quantize_tables`.

    name: of the checkpoint or the shape, for errors. Raises InputError for an embedding that is to be in INT8 and is the head too, where
    that is not to be.
    """
    tied = config.tie_word_embeddings
    if choice.embedding_bits == 8:
        if tied and choice.head_bits == 16:
            raise InputError(f"{name}: its embedding is its head too; give head_bits=8 beside embedding_bits=8, or neither")
        config = dataclasses.replace(config, int8_embedding=True)
    if choice.head_bits == 8:
        # One in INT8 is no embedding in bfloat16.
        config = dataclasses.replace(config, int8_head=True, tie_word_embeddings=tied and config.int8_embedding)
    return config


def quantize_tables(model: Llama, choice: WeightsChoice, name: str | Path) -> Llama:
    """The model with its embedding and head in INT8, as far as that is chosen. name, and errors: as of `with_tables`."""
    with_tables(model.checkpoint_config, choice, name)
    model = quantize_embedding(model) if choice.embedding_bits == 8 else model
    return quantize_head(model) if choice.head_bits == 8 else model


def _log_planned(directory: Path, quantization: str | None, in_int4: bool, choice: WeightsChoice) -> None:
    if quantization:
        how = "in INT4" if in_int4 else "nested in 8 bits" if choice.linears == NESTED else "as dequantized"
        by_default = ", as they are loaded by default" if choice.linears is None else ""
        planned = f"{directory}: its linear layers are quantized ({quantization}); they are planned {how}{by_default}"
        warn_once(log, planned, logging.INFO)


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


def load(directory: str | Path, *, dtype: str | None = None, weights: str | None = None, mesh: Mesh | None = None) -> tuple[Llama, Any]:
    """The model and the tokenizer of a checkpoint directory, see `load_model`. Raises InputError."""
    return load_model(directory, dtype=dtype, weights=weights, mesh=mesh), load_tokenizer(directory)


def default_dtype(config: LlamaConfig, checkpoint: object) -> str:
    """The dtype that a checkpoint with this config is loaded as by default. checkpoint: its name, for a warning."""
    if config.dtype == "float16":
        warn_once(log, f"{checkpoint}: is stored in float16, and loaded as bfloat16 (--dtype float32 keeps every bit)")
        return "bfloat16"
    return config.dtype
