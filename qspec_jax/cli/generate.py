"""The command `qspec generate`."""

import contextlib
import dataclasses
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from qspec_jax.cli.options import (
    Calibrate,
    DevicesOfModel,
    Distributed,
    DtypeOption,
    Json,
    ModelDirectory,
    Output,
    Samples,
    SeedOfSampling,
    SensitiveLayers,
    StateFile,
    TraceFile,
    WeightsOption,
    join_others,
    load,
    megabytes,
    place_of,
    used_seed,
    warn_of_equal_samples,
    with_sensitive_layers,
    with_settings,
    written_by_first,
)
from qspec_jax.cli.trace_file import page_to
from qspec_jax.decoding import processes
from qspec_jax.decoding.ahead import compile_ahead
from qspec_jax.decoding.chat import check_template, hint_at_chat, with_chats
from qspec_jax.decoding.config import BITS, GenerationConfig
from qspec_jax.decoding.exact_bits import check_together
from qspec_jax.decoding.generate import Stream, generate
from qspec_jax.decoding.generate import stream as stream_prompt
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.out_of_memory import explained_memory
from qspec_jax.decoding.prepare import Prepared, prepare
from qspec_jax.decoding.reading import extend
from qspec_jax.decoding.requests import checked_prompts
from qspec_jax.decoding.results import Generation
from qspec_jax.decoding.saving import load_state
from qspec_jax.drafts.registry import AUTO, NONE, USUAL
from qspec_jax.errors import InputError, writing
from qspec_jax.files import STANDARD, name_of, output_to, read_text, read_texts, to_json
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar, shown
from qspec_jax.states.state import State

log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # of somebody who may not know that standard input is read
# Rounds between two updates that only move a progress bar.
ROUNDS_PER_UPDATE = 16


