"""Hugging Face safetensors to an Orbax checkpoint, a few tensors in memory at a time.

Everything is written to a directory of another name beside the destination, which takes its place when all is there: whenever the
process ends, the destination is whole, or what it was (or, killed just as it takes the place of an earlier conversion, absent until the
next run puts that one back).
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.by_rows import quantize_by_rows
from convert.placing import check_apart, written
from pallas_kernels.formats.weights import Int4Weight, NestedWeight
from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.converted import DRAFT, MANIFEST, TARGET, Manifest
from qspec_jax.checkpoints.hub import SMALL_FILES, local
from qspec_jax.checkpoints.loading import default_dtype, load_model, log_nested, log_packed, open_source, packed_paths
from qspec_jax.checkpoints.small_files import write_small_files
from qspec_jax.checkpoints.source import WeightSource
from qspec_jax.checkpoints.tokenizers import has_tokenizer, tokenizer_problem
from qspec_jax.checkpoints.weights_text import NESTED, WeightsChoice
from qspec_jax.errors import InputError, with_type, writing
from qspec_jax.files import read_json, write_json
from qspec_jax.progress import progress_bar
from qspec_jax.quantization.weights import is_linear, quantize_nested

log = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float32")
FILE_BYTES = 1 << 26  # about what Orbax writes into a file: several are written at once
READERS = 4  # threads: one hashes more slowly than a disk writes
ALIGNMENT = 8  # bytes of the widest number


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """A conversion.

    Attributes:
        source: the directory, or ORG/NAME@COMMIT.
        directory: of the conversion.
        dtype: of its weights.
        draft_bits: 4, or 16 without a draft.
        tensors: number of weights.
        packed: how many of them are in INT4.
        nested: how many of them are nested in 8 bits.
        bytes_read: of the weights in the source, in float32 if they are dequantized.
        bytes_written: of all files in the directory.
    """

    source: str
    directory: str
    dtype: str
    draft_bits: int
    tensors: int
    packed: int
    nested: int
    bytes_read: int
    bytes_written: int


def convert(
    source: str | Path,
    directory: str | Path,
    *,
    dtype: str | None = None,
    draft_bits: int = 16,
    weights: str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> ConversionReport:
    """Converts a checkpoint to a directory that `qspec_jax.load` restores straight to devices.

    Args:
        source: a Hugging Face directory, ORG/NAME on the Hub, or a GGUF file or the folder of one.
        directory: to make.
        dtype: bfloat16 or float32; None: the checkpoint's own (float16 becomes bfloat16).
        draft_bits: 4 stores the draft's INT4 weights too, 16 does not.
        weights: packed or dequantized, for a quantized source, or nested, for any; see `load_model`.
        overwrite: whether to replace an earlier conversion, in a directory with nothing else.
        progress: whether a bar is shown; None: where standard error is a terminal.

    Raises:
        InputError: for a source that cannot be loaded, and if the directory exists, is within the source, cannot be written or has no room;
            it is then as it was.
    """
    if draft_bits not in (4, 16):
        raise InputError(f"draft bits {draft_bits} should be 4 or 16")
    folder = local(source, progress=progress)
    origin = str(source) if Path(source).exists() else f"{str(source).partition('@')[0]}@{folder.name}"
    with writing(directory, RuntimeError):  # a name that is too long, a loop of links
        directory = Path(directory).resolve()
        if converted.is_converted(folder):
            raise InputError(f"{source}: is converted already; a Hugging Face directory is needed")
        _check_places(folder, directory, overwrite)
    choice = WeightsChoice.parse(weights)
    for name, bits in (("head", choice.head_bits), ("embedding", choice.embedding_bits)):
        if bits != 16:
            raise InputError(
                f"weights {weights!r}: a conversion stores the {name} as it is; give {name}_bits where the directory is loaded"
            )
    opened = open_source(folder)
    wanted = dtype or default_dtype(opened.config, folder)
    if wanted not in DTYPES:
        raise InputError(f"dtype {wanted} (--dtype) cannot be converted to; it should be one of {', '.join(DTYPES)}")
    opened.check_contents()
    packed = packed_paths(opened, jnp.dtype(wanted), choice.linears)
    log_packed(opened, packed, jnp.dtype(wanted))
    if packed and draft_bits == 4:
        raise InputError(f"{source}: its weights stay in INT4, which the draft reads too; convert it without a draft (--draft-bits 16)")
    nested = frozenset(filter(is_linear, opened.places)) if choice.linears == NESTED else frozenset()
    if nested and draft_bits == 4:
        raise InputError(f"weights {NESTED}: a draft reads their upper 4 bits; convert without one (--draft-bits 16)")
    nest = _rounded
    if nested and choice.calibration:
        calibrated = load_model(folder, dtype=wanted, weights=weights, progress=progress).weights()

        def nest(path: str, weight: np.ndarray) -> NestedWeight:
            return jax.device_get(calibrated[path])

    elif nested:
        log_nested(source)
    if has_tokenizer(folder) and (unread := tokenizer_problem(folder)):
        log.warning("%s; without it a conversion takes no text", unread)
    check = functools.partial(_check_places, folder, directory, overwrite)
    with written(directory, _bytes_needed(opened, jnp.dtype(wanted), draft_bits, packed, nested), check) as unfinished:
        sha256, kept, arrays = _write(opened, unfinished, jnp.dtype(wanted), draft_bits, packed, nested, nest, progress)
        write_small_files(unfinished, opened.small_file)
        shapes = {path: place.shape for path, place in opened.places.items()}
        versions = {name: _version(name) for name in ("qspec-jax", "jax", "orbax-checkpoint", "safetensors")}
        manifest = Manifest(origin, wanted, draft_bits, shapes, arrays, sha256, kept, converted.stored_files(unfinished), versions)
        write_json(unfinished / MANIFEST, dataclasses.asdict(manifest))
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    read = sum(opened.read_bytes(path) for path in opened.places)
    return ConversionReport(origin, str(directory), wanted, draft_bits, len(opened.places), len(packed), len(nested), read, size)


def _check_places(source: Path, directory: Path, overwrite: bool) -> None:
    check_apart(source, directory)
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not directory.is_dir():
        raise InputError(f"{directory}: exists already and is no directory; give another place, where a new directory can be made")
    if not overwrite:
        raise InputError(f"{directory}: exists already; --overwrite replaces an earlier conversion")
    known = {MANIFEST, TARGET, DRAFT, *SMALL_FILES}
    others = sorted(path.name for path in directory.iterdir() if path.name not in known)
    if others or not converted.is_converted(directory) or "format" not in read_json(directory / MANIFEST):
        found = f", it holds {others[0]!r}" if others else ""
        raise InputError(f"{directory}: is not an earlier conversion and nothing else{found}; it is not replaced, give another directory")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "not installed"


def _bytes_needed(source: WeightSource, dtype: jnp.dtype, draft_bits: int, packed: Set[str], nested: Set[str]) -> int:
    """About how many bytes the weights take in the destination. packed, nested: the paths of those in INT4, in groups of 32 or more, and of
    those in 8 bits."""
    sizes = {path: place.size for path, place in source.places.items()}
    in_int4, in_8_bits = (sum(sizes[path] for path in paths) for paths in (packed, nested))
    drafted = sum(size for path, size in sizes.items() if is_linear(path)) if draft_bits == 4 else 0
    plain = sum(sizes.values()) - in_int4 - in_8_bits
    return plain * dtype.itemsize + in_int4 * 5 // 8 + in_8_bits * 9 // 8 + drafted * 9 // 16


def _rounded(path: str, weight: np.ndarray) -> NestedWeight:
    return quantize_by_rows(weight, quantize_nested)


def _write(
    source: WeightSource,
    directory: Path,
    dtype: jnp.dtype,
    draft_bits: int,
    packed: Set[str],
    nested: Set[str],
    nest: Callable[[str, np.ndarray], NestedWeight],
    progress: bool | None,
) -> tuple[dict, dict, dict]:
    """Writes the weights of the target, and of the draft; returns the manifest's `sha256`, `written` and `packed`. nested: the paths of
    weights that `nest` puts into 8 bits."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False  # weights hardly shrink, and it takes six times as long
    context.array.saving.ocdbt_target_data_file_size = FILE_BYTES
    context.memory.deepcopy_host_arrays = False  # they are not changed

    def room(path: str) -> int:
        return -(-source.read_bytes(path) // ALIGNMENT) * ALIGNMENT

    plan = list(converted.batches(source.places, room, converted.BATCH_BYTES))
    memories = [np.empty(converted.BATCH_BYTES, np.uint8) for _ in range(2)]  # pages that were used are faster than new ones
    sha256: dict[str, str] = {}
    arrays: dict[str, dict] = {}
    written: dict[str, dict[str, str]] = {TARGET: {}, DRAFT: {}}
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        pool = stack.enter_context(ThreadPoolExecutor(READERS))
        total = sum(map(source.read_bytes, source.places))
        bar = stack.enter_context(progress_bar(total=total, desc="convert", unit="B", unit_scale=True, leave=True, progress=progress))
        folder = stack.enter_context(converted.for_orbax(directory))
        writer = stack.enter_context(_one_thread())  # entered last: the link of for_orbax, and the folder, are there until it ends
        target, *draft = (_Checkpoint(folder / name, writer) for name in ([TARGET, DRAFT] if draft_bits == 4 else [TARGET]))

        def read(path: str, memory: np.ndarray) -> np.ndarray | Int4Weight | NestedWeight:
            if path in packed:
                weight = source.read_packed(path)
                source.examine(path, weight.scale)
                sha256[path] = written[TARGET][path] = converted.digest(weight)
                arrays[path] = converted.described(weight)
                return weight
            stored = source.read(path, memory)
            sha256[path] = converted.digest(stored)
            weight = stored.astype(dtype, copy=False)
            source.examine(path, weight)
            if path in nested:
                weight = nest(path, weight)
                written[TARGET][path], arrays[path] = converted.digest(weight), converted.described(weight)
                return weight
            written[TARGET][path] = sha256[path] if weight is stored else converted.digest(weight)
            return weight

        for paths, memory in zip(plan, itertools.cycle(memories)):
            *starts, end = itertools.accumulate(map(room, paths), initial=0)
            if end > len(memory):
                memory = np.empty(end, np.uint8)
            pieces = [memory[start : start + source.read_bytes(path)] for start, path in zip(starts, paths)]
            weights = dict(zip(paths, pool.map(read, paths, pieces)))
            bar.update(sum(map(len, pieces)))
            target.add(weights)  # waits for those before, whose memory can be read into then
            for checkpoint in draft:
                if quantized := {path: quantize_by_rows(weight) for path, weight in weights.items() if is_linear(path)}:
                    checkpoint.add(quantized)
                    written[DRAFT] |= {path: converted.digest(weight) for path, weight in quantized.items()}
        for checkpoint in (target, *draft):
            checkpoint.finish()
    source.warn_of_not_finite()

    def in_order(hashes: dict) -> dict:
        return {path: hashes[path] for path in source.places if path in hashes}

    return in_order(sha256), {name: in_order(hashes) for name, hashes in written.items()}, in_order(arrays)


class _Checkpoint:
    """An Orbax checkpoint to which weights are added; they are written while the caller goes on.

    `writer` is a pool of one thread, the only one that calls Orbax. Orbax keeps the number of its operation in one place, so two calls at
    once would confuse theirs. And Python raises KeyboardInterrupt in the main thread: it would end a call there, while Orbax's own threads
    go on writing into a folder that is being removed.
    """

    def __init__(self, directory: Path, writer: Executor):
        self._directory, self._writer = directory, writer
        self._newest: Future | None = None

    def add(self, weights: dict[str, Any]) -> None:
        """Adds weights by their paths: waits for earlier ones, and returns while these are written from their memory."""
        from orbax.checkpoint import v1 as ocp

        self._wait()
        self._begin(ocp.partial.save, self._directory, converted.as_tree(weights))

    def finish(self) -> None:
        """Completes the checkpoint, so that it can be restored."""
        from orbax.checkpoint import v1 as ocp

        self._wait()
        self._begin(ocp.partial.finalize, self._directory)
        self._wait()

    def _begin(self, call: Callable, *args) -> None:
        # Orbax's settings are a context variable, which threads do not inherit.
        self._newest = self._writer.submit(contextvars.copy_context().run, call, *args)

    def _wait(self) -> None:
        with _writing():
            if self._newest:
                self._newest.result()
        self._newest = None


@contextlib.contextmanager
def _one_thread() -> Iterator[Executor]:
    """Yields a pool of one thread. At the end, after an error or Ctrl-C too, it waits for the thread's work."""
    pool = ThreadPoolExecutor(1)

    def wait() -> None:
        # Not by joining the thread: in Python 3.11 an interrupted join marks it as ended while it runs.
        pool.submit(int).result()

    wait()  # Starts the thread: if `submit` were interrupted later, the pool might not know the thread that it had started.
    try:
        yield pool
    finally:
        try:
            wait()
        except KeyboardInterrupt:
            wait()
            raise
        finally:
            pool.shutdown(wait=False)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Turns the exceptions of Orbax and TensorStore for a full disk, a quota, or a lost connection into an OSError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))  # in TensorStore's message it follows the names of many files
        raise OSError(os.strerror(int(code[1])) if code else with_type(error)) from None
