"""Rows of a plan: the time and the memory of each way of decoding, for one model and device."""

import dataclasses
from collections.abc import Mapping, Sequence

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts import registry
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.prompts import bucket
from qspec_jax.planning import timing
from qspec_jax.planning.acceptance import (
    ACCEPTANCE,
    GIVEN,
    PROPOSING,
    Chance,
    chance_of,
    first_level,
    inner_chance_of,
    last_level,
    regardless,
)
from qspec_jax.planning.devices import Device
from qspec_jax.planning.drafting import Place, drafting
from qspec_jax.planning.heads import prefill_of_head
from qspec_jax.planning.memory import Memory, largest, memory_of
from qspec_jax.planning.plan_report import PlannedRow, Status
from qspec_jax.planning.rounds import Asked, expected_rounds
from qspec_jax.planning.steps import OutlinedDraft

MEASURED = ("full", "int8")  # caches over whose kernels times were fitted
NESTED_UNMEASURED = "no times of kernels for nested weights are stored; these are those of reading their bytes"
FIRST_GAMMAS = (1, 2, 3, 4, 6, 8)  # of cascades that leave it open; those below a round's gamma


@dataclasses.dataclass(frozen=True)
class _Turns:
    """The drafts that rounds ask in turn, as they are planned.

    Attributes:
        drafts: all of them.
        texts: of each.
        reached: the chances of the first drafts; those after them are never asked.
        acceptances: of the drafts that are reached.
        shares: the chances of a proposal, of those that may have none.
        notes: sentences on what is assumed.
        inner: of a cascade that is reached, the acceptance of its first draft by its middle; None without one.
        first: that draft, as the middle judges it.
    """

    drafts: tuple[OutlinedDraft, ...]
    texts: tuple[str, ...]
    reached: tuple[Asked, ...]
    acceptances: tuple[Chance, ...]
    shares: tuple[Chance, ...]
    notes: tuple[str, ...]
    inner: Chance | None = None
    first: Asked | None = None

    @property
    def last(self) -> OutlinedDraft:
        """The last draft that is asked: the only one that may step, since one of a model has a proposal in every round."""
        return self.drafts[len(self.reached) - 1]

    @property
    def last_texts(self) -> tuple[str, ...]:
        """The texts of its parts."""
        text = self.texts[len(self.reached) - 1]
        return registry.levels_in(text) or (text,)

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
        found = {"acceptance": self.acceptances, "inner acceptance": (self.inner,) if self.inner else (), "proposing": self.shares}
        return tuple(name for name, chances in found.items() if any(each.source != GIVEN for each in chances))


def _not_measured(parts: Sequence[str], device: Device, *, observes: bool) -> str:
    """The note on kernels. parts: the drafts of a `combine` that it is about; empty for a draft that is not made of others. observes:
    whether verifications observe for one of them."""
    who = f"{' and '.join(parts)} {'do' if len(parts) > 1 else 'does'}" if parts else "it does"
    there = f", and on {device.name} there is none that observes" if observes and device.kernels != "mosaic_gpu" else ""
    return f"no kernel that reads or observes as {who} has been measured{there}; times are as if those that read everything did"


def _with_first_gammas(turns: _Turns, gamma: int) -> list[_Turns]:
    """The drafts with each number of drafts that a cascade's first one may make at a time, where its text leaves that open."""
    text = turns.texts[len(turns.reached) - 1]
    if not turns.last.levels or registry.first_gamma_of(text) is not None:
        return [turns]
    fitting = [number for number in FIRST_GAMMAS if number < gamma] or [1]
    return [dataclasses.replace(turns, drafts=tuple(each.with_first_gamma(number) for each in turns.drafts)) for number in fitting]


