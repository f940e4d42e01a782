"""The command `qspec batch`."""

import contextlib
import dataclasses
import enum
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from tqdm import tqdm

from qspec_jax.checkpoints import hub
from qspec_jax.checkpoints.converted import MANIFEST, is_converted, stored_files
from qspec_jax.checkpoints.loading import as_loaded, config_and_dtype
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.checkpoints.weight_files import WeightFiles, weight_files
from qspec_jax.cli import process
from qspec_jax.cli.options import (
    ALL,
    Devices,
    Distributed,
    DtypeOption,
    Json,
    ModelDirectory,
    Seed,
    TensorParallel,
    devices_of,
    join_others,
    load,
    places_of,
    with_settings,
    written_by_first,
)
from qspec_jax.decoding import processes
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.data_parallel import Place
from qspec_jax.decoding.journal import REVISION, Journal, kept, run_hashes, written
from qspec_jax.decoding.jsonl import Columns, Line, as_line, as_wrong, error_of, read_lines
from qspec_jax.decoding.out_of_memory import explained_memory
from qspec_jax.decoding.prepare import ROWS_OF_AUTO, Prepared, prepare
from qspec_jax.decoding.ray_data import cluster_gpus, connect, through_actors
from qspec_jax.decoding.resolve import resolve_auto_draft
from qspec_jax.decoding.results import BatchStats
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.draft import checkpoints_of
from qspec_jax.drafts.int4 import has_stored_int4
from qspec_jax.drafts.registry import AUTO, parse_draft
from qspec_jax.errors import InputError
from qspec_jax.files import STANDARD, is_same_file, name_of, read_bytes, to_json
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.outline import outline

log = logging.getLogger(__name__)

MOST_ROWS = 1 << 20
TOLD = 20  # wrong lines that are told, each by itself


class OnError(enum.StrEnum):
    skip = "skip"
    stop = "stop"