@with_settings
def generate_command(
    model: ModelDirectory,
    config: GenerationConfig,
    silent_on_sampling: bool,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A text file that holds a prompt, or - for standard input; may be given several times.")
    ] = None,
    state: StateFile = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take each prompt as a user's message, through the checkpoint's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="With --chat, the system message before each prompt.")] = None,
    samples: Samples = 1,
    seed: SeedOfSampling = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    devices: DevicesOfModel = None,
    distributed: Distributed = False,
    calibrate: Calibrate = False,
    sensitive_layers: SensitiveLayers = 0,
    profile: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a profile of the run to this folder, for ui.perfetto.dev and XProf.")
    ] = None,
    trace: TraceFile = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes; one prompt only.")] = False,
    output: Output = None,
    as_json: Json = False,
):
    """Continue prompts."""
    if stream and (as_json or output):
        raise InputError("--stream prints text as it comes; it cannot be combined with --json or --output")
    if stream and samples > 1:
        raise InputError(f"--stream prints one text as it comes; leave it, or --samples {samples}, out")
    given = {"--stream": stream, "--devices": devices, "--distributed": distributed}
    if trace is not None and (other := next((name for name, value in given.items() if value), None)):
        raise InputError(f"--trace is of a whole decode on one device; leave it, or {other}, out")
    config = dataclasses.replace(config, num_return_sequences=samples)
    option = "--calibrate" if calibrate else "--sensitive-layers"
    if (calibrate or sensitive_layers) and config.draft == AUTO:
        log.info("draft %s: %s, which has the INT4 weights that %s is for", AUTO, USUAL, option)
        config = dataclasses.replace(config, draft=USUAL)
    if (calibrate or sensitive_layers) and not config.speculative:
        raise InputError(f"{option} is for decoding with a draft; --draft none has none")
    if sensitive_layers:
        config = dataclasses.replace(config, draft=with_sensitive_layers(config.draft_settings, sensitive_layers))
    if config.logprobs is not None and not as_json:
        raise InputError("--logprobs and --top-logprobs need --json")
    if system is not None and not chat:
        raise InputError("--system is for --chat, which takes each prompt as a user's message")
    if distributed and (calibrate or devices):
        why = "calibrates nothing; leave --calibrate" if calibrate else "takes all devices of all processes; leave --devices"
        raise InputError(f"--distributed {why} out")
    if state is not None:
        others = {
            "--exact bits": config.exact == BITS,
            "--chat": chat,
            "--calibrate": calibrate,
            "--sensitive-layers": sensitive_layers,
            "--devices": devices,
        }
        if given := next((name for name, value in (others | {"--distributed": distributed}).items() if value), None):
            instead = "; qspec chat --state continues a conversation" if given == "--chat" else ""
            raise InputError(f"{given} cannot be combined with --state, which continues what was read as it was{instead}")
    if distributed:
        join_others("generate", config, seed or 0, dtype, weights, stream, as_json, chat, system)
    named = processes.from_first(lambda: _prompts(prompt or [], prompt_file or [], piped=state is None))
    names, prompts = [name for name, _ in named], [text for _, text in named]
    if not prompts and state is None:
        raise InputError("a prompt is needed: --prompt TEXT, --prompt-file FILE, or standard input")
    check_together([config] * len(prompts))
    if stream and len(prompts) > 1:
        raise InputError("--stream takes one prompt")
    place, quiet = place_of(devices, distributed=distributed), as_json or not processes.is_first()
    if calibrate and place is not None:
        raise InputError("--calibrate is for one device; leave it, or --devices, out")

    def token_ids(network: Llama, tokenizer: Any) -> list[list[int]]:
        return checked_prompts(network, _messages(prompts, system, tokenizer) if chat else prompts, config, tokenizer, names)

    def compiles_ahead(outline: Llama, tokenizer: Any) -> None:
        nonlocal config
        config = compile_ahead(outline, token_ids(outline, tokenizer), config, tokenizer)

    ahead = place is None and state is None and trace is None and not calibrate
    with contextlib.ExitStack() as opened:
        write = processes.all_or_none(lambda: opened.enter_context(output_to(written_by_first(output))))
        write_trace = trace and opened.enter_context(page_to(trace, output))
        statements = opened.enter_context(contextlib.ExitStack())  # they end where text may come
        statements.enter_context(shown(False if quiet else None))
        network, tokenizer = processes.all_or_none(
            lambda: load(
                model,
                dtype,
                quiet=quiet,
                weights=weights,
                place=place,
                caches=[config.cache_config],
                silent_on_sampling=silent_on_sampling,
                before_weights=compiles_ahead if ahead else None,
            )
        )
        hints = () if chat or state else (hint_at_chat(tokenizer, prompt, "--chat takes it as a user's message") for prompt in prompts)
        if hint := next(filter(None, hints), None):
            log.warning("%s", hint)
        if state is None:
            tokens = token_ids(network, tokenizer)
        else:
            loaded = load_state(state, network, config=config)
            config, tokens = dataclasses.replace(config, **loaded.reader.settings), _extended(loaded, prompts, tokenizer)
        warn_of_equal_samples([config])
        settings = dict(
            config=config,
            key=key_of(used_seed(seed, [config])),
            tokenizer=tokenizer,
            calibrate=calibrate,
            progress=False if quiet else None,
        )
        memory = explained_memory(network, config, max(map(len, tokens)), rows=samples * len(tokens))
        with memory, contextlib.ExitStack() as traced:
            processes.all_or_none(lambda: traced.enter_context(profiled(profile if processes.is_first() else None)))
            prepared = processes.all_or_none(lambda: prepare(network, tokens, **settings))
            if stream:
                statements.close()
                out = _print_stream(stream_prompt(network, prepared))
            else:
                bar = Progress(config.max_new_tokens * samples * len(tokens), quiet=quiet)
                out = generate_with_progress(prepared, bar, trace=trace is not None)
        statements.close()
        if trace:
            write_trace([out.trace])
        if as_json:
            write(to_json(as_object(out)) + "\n")
        elif not stream:
            write(_in_words(out.text, samples))
    if not quiet:
        ran = prepared.config.draft_name if prepared.draft else NONE  # --gamma 0 drafts nothing
        Console(stderr=True).print(stats_table({ran: out}))


def _prompts(given: list[str], files: list[Path], *, piped: bool) -> list[tuple[str, str]]:
    """The prompts that are given, those in files, or else, if `piped`, what comes through a pipe: what messages call each, and its text."""
    prompts = [(f"prompt {i}", text) for i, text in enumerate(given)]
    prompts += zip(map(name_of, files), read_texts("--prompt-file", files))
    if piped and not prompts and sys.stdin is not None and not sys.stdin.isatty():  # piped; nothing comes where there is nothing to read
        waits = threading.Timer(PATIENCE_S, lambda: print("qspec: reads a prompt from standard input, to its end", file=sys.stderr))
        waits.start()
        try:
            prompts = [(name_of(STANDARD), text)] if (text := read_text(STANDARD)) else []
        finally:
            waits.cancel()
    return prompts


def _extended(state: State, prompts: list[str], tokenizer: Any) -> list[State]:
    """A state that was extended by each of the prompts; as it is without any."""
    return [extend(fork, prompt, tokenizer=tokenizer) for fork, prompt in zip(state.fork(len(prompts)), prompts)] if prompts else [state]