class Planner:
    """Plans rows for one model and device; see `plan`.

    Attributes:
        inner: given chances that a cascade's middle accepts a draft of its first one, by what `keys_of` says.
        inner_by_target: see `inner_chance_of`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        device: Device,
        max_new_tokens: int,
        acceptances: Mapping[str, float],
        proposing: Mapping[str, float],
        inner: Mapping[str, float] | None = None,
        *,
        inner_by_target: bool = True,
    ):
        self.config, self.device, self.max_new_tokens = config, device, max_new_tokens
        self.acceptances, self.proposing, self.inner = acceptances, proposing, inner or {}
        self.inner_by_target = inner_by_target

    def autoregressive(self, cache: CacheConfig, context: int, batch: int) -> PlannedRow:
        """A row for decoding without a draft."""
        tokens = 2 if cache.guesses else 1
        target = timing.target_cost(self.device, self.config, cache, **self._where(context, batch), tokens=tokens)
        measured = cache.kind in MEASURED and not self.config.nested_weights
        row = PlannedRow(context, batch, registry.NONE, cache.name, 0, Status.PLANNED, kernels_measured=measured)
        row = dataclasses.replace(row, note=NESTED_UNMEASURED if self.config.nested_weights else "")
        row = dataclasses.replace(row, target_tuned=timing.tuned(self.device, target), copying_ms=1e3 * target.copying)
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
        """A row for each gamma, of a cascade that leaves it open for each of `FIRST_GAMMAS` too; or one that says why there is none.

        drafts: None without a model of their cost, or why they were not made.
        """
        row = PlannedRow(context, batch, text, cache.name, 0, Status.PLANNED)
        if isinstance(drafts, InputError):
            return [dataclasses.replace(row, status=Status.NOT_PLANNED, note=str(drafts))]
        if drafts is None:
            return [dataclasses.replace(row, status=Status.NO_COST)]
        turns = self._turns(text, drafts)
        if isinstance(turns, str):
            return [dataclasses.replace(row, status=Status.NO_ACCEPTANCE, note=f"give {turns}=R")]
        row = dataclasses.replace(row, acceptance_source=turns.source, assumed=turns.assumed)
        rows = [
            self._round(dataclasses.replace(row, gamma=gamma), cache, each) for gamma in gammas for each in _with_first_gammas(turns, gamma)
        ]
        return self._fitted(rows, cache, drafts)

    def _turns(self, whole: str, drafts: tuple[OutlinedDraft, ...]) -> _Turns | str:
        """The drafts as rounds ask them, or an option and the name of one that is asked, which has to be given with it."""
        texts, reached, acceptances, shares, notes, inner, first = registry.texts_in(whole), [], [], [], [], None, None

        def share_of(text: str, named: str) -> float:
            found = chance_of(text, self.proposing, PROPOSING, named, whole) or Chance(1.0, "nothing is known of it")
            shares.append(found)
            if found.source != GIVEN:
                who = text if len(texts) > 1 or text != named else "it"
                rounds = f"{who} is ASSUMED to have a proposal in {found.rate:.0%} of the rounds that ask it, {regardless(text)}"
                notes.append(f"{rounds}: {found.source}")
            return found.rate

        for i, (text, each) in enumerate(zip(texts, drafts, strict=True)):
            judged = last_level(text)
            acceptance = chance_of(judged, self.acceptances, ACCEPTANCE, text, whole)
            if acceptance is None:
                return f"--acceptance {registry.name_of(judged)}"
            if each.levels:
                inner = inner_chance_of(text, self.inner, whole, by_target=self.inner_by_target)
                if inner is None:
                    return f"--inner-acceptance {registry.name_of(first_level(text))}"
                first = Asked(inner.rate, 1.0 if each.levels[0].always_proposes else share_of(first_level(text), text))
            share = 1.0 if each.always_proposes else share_of(text, text)
            reached.append(Asked(acceptance.rate, share))
            acceptances.append(acceptance)
            if share == 1:
                if never := texts[i + 1 :]:
                    alone, kept = " and ".join(texts[: i + 1]), "though what it keeps takes memory"
                    notes.append(f"it drafts what {alone} alone would: {' and '.join(never)} after that is never asked, {kept}")
                break
        return _Turns(drafts, texts, tuple(reached), tuple(acceptances), tuple(shares), tuple(notes), inner, first)

    def _round(self, row: PlannedRow, cache: CacheConfig, turns: _Turns) -> PlannedRow:
        """The row with the times of a round of its gamma."""
        rounds = expected_rounds(cache.schedule_for(self.config.head_dim), row.gamma, *turns.reached, batch=row.batch)
        # Kernels that read listed groups were timed on Hopper alone, and only there are any that observe.
        on_hopper = self.device.kernels == "mosaic_gpu"
        observing = [text for text, each in zip(turns.texts, turns.drafts, strict=True) if each.observes]
        unmeasured = [] if on_hopper else list(observing)
        where = self._where(row.context, row.batch)
        drafts = drafting(Place(self.device, self.config, cache, **where), turns.last, rounds, row.gamma, turns.first)
        for text, part in zip(turns.last_texts, turns.last.parts, strict=True):
            if part.model is not None:
                step = part.reads(cache.outline(self.config, row.context + 1), row.context + 1)
                if not step.kernels_measured or (step.listed and not on_hopper):
                    unmeasured.append(text)
        notes, heads = list(turns.notes), any(part.head is not None for part in turns.last.parts)
        if self.config.nested_weights:
            notes.append(NESTED_UNMEASURED)
        if heads:
            notes.append("no pass of a head has been timed by itself on a GPU; its layers are counted as those of a target")
        if unmeasured:
            parts = list(dict.fromkeys(unmeasured)) if len(turns.texts) > 1 or turns.last.levels else []
            notes.append(_not_measured(parts, self.device, observes=bool(observing)))
        target = timing.target_cost(self.device, self.config, cache, **where, tokens=row.gamma + 1, observe=bool(observing))
        target_s = self._seconds(target)
        flush_s = rounds.flushes * self._seconds(timing.flush_cost(self.config))
        round_s = drafts.seconds + target_s + flush_s + timing.FITTED.round
        row = dataclasses.replace(
            row,
            note="; ".join(notes),
            kernels_measured=not unmeasured and not heads and not self.config.nested_weights and cache.kind in MEASURED,
            step_tuned=None if drafts.step is None else timing.tuned(self.device, drafts.step),
            target_tuned=timing.tuned(self.device, target),
            copying_ms=1e3 * target.copying,
            acceptance=turns.reached[0].acceptance if len(turns.reached) == 1 else rounds.acceptance,
            proposing=rounds.proposing,
            first_gamma=turns.last.draft.at_once(row.gamma) if turns.last.levels else None,
            first_step_ms=None if drafts.first_step is None else 1e3 * self._seconds(drafts.first_step),
            middle_passes=drafts.middle_passes,
            inner_acceptance=turns.inner and turns.inner.rate,
            inner_acceptance_source=turns.inner.source if turns.inner else "",
            tokens_per_round=rounds.tokens,
            accepted_of_drafted=rounds.accepted_of_drafted,
        )
        step_s = None if drafts.step is None else self._seconds(drafts.step)
        return self._timed(row, turns.drafts, target_s=target_s, step_s=step_s, flush_s=flush_s, round_s=round_s, tokens=rounds.tokens)

    def _where(self, context: int, batch: int) -> dict[str, int]:
        """Arguments of `timing.target_cost` and `timing.draft_cost`. Rows have room for what the engine pads prompts and new tokens to."""
        return dict(context=context, batch=batch, capacity=bucket(context) + bucket(self.max_new_tokens))

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
        """The row with its times.

        Args:
            row: the way of decoding.
            drafts: all that a round may ask; those with models of their own prefill the prompts too.
            target_s, step_s, flush_s, round_s: seconds of a verification, a draft's step, a round's share of a flush, and a round.
            tokens: that a round emits for a row.
        """
        prefill = self._seconds(timing.prefill_cost(self.device, self.config, batch=row.batch, tokens=bucket(row.context)))
        parts = [part for each in drafts for part in each.parts]
        for each in (each.model for each in parts if each.model is not None and each.model.own_model):
            read = bucket(each.reads_of_prompt(row.context))
            prefill += timing.prefill_cost(self.device, each.step.model.config, batch=row.batch, tokens=read).floor  # in the same call
        prefill += sum(prefill_of_head(self.device, each.head, batch=row.batch, tokens=row.context).floor for each in parts if each.head)
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

        def fits(memory: Memory) -> bool:
            return memory.total + (memory.host if self.device.shared_memory else 0) <= room

        def possible(context):
            return context + self.max_new_tokens <= positions

        max_rows = largest(lambda batch: fits(memory(most, batch, context)))
        longest = largest(lambda context: possible(context) and fits(memory(most, batch, context)))

        def fitted(row: PlannedRow) -> PlannedRow:
            found = memory(row.gamma, batch, context)
            status = row.status if fits(found) else Status.DOES_NOT_FIT
            return dataclasses.replace(row, memory=found, status=status, max_rows=max_rows, longest_context=longest)

        return list(map(fitted, rows))
