"""The QuantSpec draft: the model itself with INT4 weights and its head in INT8, reading the upper 4 bits of the cache."""

import logging
from collections.abc import Sequence
from pathlib import Path

import jax

from qspec_jax.checkpoints import converted
from qspec_jax.drafts.cached_model import CachedModel
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.calibration import quantize_linears_for
from qspec_jax.quantization.weights import is_linear, quantize_linears, quantize_weight

log = logging.getLogger(__name__)


def quantspec(
    model: Llama,
    *,
    weight_bits: int = 4,
    head_bits: int = 8,
    planes: int = 1,
    sensitive_layers: int = 0,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: bool | None = None,
) -> CachedModel:
    """The draft of a model.

    weight_bits 16 drafts with the target's own weights, its head among them. head_bits 8 is of INT4 weights: each decode makes the INT8
    head anew (`decode.in_loop`); 16 leaves the head as it is. planes 2 drafts with the target's view of the cache. sensitive_layers: the
    first and the last so many layers are the target's own, weights and view of the cache (QuantSpec, algorithm 1, where they are L_S and
    not defined). calibration: texts (token ids) for which the INT4 weights should err least, see calibrate.py; without, they are rounded to
    nearest.
    """
    if weight_bits not in (4, 16):
        raise InputError(f"draft weight_bits {weight_bits} should be 4 or 16")
    if head_bits not in (8, 16):
        raise InputError(f"draft head_bits {head_bits} should be 8 or 16")
    if planes not in (1, 2):
        raise InputError(f"draft planes {planes} should be 1 or 2")
    layers = model.config.num_layers
    if not 0 <= sensitive_layers <= layers:
        raise InputError(f"sensitive_layers {sensitive_layers} should be from 0 to the model's {layers} layers")
    sensitive = {*range(sensitive_layers), *range(layers - sensitive_layers, layers)}
    views = tuple(2 if i in sensitive else planes for i in range(layers)) if sensitive else planes
    if weight_bits == 16:
        return CachedModel(model, views)
    draft = quantize_linears(model) if calibration is None else quantize_linears_for(model, calibration, progress=progress)
    if sensitive:
        own, made = model.weights(), draft.weights()
        of_layer = lambda path: int(path.split(".")[1]) if path.startswith("layers.") else None
        draft = Llama(model.config, lambda path, shape: (own if of_layer(path) in sensitive else made)[path])
    return CachedModel(draft, views, head_bits)


def stored(directory: str | Path, model: Llama) -> CachedModel | None:
    """The draft in a converted directory, for the model that was loaded from there; None where it has none, or one of another dtype.

    Raises InputError where it cannot be read.
    """
    directory = Path(directory)
    if not converted.is_converted(directory) or (manifest := converted.read_manifest(directory)).draft_bits == 16:
        return None
    if manifest.dtype != model.dtype.name:
        log.warning("%s: its draft is of %s weights, and is made anew for %s", directory, manifest.dtype, model.dtype.name)
        return None
    weights = model.weights()
    # Of shapes alone: a weight may say how it is sharded, and quantizing does not know what to make of that.
    shape = lambda weight: jax.eval_shape(quantize_weight, jax.ShapeDtypeStruct(weight.shape, weight.dtype))
    shapes = {path: shape(weight) for path, weight in weights.items() if is_linear(path)}
    weights |= converted.restore(directory, converted.DRAFT, shapes, getattr(weights["embedding"].sharding, "mesh", None))
    return CachedModel(Llama(model.config, lambda path, shape: weights[path]), 1, head_bits=8)