def _messages(prompts: list[str], system: str | None, tokenizer: Any) -> list[list[int]]:
    """The token ids of prompts as users' messages. Raises InputError where there is no chat template."""
    check_template(tokenizer, "--chat needs")
    first = [] if system is None else [{"role": "system", "content": system}]
    return with_chats([[*first, {"role": "user", "content": prompt}] for prompt in prompts], tokenizer)


def _in_words(texts: list[str], samples: int) -> str:
    """The texts, each under the prompt and the sample that it is of, where there are several."""
    if len(texts) == 1:
        return texts[0] + "\n"
    prompts = len(texts) // samples
    found = []
    for i, text in enumerate(texts):
        of = ([f"prompt {i // samples}"] if prompts > 1 else []) + ([f"sample {i % samples}"] if samples > 1 else [])
        found.append(f"=== {', '.join(of)} ===\n{text}\n")
    return "".join(found)


@contextlib.contextmanager
def profiled(folder: Path | None) -> Iterator[None]:
    """Writes what JAX does within to a folder, and says where. Raises InputError where that is no folder that can be written to."""
    if folder is None:
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--profile {folder}: should be a folder")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # or it would fail when all is done
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # of every call in Python there would be more than a viewer shows
    with jax.profiler.trace(str(folder), create_perfetto_trace=True, profiler_options=options):
        yield
    newest = max(folder.rglob("perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)
    log.warning("the profile is in %s; open it at ui.perfetto.dev", newest)


def generate_with_progress(prepared: Prepared, progress: "Progress", *, trace: bool = False) -> Generation:
    with progress:
        # Several processes update equally often, whichever shows a bar.
        on_tokens = progress.on_tokens if progress.active or processes.count() > 1 else None
        return generate(prepared.model, prepared, on_tokens=on_tokens, rounds_per_update=ROUNDS_PER_UPDATE, trace=trace)


class Progress:
    """A bar of new tokens on standard error; silent without a terminal."""

    def __init__(self, total: int, *, quiet: bool, label: str = "generate"):
        about = dict(total=total, desc=f"{label}: compile, read the prompt", unit="tok")
        self.bar = progress_bar(progress=False if quiet else None, **about)
        self.label, self.active = label, not self.bar.disable

    def on_tokens(self, new: list[list[int]]) -> None:
        self.bar.set_description(self.label, refresh=False)
        self.bar.update(sum(map(len, new)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()


def as_object(out: Generation) -> dict[str, Any]:
    """Without states and trace, and without log-probabilities where none were asked for."""
    found = dataclasses.asdict(dataclasses.replace(out, states=None, trace=None))
    return {name: value for name, value in found.items() if value is not None}


def _print_stream(pieces: Stream) -> Generation:
    for piece in pieces:
        if processes.is_first():
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    if processes.is_first():
        sys.stdout.write("\n")
    return pieces.generation


def stats_table(results: dict[str, Generation], *, bf16_bytes: int | None = None) -> Table:
    table = Table("", box=None, header_style="bold", padding=(0, 3, 0, 0))
    for name in results:
        table.add_column(name, overflow="fold")  # the text of a cascade is long

    def row(label: str, show) -> None:
        cells = [show(out.stats) for out in results.values()]
        if any(cells):
            table.add_row(label, *(cell or "-" for cell in cells))

    row("new tokens", lambda s: f"{s.new_tokens:,} after {s.prompt_tokens:,}")
    row(
        "acceptance rate",
        lambda s: s.num_draft_tokens and f"{s.draft_acceptance_rate:.1%} ({s.num_accepted_draft_tokens} of {s.num_draft_tokens})",
    )
    row("mean acceptance length", lambda s: s.mean_acceptance_length and f"{s.mean_acceptance_length:.2f} tokens a round")
    row("rounds", lambda s: s.num_spec_steps and f"{s.num_spec_steps}")
    row("flushes", lambda s: s.flushes and f"{s.flushes}")
    row("tokens/s (decode)", lambda s: f"{s.tokens_per_second:.1f}")
    row("prefill, decode, compile", lambda s: f"{s.prefill_s:.1f} s, {s.decode_s:.1f} s, {s.compile_s:.1f} s")
    against = lambda s: f" ({s.cache_bytes / bf16_bytes:.0%} of bfloat16)" if bf16_bytes else ""
    of_host = lambda s: f", {megabytes(s.host_cache_bytes)} of it in host memory" if s.host_cache_bytes else ""
    row("KV cache", lambda s: megabytes(s.cache_bytes) + against(s) + of_host(s))
    return table
