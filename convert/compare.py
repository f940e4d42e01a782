"""Whether a converted checkpoint holds what its source does: every tensor, and the logits of a few tokens."""

import dataclasses
import hashlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from convert.to_orbax import COPIED, QUANTIZED_AT_ONCE, TOKENIZER_FILES, quantize_by_rows
from pallas_kernels.weight_format import Int4Weight, dequantize_weight
from qspec_jax import converted
from qspec_jax.cache import Cache, empty_cache
from qspec_jax.checkpoint import Source, load_config, load_model
from qspec_jax.config import CacheConfig
from qspec_jax.converted import DRAFT, TARGET
from qspec_jax.errors import InputError
from qspec_jax.model import Llama
from qspec_jax.prefill import prefill
from qspec_jax.quantize import is_linear, quantize_weight

TOKENS = 64  # that the logits are compared after


@dataclasses.dataclass(frozen=True)
class Report:
    """wrong: what differs, a sentence each; nothing where all is well. weights, drafted: how many were compared. draft_error: the largest
    of `draft_error`, None where it is not finite. logits: whether they were compared too."""

    source: str
    directory: str
    weights: int
    drafted: int
    draft_error: float | None
    logits: bool
    wrong: list[str]


def verify(source: str | Path, directory: str | Path, *, logits: bool | None = None, progress: bool | None = None) -> Report:
    """Compares a converted checkpoint with its source, a weight at a time.

    Weights must be the source's, bit for bit, in the dtype of the conversion; the draft's may err as much as `draft_error` says.
    logits: of some tokens, from either, if all else is the same; one model at a time is in memory for it, and None compares them where
    there is room for two. progress: a bar on standard error; None shows it on a terminal. Raises InputError where one of them cannot be
    read, or they are not of one model.
    """
    opened, source, directory = Source(source), Path(source), Path(directory)
    if not converted.is_converted(directory):
        raise InputError(f"{directory}: not a converted checkpoint; `qspec convert` makes one")
    opened.check_contents()
    manifest, config = converted.read_manifest(directory), load_config(directory)
    if config != opened.config:
        raise InputError(f"{directory}: its config.json or generation_config.json is not that of {source}")
    names = [name for name in (*COPIED, *TOKENIZER_FILES) if (source / name).is_file()]
    there = lambda name: (directory / name).is_file() and (directory / name).read_bytes() == (source / name).read_bytes()
    wrong = [f"{name} is not the source's" for name in names if not there(name)]
    dtype, errors = jnp.dtype(manifest.dtype), []
    hide = None if progress is None else not progress
    for path, place in tqdm(opened.places.items(), desc="verify", unit="tensor", disable=hide):
        stored = opened.read(path)
        if hashlib.sha256(stored.reshape(-1).view(np.uint8)).hexdigest() != manifest.sha256.get(path):
            wrong.append(f"{place.name} of the source is not the tensor that was converted")
        weight = stored.astype(dtype, copy=False)
        found = converted.restore(directory, TARGET, {path: jax.ShapeDtypeStruct(place.shape, dtype)})[path]
        if not _same_bits(np.asarray(found), weight):
            wrong.append(f"{path} differs from {place.name}")
        if manifest.draft_bits == 4 and is_linear(path):
            shape = jax.eval_shape(quantize_weight, jax.ShapeDtypeStruct(place.shape, dtype))
            errors.append(draft_error(converted.restore(directory, DRAFT, {path: shape})[path], weight))
            if not errors[-1] <= 1:
                wrong.append(f"the draft's {path} errs {errors[-1]:.3g} times as much as it may")
    compared = not wrong and (_fits(opened, dtype) if logits is None else logits)
    if compared and not _same_bits(_logits(load_model(source, dtype=manifest.dtype, progress=False)), _logits(load_model(directory))):
        wrong.append("the logits differ")
    most = float(np.max(errors)) if errors and np.isfinite(errors).all() else None
    return Report(str(source), str(directory), len(opened.places), len(errors), most, compared, wrong)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    bits = lambda x: np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(bits(a), bits(b))


def draft_error(stored: Int4Weight, weight: np.ndarray) -> float:
    """The largest root mean square error of a row's group, as a share of what it may be: that of quantizing the weight again, one per
    cent more, and a thousandth of the group's range, for XLA may add in another order."""
    size, worst, rows = 2 * stored.codes.shape[-1], 0.0, max(1, QUANTIZED_AT_ONCE // weight.shape[1])
    again = quantize_by_rows(weight)
    for first in range(0, len(weight), rows):
        part = lambda x: x[first : first + rows]  # noqa: B023
        split = lambda x: np.pad(x, ((0, 0), (0, -x.shape[1] % size)), mode="edge").reshape(len(x), -1, size)
        groups, *found = (
            split(np.asarray(x, np.float64))
            for x in (part(weight), *(dequantize_weight(jax.tree.map(part, w), jnp.float32) for w in (stored, again)))
        )
        error, expected = (np.sqrt(np.square(x - groups).mean(-1)) for x in found)
        may = 1.01 * expected + 1e-3 * (groups.max(-1) - groups.min(-1)) + float(jnp.finfo(jnp.float32).tiny)
        worst = float(np.maximum(worst, np.max(error / may)))  # which keeps a NaN
    return worst


def _logits(model: Llama) -> np.ndarray:
    tokens = np.arange(TOKENS) * 7919 % model.config.vocab_size
    cache = empty_cache(model.config, CacheConfig("full"), batch=1, capacity=TOKENS, num_speculative_tokens=0, dtype=model.dtype)
    return np.asarray(_prefilled(model, jnp.asarray(tokens)[None], cache))


# One program for both, lest XLA choose its kernels anew.
@jax.jit
def _prefilled(model: Llama, tokens: jax.Array, cache: Cache) -> jax.Array:
    return prefill(model, tokens, jnp.full(1, TOKENS), cache)[0]


def _fits(source: Source, dtype: jnp.dtype) -> bool:
    """Whether there is twice the room that the weights take, on the default device."""
    numbers = sum(place.size for place in source.places.values())
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0) or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 * numbers * dtype.itemsize < free
