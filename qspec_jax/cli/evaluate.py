"""The commands `qspec eval ...`."""

import contextlib
import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.checkpoints import hub
from qspec_jax.cli.eval_options import (
    SETTINGS,
    Files,
    PromptTokens,
    Scheme,
    ScoredTokens,
    contents_of,
    loaded,
    name_of_model,
    token_ids_of,
    walks_along,
    with_embedded,
)
from qspec_jax.cli.exactness import exactness_commands
from qspec_jax.cli.measuring import measure_and_show
from qspec_jax.cli.options import (
    Calibrate,
    DtypeOption,
    EvaluatedModel,
    Gamma,
    GammaList,
    GroupSize,
    Json,
    Output,
    Plot,
    Seed,
    SensitiveLayers,
    TraceFile,
    WeightsOption,
    check_group_size,
    check_proposes,
    load,
    number_list,
    with_sensitive_layers,
)
from qspec_jax.cli.trace_file import page_to
from qspec_jax.decoding.config import GAMMA
from qspec_jax.drafts.registry import AUTO, DRAFTS, USUAL, DraftSettings, has_budget, parse_draft, with_budget
from qspec_jax.errors import InputError
from qspec_jax.evaluate import acceptance, acceptance_report, answers, needle, perplexity, quantizers
from qspec_jax.evaluate import tasks as text_tasks
from qspec_jax.evaluate.cache_views import cache_view
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.traces.trace import Trace

evaluations = typer.Typer(no_args_is_help=True, help="Measurements of a model.")
evaluations.add_typer(exactness_commands)

Mode = enum.StrEnum("Mode", {mode.replace("-", "_"): mode for mode in acceptance.MODES})
Style = enum.StrEnum("Style", list(needle.FORMATS))
VariantName = enum.StrEnum("VariantName", {name: name for name in quantizers.VARIANTS})
TaskName = enum.StrEnum("TaskName", list(text_tasks.TASKS))

ComparedDrafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        metavar=SETTINGS,
        help="Decode with this draft over each --cache that fits it, or over its own cache if none is given (repeatable). Without it, one "
        "token at a time.",
    ),
]
ComparedCaches = Annotated[
    list[str] | None,
    typer.Option("--cache", metavar=SETTINGS, help=f"{', '.join(CACHES)} (repeatable). With neither: full without a draft, and quantspec."),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts at a time.")]


@evaluations.command("acceptance")
def acceptance_command(
    command: typer.Context,
    model: EvaluatedModel = None,
    file: Annotated[list[Path] | None, typer.Option(help="A text (repeatable): the demo's held-out files, if not given.")] = None,
    num_speculative_tokens: GammaList = str(GAMMA),
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable: 0 and 1, if not given.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", "--prompt-tokens", help="Context before the first draft (repeatable): 4096, if not given."),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to walk or generate for each text: 512, if not given.")] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar=SETTINGS,
            help=f"{', '.join(DRAFTS)} (repeatable): quantspec, if not given.",
        ),
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            help="The budget of every draft that has one, as a share or in tokens (repeatable): each draft's own, if not given. 1 is "
            "everything; to streaming-llm and snapkv it is one token, which is too few."
        ),
    ] = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="Repeatable: both, if not given.")] = None,
    texts: Annotated[int | None, typer.Option(min=1, help="Maximum number of texts: all, if not given.")] = None,
    joined: Annotated[
        bool,
        typer.Option("--joined", help="Join the files, and cut --texts texts (4, if not given) from them, spread evenly."),
    ] = False,
    needles: Annotated[
        Style | None,
        typer.Option(
            help="Measure along the answers to needle prompts of this format, see `eval needle`, and not along texts; for a model of code: "
            "names."
        ),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(help="For --needles: depths of the needle, from 0 to 1, with commas between them: 0.2,0.5, if not given."),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="For --needles: prompts for each depth: 8, if not given.")] = None,
    sensitive_layers: SensitiveLayers = 0,
    scheme: Scheme = CacheConfig.scheme,
    group_size: GroupSize = None,
    calibrate: Calibrate = True,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    output: Output = None,
    plot: Plot = None,
    trace: TraceFile = None,
    as_json: Json = False,
):
    """Share of drafts that the target accepts. It is measured teacher-forced and free-running, by gamma or by what each draft reads."""
    drafts = _drafts(draft or [USUAL], budget or [], sensitive_layers)
    gammas, contexts = number_list("--gamma", num_speculative_tokens, int), context or [4096]
    if min(gammas) < 1:
        raise InputError(f"--gamma {min(gammas)} should be at least 1: without drafts there is no acceptance")
    if needles is None and (depths is not None or samples is not None):
        raise InputError(f"{'--samples' if depths is None else '--depths'} is only for --needles")
    if needles is not None and (file or texts or mode or joined or max_new_tokens is not None):
        raise InputError(
            "--needles makes its own prompts, and walks along answers: leave out --file, --texts, --joined, --mode and --max-new-tokens"
        )
    depth_list = number_list("--depths", depths or "0.2,0.5", float)
    walked = 512 if max_new_tokens is None else max_new_tokens
    modes = [Mode.teacher_forced.value] if needles else [each.value for each in mode or Mode]
    asked = acceptance_report.Comparison(drafts, gammas, temperature or [0.0, 1.0], modes, scheme, group_size, calibrate, seed)

    def measure(kept: KeptRows) -> acceptance_report.AcceptanceReport:
        contents = [] if needles else contents_of(file)
        network, tokenizer = loaded(model, dtype, weights, quiet=as_json)
        if needles:
            settings = dict(depths=depth_list, samples=samples or 8, style=needles.value, seed=seed)
            walks = [acceptance_report.along_answers(network, tokenizer, size, **settings) for size in contexts]
        else:
            walks = walks_along(tokenizer, contents, contexts, walked, texts, joined=joined)
        # Rows of an earlier run would be without their traces.
        places = dict(kept=kept if trace is None else NOT_KEPT, progress=False if as_json else None)
        on_trace = None if trace is None else traces.append
        return acceptance_report.run(name_of_model(model), network, tokenizer, walks, asked, **places, on_trace=on_trace)

    traces: list[Trace] = []
    with contextlib.nullcontext() if trace is None else page_to(trace, output) as write_trace:
        measure_and_show(command, measure, output, as_json=as_json, plot=plot)
        if trace is not None:
            write_trace(traces)


