"""The commands `qspec eval ...`."""

import dataclasses
import enum
import functools
import itertools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from qspec_jax import demo, plots
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.checkpoints import hub
from qspec_jax.cli.options import (
    Calibrate,
    DtypeOption,
    EvaluatedModel,
    GammaList,
    GroupSize,
    Json,
    Output,
    Plot,
    Seed,
    SensitiveLayers,
    check_group_size,
    check_proposes,
    load,
    number_list,
    show,
    with_sensitive_layers,
)
from qspec_jax.decoding.config import GAMMA, GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.prepare import prepare
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.quantspec import QuantSpecSettings
from qspec_jax.drafts.registry import DRAFTS, USUAL, DraftSettings, has_budget, make_draft, parse_draft, with_budget
from qspec_jax.drafts.step_bytes import ITEM_BYTES, cache_share, raised_groups, step_bytes
from qspec_jax.errors import InputError
from qspec_jax.evaluate import acceptance, answers, needle, perplexity, quantizers
from qspec_jax.evaluate import tasks as text_tasks
from qspec_jax.evaluate.stream import check_lengths, cut, token_stream
from qspec_jax.files import output_to, read_text, rows_kept
from qspec_jax.models.llama import Llama
from qspec_jax.reports import this_run
from qspec_jax.training import corpus

log = logging.getLogger(__name__)

evaluations = typer.Typer(no_args_is_help=True, help="Measurements of a model.")


Mode = enum.StrEnum("Mode", {mode.replace("-", "_"): mode for mode in acceptance.MODES})
Style = enum.StrEnum("Style", list(needle.FORMATS))
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        metavar="NAME[:SETTING=VALUE,...]",
        help=f"{', '.join(DRAFTS)}; may be given several times: quantspec.",
    ),
]


