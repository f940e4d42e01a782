"""Exports a converted checkpoint to Hugging Face safetensors, with a few weights in memory at a time."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from convert.placing import check_apart, written
from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.converted import TARGET, Manifest
from qspec_jax.checkpoints.loading import config_and_manifest
from qspec_jax.checkpoints.quantized.formats import without_quantization
from qspec_jax.checkpoints.small_files import small_file, write_small_files
from qspec_jax.checkpoints.tensor_names import Place, places
from qspec_jax.errors import InputError, writing
from qspec_jax.files import read_json, write_json
from qspec_jax.models.config import text_model_config
from qspec_jax.progress import progress_bar

SHARD_BYTES = 5_000_000_000
DTYPES = {"bfloat16": "BF16", "float32": "F32"}


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """An export: number of tensors, bytes of all files in the directory, and the names of its safetensors."""

    source: str
    directory: str
    tensors: int
    bytes_written: int
    files: list[str]


def export(source: str | Path, directory: str | Path, *, progress: bool | None = None) -> ExportReport:
    """Writes the target of a converted checkpoint as a Hugging Face directory, in shards of at most `SHARD_BYTES` (or of a tensor).

    Its tensors are, bit for bit, those that were converted, unless that changed their dtype. The draft is left out. Of a
    multimodal model, whose other parts were not converted, the text model is written as a model by itself.

    Args:
        source: the converted directory.
        directory: to make.
        progress: whether a bar is shown; None: where standard error is a terminal.

    Raises:
        InputError: for a source that is not converted, and if the directory exists, is within the source, cannot be written or has no room.
    """
    source = Path(source)

    def check() -> None:
        check_apart(source, directory)
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise InputError(f"{directory}: exists already; give another directory")

    with writing(directory, RuntimeError):  # a name that is too long, a loop of links
        directory = Path(directory).resolve()
        check()
    config, manifest = config_and_manifest(source)
    if manifest.packed:
        how = "nested in 8 bits" if manifest.is_nested else "in INT4"
        raise InputError(f"{source}: its weights are {how}, which export does not write; convert with dequantized weights and export that")
    dtype = manifest.dtype
    tensors: dict[str, list[tuple[str, Place]]] = {}  # by the names of places: those of all experts of a layer are together
    for path, place in places(dataclasses.replace(config, wrapper=None)).items():
        tensors.setdefault(place.name, []).append((path, place))

    def size(name: str) -> int:
        return sum(place.size for _, place in tensors[name]) * jnp.dtype(dtype).itemsize

    shards, total = list(converted.batches(tensors, size, SHARD_BYTES)), sum(map(size, tensors))
    names_of = {name: parts[0][1].names for name, parts in tensors.items()}
    several = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = several if len(shards) > 1 else ["model.safetensors"]
    shown = dict(total=total, desc="export", unit="B", unit_scale=True, leave=True)
    with written(directory, total, check) as unfinished, progress_bar(progress=progress, **shown) as bar:
        for file, names in zip(files, shards):
            _write_shard(source, unfinished / file, {name: tensors[name] for name in names}, manifest, bar)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(files, shards) for place in shard for name in names_of[place]}
            write_json(unfinished / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
        write_small_files(unfinished, functools.partial(small_file, source))
        raw = read_json(source / "config.json")
        if config.wrapper is not None:
            raw = text_model_config(raw) | {"tie_word_embeddings": config.tie_word_embeddings}
        raw |= dict.fromkeys(raw.keys() & {"dtype", "torch_dtype"} or {"dtype"}, dtype)
        write_json(unfinished / "config.json", without_quantization(raw))
    count = sum(map(len, names_of.values()))
    return ExportReport(str(source), str(directory), count, sum(path.stat().st_size for path in directory.iterdir()), files)


def _write_shard(source: Path, file: Path, tensors: dict[str, list[tuple[str, Place]]], manifest: Manifest, bar: tqdm) -> None:
    """Writes a safetensors file: the length of the header, the header, the tensors one after the other."""
    kind, written, header, end = jnp.dtype(manifest.dtype), manifest.written[TARGET], {"__metadata__": {"format": "pt"}}, 0
    for parts in tensors.values():
        first = parts[0][1]
        shape = [*first.shape] if first.experts is None else [*first.shape[:0:-1]]
        if len(parts) > 1:
            shape[0] = sum(place.shape[0] for _, place in parts)
        for name in first.names:
            begin, end = end, end + int(np.prod(shape)) * kind.itemsize
            header[name] = {"dtype": DTYPES[manifest.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    in_order = [part for parts in tensors.values() for part in sorted(parts, key=lambda part: part[1].first or 0)]
    experts = {path: place.experts for path, place in in_order}
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for path, weight in converted.restored(source, TARGET, {path: jax.ShapeDtypeStruct(place.shape, kind) for path, place in in_order}):
            if converted.digest(weight) != written.get(path):
                raise InputError(f"{source}: {path} of it is not what was written; copy it again, or convert again")
            whole = np.asarray(weight)
            for tensor in [whole] if experts[path] is None else (matrix.T for matrix in whole):
                out.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
            bar.update(weight.nbytes)
