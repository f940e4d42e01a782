"""A run over the lines of a file: its lines prepared, its journal opened, and the results on their way into it."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qspec_jax.decoding import processes
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.data_parallel import Place
from qspec_jax.decoding.journal import Journal, kept, written
from qspec_jax.decoding.jsonl import Line, as_line, as_wrong, error_of
from qspec_jax.decoding.out_of_memory import explained_memory
from qspec_jax.decoding.prepare import ROWS_OF_AUTO, Prepared, completed
from qspec_jax.decoding.ray_data import through_actors
from qspec_jax.decoding.results import BatchStats
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar

log = logging.getLogger(__name__)

MAX_REPORTED_LINES = 20  # lines that are wrong; of more only the number is reported


def with_made_draft(config: GenerationConfig, network: Llama) -> GenerationConfig:
    """The config with its draft made."""
    return dataclasses.replace(config, draft=make_draft(config.draft, network)) if config.has_drafts else config


def prepare_lines(
    model: Llama, tokenizer: Any, lines: Sequence[Line], config: GenerationConfig, batch_size: int | None, *, on_ray: bool, shared: bool
) -> Prepared:
    """The requests of lines, prepared together: one for each sample.

    Args:
        model: the target; an outline is enough on Ray.
        tokenizer: of the model.
        lines: those that are not wrong; there may be none.
        config: the settings that a line does not give.
        batch_size: rows at a time; None: the number that fits.
        on_ray: whether actors make the draft, so that it is not made here.
        shared: whether several samples of a line read its prompt once, which takes one device.
    """
    requests = [request for line in lines for request in line.requests(shared=shared)]
    if on_ray or not requests:
        return Prepared(model, config, tuple(requests), None, tokenizer)
    with explained_memory(model, config, max(len(request.tokens) for request in requests), rows=1):
        return completed(model, requests, config=config, tokenizer=tokenizer, batch_size=batch_size or ROWS_OF_AUTO)


def line_of_rows(lines: Sequence[Line]) -> list[int]:
    """The index of the line of each request that `prepare_lines` makes."""
    return [i for i, line in enumerate(lines) for _ in range(line.samples)]


def check_lines(lines: Sequence[Line], name: str, *, stops: bool) -> None:
    """Raises InputError where there are no lines, and where one is wrong, which stops the run. name: of the file, for messages."""
    wrong = [line for line in lines if line.error]
    if wrong and stops:
        more = f" (and {len(wrong) - 1} more; --on-error skip does the other lines)" if len(wrong) > 1 else ""
        raise InputError(f"{name}, line {wrong[0].number}: {wrong[0].error}{more}")
    if not lines:
        raise InputError(f"{name}: empty; it should have a JSON object on each line")


def open_journal(output: Path | None, run: dict[str, str], lines: Sequence[Line], name: str, *, overwrite: bool) -> Journal:
    """The journal of a run, in all its processes, with the lines that are wrong as done; says which are, and how many others are done.

    Args:
        output: where this process writes.
        run: `run_identity`.
        lines: all lines of the input.
        name: of the input, for messages.
        overwrite: whether the output, and the journal of another run, are replaced.
    """
    wrong = [line for line in lines if line.error]
    journal = processes.all_or_none(lambda: Journal(output, run, overwrite=overwrite))
    done = processes.from_first(lambda: sorted(journal.done))
    journal.done = {number: journal.done.get(number) for number in done}
    for line in wrong[:MAX_REPORTED_LINES]:
        log.warning("%s, line %d: %s", name, line.number, line.error)
    if len(wrong) > MAX_REPORTED_LINES:
        log.warning("%s: %d more lines are wrong; OUTPUT says why", name, len(wrong) - MAX_REPORTED_LINES)
    for line in wrong:
        if line.number not in journal.done:
            journal.add(kept(line.number, as_wrong(line)))
    if found := len(journal.done) - len(wrong):
        log.warning("%s: %d of %d lines are done already", journal.path, found, len(lines) - len(wrong))
    return journal


def decode_lines(
    prepared: Prepared, lines: list[Line], journal: Journal, batch_size: int | None, refill: bool, places: list[Place], *, quiet: bool
) -> BatchStats:
    """Decodes prepared lines, and adds each to the journal when all its samples are there. Returns the statistics of the run.

    Args:
        prepared: the requests of the lines, see `line_of_rows`.
        lines: in the same order.
        journal: of the run.
        batch_size: rows at a time; None: the number that fits.
        refill: see `run_batch`.
        places: the devices or meshes to work on.
        quiet: whether to show no progress bar.
    """
    owners, samples = line_of_rows(lines), [{} for _ in lines]
    longest = dataclasses.replace(prepared.config, max_new_tokens=max(config.max_new_tokens for config in prepared.configs))
    memory = explained_memory(prepared.model, longest, prepared.longest_prompt, rows=min(batch_size or 1, len(owners)))
    bar = progress_bar(total=len(lines), desc="batch", unit="prompt", leave=True, progress=False if quiet else None)
    settings = dict(batch_size=batch_size, refill=refill, devices=places)
    # The results are closed also where one cannot be kept.
    with memory, bar, contextlib.closing(run_batch(prepared.model, prepared, **settings)) as results:
        for result in results:
            bar.set_postfix_str(in_words(results.stats))
            owner = owners[result.index]
            line, found = lines[owner], samples[owner]
            found[result.index] = result
            if len(found) == line.samples:
                journal.add(kept(line.number, as_line(line, [found[index] for index in sorted(found)], prepared.tokenizer)))
                found.clear()
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
    with progress_bar(total=len(todo), desc="batch", unit="prompt", leave=True, progress=False if quiet else None) as bar:
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