@evaluations.command("acceptance")
def acceptance_command(
    model: EvaluatedModel = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A text; may be given several times: the demo's held-out files, if not given.")
    ] = None,
    num_speculative_tokens: GammaList = str(GAMMA),
    temperature: Annotated[list[float] | None, typer.Option(help="May be given several times: 0 and 1, if not given.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", "--prompt-tokens", help="Context before the first draft; may be given several times: 4096."),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to walk or generate for each text: 512, if not given.")] = None,
    draft: Drafts = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            help="The budget of every draft that has one, a share or tokens; may be given several times: each draft's own. 1 is "
            "everything. To streaming-llm and snapkv it is one token, which is too few."
        ),
    ] = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="May be given several times: both, if not given.")] = None,
    texts: Annotated[int | None, typer.Option(min=1, help="At most so many texts: all, if not given.")] = None,
    joined: Annotated[
        bool,
        typer.Option(
            "--joined", help="Join the files, and cut texts as long as a context from that, spread evenly: 4, or as many as --texts says."
        ),
    ] = False,
    needles: Annotated[
        Style | None,
        typer.Option(
            help="Along the answers to needle prompts of this format in place of texts, see `eval needle`; a model of code: names."
        ),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="For --needles: where they stand, from 0 to 1, with commas between them: 0.2,0.5, if not given.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="For --needles: prompts for each depth: 8, if not given.")] = None,
    draft_bits: Annotated[int | None, typer.Option(hidden=True, help="The old way to say --draft quantspec:weight_bits=16.")] = None,
    draft_planes: Annotated[int | None, typer.Option(hidden=True, help="The old way to say --draft quantspec:cache=int8.")] = None,
    sensitive_layers: SensitiveLayers = 0,
    scheme: Annotated[str, typer.Option(help="KV quantizer: int8_first or paper.")] = CacheConfig.scheme,
    group_size: GroupSize = None,
    calibrate: Calibrate = True,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """Share of drafts that the target accepts. It is measured teacher-forced and free-running, by gamma or by what each draft reads."""
    if plot:
        plots.check(plot, output)
    asked = _with_budgets(draft or [USUAL], budget or [])
    chosen_drafts = _chosen_drafts(asked, draft_bits, draft_planes, sensitive_layers)
    gammas, heats, sizes = number_list("--gamma", num_speculative_tokens, int), temperature or [0.0, 1.0], context or [4096]
    if min(gammas) < 1:
        raise InputError(f"--gamma {min(gammas)} should be at least 1: acceptance is of drafts")
    modes, cache = mode or list(Mode), dict(scheme=scheme, group_size=group_size)
    if needles is None:
        if depths is not None or samples is not None:
            raise InputError(f"{'--samples' if depths is None else '--depths'} goes with --needles")
        walked = 512 if max_new_tokens is None else max_new_tokens
        if joined:
            for size in sizes:
                check_lengths(size, walked)
            network, tokenizer = load(model or demo.MODEL, dtype or (None if model else demo.dtype()), quiet=as_json)
            stream = token_stream(tokenizer, map(read_text, file or corpus.held_out_files()))
            walks = [acceptance.Walk(size, cut(stream, size + walked, texts or 4), walked, []) for size in sizes]
        else:
            network, _, contents = _texts(model, file, dtype, quiet=as_json)
            walks = [_walk_along(contents, size, walked, texts) for size in sizes]
    elif file or texts or mode or joined or max_new_tokens is not None:
        raise InputError(
            "--needles makes its own prompts, and walks along their answers: it goes without --file, --texts, --joined, --mode and "
            "--max-new-tokens"
        )
    else:
        network, tokenizer = load(model or demo.MODEL, dtype or (None if model else demo.dtype()), quiet=as_json)
        prompts = dict(depths=number_list("--depths", depths or "0.2,0.5", float), samples=samples or 8, style=needles.value, seed=seed)
        walks, modes = [_walk_along_answers(network, tokenizer, size, **prompts) for size in sizes], [Mode.teacher_forced]
    results, runs = [], []
    for walk in walks:
        prompts = [text[: -walk.new_tokens] for text in walk.texts]
        configs = [
            GenerationConfig(draft=USUAL, num_speculative_tokens=gamma, temperature=heat, max_new_tokens=walk.new_tokens, **cache)
            for gamma in gammas
            for heat in heats
        ]
        for config in configs:
            acceptance.check(network, prompts, config)
        runs.append((walk, prompts, configs))
    # What is wrong with a draft is found before any is measured.
    quantized = functools.partial(int4_model, network, progress=False if as_json else None)
    of_texts = lambda prompts: functools.partial(quantized, calibration=prompts if calibrate else None)
    make = lambda chosen, prompts: _made(chosen, network, of_texts(prompts))
    drafts, with_int4 = make(chosen_drafts, runs[0][1])
    for _, prompts, configs in runs:
        for made in drafts.values():
            acceptance.check_draft(network, made, prompts, max(configs, key=lambda config: config.num_speculative_tokens))
    del made
    total = sum(len(chosen_drafts) * len(configs) * len(modes) for _, _, configs in runs)
    about = {"model": str(model or "the embedded model"), "dtype": network.dtype.name, "seed": seed, "scheme": scheme}
    about |= {"group_size": CacheConfig(**cache).group_size_for(network.config.head_dim), "calibration": calibrate}
    with rows_kept(output, about) as keep, output_to(output) as write:
        with tqdm(total=total, unit="run", leave=False, disable=True if as_json else None) as bar:
            for walk, prompts, configs in runs:
                if calibrate and walk is not walks[0]:
                    for name in with_int4:  # before others like them take as much memory
                        del drafts[name]
                    drafts |= make({name: chosen_drafts[name] for name in with_int4}, prompts)[0]
                key = key_of(seed)
                of_gamma = {config.num_speculative_tokens: config for config in configs}
                chosen = {
                    (name, gamma): prepare(network, prompts, config=dataclasses.replace(config, draft=draft), key=key).draft
                    for name, draft in drafts.items()
                    for gamma, config in of_gamma.items()
                }
                asked = list(itertools.product(chosen_drafts, configs, modes))
                forced = [(name, config) for name, config, kind in asked if kind == Mode.teacher_forced]
                runs_of = ((network, chosen[name, config.num_speculative_tokens], walk.texts, config, key) for name, config in forced)
                measured_in_turn = acceptance.teacher_forced_in_turn(runs_of)
                for name, config, kind in asked:
                    gamma, heat = config.num_speculative_tokens, config.temperature
                    title = f"{name}, {walk.context:,} tokens, gamma {gamma}, temperature {heat:g}, {kind}"
                    bar.set_description(title)
                    if kind == Mode.teacher_forced:
                        measured = next(measured_in_turn)
                    else:
                        measured = acceptance.free_running(network, chosen[name, gamma], prompts, config, key)
                    bar.update()
                    of_run = {"draft": name, "context": walk.context, "gamma": gamma, "temperature": heat, "mode": kind.value}
                    read = step_bytes(chosen[name, gamma], config.cache_config, walk.context + 1, max_item_bytes=ITEM_BYTES)
                    share = cache_share(chosen[name, gamma], config.cache_config, walk.context + 1)
                    raised = raised_groups(chosen[name, gamma], config.cache_config, walk.context + 1)
                    reads = {"step_bytes": read, "cache_share": share, "raised_groups": raised}
                    of_walk = reads | {"texts": len(prompts), "right": walk.right}
                    results.append(of_run | dataclasses.asdict(measured) | of_walk)
                    keep(results[-1])
                    if not as_json:
                        bar.write(f"qspec: {title}: {acceptance.in_words(measured)}", file=sys.stderr)
                measured_in_turn.close()  # which lets go of drafts before others take as much memory
                del chosen
        report = acceptance.AcceptanceReport(
            len(walks[0].texts),
            walks[0].skipped,
            results,
            **this_run(),
            **about,
        )
        show(report, acceptance.table, output, write, as_json=as_json)
    if plot:
        acceptance.plot(report, plot)


def _made(chosen: dict[str, DraftSettings], model: Llama, int4: Callable[[], Llama]) -> tuple[dict[str, Draft], list[str]]:
    """The drafts by their names, and the names of those that asked for INT4 weights, which are made when the first does."""
    int4, made, asked = functools.cache(int4), {}, []
    for name, settings in chosen.items():
        made[name] = make_draft(settings, model, int4=lambda name=name: asked.append(name) or int4())
    return made, list(dict.fromkeys(asked))


def _walk_along(contents: dict[str, list[int]], context: int, new_tokens: int, most: int | None) -> acceptance.Walk:
    """The texts that are long enough, at most so many. Says which are not. Raises InputError where none is."""
    chosen, too_short = perplexity.long_enough(contents, context, new_tokens)
    if too_short:
        names = ", ".join(text.name for text in too_short[:3]) + (", ..." if len(too_short) > 3 else "")
        size = context + new_tokens
        log.warning("%d of %d texts have fewer than %d tokens and are left out: %s", len(too_short), len(contents), size, names)
    return acceptance.Walk(context, chosen[:most], new_tokens, [text.name for text in too_short])


def _walk_along_answers(network, tokenizer, length: int, **prompts) -> acceptance.Walk:
    """Needle prompts with their answers. Says where the model itself does not know them."""
    found = needle.answered(network, tokenizer, length=length, **prompts)
    if found.void:
        asked = f"{found.right} of {len(found.texts)} needles of {length} tokens"
        log.warning("void: with a full cache the model finds %s, so that acceptance there says little of drafts", asked)
    return acceptance.Walk(length, found.texts, found.answer_tokens, [], found.right)


def _with_budgets(texts: list[str], budgets: list[float]) -> list[str]:
    """The texts of drafts, those with a budget once for each. Raises InputError for one that has named its own."""
    found = []
    for text in texts:
        parse_draft(text)  # which raises InputError for what is no draft
        found += [with_budget(text, budget) for budget in budgets] if budgets and has_budget(text) else [text]
    return found


def _chosen_drafts(texts: list[str], bits: int | None, planes: int | None, sensitive_layers: int) -> dict[str, DraftSettings]:
    """The settings of the drafts to measure, by their texts, with what the options of their own say of QuantSpec's."""
    chosen = {}
    for text in texts:
        settings = parse_draft(text)
        check_proposes(text, settings)
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


VariantName = enum.StrEnum("VariantName", {name: name for name in quantizers.VARIANTS})
Files = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Texts: the demo's held-out files, if not given.")]
PromptTokens = Annotated[int, typer.Option(help="Context before the first token that is scored.")]
Scored = Annotated[int, typer.Option(help="Tokens to score of each text.")]


def _cache_names(names: list[str] | None) -> list[str]:
    if names and "bf16" in names:  # its name before version 0.2
        log.warning("--cache bf16 is now called --cache full")
    return [perplexity.FULL if name == "bf16" else name for name in names or perplexity.DEFAULT_VIEWS]


@evaluations.command("perplexity")
def perplexity_command(
    file: Files = None,
    model: EvaluatedModel = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SETTING=VALUE,...]",
            help=f"{', '.join(CACHES)}, or int4, the upper plane of int8 alone; may be given "
            "several times: full, int8 and int4, if not given.",
        ),
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
    """Perplexity of real text through each KV cache. It also measures how far the predictions are from the full cache's."""
    if plot:
        plots.check(plot, output)
    names = _cache_names(cache)
    caches = [perplexity.cache_view(name, scheme=scheme, group_size=group_size).cache for name in names]
    check_group_size(group_size, [perplexity.cache_view(name).cache for name in names])
    network, tokenizer, texts = _texts(model, file, dtype, quiet=as_json, caches=caches)
    with output_to(output) as write:
        report = perplexity.run(
            str(model or "the embedded model"),
            network,
            tokenizer,
            texts,
            names,
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
    """What the KV quantizer's choices cost. It compares axes of the scales, and rounding with truncation to the draft's 4 bits."""
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


MethodDrafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        metavar="NAME[:SETTING=VALUE,...]",
        help="Over each --cache that it goes with, or its own if none is given; may be given several times. Without it, one token at a "
        "time.",
    ),
]
MethodCaches = Annotated[
    list[str] | None,
    typer.Option(
        "--cache",
        metavar="NAME[:SETTING=VALUE,...]",
        help=f"{', '.join(CACHES)}; may be given several times. With neither: full without a draft, and quantspec.",
    ),
]
PromptsAtATime = Annotated[int, typer.Option(min=1, help="Prompts at a time.")]


