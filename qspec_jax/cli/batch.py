"""The command `qspec batch`."""

import contextlib
import dataclasses
import enum
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import jax
import typer

from qspec_jax.checkpoints import hub
from qspec_jax.checkpoints.loading import outline_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.cli import process
from qspec_jax.cli.options import (
    ALL,
    Devices,
    Distributed,
    DtypeOption,
    Json,
    ModelDirectory,
    Samples,
    SeedOfSampling,
    TensorParallel,
    WeightsOption,
    devices_of,
    join_others,
    load,
    places_of,
    used_seed,
    warn_of_equal_samples,
    with_settings,
    written_by_first,
)
from qspec_jax.decoding import processes
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.data_parallel import Place
from qspec_jax.decoding.journal import Journal
from qspec_jax.decoding.jsonl import MAX_SAMPLES, Columns, first_with_prefix, read_lines
from qspec_jax.decoding.prefixes import Prefixes
from qspec_jax.decoding.prepare import ROWS_OF_AUTO
from qspec_jax.decoding.ray_data import cluster_gpus, connect
from qspec_jax.decoding.resolve import resolve_draft
from qspec_jax.decoding.results import BatchStats
from qspec_jax.decoding.run_identity import Checkpoints, run_identity
from qspec_jax.decoding.run_lines import (
    check_lines,
    decode_lines,
    decode_lines_on_ray,
    in_words,
    line_of_rows,
    open_journal,
    prepare_lines,
    with_made_draft,
)
from qspec_jax.drafts.draft import checkpoints_of
from qspec_jax.drafts.registry import AUTO
from qspec_jax.errors import InputError
from qspec_jax.files import STANDARD, is_same_file, name_of, read_bytes, to_json

log = logging.getLogger(__name__)

