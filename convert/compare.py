"""Compares a converted checkpoint with its source: every tensor, and the logits of a few tokens."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from convert.by_rows import stored_error
from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.converted import DRAFT, TARGET
from qspec_jax.checkpoints.hub import SMALL_FILES, local
from qspec_jax.checkpoints.huggingface import load_config
from qspec_jax.checkpoints.loading import load_model, open_source
from qspec_jax.checkpoints.small_files import small_file
from qspec_jax.checkpoints.source import WeightSource
from qspec_jax.checkpoints.weights_text import DEQUANTIZED, PACKED
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar
from qspec_jax.quantization.weights import is_linear, quantize_weight

TOKENS = 64  # of the prompt whose logits are compared


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """The differences between a conversion and its source.

    Attributes:
        source: its directory.
        directory: of the conversion.
        weights: number of weights of the target that were compared.
        drafted: number of weights of the draft that were compared.
        draft_error: the maximum of `by_rows.stored_error` of the draft; None if it is not finite.
        logits: whether logits were compared too.
        wrong: a sentence for each difference.
        nested: number of weights of the target that are nested.
        nested_error: the maximum of `by_rows.stored_error` of these; None if it is not finite.
    """

    source: str
    directory: str
    weights: int
    drafted: int
    draft_error: float | None
    logits: bool
    wrong: list[str]
    nested: int = 0
    nested_error: float | None = None


def verify(source: str | Path, directory: str | Path, *, logits: bool | None = None, progress: bool | None = None) -> VerificationReport:
    """Compares a converted checkpoint with its source, with a few weights in memory at a time.

    Weights must be the source's, bit for bit, in the dtype of the conversion; nested ones and the draft's may have the error that
    `stored_error` allows.

    Args:
        source: a directory, or ORG/NAME on the Hub.
        directory: of the conversion.
        logits: whether to compare logits too if all weights are the same, with one model in memory at a time; None: if two would fit.
            Those of nested weights are not compared, as these may be rounded otherwise where they are made again.
        progress: whether a bar is shown; None: where standard error is a terminal.

    Raises:
        InputError: if one of the two cannot be read, or they are of different models; and where logits are asked for of nested weights.
    """
    source, directory = local(source, progress=progress), Path(directory)
    if converted.is_converted(source):
        raise InputError(f"{source}: is a conversion; give its source first, then the conversion")
    opened = open_source(source)
    manifest = converted.read_manifest(directory)
    if logits and manifest.is_nested:
        raise InputError(f"{directory}: logits of nested weights cannot be compared; leave --logits out, and each weight is checked")
    opened.check_contents()
    config = load_config(directory, dtype=opened.config.dtype)
    dtype = jnp.dtype(manifest.dtype)
    if config != opened.config:
        raise InputError(f"{directory}: its config.json or generation_config.json is not that of {source}")
    converted.check_shapes(directory, manifest, {path: place.shape for path, place in opened.places.items()})
    wrong = [f"{name} is not the source's" for name in SMALL_FILES if opened.small_file(name) != small_file(directory, name)]
    shapes = {path: jax.ShapeDtypeStruct(place.shape, dtype) for path, place in opened.places.items()}
    nested = manifest.packed.keys() if manifest.is_nested else frozenset()
    if unlike := sorted(path for path in manifest.packed if path not in nested and not opened.can_pack(path)):
        raise InputError(f"{directory}: {unlike[0]} of it is in INT4, and is stored otherwise in {source}")
    weights, errors = converted.restored(directory, TARGET, manifest.stored_shapes(dtype)), []
    nested_errors = []
    drafted = {path: jax.eval_shape(quantize_weight, shape) for path, shape in shapes.items() if is_linear(path)}
    draft = converted.restored(directory, DRAFT, drafted if manifest.draft_bits == 4 else {})
    for path, place in progress_bar(opened.places.items(), progress=progress, desc="verify", unit="tensor", leave=True):
        stored = opened.read_packed(path) if path in manifest.packed.keys() - nested else opened.read(path)
        if converted.digest(stored) != manifest.sha256.get(path):
            wrong.append(f"{place.name} of the source is not the tensor that was converted")
        weight = stored
        if not isinstance(stored, Int4Weight):
            weight = stored.astype(dtype, copy=False)
            opened.examine(path, weight)
        found = next(weights)[1]
        if path in nested:
            nested_errors.append(stored_error(found, weight))
            if converted.digest(found) != manifest.written[TARGET].get(path):
                wrong.append(f"{path} is not what was written")
            if nested_errors[-1] > 1:
                wrong.append(f"{path} errs {nested_errors[-1]:.3g} times as much as it may")
        elif not all(map(_same_bits, *(map(np.asarray, jax.tree.leaves(x)) for x in (found, weight)))):
            wrong.append(f"{path} differs from {place.name}")
        if manifest.draft_bits == 4 and is_linear(path):
            quantized = next(draft)[1]
            errors.append(stored_error(quantized, weight))
            if converted.digest(quantized) != manifest.written[DRAFT].get(path):
                wrong.append(f"the draft's {path} is not what was written")
            if errors[-1] > 1:
                wrong.append(f"the draft's {path} errs {errors[-1]:.3g} times as much as it may")
    how = PACKED if manifest.packed else DEQUANTIZED
    compared = not wrong and not nested and (_fits(opened, dtype) if logits is None else logits)
    if not compared:  # otherwise loading the source warns
        opened.warn_of_not_finite()
    if compared and not _same_bits(
        _logits(load_model(source, dtype=manifest.dtype, weights=how, progress=False)), _logits(load_model(directory))
    ):
        wrong.append("the logits differ")

    def largest(found: list[float]) -> float | None:
        return max(found) if found and np.isfinite(found).all() else None

    of_nested = len(nested_errors), largest(nested_errors)
    return VerificationReport(str(source), str(directory), len(opened.places), len(errors), largest(errors), compared, wrong, *of_nested)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    bits = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(*bits)


def _logits(model: Llama) -> np.ndarray:
    tokens = np.arange(TOKENS) * 7919 % model.config.vocab_size
    cache = CacheConfig("full").empty(model.config, batch=1, capacity=TOKENS, num_speculative_tokens=0, dtype=model.dtype)
    return np.asarray(_prefilled(model, jnp.asarray(tokens)[None], cache))


# Compiled once for both models, or XLA could choose other kernels for the second.
@jax.jit
def _prefilled(model: Llama, tokens: jax.Array, cache: Cache) -> jax.Array:
    return prefill(model, tokens, jnp.full(1, TOKENS), cache)[0]


def _fits(source: WeightSource, dtype: jnp.dtype) -> bool:
    """Whether the weights take less than half of the default device's free memory."""
    numbers = sum(place.size for place in source.places.values())
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else _free_on_the_host()
    return 2 * numbers * dtype.itemsize < free


def _free_on_the_host() -> int:
    """Bytes of free memory, the page cache included; 0 on systems other than Linux."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) * 1024 if found else 0