def _drafts(texts: Sequence[str], budgets: Sequence[float], sensitive_layers: int) -> dict[str, DraftSettings]:
    """The settings of the drafts to measure, by their texts; those with a budget once for each of the budgets."""
    found = {}
    for text in texts:
        if text == AUTO:
            raise InputError(f"--draft {AUTO} chooses a draft for generate and batch; name the drafts whose acceptance eval should measure")
        check_proposes(text, parse_draft(text))
        for each in [with_budget(text, budget) for budget in budgets] if budgets and has_budget(text) else [text]:
            found[each] = with_sensitive_layers(parse_draft(each), sensitive_layers)
    return found


@evaluations.command("perplexity")
def perplexity_command(
    command: typer.Context,
    file: Files = None,
    model: EvaluatedModel = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            metavar=SETTINGS,
            help=f"{', '.join(CACHES)}, or int4, the upper plane of int8 alone (repeatable): full, int8 and int4, if not given.",
        ),
    ] = None,
    prompt_tokens: PromptTokens = 4096,
    max_new_tokens: ScoredTokens = 512,
    scheme: Scheme = CacheConfig.scheme,
    group_size: GroupSize = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """Perplexity of real text through each KV cache. It also measures how far the predictions are from the full cache's."""
    names = cache or list(perplexity.DEFAULT_CACHES)
    caches = [cache_view(name, scheme=scheme, group_size=group_size).cache for name in names]
    check_group_size(group_size, [cache_view(name).cache for name in names])
    sizes = dict(prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, scheme=scheme, group_size=group_size)

    def measure(kept: KeptRows) -> perplexity.PerplexityReport:
        contents = contents_of(file)
        network, tokenizer = loaded(model, dtype, weights, quiet=as_json, caches=caches)
        texts, progress = token_ids_of(tokenizer, contents), False if as_json else None
        return perplexity.run(name_of_model(model), network, tokenizer, texts, names, **sizes, kept=kept, progress=progress)

    measure_and_show(command, measure, output, as_json=as_json, plot=plot)


@evaluations.command("quantizers")
def quantizers_command(
    command: typer.Context,
    file: Files = None,
    model: EvaluatedModel = None,
    variant: Annotated[
        list[VariantName] | None,
        typer.Option(help="Axes of keys and values, or another quantizer on the first (repeatable): all, if not given."),
    ] = None,
    prompt_tokens: PromptTokens = 4096,
    max_new_tokens: ScoredTokens = 512,
    group_size: GroupSize = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """What the KV quantizer's choices cost. It compares axes of the scales, and rounding with truncation to the draft's 4 bits."""
    sizes = dict(prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, group_size=group_size)

    def measure(kept: KeptRows) -> quantizers.QuantizersReport:
        contents = contents_of(file)
        network, tokenizer = loaded(model, dtype, weights, quiet=as_json)
        texts, progress = token_ids_of(tokenizer, contents), False if as_json else None
        return quantizers.run(
            name_of_model(model), network, tokenizer, texts, variant or list(VariantName), **sizes, kept=kept, progress=progress
        )

    measure_and_show(command, measure, output, as_json=as_json, plot=plot)


@evaluations.command("needle")
def needle_command(
    command: typer.Context,
    model: EvaluatedModel = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas between them.")] = "1024,2048,4096",
    depths: Annotated[str, typer.Option(help="Depths of the needle, from 0 to 1, with commas between them.")] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="Prompts for each length and depth.")] = 4,
    style: Annotated[
        Style,
        typer.Option(
            "--format",
            help="python: functions, for models of code; names: the same with values of words, for small ones; text: sentences, "
            "for all others.",
        ),
    ] = Style.python,
    draft: ComparedDrafts = None,
    cache: ComparedCaches = None,
    batch_size: BatchSize = 4,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """How often a model finds a value in a synthetic text. It is counted by length and depth, for each draft and cache that is given."""
    methods = answers.methods_of(draft or [], cache or [])
    sizes = dict(lengths=number_list("--lengths", lengths, int), depths=number_list("--depths", depths, float), samples=samples)
    places = dict(batch_size=batch_size, progress=False if as_json else None)

    def measure(kept: KeptRows) -> needle.NeedleReport:
        network, tokenizer = loaded(model, dtype, weights, quiet=as_json, caches=answers.caches_of(methods))
        return needle.run(network, tokenizer, **sizes, style=style.value, methods=methods, seed=seed, kept=kept, **places)

    measure_and_show(command, measure, output, as_json=as_json, plot=plot)


