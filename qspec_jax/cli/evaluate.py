"""The commands `qspec eval ...`."""

import dataclasses
import enum
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import typer

from qspec_jax import demo, drafts, plots
from qspec_jax.caches.config import CacheConfig
from qspec_jax.cli.options import (
    CacheKind,
    Calibrate,
    DtypeOption,
    EvaluatedModel,
    GammaList,
    GroupSize,
    Json,
    Method,
    Output,
    Plot,
    Seed,
    SensitiveLayers,
    load,
    number_list,
    show,
)
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.errors import InputError
from qspec_jax.evaluate import acceptance, acceptance_report, needle, perplexity, quantizers
from qspec_jax.files import output_to, read_text
from qspec_jax.training import corpus

log = logging.getLogger(__name__)

evaluations = typer.Typer(no_args_is_help=True, help="Measurements of a model.")


@evaluations.command("acceptance")
def acceptance_command(
    model: EvaluatedModel = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A text; may be given several times: the demo's held-out files, if not given.")
    ] = None,
    num_speculative_tokens: GammaList = str(GenerationConfig.num_speculative_tokens),
    temperature: Annotated[list[float] | None, typer.Option(help="May be given several times: 0 and 1, if not given.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Context before the first draft.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to walk or generate for each text.")] = 512,
    draft_bits: Annotated[int, typer.Option(help="Bits of the draft's weights, 4 or 16.")] = 4,
    draft_planes: Annotated[int, typer.Option(help="Planes of the cache that the draft reads, 1 or 2.")] = 1,
    sensitive_layers: SensitiveLayers = 0,
    scheme: Annotated[str, typer.Option(help="KV quantizer: int8_first or paper.")] = CacheConfig.scheme,
    calibrate: Calibrate = True,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """Share of drafts that the target accepts, against gamma: teacher-forced and free-running."""
    if plot:
        plots.check(plot, None)
    shared = dict(max_new_tokens=max_new_tokens, scheme=scheme)
    configs = [
        GenerationConfig(num_speculative_tokens=gamma, temperature=heat, **shared)
        for gamma in number_list("--gamma", num_speculative_tokens, int)
        for heat in temperature or [0.0, 1.0]
    ]
    network, _, texts = _texts(model, file, dtype, quiet=as_json)
    chosen, too_short = perplexity.long_enough(texts, prompt_tokens, max_new_tokens)
    skipped = [text.name for text in too_short]
    prompts = [text[:prompt_tokens] for text in chosen]
    for config in configs:
        acceptance.check(network, prompts, config)
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        size = prompt_tokens + max_new_tokens
        log.warning("%d of %d texts have fewer than %d tokens and are left out: %s", len(skipped), len(texts), size, names)
    draft = drafts.quantspec(
        network,
        weight_bits=draft_bits,
        planes=draft_planes,
        sensitive_layers=sensitive_layers,
        calibration=prompts if calibrate else None,
        progress=False if as_json else None,
    )
    results = []
    for config in configs:
        key = jax.random.key(seed)
        for mode in ("teacher-forced", "free-running"):
            gamma = config.num_speculative_tokens
            _say(f"gamma {gamma}, temperature {config.temperature:g}, {mode}: {len(chosen)} texts", quiet=as_json)
            if mode == "teacher-forced":
                measured = acceptance.teacher_forced(network, draft, chosen, config, key)
            else:
                measured = acceptance.free_running(network, draft, prompts, config, key)
            results.append({"gamma": gamma, "temperature": config.temperature, "mode": mode} | dataclasses.asdict(measured))
    report = acceptance_report.Report(len(chosen), skipped, results)
    show(report, acceptance_report.table, None, sys.stdout.write, as_json=as_json)
    if plot:
        acceptance_report.plot(report, plot)


def _say(message: str, *, quiet: bool) -> None:
    if not quiet and sys.stderr.isatty():
        print(message, file=sys.stderr)


CacheName = enum.StrEnum("CacheName", {name: name for name in perplexity.PLANES})
VariantName = enum.StrEnum("VariantName", {name: name for name in quantizers.VARIANTS})
Style = enum.StrEnum("Style", list(needle.FORMATS))
Files = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Texts: the demo's held-out files, if not given.")]
PromptTokens = Annotated[int, typer.Option(help="Context before the first token that is scored.")]
Scored = Annotated[int, typer.Option(help="Tokens to score of each text.")]


