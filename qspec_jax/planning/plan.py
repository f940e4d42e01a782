"""`qspec plan`: arithmetic intensity, memory, the time of each step and the speed-up of each draft, on a device that need not be there."""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts import registry
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.prompts import bucket
from qspec_jax.planning import timing
from qspec_jax.planning.acceptance import ACCEPTANCE, GIVEN, PROPOSING, Chance, chance_of, keys_of, regardless
from qspec_jax.planning.devices import Device
from qspec_jax.planning.memory import Memory, largest, memory_of
from qspec_jax.planning.operations import cache_bytes, model_bytes, pass_work, prefill_work, row_of
from qspec_jax.planning.rounds import Asked, Rounds, expected_rounds
from qspec_jax.planning.steps import OutlinedDraft, outlined, own_step
from qspec_jax.quantization.outline import outline

CACHES = ("full", "int8")  # the baselines' caches; drafts go with the second
GAMMAS = (1, 2, 3, 4, 6, 8, 10, 12)


@dataclasses.dataclass(frozen=True)
class Intensity:
    """FLOPs per byte of linear layers, of attention and of both together, in prefill and in decoding one token at a time with a full
    cache. attention_share: of the time by bytes and FLOPs alone, in decoding."""

    context: int
    batch: int
    prefill_linear: float
    prefill_attention: float
    prefill_aggregate: float
    decode_linear: float
    decode_attention: float
    decode_aggregate: float
    attention_share: float


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of the caches of a batch, and the full one's as a share of the weights."""

    context: int
    batch: int
    full_cache_bytes: int
    int8_cache_bytes: int
    full_cache_to_weights: float


class Status(enum.StrEnum):
    """What became of a way of decoding. With the last three there are no figures."""

    PLANNED = "planned"
    DOES_NOT_FIT = "does not fit"  # times are as if it did
    NO_COST = "no model of its cost"
    NO_ACCEPTANCE = "no acceptance known"
    NOT_PLANNED = "not planned"  # the note says why


@dataclasses.dataclass(frozen=True)
class PlannedRow:
    """A way of decoding at one context and batch. draft: its text, "none" without one. gamma: 0 without one.

    step_ms: one step of the draft's model, None without one; target_ms: a verification, or a step without a draft; round_ms: a round with
    all of its drafts, and its share of a flush. ms_per_token: of each row; tokens_per_second: of all rows together. speedup: over the
    faster of the autoregressive ways that fit, with a cache `baseline`; None where none fits. most_rows: of this context that fit;
    longest_context: of this batch, within the models' positions. acceptance: the conditional one, of `combine` what comes of its drafts'
    (None where it drafts nothing), and acceptance_source where it comes from. proposing: the share of the rounds that have a proposal.
    assumed: which of "acceptance" and "proposing" were not given. note: sentences on what the times leave out. kernels_measured: whether
    GPU kernels that read as it does were measured; if not, times are as if those that read everything did; None where nothing is planned.
    step_tuned, target_tuned: whether attention in a step and in a verification has configurations that were tuned on the device, see
    `timing.tuned`.
    """

    context: int
    batch: int
    draft: str
    cache: str
    gamma: int
    status: Status
    note: str = ""
    acceptance: float | None = None
    acceptance_source: str = ""
    proposing: float | None = None
    assumed: tuple[str, ...] = ()
    kernels_measured: bool | None = None
    step_tuned: bool | None = None
    target_tuned: bool | None = None
    accepted_of_drafted: float | None = None
    tokens_per_round: float | None = None
    prefill_s: float | None = None
    step_ms: float | None = None
    target_ms: float | None = None
    flush_ms: float | None = None
    round_ms: float | None = None
    ms_per_token: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    baseline: str | None = None
    memory: Memory | None = None
    most_rows: int | None = None
    longest_context: int | None = None

    @property
    def compared(self) -> bool:
        return self.status == Status.PLANNED and self.speedup is not None


