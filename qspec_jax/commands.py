"""The command line: `qspec demo`, `generate`, `convert`, `verify`, `export`, `info`, `batch`, `eval ...`, `bench ...`.

With --json, standard output is one JSON object. `qspec_jax.cli` runs them.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from convert.commands import conversions
from qspec_jax import demo as embedded
from qspec_jax import drafts, process
from qspec_jax.bench.commands import benchmarks
from qspec_jax.command_line import (
    CacheKind,
    Calibrate,
    DtypeOption,
    Gamma,
    GroupSize,
    Json,
    ModelDirectory,
    Output,
    Seed,
    SensitiveLayers,
    load,
    with_settings,
)
from qspec_jax.config import CacheConfig, GenerationConfig
from qspec_jax.decode import Step
from qspec_jax.demo import corpus
from qspec_jax.errors import InputError
from qspec_jax.evaluate.batch_command import batch
from qspec_jax.evaluate.commands import evaluations
from qspec_jax.files import output_to, read_texts, to_json
from qspec_jax.generate import Generation, Stream, generate, token_lists
from qspec_jax.generate import stream as stream_prompt
from qspec_jax.info import ModelInfo, model_info

# Rounds between two looks at the decode loop, where they only move a progress bar.
ROUNDS_PER_UPDATE = 16

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(evaluations, name="eval")
app.add_typer(benchmarks, name="bench")
app.add_typer(conversions)
app.command("batch")(batch)


def _print_version(asked: bool) -> None:
    if asked:
        print(process.version())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
):
    """Self-speculative decoding for long contexts."""


@app.command("generate")
@with_settings
def generate_command(
    model: ModelDirectory,
    config: GenerationConfig,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A text file that holds a prompt, or - for standard input; may be given several times.")
    ] = None,
    cache: Annotated[CacheKind | None, typer.Option(help="Cache of the autoregressive method: full, if not given.")] = None,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    calibrate: Calibrate = False,
    sensitive_layers: SensitiveLayers = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes; one prompt only.")] = False,
    output: Output = None,
    as_json: Json = False,
):
    """Continue prompts."""
    speculative = config.method == "quantspec"
    if cache is not None and speculative:
        raise InputError("--cache is for --method autoregressive; quantspec always has the int8 cache")
    if stream and (as_json or output):
        raise InputError("--stream prints text as it comes; it does not go with --json or --output")
    if (calibrate or sensitive_layers) and not speculative:
        option = "--calibrate" if calibrate else "--sensitive-layers"
        raise InputError(f"{option} is for --method quantspec; the autoregressive method has no draft")
    if config.logprobs is not None and not as_json:
        raise InputError("--logprobs and --top-logprobs go with --json")
    config = dataclasses.replace(config, cache=cache and cache.value)
    prompts = [*(prompt or []), *read_texts("--prompt-file", prompt_file or [])]
    if not prompts:
        raise InputError("a prompt is needed: --prompt TEXT or --prompt-file FILE")
    if stream and len(prompts) > 1:
        raise InputError("--stream takes one prompt")
    with output_to(output) as write:
        network, tokenizer = load(model, dtype, quiet=as_json)
        tokens = token_lists(network, prompts, config, tokenizer)
        draft = None
        if speculative and (calibrate or sensitive_layers):
            settings = dict(calibration=tokens if calibrate else None, sensitive_layers=sensitive_layers)
            draft = drafts.quantspec(network, **settings, progress=False if as_json else None)
        elif speculative:
            draft = drafts.stored(model, network)
        if stream:
            out = _print_stream(
                stream_prompt(network, tokens[0], config=config, key=jax.random.key(seed), tokenizer=tokenizer, draft=draft)
            )
        else:
            progress = _Progress(config.max_new_tokens * len(prompts), quiet=as_json)
            out = _generate(network, tokenizer, tokens, config, seed, progress, draft)
        if as_json:
            write(to_json(_as_object(out)) + "\n")
        elif not stream:
            write(out.text[0] + "\n" if len(prompts) == 1 else "".join(f"=== prompt {i} ===\n{text}\n" for i, text in enumerate(out.text)))
    if not as_json:
        Console(stderr=True).print(_stats_table({config.method: out}))


@app.command()
def info(
    directory: Annotated[Path, typer.Argument(help="Checkpoint directory, in Hugging Face format or converted; or ORG/NAME on the Hub.")],
    context: Annotated[int | None, typer.Option(help="Tokens to size the cache for: the model's longest sequence, if not given.")] = None,
    group_size: GroupSize = None,
    as_json: Json = False,
):
    """What a checkpoint is, and what it takes in memory."""
    found = model_info(directory, context=context, cache=CacheConfig(group_size=group_size))
    if as_json:
        print(to_json(dataclasses.asdict(found)))
    else:
        Console().print(_info_table(found))


@app.command()
def demo(
    prompt_tokens: Annotated[int, typer.Option(help="How much of the held-out file to read.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(help="How much to continue it by.")] = 256,
    num_speculative_tokens: Gamma = GenerationConfig.num_speculative_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy, which a model this small turns into repetition.")] = 0.8,
    seed: Seed = 0,
    calibrate: Calibrate = True,
    as_json: Json = False,
):
    """Continue a real source file with the embedded model, by both methods."""
    console = Console(quiet=as_json)
    network, tokenizer = load(embedded.MODEL, embedded.dtype(), quiet=as_json)
    path = _demo_file()
    tokens = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    positions = network.config.max_length
    if prompt_tokens > min(len(tokens), positions - max_new_tokens):
        raise InputError(
            f"--prompt-tokens {prompt_tokens} and --max-new-tokens {max_new_tokens} are too many: {path.name} has {len(tokens)} tokens, "
            f"and the model {positions} positions for both"
        )
    prompt = tokens[:prompt_tokens]
    parameters = sum(weight.size for weight in network.weights().values())
    console.print(
        f"[bold]qspec demo[/]: a Llama of {parameters / 1e6:.1f} M parameters, trained on Python source, continues {path.name} "
        f"(held out from its training) after {prompt_tokens:,} tokens, by {max_new_tokens} new ones, "
        f"on {_device_name()} in {network.dtype.name}.\n"
    )
    shared = dict(max_new_tokens=max_new_tokens, temperature=temperature, ignore_eos=True)
    runs = {
        "quantspec": GenerationConfig(num_speculative_tokens=num_speculative_tokens, **shared),
        "autoregressive": GenerationConfig(method="autoregressive", **shared),
    }
    draft = drafts.quantspec(network, calibration=[prompt] if calibrate else None, progress=False if as_json else None)
    results = {}
    for name, config in runs.items():
        results[name] = _generate(network, tokenizer, [prompt], config, seed, _Progress(max_new_tokens, quiet=as_json, label=name), draft)
    if as_json:
        print(to_json({"file": path.name, "dtype": network.dtype.name} | {name: _as_object(out) for name, out in results.items()}))
        return
    context = tokenizer.decode(prompt[-60:])
    continued = Text.assemble((context, "dim"), (results["quantspec"].text[0], "green"))
    console.print(Panel(continued, title=f"{path.name}, continued by quantspec", title_align="left"))
    console.print(_stats_table(results, bf16_bytes=_bf16_cache_bytes(network, prompt_tokens + max_new_tokens)))
    if jax.default_backend() == "cpu":
        console.print(
            "On a CPU speculation shows its [bold]acceptance[/], not its speed-up: it pays where decoding waits for memory, on a GPU at "
            "long context. Here unpacking 4-bit codes costs more than it saves."
        )


def _generate(
    network, tokenizer, prompts: list, config: GenerationConfig, seed: int, progress: "_Progress", draft: Step | None
) -> Generation:
    with progress:
        return generate(
            network,
            prompts,
            config=config,
            key=jax.random.key(seed),
            tokenizer=tokenizer,
            draft=draft,
            on_tokens=progress.on_tokens if progress.active else None,
            rounds_per_update=ROUNDS_PER_UPDATE,
        )


class _Progress:
    """A bar of new tokens on standard error; silent without a terminal."""

    def __init__(self, total: int, *, quiet: bool, label: str = "generate"):
        self.bar = tqdm(total=total, desc=f"{label}: compile, read the prompt", unit="tok", leave=False, disable=True if quiet else None)
        self.label, self.active = label, not self.bar.disable

    def on_tokens(self, new: list[list[int]]) -> None:
        self.bar.set_description(self.label, refresh=False)
        self.bar.update(sum(map(len, new)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()


def _as_object(out: Generation) -> dict[str, Any]:
    """Without log-probabilities where none were asked for."""
    return {name: value for name, value in dataclasses.asdict(out).items() if value is not None}


def _print_stream(pieces: Stream) -> Generation:
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return pieces.generation


def _demo_file() -> Path:
    path = next(iter(corpus.held_out_files()), None)
    if path is None:
        raise InputError("this Python has no sources of its standard library, which the demo reads; use another Python")
    return path


def _device_name() -> str:
    device = jax.devices()[0]
    return "a CPU" if device.platform == "cpu" else device.device_kind


def _bf16_cache_bytes(network, tokens: int) -> int:
    c = network.config
    return 2 * 2 * c.num_layers * c.num_kv_heads * c.head_dim * tokens


def _megabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _stats_table(results: dict[str, Generation], *, bf16_bytes: int | None = None) -> Table:
    table = Table("", *results, box=None, header_style="bold", padding=(0, 3, 0, 0))

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
    row("KV cache", lambda s: _megabytes(s.cache_bytes) + against(s))
    return table


def _info_table(found: ModelInfo) -> Table:
    table = Table("", "", box=None, show_header=False, padding=(0, 3, 0, 0))
    rows: dict[str, Any] = {
        "architecture": f"{found.architecture}, stored in {found.dtype}",
        "parameters": f"{found.parameters:,}",
        "layers": f"{found.num_layers} of {found.hidden_size}, MLP {found.intermediate_size}",
        "heads": f"{found.num_heads} query, {found.num_kv_heads} KV, of {found.head_dim}",
        "vocabulary": f"{found.vocab_size:,}, embeddings {'tied' if found.tie_word_embeddings else 'not tied'}",
        "positions": f"{found.max_length:,}, rope {found.rope_type}",
        "EOS ids": ", ".join(map(str, found.eos_token_ids)) or "none",
        "weights": f"{_megabytes(found.weight_bytes)} target, {_megabytes(found.draft_weight_bytes)} more for the INT4 draft",
        f"KV cache, {found.context:,} tokens": f"{_megabytes(found.cache_bytes)} hierarchical, {_megabytes(found.full_cache_bytes)} full",
    }
    for label, value in rows.items():
        table.add_row(label, value)
    return table
