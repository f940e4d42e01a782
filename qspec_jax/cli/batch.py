"""The command `qspec batch`."""

import contextlib
import dataclasses
import enum
import json
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
from qspec_jax.decoding import diagnosis, processes
from qspec_jax.decoding.batch import ROWS_OF_AUTO, BatchStats, run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.data_parallel import Place
from qspec_jax.decoding.jsonl import Columns, Journal, Line, as_line, as_wrong, error_of, kept, read_lines, run_hashes, written
from qspec_jax.decoding.ray_data import cluster_gpus, connect, through_actors
from qspec_jax.decoding.settled import for_prompts, with_costs, with_draft
from qspec_jax.drafts import Draft, make_draft
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
            (config,) = with_draft(network, [config], None, batch=rows_at_once or ROWS_OF_AUTO, device_kind=kind)
    draft = None if chosen or ray else processes.all_or_none(lambda: _made(config, network, model))
    lines = read_lines(content, network, tokenizer, config, seed, draft, columns)
    wrong = [line for line in lines if line.error]
    if wrong and on_error is OnError.stop:
        more = f" (and {len(wrong) - 1} more; --on-error skip does the other lines)" if len(wrong) > 1 else ""
        raise InputError(f"{name}, line {wrong[0].number}: {wrong[0].error}{more}")
    if not lines:
        raise InputError(f"{name}: empty; it should have a JSON object on each line")
    # What is left open is settled by all lines, before any is left out because it is done: what comes of it is what a run is known by.
    requests = [line.request for line in lines if line.request]
    configs, lengths = [request.config for request in requests], [len(request.tokens) for request in requests]
    if chosen and ray is None and configs:
        configs = with_draft(network, configs, lengths, batch=min(rows_at_once or ROWS_OF_AUTO, len(configs)))
        config = dataclasses.replace(config, **{name: getattr(configs[0], name) for name in ("draft", "num_speculative_tokens", "cache")})
        draft = processes.all_or_none(lambda: _made(config, network, model))
    if ray is None:
        with diagnosis.explained_memory(network, config, max(lengths, default=1), rows=1):
            draft = for_prompts(network, draft, configs, [request.tokens for request in requests])
        configs = with_costs(network, configs, lengths, draft)
    lines = _with_configs(lines, configs)
    settings = dataclasses.asdict(config) | {"seed": seed, "dtype": network.dtype.name, "columns": dataclasses.asdict(columns)}
    costs = [each.draft_cost for each in configs] if config.adaptive else None
    of_run = (json.dumps(settings, sort_keys=True), costs, draft and draft.chosen())
    if changed := [path for path, directory in directories.items() if of_checkpoint(directory) != checkpoints[path]]:
        raise InputError(f"{changed[0]}: its files changed while they were loaded; start again once they are as they should be")
    has_int4 = has_stored_int4(stored_at, network.dtype.name)
    of_files = [
        repr((dataclasses.replace(network.checkpoint_config, dtype=""), has_int4)).encode(),
        *(part for parts in checkpoints.values() for part in parts),
    ]
    version = [process.version_of("qspec-jax").encode()]
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
    todo = [line for line in lines if line.number not in journal.done]

    def interrupted() -> None:
        print(f"qspec: interrupted{journal.goes_on}", file=sys.stderr)
        journal.close()

    process.endings.append(interrupted)
    try:
        if ray:
            settings = dict(batch_size=rows_at_once, actors=ray_actors, dtype=dtype and str(dtype), seed=seed, columns=columns)
            seconds = _through_ray(
                todo, content, stored_at.resolve(), config, journal, settings, stops=on_error is OnError.stop, quiet=as_json
            )
            journal.finish()
            if as_json:
                print(to_json({"lines": len(lines), "wrong": len(wrong), "done_before": found, "seconds": seconds}))
            else:
                where = "standard output" if output == STANDARD else output
                print(f"{where}: {len(todo)} prompts on Ray in {seconds:.1f} s", file=sys.stderr)
            return
        longest = dataclasses.replace(config, max_new_tokens=max((each.max_new_tokens for each in configs), default=1))
        with diagnosis.explained_memory(network, longest, max(lengths, default=1), rows=max(1, min(rows_at_once or 1, len(todo)))):
            stats = _run(network, tokenizer, draft, todo, journal, rows_at_once, refill, places, quiet=quiet)
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


def _made(config: GenerationConfig, network: Llama, model: Path) -> Draft | None:
    """The draft, of the INT4 weights that are stored with the model if there are any."""
    return make_draft(config.draft, network, directory=model) if _drafts(config) else None


def _with_configs(lines: list[Line], configs: list[GenerationConfig]) -> list[Line]:
    """The lines with these configs, one for each that has a request."""
    settled = iter(configs)
    with_config = lambda request: request and dataclasses.replace(request, config=next(settled))
    return [dataclasses.replace(line, request=with_config(line.request)) for line in lines]


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
    network,
    tokenizer,
    draft: Draft | None,
    todo: list[Line],
    journal: Journal,
    batch_size: int | None,
    refill: bool,
    places: list[Place],
    *,
    quiet: bool,
) -> BatchStats:
    if not todo:
        return BatchStats()
    requests, settings = [line.request for line in todo], dict(batch_size=batch_size, refill=refill, devices=places)
    results = run_batch(network, requests, draft=draft, tokenizer=tokenizer, **settings)
    bar = tqdm(total=len(todo), desc="batch", unit="prompt", disable=True if quiet else None)
    with bar, contextlib.closing(results):  # closed also where a result cannot be kept
        for result in results:
            line = todo[result.index]
            journal.add(kept(line.number, as_line(line, result, tokenizer)))
            bar.set_postfix_str(_speed(results.stats))
            bar.update()
    return results.stats
