"""The target's own weights in INT4, which several drafts share."""

import logging
from collections.abc import Sequence
from pathlib import Path

import jax

from qspec_jax.checkpoints import converted
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.calibration import quantize_linears_for
from qspec_jax.quantization.weights import is_linear, quantize_linears, quantize_weight

log = logging.getLogger(__name__)


def int4_model(
    model: Llama,
    *,
    directory: str | Path | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: bool | None = None,
) -> Llama:
    """The model with INT4 linear layers; all else is the same arrays, not copies.

    calibration: texts (token ids) for which the weights should err least, see calibration.py; without, they are those stored in a converted
    directory that the model was loaded from, or rounded to nearest. Raises InputError where a directory cannot be read.
    """
    if calibration is not None:
        return quantize_linears_for(model, calibration, progress=progress)
    found = None if directory is None else stored_int4(directory, model)
    return quantize_linears(model) if found is None else found


def stored_int4(directory: str | Path, model: Llama) -> Llama | None:
    """The INT4 model in a converted directory, for the model that was loaded from there; None where it has none, or one of another dtype.

    Raises InputError where it cannot be read.
    """
    directory = Path(directory)
    if not has_stored_int4(directory, model.dtype.name):
        if has_stored_int4(directory, None):
            stored_as = converted.read_manifest(directory).dtype
            log.warning("%s: its draft is of %s weights, and is made anew for %s", directory, stored_as, model.dtype.name)
        return None
    weights = model.weights()
    # By shapes alone: a weight may say how it is sharded, and quantizing does not know what to make of that.
    shape = lambda weight: jax.eval_shape(quantize_weight, jax.ShapeDtypeStruct(weight.shape, weight.dtype))
    shapes = {path: shape(weight) for path, weight in weights.items() if is_linear(path)}
    weights |= converted.restore(directory, converted.DRAFT, shapes, getattr(weights["embedding"].sharding, "mesh", None))
    return Llama(model.config, lambda path, shape: weights[path])


def has_stored_int4(directory: str | Path, dtype: str | None) -> bool:
    """Whether a directory has INT4 weights made of those of a dtype, or of any for None. Raises InputError where it cannot be read."""
    if not converted.is_converted(directory):
        return False
    manifest = converted.read_manifest(directory)
    return manifest.draft_bits != 16 and dtype in (None, manifest.dtype)


def with_own_layers(quantized: Llama, model: Llama, layers: set[int]) -> Llama:
    """The quantized model with these layers of the model's own weights."""
    own, made = model.weights(), quantized.weights()
    layer_of = lambda path: int(path.split(".")[1]) if path.startswith("layers.") else None
    return Llama(model.config, lambda path, shape: (own if layer_of(path) in layers else made)[path])