MAX_ROWS = 1 << 20


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
        typer.Option(metavar="ROWS", help="Prompts at a time on each device, or auto: the number that fits its memory."),
    ] = "8",
    devices: Devices = ALL,
    tensor_parallel: TensorParallel = 1,
    distributed: Distributed = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Work on a Ray cluster: its address, auto for the one that runs here, or local to start one."),
    ] = None,
    ray_actors: Annotated[
        int | None, typer.Option(min=1, help="With --ray, the number of processes. Default: one for each GPU of the cluster, or one.")
    ] = None,
    on_error: Annotated[OnError, typer.Option(help="For a wrong line: write its error to OUTPUT, or stop before any work.")] = OnError.stop,
    ignore_columns: Annotated[
        bool, typer.Option("--ignore-columns", help="Ignore unknown keys of a line, such as a data set's own columns.")
    ] = False,
    pass_columns: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="Copy these keys of a line to its OUTPUT, unchanged; may be given several times."),
    ] = None,
    samples: Samples = 1,
    seed: SeedOfSampling = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    refill: Annotated[bool, typer.Option(help="Give a free slot to the next prompt at once, not when all are free.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT, and the journal of another run.")] = False,
    as_json: Json = False,
):
    """Continue the prompts of a file, a batch that stays full. Started again after it was killed, it goes on where it was."""
    rows_at_once = _rows(batch_size)
    if samples > MAX_SAMPLES:
        raise InputError(f"--samples {samples} should be from 1 to {MAX_SAMPLES:,}")
    config = dataclasses.replace(config, num_return_sequences=samples)
    columns = _columns(ignore_columns, pass_columns or [])
    if distributed:
        if ray is not None or tensor_parallel > 1:
            raise InputError("--distributed divides the model over all devices; it cannot be combined with --ray or --tensor-parallel")
        if rows_at_once is None:
            raise InputError("--distributed: --batch-size should be a number, for machines may differ in how much memory is free")
    if as_json and output == STANDARD:
        raise InputError("--json prints its object on standard output, where the results would be; give OUTPUT a file, or leave --json out")
    if ray_actors and ray is None:
        raise InputError("--ray-actors is for --ray")
    if weights and ray is not None:
        raise InputError("--weights is for decoding here; leave it, or --ray, out")
    if distributed:
        join_others("batch", config, seed or 0, dtype, weights, rows_at_once, refill, on_error, columns)
    quiet, stops = as_json or not processes.is_first(), on_error is OnError.stop
    if ray is None:
        places = _places(config, devices, tensor_parallel, distributed=distributed)
    else:
        _check_for_ray(config, devices, tensor_parallel, refill)
    content, name = processes.from_first(lambda: _content(source, output)).encode("latin-1"), name_of(source)
    alone = ray is None and not distributed and len(places) == 1
    if not alone and (number := first_with_prefix(content)):
        given = "--ray" if ray is not None else "--distributed" if distributed else None
        one = f"{given} works on several; leave it out" if given else f"there are {len(places)}; give --devices 1"
        raise InputError(f"{name}, line {number}: lines with a prefix are decoded on one device, and {one}")
    checkpoints = processes.all_or_none(lambda: Checkpoints(model, config, lambda each: hub.local(each, progress=False if quiet else None)))
    of_lines = config
    if ray is None:
        network, tokenizer = processes.all_or_none(
            lambda: load(
                model,
                dtype,
                quiet=quiet,
                weights=weights,
                place=places[0],
                caches=[config.cache_config],
                silent_on_sampling=silent_on_sampling,
            )
        )
        # A draft with a model of its own is made before lines are read, so that their lengths cannot count.
        if config.leaves_gammas_open and checkpoints_of(config.draft_settings):
            (config,) = resolve_draft(network, [config], None, batch=rows_at_once or ROWS_OF_AUTO)
        # A draft that is named is made first: lines that are too long for its model are wrong.
        if config.draft != AUTO and not config.leaves_gammas_open:
            of_lines = processes.all_or_none(lambda: with_made_draft(config, network))
    else:
        jax.config.update("jax_platforms", "cpu")  # GPUs are the actors'
        connect(ray)
        if dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        network = outline_model(checkpoints.directory, dtype=dtype and str(dtype), weights=weights)
        tokenizer = load_tokenizer(checkpoints.directory)
        # Draft auto is resolved here, since the run's identity holds what it becomes.
        kind = "a GPU of the cluster" if cluster_gpus() else "cpu"
        (config,) = resolve_draft(network, [config], None, batch=rows_at_once or ROWS_OF_AUTO, device_kind=kind)
        of_lines = config
    prefixes = Prefixes(tokenizer, Path() if source == STANDARD else source.parent)
    lines = read_lines(content, network, tokenizer, of_lines, seed or 0, columns, prefixes)
    seed = used_seed(seed, [line.request.config for line in lines if line.request and not line.seeded])
    check_lines(lines, name, stops=stops)
    warn_of_equal_samples([line.request.config for line in lines if line.request])
    # All lines are prepared, also those that are done: draft "auto" and costs depend on all of them, and a run is known by them.
    good = [line for line in lines if line.request]
    work = dict(on_ray=ray is not None, shared=alone)
    prepared = processes.all_or_none(lambda: prepare_lines(network, tokenizer, good, config, rows_at_once, **work))
    processes.all_or_none(checkpoints.check_unchanged)
    run = run_identity(
        [content, *_named(prefixes.contents)],
        prepared,
        checkpoints,
        (seed, columns, weights),
        process.version_of("qspec-jax"),
    )
    journal = open_journal(written_by_first(output), run, lines, name, overwrite=overwrite)
    todo = [i for i, line in enumerate(good) if line.number not in journal.done]
    report = {"lines": len(lines), "wrong": len(lines) - len(good), "done_before": len(good) - len(todo)}
    with _ending_run(journal):
        if ray is None:
            stats, done = BatchStats(), ""
            if todo:
                rows = [row for row, i in enumerate(line_of_rows(good)) if good[i].number not in journal.done]
                stats = decode_lines(prepared.select(rows), [good[i] for i in todo], journal, rows_at_once, refill, places, quiet=quiet)
            report |= dataclasses.asdict(stats) | stats.rates | {"prompts": len(todo), "samples": stats.prompts}
            skipped = f", {report['wrong']} lines wrong" if report["wrong"] else ""
            busy = "" if stats.rates["busy_slots"] is None else f"; {stats.rates['busy_slots']:.1%} of places busy"
            samples = f", {stats.prompts} samples" if stats.prompts > len(todo) else ""
            if stats.prompts:
                done = f"{len(todo)} prompts{samples}{skipped}, {stats.new_tokens:,} tokens, {in_words(stats)}{busy}"
        else:
            settings = dict(batch_size=rows_at_once, actors=ray_actors, dtype=dtype and str(dtype), seed=seed, columns=columns)
            directory = checkpoints.directory.resolve()
            seconds = decode_lines_on_ray(
                [good[i] for i in todo], content, directory, prepared.config, journal, settings, stops=stops, quiet=quiet
            )
            report["seconds"] = seconds
            done = f"{len(todo)} prompts on Ray in {seconds:.1f} s"
        journal.finish()
    if as_json and processes.is_first():
        print(to_json(report))
    elif done and not quiet:
        print(f"{'standard output' if output == STANDARD else output}: {done}", file=sys.stderr)


