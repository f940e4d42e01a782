"""`qspec plan`: arithmetic intensity, memory, the time of each step and the speed-up of each draft, on a device that need not be there."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence

from qspec_jax.caches.cache import Gives
from qspec_jax.caches.registry import CACHES as REGISTERED
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts import registry
from qspec_jax.drafts.draft import needs_of
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.prompts import bucket
from qspec_jax.planning import timing
from qspec_jax.planning.acceptance import GIVEN, first_level, keys_of, regardless
from qspec_jax.planning.devices import Device
from qspec_jax.planning.operations import model_bytes, pass_work, prefill_work
from qspec_jax.planning.plan_report import Best, Intensity, PlannedRow, Sizes, Status
from qspec_jax.planning.planner import MEASURED, Planner
from qspec_jax.planning.report import PlanReport
from qspec_jax.planning.steps import OutlinedDraft, outlined, own_step
from qspec_jax.quantization.outline import outline

CACHES = ("full", "int8")  # of the baselines; with a part in host memory they are baselines too
GAMMAS = (1, 2, 3, 4, 6, 8, 10, 12)


def plan(
    name: str,
    config: LlamaConfig,
    device: Device,
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    caches: Sequence[str] = (),
    drafts: Sequence[str] = (),
    acceptances: Mapping[str, float] | None = None,
    inner_acceptances: Mapping[str, float] | None = None,
    proposing: Mapping[str, float] | None = None,
    gammas: Sequence[int] = GAMMAS,
    max_new_tokens: int = 640,
) -> PlanReport:
    """Plans every draft with each gamma, at each context and batch, in bfloat16.

    Args:
        name: of the model, for the report.
        config: the model's shape.
        device: to plan for.
        contexts, batches: tokens of each prompt, and numbers of prompts.
        caches: texts as --cache takes them, of which decoding without a draft is planned besides `CACHES`, and every draft; drafts over the
            int8 cache, if none are given.
        drafts: texts as --draft takes them; all of the registry with their default settings, if none are given.
        acceptances: the conditional acceptance of a draft by its text or its name, of all others by "".
        inner_acceptances: likewise that of a cascade's first draft by its middle.
        proposing: likewise the share of rounds in which a draft that may have no proposal has one.
        gammas: drafts of a round.
        max_new_tokens: tokens that are decoded after each prompt.

    Raises:
        InputError: a context is too long for the model; a cache is unknown or does not fit the model; a draft in `drafts` is unknown or
            does not fit the model or the context; a draft in `proposing` never lacks a proposal. Where `drafts` is empty, a draft of the
            registry that does not fit the model is listed with the reason instead.
    """
    texts = [text for text in dict.fromkeys(drafts or registry.DRAFTS) if text != registry.NONE]
    for context in contexts:
        if context + max_new_tokens > config.max_length:
            held = f"the {config.max_length:,} positions of the model"
            raise InputError(f"a context of {context:,} tokens and {max_new_tokens:,} new ones are more than {held}")
    given: dict[str, CacheConfig] = {}
    for text in caches:
        if (cache := CacheConfig.parse(text)) not in given.values():
            given[text] = cache
    for cache in given.values():
        cache.check(config)
    own, drafted = {kind: CacheConfig(kind) for kind in CACHES} | given, given or {"int8": CacheConfig()}
    lossless = {text for text, cache in own.items() if cache.kind in CACHES}
    model, int4 = outline(config), functools.cache(lambda: outline(config, int4=True))
    made: dict[str, tuple[OutlinedDraft, ...] | InputError | None] = {}
    for text in texts:
        try:
            settings = registry.parse_draft(text)
            registry.check_windows(settings, config)
            made[text] = outlined(settings, model, int4)
        except InputError as error:
            if drafts:  # some errors begin with the text themselves
                raise InputError(str(error) if str(error).startswith(f"draft {text!r}") else f"draft {text}: {error}") from None
            made[text] = error  # such as that it wants a checkpoint
    _check_proposing(proposing or {}, made)
    planner = Planner(config, device, max_new_tokens, acceptances or {}, proposing or {}, inner_acceptances, inner_by_target=bool(drafts))
    report = dict(intensity=[], sizes=[], rows=[], best=[])
    for context in contexts:
        for text, found in made.items():
            try:
                for each in found if isinstance(found, tuple) else ():
                    _check_fits(each, context, max_new_tokens)
            except InputError as error:
                raise InputError(f"draft {text}: {error}") from None
        for batch in batches:
            report["intensity"].append(intensity(config, device, context, batch))
            report["sizes"].append(sizes(config, context, batch, max_new_tokens))
            rows = [dataclasses.replace(planner.autoregressive(cache, context, batch), cache=text) for text, cache in own.items()]
            for (over, cache), (text, found) in itertools.product(drafted.items(), made.items()):
                if isinstance(found, tuple):
                    found = _refused(text, cache) or found
                rows += [dataclasses.replace(row, cache=over) for row in planner.drafted(text, found, cache, context, batch, gammas)]
            rows = _compared(rows, lossless)
            report["rows"] += rows
            # What changes the output is compared with what does not only where nothing else is asked for.
            alike = [row for row in rows if row.cache in lossless]
            of_drafts = any(row.draft != registry.NONE for row in alike)
            report["best"].append(_best(alike if of_drafts else rows, context, batch))
    return PlanReport(
        model=name,
        device=device,
        estimated=not device.measured,
        ridge=device.ridge,
        weight_bytes=model_bytes(config),
        max_new_tokens=max_new_tokens,
        notes=[*_notes(config, device, batches, report["rows"]), *_notes_on_caches(given, device)],
        **report,
    )


def _refused(draft: str, cache: CacheConfig) -> InputError | None:
    """Why a draft cannot be over a cache, or None."""
    if not cache.takes_drafts:
        return InputError(f"no draft is compatible with cache {cache.kind}")
    lacking = needs_of(registry.parse_draft(draft)) - REGISTERED[cache.kind].gives
    does = " and ".join(need.value for need in Gives if need in lacking)
    return InputError(f"it {does}, which cache {cache.kind} does not give") if lacking else None


def _check_proposing(given: Mapping[str, float], made: Mapping[str, tuple[OutlinedDraft, ...] | InputError | None]) -> None:
    """Raises InputError where none of the drafts that a share of rounds is given for could lack a proposal."""
    planned = [
        (keys_of(first_level(part), part, text), each.levels[0] if each.levels else each)
        for text, found in made.items()
        if isinstance(found, tuple)
        for part, each in zip(registry.texts_in(text), found, strict=True)
    ]
    for key in given:
        meant = [each for keys, each in planned if key in keys]
        if meant and all(each.always_proposes for each in meant):
            raise InputError(f"--proposing {key}{'=' if key else ''}{given[key]:g}: {key or 'every draft'} has a proposal in every round")


def _check_fits(each: OutlinedDraft, context: int, new_tokens: int) -> None:
    """Raises InputError for a context that is too long for a draft's own model, or too short for what it is to read."""
    most = each.draft.max_length
    if most is not None and context + new_tokens > most:
        held = f"the {most:,} positions of its model"
        raise InputError(f"a context of {context:,} tokens and {new_tokens:,} new ones are more than {held}")
    for part in each.parts:
        if part.model is not None:
            part.model.check_capacity(bucket(context) + bucket(new_tokens))