@evaluations.command("needle")
def needle_command(
    model: EvaluatedModel = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas between them.")] = "1024,2048,4096",
    depths: Annotated[str, typer.Option(help="Where the needle stands, from 0 to 1, with commas between them.")] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="Prompts for each length and depth.")] = 4,
    style: Annotated[
        Style,
        typer.Option(
            "--format",
            help="python: functions, for models of code; names: the same with values of words, for small ones; text: sentences, "
            "for all others.",
        ),
    ] = Style.python,
    draft: MethodDrafts = None,
    cache: MethodCaches = None,
    batch_size: PromptsAtATime = 4,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """How often a model finds a value in a synthetic text. It is counted by length and depth, for each draft and cache that is given."""
    methods = answers.methods_of(draft or [], cache or [])
    caches = [CacheConfig.parse(method.cache) for method in methods]
    sizes, shares = number_list("--lengths", lengths, int), number_list("--depths", depths, float)
    if plot:
        plots.check(plot, None)
    progress = False if as_json else None
    network, tokenizer = load(model or demo.MODEL, dtype or (None if model else demo.dtype()), quiet=as_json, caches=caches)
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
        progress=progress,
    )
    show(report, needle.table, None, sys.stdout.write, as_json=as_json)
    if plot:
        needle.plot(report, plot)