def _named(files: dict[str, bytes]) -> list[bytes]:
    """The names and contents of files, in the order of their names."""
    return [part for name in sorted(files) for part in (name.encode(errors="surrogatepass"), files[name])]


@contextlib.contextmanager
def _ending_run(journal: Journal) -> Iterator[None]:
    """Closes the journal at the end; where the run is interrupted, a line says how it goes on."""

    def interrupted() -> None:
        print(f"qspec: interrupted{journal.goes_on}", file=sys.stderr)
        journal.close()

    with contextlib.closing(journal), process.WhenInterrupted(interrupted):
        yield


def _places(config: GenerationConfig, devices: str, tensor_parallel: int, *, distributed: bool) -> list[Place]:
    """The devices or meshes that options name. Of a cache in host memory, which devices would share, it is one unless several are asked
    for."""
    on = devices_of(devices)
    if devices == ALL and not distributed and config.cache_config.in_host_memory:
        if len(on) > 1:
            log.warning("cache %s: one device of %d is used, as they would share host memory", config.cache, len(on))
        on = on[:1]
    return places_of(on, len(on) if distributed else tensor_parallel)


def _content(source: Path, output: Path) -> str:
    """What is in the input, a character for each byte, for JSON knows no bytes."""
    if is_same_file(source, output):
        raise InputError(f"{output}: INPUT and OUTPUT are the same file")
    return read_bytes(source).decode("latin-1")


def _check_for_ray(config: GenerationConfig, devices: str, tensor_parallel: int, refill: bool) -> None:
    """Raises InputError for options that depend on the machine that decodes, and for those of a single process."""
    if "skip=auto" in config.draft:
        raise InputError(f"--ray: --draft {config.draft} depends on the machine that decodes; name a draft and its layers")
    if config.adaptive and config.draft_cost is None:
        raise InputError("--ray: --adaptive needs --draft-cost, for costs are stored for the machine that decodes")
    if config.cache_config.in_host_memory:
        raise InputError(f"--ray: cache {config.cache} has a part in host memory, which the actors of a machine would share")
    if not refill:
        raise InputError("--ray: --no-refill is for one process, to compare with")
    if devices != ALL or tensor_parallel > 1:
        raise InputError("--ray: --devices and --tensor-parallel are for one machine; --ray-actors says how many work")


def _rows(text: str) -> int | None:
    """A number of rows, None for auto. Raises InputError for any other text."""
    if text == AUTO:
        return None
    if not (text.isdecimal() and text.isascii() and 0 < int(text) <= MAX_ROWS):
        raise InputError(f"--batch-size {text} should be a whole number from 1 to {MAX_ROWS:,}, or {AUTO}")
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