def intensity(config: LlamaConfig, device: Device, context: int, batch: int) -> Intensity:
    """The arithmetic intensity of prefill and of decoding (QuantSpec, arXiv 2502.10424, table 1, figures 2 and 5)."""
    step = pass_work(own_step(config, CacheConfig("full").outline(config, context), context), batch=batch, tokens=1)
    prompt = prefill_work(config, batch=batch, tokens=context)
    seconds = [max(work.bytes / device.read_bytes_per_s, work.flops / device.flops_per_s) for work in (step.linear, step.attention)]

    def of(work):
        return (work.linear.intensity, work.attention.intensity, work.total.intensity)

    return Intensity(context, batch, *of(prompt), *of(step), attention_share=seconds[1] / sum(seconds))


def sizes(config: LlamaConfig, context: int, batch: int, max_new_tokens: int) -> Sizes:
    """The caches for prompts of `context` tokens and what is added to them (figure 6 of the paper has them against the weights)."""
    full, int8 = (batch * CacheConfig(kind).outline(config, context + max_new_tokens).num_bytes for kind in CACHES)
    return Sizes(context, batch, full, int8, full / model_bytes(config))


def _compared(rows: Sequence[PlannedRow], lossless: Collection[str]) -> list[PlannedRow]:
    """The rows of one context and batch with their speed-up over the fastest of the autoregressive ones that fit. lossless: the caches of
    those that count."""
    baselines = [row for row in rows if row.draft == registry.NONE and row.status == Status.PLANNED and row.cache in lossless]
    if not baselines:
        return list(rows)
    baseline = min(baselines, key=lambda row: row.ms_per_token)

    def speedup(row):
        return None if row.ms_per_token is None else baseline.ms_per_token / row.ms_per_token

    return [dataclasses.replace(row, speedup=speedup(row), baseline=baseline.cache) for row in rows]


