"""The target's own weights in INT4, which several drafts share."""

import logging
from collections.abc import Sequence
from pathlib import Path

import jax

from pallas_kernels.formats.weights import Int4Weight, NestedWeight
from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.huggingface import load_config
from qspec_jax.checkpoints.tensor_names import weight_shapes
from qspec_jax.errors import InputError, warn_once
from qspec_jax.models.llama import Llama
from qspec_jax.models.placement import Placement
from qspec_jax.models.sharding import mesh_of
from qspec_jax.progress import working
from qspec_jax.quantization.calibration import quantize_linears_for
from qspec_jax.quantization.outline import is_outline
from qspec_jax.quantization.weights import groups_are_cut, is_linear, quantize_linears, quantize_weight

log = logging.getLogger(__name__)


@working("quantizing weights to INT4")
def int4_model(
    model: Llama,
    *,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: bool | None = None,
) -> Llama:
    """The model with INT4 linear layers; all else is the same arrays, not copies, and so are layers that are in INT4 already, the upper
    planes of nested ones, and experts.

    Args:
        model: the model, or an outline of it, which gives an outline.
        calibration: token ids of texts for which the weights should err least, see calibration.py; without effect, as a
            log line says, if all layers are in INT4 already. None: the weights that are stored in the converted directory that the model
            was loaded from, or its own, rounded to nearest.
        progress: a bar on standard error; None shows it on a terminal.

    Raises:
        InputError: for a directory that cannot be read, or is not there any more, and for calibration where some layers are in INT4.
    """
    linears = [weight for path, weight in model.weights().items() if is_linear(path)]
    packed = [isinstance(weight, Int4Weight | NestedWeight) for weight in linears]
    if all(packed):
        if calibration is not None:
            nested = model.checkpoint_config.nested_weights
            whose = "upper planes of the target's nested weights" if nested else "target's own INT4 weights"
            warn_once(log, f"nothing is calibrated: the draft reads the {whose}", logging.INFO)
        if all(isinstance(weight, Int4Weight) for weight in linears):
            return model
        return jax.eval_shape(quantize_linears, model) if is_outline(model) else quantize_linears(model)
    if model.checkpoint_config.experts is not None:
        log.info("INT4 weights of the draft: of experts it reads the target's own weights, all other linear layers are in INT4")
    if calibration is not None and any(packed):
        raise InputError("calibration: some of the target's layers are in INT4 already; leave it out")
    if calibration is not None:
        return quantize_linears_for(model, calibration, progress=progress)
    if is_outline(model):
        return jax.eval_shape(quantize_linears, model)
    directory = model.origin.directory
    if directory is not None and not directory.exists():
        raise InputError(f"{directory}: no such directory, where the model was loaded from")
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
            log.warning("%s: its draft is of %s weights, and is quantized again for %s", directory, stored_as, model.dtype.name)
        return None
    weights, mesh = model.weights(), mesh_of(model.weights())
    placement = Placement(load_config(directory), mesh)

    def shape(whole):
        return jax.eval_shape(quantize_weight, jax.ShapeDtypeStruct(whole, model.dtype))

    shapes = {path: shape(whole) for path, whole in weight_shapes(placement.config).items() if is_linear(path)}
    if mesh is not None and (cut := [path for path, weight in shapes.items() if groups_are_cut(path, weight, mesh)]):
        log.warning("%s: its draft is quantized again, for %d devices would cut groups of %s", directory, mesh.size, cut[0])
        return None
    found = converted.restore(directory, converted.DRAFT, shapes, placement)
    weights |= {path: placement.spread(path, weight) for path, weight in found.items()}
    return model.with_weights(weights)


def has_stored_int4(directory: str | Path, dtype: str | None) -> bool:
    """Whether a directory has INT4 weights made of those of a dtype, or of any for None. Raises InputError where it cannot be read."""
    if not converted.is_converted(directory):
        return False
    manifest = converted.read_manifest(directory)
    return manifest.draft_bits != 16 and dtype in (None, manifest.dtype)


def with_own_layers(quantized: Llama, model: Llama, layers: set[int]) -> Llama:
    """The quantized model with these layers of the model's own weights."""
    own, made = model.weights(), quantized.weights()

    def layer_of(path):
        return int(path.split(".")[1]) if path.startswith("layers.") else None

    return quantized.with_weights({path: own[path] if layer_of(path) in layers else weight for path, weight in made.items()})