@evaluations.command("tasks")
def tasks_command(
    command: typer.Context,
    file: Files = None,
    model: EvaluatedModel = None,
    task: Annotated[list[TaskName] | None, typer.Option(help="Repeatable: all, if not given.")] = None,
    draft: ComparedDrafts = None,
    cache: ComparedCaches = None,
    length: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 2048,
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 16,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of an answer; only lines that are at most as long are asked for.")
    ] = 48,
    depths: Annotated[
        str, typer.Option(help="For retrieval: depths of the line, which samples use in turn, from 0 to 1, with commas between them.")
    ] = ",".join(map(str, text_tasks.DEPTHS)),
    batch_size: BatchSize = 4,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """Tasks of LongBench's kinds, made from the texts. They are completion, continuation and retrieval, for several caches and drafts."""
    methods = answers.methods_of(draft or [], cache or [])
    names, shares = list(dict.fromkeys(name.value for name in task or TaskName)), number_list("--depths", depths, float)
    asked = text_tasks.Settings(length, samples, max_new_tokens, tasks=names, depths=shares, seed=seed)
    places = dict(batch_size=batch_size, progress=False if as_json else None)

    def measure(kept: KeptRows) -> text_tasks.TasksReport:
        contents = contents_of(file)
        network, tokenizer = loaded(model, dtype, weights, quiet=as_json, caches=answers.caches_of(methods))
        return text_tasks.run(name_of_model(model), network, tokenizer, [text for _, text in contents], asked, methods, kept=kept, **places)

    measure_and_show(command, measure, output, as_json=as_json, plot=plot)


@evaluations.command("harness")
def harness_command(
    command: typer.Context,
    tasks: Annotated[list[str], typer.Argument(metavar="TASK...", help="Names of tasks, groups or tags.", show_default=False)],
    model: EvaluatedModel = None,
    cache: Annotated[str, typer.Option(metavar=SETTINGS, help="The model's cache; int4 is the upper plane of int8 alone.")] = "int8",
    draft: Annotated[str, typer.Option(metavar=SETTINGS, help="Draft for generation tasks; affects speed only.")] = USUAL,
    num_speculative_tokens: Gamma = GAMMA,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="Maximum tokens read for a prediction; longer contexts lose their beginning.")
    ] = None,
    include_path: Annotated[list[Path] | None, typer.Option(help="A directory with tasks of your own (repeatable).")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question: as the task says, if not given.")] = None,
    limit: Annotated[float | None, typer.Option(min=0, help="The first LIMIT samples of each task, or that share, if below 1.")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="With the tokenizer's chat template.")] = False,
    system_instruction: Annotated[str | None, typer.Option(help="The beginning of each prompt.")] = None,
    metadata: Annotated[
        str | None, typer.Option(help='Settings that a task asks for, in JSON, such as {"max_seq_lengths": [4096]}.')
    ] = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
):
    """Tasks of lm-evaluation-harness, through the cache."""
    try:
        from qspec_jax.evaluate import harness, harness_report
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise InputError('lm-evaluation-harness is not installed; pip install "qspec-jax[eval]" has it') from None
    given, progress = _json_object("--metadata", metadata), False if as_json else None
    caches = [cache_view(cache).cache]
    settings = dict(cache=cache, draft=draft, gamma=num_speculative_tokens, batch_size=batch_size, max_length=max_length, seed=seed)
    chosen = dict(num_fewshot=num_fewshot, limit=limit, apply_chat_template=apply_chat_template, system_instruction=system_instruction)

    def measure(kept: KeptRows) -> harness_report.HarnessReport:
        checkpoint, dtype_of_model = with_embedded(model, dtype)
        directory = hub.local(checkpoint, progress=progress)
        network, tokenizer = load(directory, dtype_of_model, quiet=as_json, weights=weights, caches=caches)
        lm = harness.QspecLM(directory, **settings, progress=progress, model=network, tokenizer=tokenizer)
        return harness_report.run(lm, tasks, include_path=include_path or [], metadata=given, kept=kept, **chosen)

    measure_and_show(command, measure, output, as_json=as_json)


def _json_object(option: str, text: str | None) -> dict | None:
    """The object that an option's JSON has. Raises InputError for anything else."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{option} {text!r} should be a JSON object")
    return found