@dataclasses.dataclass(frozen=True)
class Best:
    """What is fastest at a context and batch: a draft with its gamma, or "none" with the better cache; None where nothing fits.

    drafts_compared: how many drafts fit and have figures. assumed: what the row, or without a draft any that was compared, has in
    `PlannedRow.assumed`. with_measured_kernels: the fastest whose GPU kernels were measured, if that is another.
    """

    context: int
    batch: int
    draft: str | None
    gamma: int
    cache: str | None
    speedup: float | None
    drafts_compared: int = 0
    assumed: tuple[str, ...] = ()
    with_measured_kernels: "Best | None" = None


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A plan. estimated: whether the device's times rest on its datasheet alone, and on efficiencies that were measured on others. notes:
    sentences for people on what the figures rest on."""

    model: str
    device: Device
    estimated: bool
    ridge: float
    weight_bytes: float
    max_new_tokens: int
    intensity: list[Intensity]
    sizes: list[Sizes]
    rows: list[PlannedRow]
    best: list[Best]
    notes: list[str]


def plan(
    name: str,
    config: LlamaConfig,
    device: Device,
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    drafts: Sequence[str] = (),
    acceptances: Mapping[str, float] | None = None,
    proposing: Mapping[str, float] | None = None,
    gammas: Sequence[int] = GAMMAS,
    max_new_tokens: int = 640,
) -> PlanReport:
    """Plans every draft with each gamma, at each context and batch, in bfloat16.

    drafts: texts as --draft takes them; all of the registry with their default settings, if none are given. acceptances: the conditional
    acceptance of a draft by its text or its name, of all others by "". proposing: likewise the share of rounds in which a draft that may
    have no proposal has one.

    Raises InputError for a context that is too long for the model, for a draft in `drafts` that is unknown or does not fit the model or the
    context, and for one in `proposing` that never lacks a proposal. Where `drafts` is empty, a draft of the registry that does not fit the
    model is listed with the reason instead.
    """
    texts = [text for text in dict.fromkeys(drafts or registry.DRAFTS) if text != registry.NONE]
    for context in contexts:
        if context + max_new_tokens > config.max_length:
            held = f"the {config.max_length:,} positions of the model"
            raise InputError(f"a context of {context:,} tokens and {max_new_tokens:,} new ones are more than {held}")
    model, int4 = outline(config), functools.cache(lambda: outline(config, int4=True))
    made: dict[str, tuple[OutlinedDraft, ...] | InputError | None] = {}
    for text in texts:
        try:
            made[text] = outlined(registry.parse_draft(text), model, int4)
        except InputError as error:
            if drafts:  # some errors begin with the text themselves
                raise InputError(str(error) if str(error).startswith(f"draft {text!r}") else f"draft {text}: {error}") from None
            made[text] = error  # such as that it wants a checkpoint
    _check_proposing(proposing or {}, made)
    planner = Planner(config, device, max_new_tokens, acceptances or {}, proposing or {})
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
            rows = [planner.autoregressive(CacheConfig(kind), context, batch) for kind in CACHES]
            for text, found in made.items():
                rows += planner.drafted(text, found, CacheConfig(), context, batch, gammas)
            rows = _compared(rows)
            report["rows"] += rows
            report["best"].append(_best(rows, context, batch))
    return PlanReport(
        model=name,
        device=device,
        estimated=not device.measured,
        ridge=device.ridge,
        weight_bytes=model_bytes(config),
        max_new_tokens=max_new_tokens,
        notes=_notes(config, device, batches, report["rows"]),
        **report,
    )


def _check_proposing(given: Mapping[str, float], made: Mapping[str, tuple[OutlinedDraft, ...] | InputError | None]) -> None:
    """Raises InputError where none of the drafts that a share of rounds is given for could lack a proposal."""
    planned = [
        (keys_of(part, text), each)
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
    if each.model is not None:
        each.model.check_capacity(bucket(context) + bucket(new_tokens))


def intensity(config: LlamaConfig, device: Device, context: int, batch: int) -> Intensity:
    """The arithmetic intensity of prefill and of decoding (QuantSpec, arXiv 2502.10424, table 1, figures 2 and 5)."""
    row = row_of(config, CacheConfig("full"), context)
    step = pass_work(own_step(config, row), row.group_size, batch=batch, tokens=1)
    prompt = prefill_work(config, batch=batch, tokens=context)
    seconds = [max(work.bytes / device.read_bytes_per_s, work.flops / device.flops_per_s) for work in (step.linear, step.attention)]
    of = lambda work: (work.linear.intensity, work.attention.intensity, work.total.intensity)
    return Intensity(context, batch, *of(prompt), *of(step), attention_share=seconds[1] / sum(seconds))


def sizes(config: LlamaConfig, context: int, batch: int, max_new_tokens: int) -> Sizes:
    """The caches for prompts of `context` tokens and what is added to them (figure 6 of the paper has them against the weights)."""
    full, int8 = (cache_bytes(config, CacheConfig(kind), batch=batch, capacity=context + max_new_tokens, gamma=0) for kind in CACHES)
    return Sizes(context, batch, full, int8, full / model_bytes(config))


@dataclasses.dataclass(frozen=True)
class _Turns:
    """The drafts that rounds ask in turn, as they are planned. drafts: all of them. texts: of each. reached: for the first so many, with
    chances from which a round is foreseen; the others are never asked. acceptances: of those that are reached. shares: the chances that
    they have a proposal, of those that may have none."""

    drafts: tuple[OutlinedDraft, ...]
    texts: tuple[str, ...]
    reached: tuple[Asked, ...]
    acceptances: tuple[Chance, ...]
    shares: tuple[Chance, ...]
    notes: tuple[str, ...]

    @property
    def model(self) -> OutlinedDraft | None:
        """The draft that steps, if any is asked: the last, since one of a model has a proposal in every round."""
        last = self.drafts[len(self.reached) - 1]
        return last if last.model is not None else None

    @property
    def source(self) -> str:
        """Where the acceptance comes from."""
        if "acceptance" not in self.assumed:
            return GIVEN
        if len(self.drafts) == 1:
            return self.acceptances[0].source
        return "; ".join(f"{text} {each.rate:g}, {each.source}" for text, each in zip(self.texts, self.acceptances))

    @property
    def assumed(self) -> tuple[str, ...]:
        """See `PlannedRow.assumed`."""
        found = {"acceptance": self.acceptances, "proposing": self.shares}
        return tuple(name for name, chances in found.items() if any(each.source != GIVEN for each in chances))


def _not_measured(parts: Sequence[str], device: Device, *, observes: bool) -> str:
    """The note on kernels. parts: the drafts of a `combine` that it is about; empty for a draft that is not made of others. observes:
    whether verifications observe for one of them."""
    who = f"{' and '.join(parts)} {'do' if len(parts) > 1 else 'does'}" if parts else "it does"
    there = f", and on {device.name} there is none that observes" if observes and device.kernels != "mosaic_gpu" else ""
    return f"no kernel that reads or observes as {who} has been measured{there}; times are as if those that read everything did"


class Planner:
    """Plans rows for one model and device; see `plan`."""

    def __init__(
        self,
        config: LlamaConfig,
        device: Device,
        max_new_tokens: int,
        acceptances: Mapping[str, float],
        proposing: Mapping[str, float],
    ):
        self.config, self.device, self.max_new_tokens = config, device, max_new_tokens
        self.acceptances, self.proposing = acceptances, proposing

    def autoregressive(self, cache: CacheConfig, context: int, batch: int) -> PlannedRow:
        """A row for decoding without a draft."""
        row = PlannedRow(context, batch, registry.NONE, cache.kind, 0, Status.PLANNED, kernels_measured=True)
        target = timing.target_cost(self.device, self.config, cache, context=context, batch=batch, tokens=1)
        row = dataclasses.replace(row, target_tuned=timing.tuned(self.device, target))
        rounds = expected_rounds(cache.schedule_for(self.config.head_dim), 0, batch=batch)
        target_s, flush = self._seconds(target), rounds.flushes * self._seconds(timing.flush_cost(self.config))
        row = self._timed(row, (), target_s=target_s, step_s=None, flush_s=flush, round_s=target_s + flush, tokens=1.0)
        return self._fitted([row], cache, ())[0]

    def drafted(
        self,
        text: str,
        drafts: tuple[OutlinedDraft, ...] | InputError | None,
        cache: CacheConfig,
        context: int,
        batch: int,
        gammas: Sequence[int],
    ) -> list[PlannedRow]:
        """A row for each gamma, or one that says why there is none. drafts: None without a model of their cost, or why they were not
        made."""
        row = PlannedRow(context, batch, text, cache.kind, 0, Status.PLANNED)
        if isinstance(drafts, InputError):
            return [dataclasses.replace(row, status=Status.NOT_PLANNED, note=str(drafts))]
        if drafts is None:
            return [dataclasses.replace(row, status=Status.NO_COST)]
        turns = self._turns(text, drafts)
        if isinstance(turns, str):
            return [dataclasses.replace(row, status=Status.NO_ACCEPTANCE, note=f"give --acceptance {turns}=R")]
        row = dataclasses.replace(row, acceptance_source=turns.source, assumed=turns.assumed)
        return self._fitted([self._round(dataclasses.replace(row, gamma=gamma), cache, turns) for gamma in gammas], cache, drafts)

    def _turns(self, whole: str, drafts: tuple[OutlinedDraft, ...]) -> _Turns | str:
        """The drafts as rounds ask them, or the name of one that is asked and of which no acceptance is known."""
        texts, reached, acceptances, shares, notes = registry.texts_in(whole), [], [], [], []
        for i, (text, each) in enumerate(zip(texts, drafts, strict=True)):
            acceptance = chance_of(text, self.acceptances, ACCEPTANCE, whole=whole)
            if acceptance is None:
                return registry.name_of(text)
            share = 1.0
            if not each.always_proposes:
                found = chance_of(text, self.proposing, PROPOSING, whole=whole) or Chance(1.0, "nothing is known of it")
                share = found.rate
                shares.append(found)
                if found.source != GIVEN:
                    who = text if len(texts) > 1 else "it"
                    rounds = f"{who} is ASSUMED to have a proposal in {share:.0%} of the rounds that ask it, {regardless(text)}"
                    notes.append(f"{rounds}: {found.source}")
            reached.append(Asked(acceptance.rate, share))
            acceptances.append(acceptance)
            if share == 1:
                if never := texts[i + 1 :]:
                    alone, kept = " and ".join(texts[: i + 1]), "though what it keeps takes memory"
                    notes.append(f"it drafts what {alone} alone would: {' and '.join(never)} behind that is never asked, {kept}")
                break
        return _Turns(drafts, texts, tuple(reached), tuple(acceptances), tuple(shares), tuple(notes))

    def _round(self, row: PlannedRow, cache: CacheConfig, turns: _Turns) -> PlannedRow:
        """The row with the times of a round of its gamma."""
        rounds = expected_rounds(cache.schedule_for(self.config.head_dim), row.gamma, *turns.reached, batch=row.batch)
        step_s, step_tuned, drafting_s = None, None, 0.0
        # Kernels that read listed groups were timed on Hopper alone, and only there are any that observe.
        on_hopper = self.device.kernels == "mosaic_gpu"
        observing = [text for text, each in zip(turns.texts, turns.drafts, strict=True) if each.observes]
        unmeasured = [] if on_hopper else list(observing)
        where = dict(context=row.context, batch=row.batch)
        if turns.model is not None:
            cost = timing.draft_cost(self.device, turns.model, self.config, cache, **where)
            step_s, step_tuned = self._seconds(cost), timing.tuned(self.device, cost)
            drafting_s = self._drafting(row, cache, turns.model, rounds, step_s)
            step = turns.model.reads(row_of(self.config, cache, row.context + 1))
            if not step.kernels_measured or (step.listed and not on_hopper):
                unmeasured.append(turns.texts[len(turns.reached) - 1])
        notes = list(turns.notes)
        if unmeasured:
            parts = list(dict.fromkeys(unmeasured)) if len(turns.texts) > 1 else []
            notes.append(_not_measured(parts, self.device, observes=bool(observing)))
        target = timing.target_cost(self.device, self.config, cache, **where, tokens=row.gamma + 1, observe=bool(observing))
        target_s = self._seconds(target)
        flush_s = rounds.flushes * self._seconds(timing.flush_cost(self.config))
        round_s = drafting_s + target_s + flush_s + timing.FITTED.round
        row = dataclasses.replace(
            row,
            note="; ".join(notes),
            kernels_measured=not unmeasured,
            step_tuned=step_tuned,
            target_tuned=timing.tuned(self.device, target),
            acceptance=turns.reached[0].acceptance if len(turns.reached) == 1 else rounds.acceptance,
            proposing=rounds.proposing,
            tokens_per_round=rounds.tokens,
            accepted_of_drafted=rounds.accepted_of_drafted,
        )
        return self._timed(row, turns.drafts, target_s=target_s, step_s=step_s, flush_s=flush_s, round_s=round_s, tokens=rounds.tokens)

    def _drafting(self, row: PlannedRow, cache: CacheConfig, draft: OutlinedDraft, rounds: Rounds, step_s: float) -> float:
        """Seconds of the passes of a draft's model in a round. It reads first what it lacks of the text: after a round in which it was not
        asked it must catch up on all that round emitted."""
        width = draft.model.first_pass
        if width == 1:
            return rounds.steps * step_s
        where = dict(context=row.context, batch=row.batch)
        first_s = self._seconds(timing.draft_cost(self.device, draft, self.config, cache, **where, tokens=width))
        behind = (1 - rounds.asked) * rounds.tokens / width
        return (rounds.passes[0] + behind) * first_s + sum(rounds.passes[1:]) * step_s

    def _seconds(self, cost: timing.Cost) -> float:
        return cost.seconds(self.device)

    def _timed(
        self,
        row: PlannedRow,
        drafts: Sequence[OutlinedDraft],
        *,
        target_s: float,
        step_s: float | None,
        flush_s: float,
        round_s: float,
        tokens: float,
    ) -> PlannedRow:
        """The row with its times, from those of a round that emits so many tokens. drafts: all of them; those with models of their own
        prefill the prompts too."""
        prefill = self._seconds(timing.prefill_cost(self.device, self.config, batch=row.batch, tokens=bucket(row.context)))
        for each in (each.model for each in drafts if each.model is not None and each.model.own_model):
            read = bucket(each.reads_of_prompt(row.context))
            prefill += timing.prefill_cost(self.device, each.step.model.config, batch=row.batch, tokens=read).floor  # in the same call
        return dataclasses.replace(
            row,
            prefill_s=prefill,
            step_ms=None if step_s is None else 1e3 * step_s,
            target_ms=1e3 * target_s,
            flush_ms=1e3 * flush_s,
            round_ms=1e3 * round_s,
            ms_per_token=1e3 * round_s / tokens,
            tokens_per_second=row.batch * tokens / round_s,
        )

    def _fitted(self, rows: Sequence[PlannedRow], cache: CacheConfig, drafts: Sequence[OutlinedDraft]) -> list[PlannedRow]:
        """These rows, which differ in gamma alone, with their memory; and what fits, with the largest gamma, whose caches are largest."""
        batch, context = rows[0].batch, rows[0].context
        room = 1e9 * self.device.memory_gb - self.device.reserved_bytes
        most = max(row.gamma for row in rows)
        positions = min([self.config.max_length, *(each.draft.max_length for each in drafts if each.draft.max_length is not None)])

        def memory(gamma: int, batch: int, context: int) -> Memory:
            padded = dict(context=bucket(context), new_tokens=bucket(self.max_new_tokens))  # as the engine allocates
            return memory_of(self.config, cache, drafts, batch=batch, **padded, gamma=gamma)

        possible = lambda context: context + self.max_new_tokens <= positions

        most_rows = largest(lambda batch: memory(most, batch, context).total <= room)
        longest = largest(lambda context: possible(context) and memory(most, batch, context).total <= room)

        def fitted(row: PlannedRow) -> PlannedRow:
            found = memory(row.gamma, batch, context)
            status = row.status if found.total <= room else Status.DOES_NOT_FIT
            return dataclasses.replace(row, memory=found, status=status, most_rows=most_rows, longest_context=longest)

        return list(map(fitted, rows))


def _compared(rows: Sequence[PlannedRow]) -> list[PlannedRow]:
    """The rows of one context and batch with their speed-up over the faster of the autoregressive ones that fit."""
    baselines = [row for row in rows if row.draft == registry.NONE and row.status == Status.PLANNED]
    if not baselines:
        return list(rows)
    baseline = min(baselines, key=lambda row: row.ms_per_token)
    speedup = lambda row: None if row.ms_per_token is None else baseline.ms_per_token / row.ms_per_token
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
    return Best(context, batch, row.draft, row.gamma, row.cache, row.speedup, len(drafts), assumed, others)


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
    if config.dtype not in ("bfloat16", "float16"):
        notes.append(f"planned in bfloat16; the checkpoint is in {config.dtype}")
    for batch in batches:
        notes += _tuning_notes([row for row in rows if row.batch == batch])
    for row in rows:
        if row.ms_per_token is None:
            notes.append(f"{row.draft}: {row.status}{f'; {row.note}' if row.note else ''}")
        elif row.note:
            notes.append(f"{row.draft}: {row.note}")
        if row.acceptance is not None and row.acceptance_source != GIVEN:
            several = len(registry.texts_in(row.draft)) > 1  # whose source has the rate of each
            rate = "" if several else f" {row.acceptance:g}"
            notes.append(f"{row.draft}: acceptance{rate} is ASSUMED, {regardless(row.draft)}: {row.acceptance_source}")
    return list(dict.fromkeys(notes))


def _tuning_notes(rows: Sequence[PlannedRow]) -> list[str]:
    """Which passes of one batch have attention that was tuned on the device and which have not; nothing where all are alike."""

    def those(wanted: bool) -> list[str]:
        targets = [row for row in rows if row.target_tuned is wanted]
        verified = sorted({row.gamma + 1 for row in targets if row.draft != registry.NONE})
        without = ["a token without a draft"] if any(row.draft == registry.NONE for row in targets) else []
        steps = dict.fromkeys(f"a step of {row.draft}" for row in rows if row.step_tuned is wanted)
        return [*without, *steps, *([f"verifying {', '.join(map(str, verified))} tokens"] if verified else [])]

    tuned, others = those(True), those(False)
    if not tuned or not others:
        return []
    compared = f"attention over quantized tokens was tuned on this device for {'; '.join(tuned)}; not for {'; '.join(others)}"
    slower = "These take longer for that alone; their figure for INT8 is fitted on 7 tokens and 32 KV heads"
    return [f"batch {rows[0].batch}: {compared}. {slower}"]