@evaluations.command("perplexity")
def perplexity_command(
    file: Files = None,
    model: EvaluatedModel = None,
    cache: Annotated[
        list[CacheName] | None,
        typer.Option(help="The model's own precision, both planes, or the upper one; may be given several times: all three, if not given."),
    ] = None,
    prompt_tokens: PromptTokens = 4096,
    max_new_tokens: Scored = 512,
    scheme: Annotated[str, typer.Option(help="KV quantizer: int8_first or paper.")] = CacheConfig.scheme,
    group_size: GroupSize = None,
    dtype: DtypeOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """Perplexity of real text through decode, with each KV cache, and how far its predictions are from the full cache's."""
    if plot:
        plots.check(plot, output)
    network, tokenizer, texts = _texts(model, file, dtype, quiet=as_json)
    with output_to(output) as write:
        report = perplexity.run(
            str(model or "the embedded model"),
            network,
            tokenizer,
            texts,
            cache or list(CacheName),
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            scheme=scheme,
            group_size=group_size,
            progress=False if as_json else None,
        )
        show(report, perplexity.table, output, write, as_json=as_json)
    if plot:
        perplexity.plot(report, plot)


@evaluations.command("quantizers")
def quantizers_command(
    file: Files = None,
    model: EvaluatedModel = None,
    variant: Annotated[
        list[VariantName] | None,
        typer.Option(help="Axes of keys and values, or another quantizer on the first; may be given several times: all, if not given."),
    ] = None,
    prompt_tokens: PromptTokens = 4096,
    max_new_tokens: Scored = 512,
    group_size: GroupSize = None,
    dtype: DtypeOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """What the KV quantizer's choices cost: axes of the scales, rounding or truncation to the draft's 4 bits."""
    if plot:
        plots.check(plot, output)
    network, tokenizer, texts = _texts(model, file, dtype, quiet=as_json)
    with output_to(output) as write:
        report = quantizers.run(
            str(model or "the embedded model"),
            network,
            tokenizer,
            texts,
            variant or list(VariantName),
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            group_size=group_size,
            progress=False if as_json else None,
        )
        show(report, quantizers.table, output, write, as_json=as_json)
    if plot:
        quantizers.plot(report, plot)


@evaluations.command("needle")
def needle_command(
    model: EvaluatedModel = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas between them.")] = "1024,2048,4096",
    depths: Annotated[str, typer.Option(help="Where the needle stands, from 0 to 1, with commas between them.")] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="Prompts for each length and depth.")] = 4,
    style: Annotated[
        Style, typer.Option("--format", help="python: functions, for models of code; text: sentences, for all others.")
    ] = Style.python,
    method: Annotated[Method | None, typer.Option(help="This one alone: quantspec and the full cache, if not given.")] = None,
    cache: Annotated[CacheKind | None, typer.Option(help="Cache of --method autoregressive: full, if not given.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 4,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """How often a model finds a value in a synthetic text, by length and depth, with a full cache and with quantspec's."""
    if cache is not None and method is not Method.autoregressive:
        raise InputError("--cache is for --method autoregressive; quantspec always has the int8 cache")
    methods = needle.METHODS
    if method is not None:
        methods = (needle.Method(method.value, "int8" if method is Method.quantspec else (cache or CacheKind.full).value),)
    sizes, shares = number_list("--lengths", lengths, int), number_list("--depths", depths, float)
    if plot:
        plots.check(plot, None)
    directory, progress = model or demo.MODEL, False if as_json else None
    network, tokenizer = load(directory, dtype or (None if model else demo.dtype()), quiet=as_json)
    report = needle.run(
        network,
        tokenizer,
        lengths=sizes,
        depths=shares,
        samples=samples,
        style=style.value,
        methods=methods,
        seed=seed,
        batch_size=batch_size,
        draft=None if method is Method.autoregressive else drafts.stored(directory, network),
        progress=progress,
    )
    show(report, needle.table, None, sys.stdout.write, as_json=as_json)
    if plot:
        needle.plot(report, plot)


def _texts(model: Path | None, files: Sequence[Path] | None, dtype: str | None, *, quiet: bool) -> tuple:
    """The model, its tokenizer, and the token ids of the files, or of the held-out ones, by name."""
    paths = files or corpus.held_out_files()
    contents = {str(path): read_text(path) for path in paths}
    network, tokenizer = load(model or demo.MODEL, dtype or (None if model else demo.dtype()), quiet=quiet)
    return network, tokenizer, {name: tokenizer(text)["input_ids"] for name, text in contents.items()}
