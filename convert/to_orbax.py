"""Hugging Face safetensors to an Orbax checkpoint, a few tensors in memory at a time.

Everything is written to a directory of another name beside the destination, which takes its place when all is there: whenever the
process ends, the destination is whole, or what it was (or, killed just as it takes the place of an earlier conversion, absent, and that
one in a hidden directory beside it).
"""

import dataclasses
import hashlib
import importlib.metadata
import operator
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from convert.placing import check_apart, written
from pallas_kernels.weight_format import Int4Weight
from qspec_jax import converted
from qspec_jax.checkpoint import Source, stored_dtype
from qspec_jax.converted import DRAFT, MANIFEST, TARGET, Manifest
from qspec_jax.errors import InputError
from qspec_jax.quantize import is_linear, quantize_weight

BATCH_BYTES = 1 << 27  # that are written at once: fewer, and Orbax's own work takes longer than the writing
QUANTIZED_AT_ONCE = 1 << 22  # numbers: quantizing takes several float32 copies of them
DTYPES = ("bfloat16", "float32")
COPIED = ("config.json", "generation_config.json")
# Of tokenizers; never code.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


@dataclasses.dataclass(frozen=True)
class Report:
    """What was written. bytes_read: of tensors, in the source."""

    source: str
    directory: str
    dtype: str
    draft_bits: int
    tensors: int
    bytes_read: int
    bytes_written: int


def convert(
    source: str | Path,
    directory: str | Path,
    *,
    dtype: str | None = None,
    draft_bits: int = 16,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Report:
    """Converts a Hugging Face directory to one that `qspec_jax.load` restores straight to devices.

    dtype: bfloat16 or float32; None is the checkpoint's own (float16 becomes bfloat16). draft_bits: 4 stores the draft's INT4 weights
    too. overwrite: replaces an earlier conversion. progress: a bar on standard error; None shows it on a terminal.

    Raises InputError for a source that cannot be loaded, and where the destination exists, is within the source, cannot be written or
    has no room; it is then as it was. With overwrite it must be an earlier conversion and hold nothing else.
    """
    if draft_bits not in (4, 16):
        raise InputError(f"draft bits {draft_bits} should be 4 or 16")
    source = Path(source)
    try:
        directory = Path(directory).resolve()
        if converted.is_converted(source):
            raise InputError(f"{source}: is converted already; a Hugging Face directory is needed")
        _check_places(source, directory, overwrite)
    except (OSError, RuntimeError) as error:  # a name that is too long, a loop of links
        raise InputError(f"{directory}: cannot be written ({error})") from None
    opened = Source(source)
    wanted = dtype or stored_dtype(opened.config)
    if wanted not in DTYPES:
        raise InputError(f"dtype {wanted} is not one to convert to; {', '.join(DTYPES)} are (--dtype)")
    opened.check_contents()
    with written(directory, _bytes_needed(opened, jnp.dtype(wanted), draft_bits), replace=overwrite) as unfinished:
        sha256 = {}
        for name in [TARGET, DRAFT] if draft_bits == 4 else [TARGET]:
            sha256 |= _write(opened, unfinished, name, jnp.dtype(wanted), progress)
        copy_small_files(source, unfinished)
        versions = {name: importlib.metadata.version(name) for name in ("qspec-jax", "jax", "orbax-checkpoint", "safetensors")}
        Manifest(str(source), wanted, draft_bits, sha256, versions).write(unfinished)
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    read = sum(opened.read_bytes(path) for path in opened.places)
    return Report(str(source), str(directory), wanted, draft_bits, len(opened.places), read, size)


def _check_places(source: Path, directory: Path, overwrite: bool) -> None:
    check_apart(source, directory)
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not overwrite:
        raise InputError(f"{directory}: exists already; --overwrite replaces an earlier conversion")
    known = {MANIFEST, TARGET, DRAFT, *COPIED, *TOKENIZER_FILES}
    others = sorted(path.name for path in directory.iterdir() if path.name not in known) if directory.is_dir() else []
    if others or not converted.is_converted(directory):
        found = f", it holds {others[0]!r}" if others else ""
        raise InputError(f"{directory}: is not an earlier conversion and nothing else{found}; it is not replaced, give another directory")
    converted.read_manifest(directory)


def copy_small_files(source: Path, directory: Path) -> None:
    """The config and the tokenizer's."""
    for name in (*COPIED, *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _bytes_needed(source: Source, dtype: jnp.dtype, draft_bits: int) -> int:
    """About, of the destination's weights."""
    sizes = {path: place.size for path, place in source.places.items()}
    drafted = sum(size for path, size in sizes.items() if is_linear(path)) if draft_bits == 4 else 0
    return sum(sizes.values()) * dtype.itemsize + drafted * 9 // 16


def _write(source: Source, directory: Path, name: str, dtype: jnp.dtype, progress: bool | None) -> dict[str, str]:
    """Writes the weights of the target or the draft; returns the hash of each in the source."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False  # weights hardly shrink, and it takes six times as long
    sha256: dict[str, str] = {}
    paths = [path for path in source.places if name == TARGET or is_linear(path)]
    total = sum(map(source.read_bytes, paths))
    hide = None if progress is None else not progress
    with context, tqdm(total=total, desc=f"convert the {name}", unit="B", unit_scale=True, disable=hide) as bar:

        def weights() -> Iterator[tuple[str, Any]]:
            for path in paths:
                array = source.read(path)
                sha256[path] = hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()
                bar.update(array.nbytes)
                array = array.astype(dtype, copy=False)
                yield path, quantize_by_rows(array) if name == DRAFT else array
                del array

        saving = None
        try:
            for batch in _batches(weights()):  # which reads while the batch before is written
                if saving:
                    saving.result()
                saving = ocp.partial.save_async(directory / name, converted.as_tree(batch))
                del batch
        finally:
            if saving:
                saving.result()
        ocp.partial.finalize(directory / name)
    return sha256


def _batches(weights: Iterator[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    batch, size = {}, 0
    for path, weight in weights:
        batch[path] = weight
        size += weight.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def quantize_by_rows(weight: np.ndarray) -> Int4Weight:
    """`quantize_weight`, some rows at a time, in the host's memory."""
    rows = max(1, QUANTIZED_AT_ONCE // weight.shape[1])
    # All parts of one size, for it is compiled for each; rows do not depend on each other.
    parts = []
    for first in range(0, len(weight), rows):
        part = weight[first : first + rows]
        padded = np.pad(part, ((0, min(rows, len(weight)) - len(part)), (0, 0)))
        quantized = jax.device_get(quantize_weight(jnp.asarray(padded)))
        parts.append(jax.tree.map(operator.itemgetter(slice(len(part))), quantized))
    return jax.tree.map(lambda *several: np.concatenate(several), *parts)
