"""A run over the lines of a file: what identifies it, and the results on their way into its journal."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from qspec_jax.checkpoints import hub
from qspec_jax.checkpoints.converted import MANIFEST, is_converted, stored_files
from qspec_jax.checkpoints.loading import as_loaded, config_and_dtype
from qspec_jax.checkpoints.weight_files import WeightFiles, weight_files
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.data_parallel import Place
from qspec_jax.decoding.journal import REVISION, Journal, kept, run_hashes, written
from qspec_jax.decoding.jsonl import Line, as_line, error_of
from qspec_jax.decoding.out_of_memory import explained_memory
from qspec_jax.decoding.prepare import ROWS_OF_AUTO, Prepared, prepare
from qspec_jax.decoding.ray_data import through_actors
from qspec_jax.decoding.results import BatchStats
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.int4 import has_stored_int4
from qspec_jax.errors import InputError
from qspec_jax.files import read_bytes
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.outline import outline


def outline_of(directory: Path, dtype: str | None) -> Llama:
    """The model without its weights, for a process whose actors load them."""
    shape, stored_as = config_and_dtype(directory)
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return outline(shape, dtype=as_loaded(dtype or stored_as))


def drafts(config: GenerationConfig) -> bool:
    """Whether rounds have drafts."""
    return config.speculative and config.num_speculative_tokens != 0


def with_made_draft(config: GenerationConfig, network: Llama) -> GenerationConfig:
    """The config with its draft made."""
    return dataclasses.replace(config, draft=make_draft(config.draft, network)) if drafts(config) else config


def prepare_lines(
    model: Llama, tokenizer: Any, lines: Sequence[Line], config: GenerationConfig, batch_size: int | None, *, on_ray: bool
) -> Prepared:
    """The requests of lines, prepared together.

    Args:
        model: the target; an outline is enough on Ray.
        tokenizer: of the model.
        lines: those that are not wrong; there may be none.
        config: the settings that a line does not give.
        batch_size: rows at a time; None: the number that fits.
        on_ray: whether actors make the draft, so that it is not made here.
    """
    requests = [line.request for line in lines]
    if on_ray or not requests:
        return Prepared(model, config, tuple(requests), None, tokenizer)
    with explained_memory(model, config, max(len(request.tokens) for request in requests), rows=1):
        return prepare(model, requests, config=config, tokenizer=tokenizer, batch_size=batch_size or ROWS_OF_AUTO, checked=True)


def run_identity(
    content: bytes, prepared: Prepared, directory: Path, checkpoints: Sequence[bytes], settings: tuple[Any, ...], version: str
) -> dict[str, str]:
    """Hashes of all that the results of a run depend on, for its journal.

    Args:
        content: of the input.
        prepared: the requests of all lines.
        directory: of the checkpoint.
        checkpoints: `of_checkpoint` of this one and those of drafts.
        settings: more of the run that has a text.
        version: of this program.
    """
    model = prepared.model
    config = dataclasses.replace(model.checkpoint_config, dtype="")
    of_files = [repr((config, has_stored_int4(directory, model.dtype.name))).encode(), *checkpoints]
    of_run = repr((prepared.identity(), model.dtype.name, *settings)).encode()
    return run_hashes(prompts=[content], settings=[of_run], checkpoint=of_files, version=[version.encode(), REVISION])


def of_checkpoint(directory: Path) -> list[bytes]:
    """What results depend on of a checkpoint: the contents of its small files; of its weights, which are too large to be read for this, the
    names, sizes and times of files."""
    if is_converted(directory):
        listed, names = {directory / MANIFEST}, sorted(stored_files(directory))
    else:
        try:
            files = weight_files(directory)
        except InputError:  # loading says what is wrong with them
            files = WeightFiles(())
        listed, names = {directory / files.index} if files.index else set(), files.names
    # Some tokenizers have files for certain versions of transformers beside those with well-known names.
    small = {*(directory / name for name in hub.SMALL_FILES), *directory.glob("*token*.json"), *directory.glob(hub.TEMPLATES)}
    contents = {path.relative_to(directory).as_posix(): read_bytes(path) for path in small | listed if path.is_file()}
    weights = [(name, *_state(directory / name)) for name in names]
    return [*(part for name in sorted(contents) for part in (os.fsencode(name), contents[name])), repr(weights).encode()]


def _state(path: Path) -> tuple[int, ...]:
    """Size and times of a file, its last change included, which no tool sets back as it does that of the content; none where it is not
    there, or cannot be."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # loading says what is wrong with it
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def decode_lines(
    prepared: Prepared, lines: list[Line], journal: Journal, batch_size: int | None, refill: bool, places: list[Place], *, quiet: bool
) -> BatchStats:
    """Decodes prepared lines, and adds each result to the journal as it comes. Returns the statistics of the run.

    Args:
        prepared: the requests of the lines.
        lines: in the same order.
        journal: of the run.
        batch_size: rows at a time; None: the number that fits.
        refill: see `run_batch`.
        places: the devices or meshes to work on.
        quiet: whether to show no progress bar.
    """
    results = run_batch(prepared.model, prepared, batch_size=batch_size, refill=refill, devices=places)
    bar = tqdm(total=len(lines), desc="batch", unit="prompt", disable=True if quiet else None)
    with bar, contextlib.closing(results):  # closed also where a result cannot be kept
        for result in results:
            line = lines[result.index]
            journal.add(kept(line.number, as_line(line, result, prepared.tokenizer)))
            bar.set_postfix_str(in_words(results.stats))
            bar.update()
    return results.stats


def decode_lines_on_ray(
    todo: list[Line],
    content: bytes,
    directory: Path,
    config: GenerationConfig,
    journal: Journal,
    settings: dict[str, Any],
    *,
    stops: bool,
    quiet: bool,
) -> float:
    """Decodes lines on a Ray cluster, and adds each result to the journal as it comes. Returns the seconds that it took.

    Args:
        todo: the lines.
        content: of the whole input.
        directory: of the checkpoint.
        config: the settings that a line does not give.
        journal: of the run.
        settings: more arguments of `through_actors`.
        stops: whether a line that an actor finds wrong raises InputError.
        quiet: whether to show no progress bar.
    """
    if not todo:
        return 0.0
    began, raw = time.monotonic(), content.rstrip().splitlines()
    numbered = [(line.number, raw[line.number - 1].decode("utf-8-sig")) for line in todo]
    with tqdm(total=len(todo), desc="batch", unit="prompt", disable=True if quiet else None) as bar:
        for result in through_actors(numbered, directory, config, **settings):
            if stops and (error := error_of(written(result))):
                raise InputError(f"line {result['line']}: {error}")
            journal.add(result)
            bar.update()
    return time.monotonic() - began


def in_words(stats: BatchStats) -> str:
    """Tokens per second and the acceptance rate."""
    accepted = stats.rates["draft_acceptance_rate"]
    return f"{stats.rates['tokens_per_second']:.1f} tokens/s" + ("" if accepted is None else f", {accepted:.1%} of drafts accepted")
