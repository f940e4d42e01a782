"""The commands `qspec eval ...`."""

import dataclasses
import enum
import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import typer

from qspec_jax import demo, plots
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.cli.options import (
    CacheKind,
    Calibrate,
    DtypeOption,
    EvaluatedModel,
    GammaList,
    GroupSize,
    Json,
    OldMethod,
    Output,
    Plot,
    Seed,
    SensitiveLayers,
    chosen_draft,
    load,
    number_list,
    show,
    with_sensitive_layers,
)
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts.int4 import int4_model, stored_int4
from qspec_jax.drafts.quantspec import QuantSpecSettings
from qspec_jax.drafts.registry import DRAFTS, NONE, DraftSettings, parse_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate import acceptance, needle, perplexity, quantizers
from qspec_jax.files import output_to, read_text
from qspec_jax.training import corpus

log = logging.getLogger(__name__)

evaluations = typer.Typer(no_args_is_help=True, help="Measurements of a model.")


Drafts = Annotated[
    list[str] | None,
    typer.Option("--draft", metavar="NAME[:SETTING=VALUE,...]", help=f"{', '.join(DRAFTS)}; may be given several times: quantspec."),
]


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
    draft: Drafts = None,
    draft_bits: Annotated[int | None, typer.Option(hidden=True, help="The old way to say --draft quantspec:weight_bits=16.")] = None,
    draft_planes: Annotated[int | None, typer.Option(hidden=True, help="The old way to say --draft quantspec:cache=int8.")] = None,
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
    chosen_drafts = _chosen_drafts(draft or [GenerationConfig.draft], draft_bits, draft_planes, sensitive_layers)
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
    int4 = functools.cache(lambda: int4_model(network, calibration=prompts if calibrate else None, progress=False if as_json else None))
    results = []
    for name, settings in chosen_drafts.items():
        made = settings.make(network, int4)
        for config in configs:
            key = jax.random.key(seed)
            for mode in ("teacher-forced", "free-running"):
                gamma = config.num_speculative_tokens
                _say(f"{name}, gamma {gamma}, temperature {config.temperature:g}, {mode}: {len(chosen)} texts", quiet=as_json)
                if mode == "teacher-forced":
                    measured = acceptance.teacher_forced(network, made, chosen, config, key)
                else:
                    measured = acceptance.free_running(network, made, prompts, config, key)
                of_run = {"draft": name, "gamma": gamma, "temperature": config.temperature, "mode": mode}
                results.append(of_run | dataclasses.asdict(measured))
    report = acceptance.AcceptanceReport(len(chosen), skipped, results)
    show(report, acceptance.table, None, sys.stdout.write, as_json=as_json)
    if plot:
        acceptance.plot(report, plot)


def _chosen_drafts(texts: list[str], bits: int | None, planes: int | None, sensitive_layers: int) -> dict[str, DraftSettings]:
    """The settings of the drafts to measure, by their texts, with what the options of their own say of QuantSpec's."""
    chosen = {}
    for text in texts:
        settings = parse_draft(text)
        if settings is None:
            raise InputError(f"--draft {text}: there is nothing to accept without a draft")
        old = {} if bits is None else {"weight_bits": bits}
        if planes is not None:
            old["cache"] = {1: "int4", 2: "int8"}.get(planes, str(planes))
        if old and not isinstance(settings, QuantSpecSettings):
            raise InputError("--draft-bits and --draft-planes are for --draft quantspec")
        if old:
            log.warning("--draft-bits and --draft-planes are now settings of --draft: quantspec:weight_bits=16,cache=int8")
            settings = dataclasses.replace(settings, **old)
        chosen[text] = with_sensitive_layers(settings, sensitive_layers)
    return chosen


def _say(message: str, *, quiet: bool) -> None:
    if not quiet and sys.stderr.isatty():
        print(message, file=sys.stderr)


# bf16: the name of the full cache before version 0.2.
CacheName = enum.StrEnum("CacheName", {name: name for name in (*perplexity.CACHE_VIEWS, "bf16")})
VariantName = enum.StrEnum("VariantName", {name: name for name in quantizers.VARIANTS})
Style = enum.StrEnum("Style", list(needle.FORMATS))
Files = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Texts: the demo's held-out files, if not given.")]
PromptTokens = Annotated[int, typer.Option(help="Context before the first token that is scored.")]
Scored = Annotated[int, typer.Option(help="Tokens to score of each text.")]


def _cache_names(names: list[CacheName] | None) -> list[str]:
    if names and CacheName.bf16 in names:
        log.warning("--cache bf16 is now called --cache full")
    return [perplexity.FULL if name is CacheName.bf16 else name.value for name in names or []] or list(perplexity.CACHE_VIEWS)


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
            _cache_names(cache),
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
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", metavar="NAME[:SETTING=VALUE,...]", help="This one alone: none with the full cache and quantspec, if not given."
        ),
    ] = None,
    method: OldMethod = None,
    cache: Annotated[CacheKind | None, typer.Option(help="The target's cache: int8 with a draft, full without, if not given.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 4,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """How often a model finds a value in a synthetic text, by length and depth, with a full cache and with quantspec's."""
    methods = needle.METHODS
    if draft is not None or method is not None:
        config = GenerationConfig(draft=chosen_draft(draft, method), cache=cache and cache.value)
        methods = (needle.Method.of(config),)
    elif cache is not None:
        raise InputError("--cache goes with --draft")
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
        int4=stored_int4(directory, network) if any(method.draft != NONE for method in methods) else None,
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