TaskName = enum.StrEnum("TaskName", list(text_tasks.TASKS))


@evaluations.command("tasks")
def tasks_command(
    file: Files = None,
    model: EvaluatedModel = None,
    task: Annotated[list[TaskName] | None, typer.Option(help="May be given several times: all, if not given.")] = None,
    draft: MethodDrafts = None,
    cache: MethodCaches = None,
    length: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 2048,
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 16,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens of an answer; only lines at most as long are asked for.")
    ] = 48,
    depths: Annotated[
        str, typer.Option(help="For retrieval: depths of the line, which samples use in turn, from 0 to 1, with commas between them.")
    ] = ",".join(map(str, text_tasks.DEPTHS)),
    batch_size: PromptsAtATime = 4,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """Tasks of LongBench's kinds, made from the texts. They are completion, continuation and retrieval, for several caches and drafts."""
    methods = answers.methods_of(draft or [], cache or [])
    caches = [CacheConfig.parse(method.cache) for method in methods]
    names, shares = list(dict.fromkeys(name.value for name in task or TaskName)), number_list("--depths", depths, float)
    if plot:
        plots.check(plot, output)
    texts = [read_text(path) for path in file or corpus.held_out_files()]
    progress = False if as_json else None
    with output_to(output) as write:
        network, tokenizer = load(model or demo.MODEL, dtype or (None if model else demo.dtype()), quiet=as_json, caches=caches)
        report = text_tasks.run(
            str(model or "the embedded model"),
            network,
            tokenizer,
            texts,
            text_tasks.Settings(length, samples, max_new_tokens, tasks=names, depths=shares, seed=seed),
            methods,
            batch_size=batch_size,
            progress=progress,
        )
        show(report, text_tasks.table, output, write, as_json=as_json)
    if plot:
        text_tasks.plot(report, plot)