@with_settings
def batch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A JSON object on each line, with a prompt and perhaps settings of its own, or as in OpenAI's batch files. Equal lines "
            "with one seed are one sample. - is standard input.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="Results, a line for each line of the input; a pipe, a device or -, standard output, gets them all at the end.",
        ),
    ],
    model: ModelDirectory,
    config: GenerationConfig,
    silent_on_sampling: bool,
    batch_size: Annotated[
        str,
        typer.Option(metavar="ROWS", help="Prompts at a time on each device, or auto: as many as fit its memory."),
    ] = "8",
    devices: Devices = ALL,
    tensor_parallel: TensorParallel = 1,
    distributed: Distributed = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Work on a Ray cluster: its address, auto for the one that runs here, or local to start one."),
    ] = None,
    ray_actors: Annotated[
        int | None, typer.Option(min=1, help="With --ray, how many processes: one for each GPU of the cluster, or one, if not given.")
    ] = None,
    on_error: Annotated[OnError, typer.Option(help="A line that is wrong: say so in its place, or stop before any work.")] = OnError.stop,
    ignore_columns: Annotated[
        bool, typer.Option("--ignore-columns", help="Leave out keys that are not a line's, as a data set's own columns.")
    ] = False,
    pass_columns: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="Copy these keys of a line to its OUTPUT, unchanged; may be given several times."),
    ] = None,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    refill: Annotated[bool, typer.Option(help="Give a slot that is free to the next prompt at once, not when all are.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT, and what is left of another run.")] = False,
    as_json: Json = False,
):
    """Continue the prompts of a file, a batch that stays full. Started again after it was killed, it goes on where it was."""
    rows_at_once = _rows(batch_size)
    columns = _columns(ignore_columns, pass_columns or [])
    if distributed:
        if ray is not None or tensor_parallel > 1:
            raise InputError("--distributed divides the model over all devices; it goes with neither --ray nor --tensor-parallel")
        if rows_at_once is None:
            raise InputError("--distributed: --batch-size should be a number, for machines may differ in how much memory is free")
    if as_json and output == STANDARD:
        raise InputError("--json prints its object on standard output, where the results would be; give OUTPUT a file, or leave --json out")
    if distributed:
        join_others("batch", config, seed, dtype, rows_at_once, refill, on_error, columns)
    quiet = as_json or not processes.is_first()
    if ray is None:
        on = devices_of(devices)
        if devices == ALL and not distributed and config.cache_config.in_host_memory:
            if len(on) > 1:
                log.warning("cache %s: one device of %d is used, as they would share host memory", config.cache, len(on))
            on = on[:1]
        places = places_of(on, len(on) if distributed else tensor_parallel)
    else:
        _check_for_ray(config, devices, tensor_parallel, refill)
    if ray_actors and ray is None:
        raise InputError("--ray-actors goes with --ray")
    content, name = processes.from_first(lambda: _content(source, output)).encode("latin-1"), name_of(source)
    of_hub = lambda checkpoint: processes.all_or_none(lambda: hub.local(checkpoint, progress=False if quiet else None))
    stored_at = of_hub(model)
    if ray is not None:
        jax.config.update("jax_platforms", "cpu")  # GPUs are the actors'
        connect(ray)
    chosen = config.draft == AUTO
    of_draft = () if chosen or not _drafts(config) else checkpoints_of(parse_draft(config.draft))
    directories = {path: of_hub(path) for path in of_draft}
    directories[model] = stored_at
    checkpoints = processes.all_or_none(lambda: {path: of_checkpoint(directory) for path, directory in directories.items()})
    if ray is None:
        network, tokenizer = processes.all_or_none(
            lambda: load(model, dtype, quiet=quiet, place=places[0], caches=[config.cache_config], silent_on_sampling=silent_on_sampling)
        )
    else:
        network, tokenizer = _outline(stored_at, dtype), load_tokenizer(stored_at)
        if config.draft == AUTO:  # here, since what the run is known by is what it is settled to
            kind = "a GPU of the cluster" if cluster_gpus() else "cpu"
            (config,) = resolve_auto_draft(network, [config], None, batch=rows_at_once or ROWS_OF_AUTO, device_kind=kind)
    # A draft that is named is made first: lines that are too long for its model are wrong.
    of_lines = config if chosen or ray is not None else processes.all_or_none(lambda: _with_draft(config, network))
    lines = read_lines(content, network, tokenizer, of_lines, seed, columns)
    wrong = [line for line in lines if line.error]
    if wrong and on_error is OnError.stop:
        more = f" (and {len(wrong) - 1} more; --on-error skip does the other lines)" if len(wrong) > 1 else ""
        raise InputError(f"{name}, line {wrong[0].number}: {wrong[0].error}{more}")
    if not lines:
        raise InputError(f"{name}: empty; it should have a JSON object on each line")
    # All lines are prepared, also those that are done: draft "auto" and costs depend on all of them, and a run is known by them.
    good = [line for line in lines if line.request]
    requests = [line.request for line in good]
    if ray is not None or not good:
        prepared = Prepared(network, config, tuple(requests), None, tokenizer)
    else:
        longest = max(len(request.tokens) for request in requests)
        with explained_memory(network, config, longest, rows=1):
            prepared = processes.all_or_none(
                lambda: prepare(network, requests, config=config, tokenizer=tokenizer, batch_size=rows_at_once or ROWS_OF_AUTO)
            )
    config, configs = prepared.config, prepared.configs
    of_run = (prepared.identity(), seed, network.dtype.name, columns)
    if changed := [path for path, directory in directories.items() if of_checkpoint(directory) != checkpoints[path]]:
        raise InputError(f"{changed[0]}: its files changed while they were loaded; start again once they are as they should be")
    has_int4 = has_stored_int4(stored_at, network.dtype.name)
    of_files = [
        repr((dataclasses.replace(network.checkpoint_config, dtype=""), has_int4)).encode(),
        *(part for parts in checkpoints.values() for part in parts),
    ]
    version = [process.version_of("qspec-jax").encode(), REVISION]
    run = run_hashes(prompts=[content], settings=[repr(of_run).encode()], checkpoint=of_files, version=version)
    journal = processes.all_or_none(lambda: Journal(written_by_first(output), run, overwrite=overwrite))
    done = processes.from_first(lambda: sorted(journal.done))
    journal.done = {number: journal.done.get(number) for number in done}
    for line in wrong[:TOLD]:
        log.warning("%s, line %d: %s", name, line.number, line.error)
    if len(wrong) > TOLD:
        log.warning("%s: %d more lines are wrong; OUTPUT says why", name, len(wrong) - TOLD)
    for line in wrong:
        if line.number not in journal.done:
            journal.add(kept(line.number, as_wrong(line)))
    if found := len(journal.done) - len(wrong):
        log.warning("%s: %d of %d lines are done already", journal.path, found, len(lines) - len(wrong))
    todo = [i for i, line in enumerate(good) if line.number not in journal.done]

    def interrupted() -> None:
        print(f"qspec: interrupted{journal.goes_on}", file=sys.stderr)
        journal.close()

    process.endings.append(interrupted)
    try:
        if ray:
            settings = dict(batch_size=rows_at_once, actors=ray_actors, dtype=dtype and str(dtype), seed=seed, columns=columns)
            seconds = _through_ray(
                [good[i] for i in todo],
                content,
                stored_at.resolve(),
                config,
                journal,
                settings,
                stops=on_error is OnError.stop,
                quiet=as_json,
            )
            journal.finish()
            if as_json:
                print(to_json({"lines": len(lines), "wrong": len(wrong), "done_before": found, "seconds": seconds}))
            else:
                where = "standard output" if output == STANDARD else output
                print(f"{where}: {len(todo)} prompts on Ray in {seconds:.1f} s", file=sys.stderr)
            return
        stats = BatchStats()
        if todo:
            at_once, prepared = min(rows_at_once or 1, len(todo)), prepared.select(todo)
            longest = dataclasses.replace(config, max_new_tokens=max(each.max_new_tokens for each in configs))
            with explained_memory(network, longest, prepared.longest_prompt, rows=at_once):
                stats = _run(prepared, [good[i] for i in todo], journal, rows_at_once, refill, places, quiet=quiet)
        journal.finish()
        if not processes.is_first():
            return
    except KeyboardInterrupt:
        interrupted()
        raise
    finally:
        process.endings.remove(interrupted)
        journal.close()
    if as_json:
        print(to_json({"lines": len(lines), "wrong": len(wrong), "done_before": found} | dataclasses.asdict(stats) | stats.rates))
    elif stats.prompts:
        busy = stats.rates["busy_slots"]
        places = "" if busy is None else f"; {busy:.1%} of places busy"
        where = "standard output" if output == STANDARD else output
        skipped = f", {len(wrong)} lines wrong" if wrong else ""
        print(f"{where}: {stats.prompts} prompts{skipped}, {stats.new_tokens:,} tokens, {_speed(stats)}{places}", file=sys.stderr)


