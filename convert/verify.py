"""Whether a converted checkpoint holds what its source does: every tensor, and the logits of a few tokens."""

import dataclasses
import hashlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pallas_kernels.weight_format import Int4Weight, dequantize_weight
from qspec_jax import converted
from qspec_jax.cache import empty_cache
from qspec_jax.checkpoint import Source, load_config, load_model
from qspec_jax.config import CacheConfig
from qspec_jax.converted import DRAFT, TARGET
from qspec_jax.errors import InputError
from qspec_jax.model import Llama
from qspec_jax.prefill import bucket, prefill
from qspec_jax.quantize import quantize_weight

TOKENS = 64  # that the logits are compared after


@dataclasses.dataclass(frozen=True)
class Report:
    """wrong: what differs, a sentence each; nothing where all is well. weights, drafted: how many were compared. draft_error: the largest
    root mean square of a group's errors, as a share of what plain rounding may err by. logits: whether they were compared too."""

    source: str
    directory: str
    weights: int
    drafted: int
    draft_error: float | None
    logits: bool
    wrong: list[str]


def verify(source: str | Path, directory: str | Path, *, logits: bool | None = None, progress: bool | None = None) -> Report:
    """Compares a converted checkpoint with its source, a weight at a time.

    Weights must be the source's, bit for bit, in the dtype of the conversion; the draft's must err no more than plain rounding may.
    logits: of some tokens, from either, which need a model in memory; None compares them where it fits. progress: a bar on standard
    error; None shows it on a terminal. Raises InputError where one of them cannot be read, or they are not of one model.
    """
    opened, directory = Source(source), Path(directory)
    if not converted.is_converted(directory):
        raise InputError(f"{directory}: not a converted checkpoint; `qspec convert` makes one")
    manifest, config = converted.read_manifest(directory), load_config(directory)
    if config != load_config(source):
        raise InputError(f"{directory}: its config.json is not that of {source}")
    dtype, wrong, errors = jnp.dtype(manifest.dtype), [], []
    hide = None if progress is None else not progress
    for path, place in tqdm(opened.places.items(), desc="verify", unit="tensor", disable=hide):
        stored = opened.read(path)
        if hashlib.sha256(stored.reshape(-1).view(np.uint8)).hexdigest() != manifest.sha256.get(path):
            wrong.append(f"{place.name} of the source is not the tensor that was converted")
        weight = stored.astype(dtype, copy=False)
        found = converted.restore(directory, TARGET, {path: jax.ShapeDtypeStruct(place.shape, dtype)})[path]
        if np.asarray(found).tobytes() != weight.tobytes():
            wrong.append(f"{path} differs from {place.name}")
        if manifest.draft_bits == 4 and path.endswith("_proj.weight"):
            shape = jax.eval_shape(quantize_weight, jax.ShapeDtypeStruct(place.shape, dtype))
            errors.append(draft_error(converted.restore(directory, DRAFT, {path: shape})[path], weight))
            if not errors[-1] <= 1:
                wrong.append(f"the draft's {path} errs {errors[-1]:.3g} times as much as plain rounding may")
    compared = not wrong and (_fits(opened, dtype) if logits is None else logits)
    if compared and not np.array_equal(_logits(load_model(source, dtype=manifest.dtype, progress=False)), _logits(load_model(directory))):
        wrong.append("the logits differ")
    return Report(str(source), str(directory), len(opened.places), len(errors), max(errors, default=None), compared, wrong)


def draft_error(quantized: Int4Weight, weight: np.ndarray) -> float:
    """The largest root mean square error of a group, as a share of the most that rounding to 16 steps over its range may err by.

    Scales and zeros as they are stored count as well, so that share is taken of the range and three units in their last place.
    """
    size = 2 * quantized.codes.shape[-1]
    padding = -weight.shape[1] % size
    pad = lambda x: np.pad(np.asarray(x, np.float64), ((0, 0), (0, padding)), mode="edge").reshape(len(weight), -1, size)
    groups, found = pad(weight), pad(dequantize_weight(quantized, jnp.float32))
    low, high = groups.min(-1), groups.max(-1)
    last_place = 3 * float(jnp.finfo(quantized.scale.dtype).eps) * np.maximum(abs(low), abs(high))
    most = (high - low) / 30 + last_place
    error = np.sqrt(np.square(found - groups).mean(-1))
    return float((error / np.maximum(most, np.finfo(np.float64).tiny)).max())


def _logits(model: Llama) -> np.ndarray:
    tokens = np.arange(TOKENS) * 7919 % model.config.vocab_size
    settings = dict(batch=1, capacity=TOKENS, num_speculative_tokens=0, dtype=model.dtype)
    cache = empty_cache(model.config, CacheConfig("full"), **settings)
    run = jax.jit(lambda model, tokens, cache: prefill(model, tokens, jnp.full(1, TOKENS), cache)[0])
    return np.asarray(run(model, jnp.asarray(tokens)[None, : bucket(TOKENS)], cache))


def _fits(source: Source, dtype: jnp.dtype) -> bool:
    """Whether there is twice the room that the weights take, on the default device."""
    numbers = sum(int(np.prod(place.shape)) for place in source.places.values())
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0) or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 * numbers * dtype.itemsize < free