def _texts(
    model: Path | None, files: Sequence[Path] | None, dtype: str | None, *, quiet: bool, caches: Sequence[CacheConfig] = ()
) -> tuple:
    """The model, its tokenizer, and the token ids of the files, or of the held-out ones, by name. caches: see `load`."""
    paths = files or corpus.held_out_files()
    contents = {str(path): read_text(path) for path in paths}
    network, tokenizer = load(model or demo.MODEL, dtype or (None if model else demo.dtype()), quiet=quiet, caches=caches)
    return network, tokenizer, {name: tokenizer(text)["input_ids"] for name, text in contents.items()}


@evaluations.command("harness")
def harness_command(
    tasks: Annotated[list[str], typer.Argument(metavar="TASK...", help="Names of tasks, groups or tags.", show_default=False)],
    model: EvaluatedModel = None,
    cache: Annotated[
        str, typer.Option(metavar="NAME[:SETTING=VALUE,...]", help="The model's cache; int4 is the upper plane of int8 alone.")
    ] = "int8",
    draft: Annotated[str, typer.Option(metavar="NAME[:SETTING=VALUE,...]", help="For generation: speed, never what comes out.")] = USUAL,
    num_speculative_tokens: Annotated[int, typer.Option("--gamma", "--num-speculative-tokens", help="Most drafts of a round.")] = GAMMA,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    max_length: Annotated[int | None, typer.Option(help="Most tokens read for a prediction; longer contexts lose their beginning.")] = None,
    include_path: Annotated[list[Path] | None, typer.Option(help="A directory with tasks of your own; may be given several times.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question: as the task says, if not given.")] = None,
    limit: Annotated[float | None, typer.Option(min=0, help="The first so many of each task, or that share, if less than 1.")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="With the tokenizer's chat template.")] = False,
    system_instruction: Annotated[str | None, typer.Option(help="What stands at the beginning of each prompt.")] = None,
    metadata: Annotated[str | None, typer.Option(help='What a task asks for, in JSON, such as {"max_seq_lengths": [4096]}.')] = None,
    dtype: DtypeOption = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
):
    """Tasks of lm-evaluation-harness, through the cache."""
    try:
        from qspec_jax.evaluate import harness
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise InputError('lm-evaluation-harness is not installed; pip install "qspec-jax[eval]" has it') from None
    given = _json_object("--metadata", metadata)
    reading = perplexity.cache_view(cache)
    with output_to(output) as write:
        directory = hub.local(model or demo.MODEL, progress=False if as_json else None)
        network, tokenizer = load(directory, dtype or (None if model else demo.dtype()), quiet=as_json, caches=[reading.cache])
        settings = dict(cache=cache, draft=draft, gamma=num_speculative_tokens, batch_size=batch_size, max_length=max_length, seed=seed)
        lm = harness.QspecLM(directory, **settings, progress=False if as_json else None, model=network, tokenizer=tokenizer)
        chosen = dict(num_fewshot=num_fewshot, limit=limit, apply_chat_template=apply_chat_template, system_instruction=system_instruction)
        report = harness.run(lm, tasks, include_path=include_path or [], metadata=given, **chosen)
        show(report, harness.table, output, write, as_json=as_json)


def _json_object(option: str, text: str | None) -> dict | None:
    """The object that an option's JSON says. Raises InputError for anything else."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{option} {text!r} should be a JSON object")
    return found