def _content(source: Path, output: Path) -> str:
    """What is in the input, a character for each byte, for JSON knows no bytes."""
    if is_same_file(source, output):
        raise InputError(f"{output}: INPUT and OUTPUT are the same file")
    return read_bytes(source).decode("latin-1")


def _check_for_ray(config: GenerationConfig, devices: str, tensor_parallel: int, refill: bool) -> None:
    """Raises InputError for what only the machine that the weights are on could settle, and for what goes with one process alone."""
    if "skip=auto" in config.draft:
        raise InputError(f"--ray: --draft {config.draft} is settled by the machine that decodes; name a draft and its layers")
    if config.adaptive and config.draft_cost is None:
        raise InputError("--ray: --adaptive needs --draft-cost, for costs are stored for the machine that decodes")
    if config.cache_config.in_host_memory:
        raise InputError(f"--ray: cache {config.cache} has a part in host memory, which the actors of a machine would share")
    if not refill:
        raise InputError("--ray: --no-refill is for one process, to compare with")
    if devices != ALL or tensor_parallel > 1:
        raise InputError("--ray: --devices and --tensor-parallel are for one machine; --ray-actors says how many work")


def _outline(directory: Path, dtype: str | None) -> Llama:
    """The model without its weights, which are where the actors are."""
    shape, stored_as = config_and_dtype(directory)
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return outline(shape, dtype=as_loaded(dtype or stored_as))


def _rows(text: str) -> int | None:
    """A number of rows, None for auto. Raises InputError for any other text."""
    if text == AUTO:
        return None
    if not (text.isdecimal() and text.isascii() and 0 < int(text) <= MOST_ROWS):
        raise InputError(f"--batch-size {text} should be a whole number from 1 to {MOST_ROWS:,}, or {AUTO}")
    return int(text)


def _columns(ignore: bool, passed: list[str]) -> Columns:
    """What --ignore-columns and --pass-columns say. Raises InputError for a name that is empty or that the output has itself."""
    names = tuple(dict.fromkeys(name for text in passed for name in text.split(",")))
    if "" in names:
        raise InputError(f"--pass-columns {','.join(passed)!r} should be names with commas between them")
    try:
        return Columns(ignore, names)
    except InputError as error:
        raise InputError(f"--pass-columns: {error}") from None


def _drafts(config: GenerationConfig) -> bool:
    return config.speculative and config.num_speculative_tokens != 0


def _with_draft(config: GenerationConfig, network: Llama) -> GenerationConfig:
    """The config with its draft made."""
    return dataclasses.replace(config, draft=make_draft(config.draft, network)) if _drafts(config) else config


def of_checkpoint(directory: Path) -> list[bytes]:
    """What the results take from a checkpoint: its small files, and names, sizes and times of those of its weights, which are too large to
    be read for this."""
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


def _speed(stats: BatchStats) -> str:
    accepted = stats.rates["draft_acceptance_rate"]
    return f"{stats.rates['tokens_per_second']:.1f} tokens/s" + ("" if accepted is None else f", {accepted:.1%} of drafts accepted")


def _through_ray(
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
    """Continues lines on a Ray cluster. Returns the seconds that it took. stops: raise InputError for a line that an actor finds wrong."""
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


def _run(
    prepared: Prepared, lines: list[Line], journal: Journal, batch_size: int | None, refill: bool, places: list[Place], *, quiet: bool
) -> BatchStats:
    results = run_batch(prepared.model, prepared, batch_size=batch_size, refill=refill, devices=places)
    bar = tqdm(total=len(lines), desc="batch", unit="prompt", disable=True if quiet else None)
    with bar, contextlib.closing(results):  # closed also where a result cannot be kept
        for result in results:
            line = lines[result.index]
            journal.add(kept(line.number, as_line(line, result, prepared.tokenizer)))
            bar.set_postfix_str(_speed(results.stats))
            bar.update()
    return results.stats