def _best(rows: Sequence[PlannedRow], context: int, batch: int) -> Best:
    fitting = [row for row in rows if row.status == Status.PLANNED]
    if not fitting:
        return Best(context, batch, None, 0, None, None)
    row = min(fitting, key=lambda row: row.ms_per_token)
    others = None if row.kernels_measured else _best([row for row in rows if row.kernels_measured], context, batch)
    drafts = {each.draft for each in fitting} - {registry.NONE}
    rests_on = fitting if row.draft == registry.NONE else [row]
    assumed = tuple(dict.fromkeys(name for each in rests_on for name in each.assumed))
    return Best(context, batch, row.draft, row.gamma, row.cache, row.speedup, len(drafts), assumed, others, row.first_gamma)


def _notes(config: LlamaConfig, device: Device, batches: Sequence[int], rows: Sequence[PlannedRow]) -> list[str]:
    notes = []
    if device.measured:
        bandwidth = f"{device.read_bytes_per_s / 1e9:,.0f} GB/s"
        notes.append(f"reads {bandwidth}, as measured; the times of kernels are fitted on rows of an H100 and an H200")
    else:
        notes.append("an ESTIMATE: nothing was measured on this device; it rests on its datasheet, and efficiencies of an H100 and an H200")
    if max(batches) > 1:
        notes.append("batches of several rows rest on one measured row, of 8")
    if max(batches) > (most := timing.max_int4_rows(device)):
        notes.append(f"INT4 weights have no kernel there for more than {most} rows; above, they are dequantized in every step")
    if device.kernels == "mosaic_gpu" and not config.is_fusable:
        notes.append(f"layers of {config.architecture} have no fused kernel: each of their matrices is multiplied in a launch of its own")
    if config.experts is not None:
        notes.append(
            f"a token reads {config.experts.chosen} of {config.experts.count} experts, and several are counted as if each chose at random; "
            "experts run in plain JAX, which reads more, and whose time was not measured"
        )
    if config.dtype not in ("bfloat16", "float16"):
        notes.append(f"planned in bfloat16; the checkpoint is in {config.dtype}")
    for batch in batches:
        notes += _tuning_notes([row for row in rows if row.batch == batch and row.kernels_measured])
    for row in rows:
        if row.ms_per_token is None:
            notes.append(f"{row.draft}: {row.status}{f'; {row.note}' if row.note else ''}")
        elif row.note:
            notes.append(f"{row.draft}: {row.note}")
        if row.acceptance is not None and row.acceptance_source != GIVEN:
            several = len(registry.texts_in(row.draft)) > 1  # whose source has the rate of each
            rate = "" if several else f" {row.acceptance:g}"
            notes.append(f"{row.draft}: acceptance{rate} is ASSUMED, {regardless(row.draft)}: {row.acceptance_source}")
        if row.inner_acceptance is not None and row.inner_acceptance_source != GIVEN:
            notes.append(f"{row.draft}: inner acceptance {row.inner_acceptance:g} is ASSUMED: {row.inner_acceptance_source}")
    return list(dict.fromkeys(notes))


def _notes_on_caches(caches: Mapping[str, CacheConfig], device: Device) -> list[str]:
    notes = []
    for text, cache in caches.items():
        if cache.guesses:
            notes.append(f"{text}: each pass of the target also reads a guess at the next token")
        if cache.kind not in CACHES:
            notes.append(f"{text}: this cache is lossy, so the output differs from the target's over the caches {' and '.join(CACHES)}")
        if cache.kind not in MEASURED:
            notes.append(f"{text}: no kernel that reads this cache has been measured; times are as if those that read int8 and full did")
        if cache.in_host_memory:
            speed = device.host_bytes_per_s / 1e9
            notes.append(f"{text}: copies from host memory, beside which all else runs, are at {speed:,.0f} GB/s")
    return notes


def _step_of(row: PlannedRow) -> str:
    """What `PlannedRow.step_ms` is of."""
    return f"a step of {row.draft}" if row.first_gamma is None else f"{row.first_gamma + 1} tokens of the middle of {row.draft}"


def _tuning_notes(rows: Sequence[PlannedRow]) -> list[str]:
    """Which passes of one batch have attention that was tuned on the device and which have not; nothing where all are alike."""

    def those(wanted: bool) -> list[str]:
        targets = [row for row in rows if row.target_tuned is wanted]
        verified = sorted({row.gamma + 1 for row in targets if row.draft != registry.NONE})
        without = ["a token without a draft"] if any(row.draft == registry.NONE for row in targets) else []
        steps = dict.fromkeys(_step_of(row) for row in rows if row.step_tuned is wanted)
        return [*without, *steps, *([f"verifying {', '.join(map(str, verified))} tokens"] if verified else [])]

    tuned, others = those(True), those(False)
    if not tuned or not others:
        return []
    compared = f"attention over quantized tokens was tuned on this device for {'; '.join(tuned)}; not for {'; '.join(others)}"
    slower = "These take longer for that alone; their figure for INT8 is fitted on 7 tokens and 32 KV heads"
    return [f"batch {rows[0].batch}: {compared}. {slower}"]
