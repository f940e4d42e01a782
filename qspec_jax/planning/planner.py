"""Rows of a plan: the time and the memory of each way of decoding, for one model and device."""

import dataclasses
from collections.abc import Mapping, Sequence

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts import registry
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.prompts import bucket
from qspec_jax.planning import timing
from qspec_jax.planning.acceptance import ACCEPTANCE, GIVEN, PROPOSING, Chance, chance_of, regardless
from qspec_jax.planning.devices import Device
from qspec_jax.planning.memory import Memory, largest, memory_of
from qspec_jax.planning.plan_report import PlannedRow, Status
from qspec_jax.planning.rounds import Asked, Rounds, expected_rounds
from qspec_jax.planning.steps import OutlinedDraft

MEASURED = ("full", "int8")  # caches over whose kernels times were fitted


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
    """

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
        tokens = 2 if cache.guesses else 1
        target = timing.target_cost(self.device, self.config, cache, **self._where(context, batch), tokens=tokens)
        row = PlannedRow(context, batch, registry.NONE, cache.name, 0, Status.PLANNED, kernels_measured=cache.kind in MEASURED)
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
        """A row for each gamma, or one that says why there is none. drafts: None without a model of their cost, or why they were not
        made."""
        row = PlannedRow(context, batch, text, cache.name, 0, Status.PLANNED)
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
                    notes.append(f"it drafts what {alone} alone would: {' and '.join(never)} after that is never asked, {kept}")
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
        where = self._where(row.context, row.batch)
        if turns.model is not None:
            cost = timing.draft_cost(self.device, turns.model, self.config, cache, **where)
            step_s, step_tuned = self._seconds(cost), timing.tuned(self.device, cost)
            drafting_s = self._drafting(row, cache, turns.model, rounds, step_s)
            step = turns.model.reads(cache.outline(self.config, row.context + 1), row.context + 1)
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
            kernels_measured=not unmeasured and cache.kind in MEASURED,
            step_tuned=step_tuned,
            target_tuned=timing.tuned(self.device, target),
            copying_ms=1e3 * target.copying,
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
        where = self._where(row.context, row.batch)
        first_s = self._seconds(timing.draft_cost(self.device, draft, self.config, cache, **where, tokens=width))
        catching_up = (1 - rounds.asked) * rounds.tokens / width
        return (rounds.passes[0] + catching_up) * first_s + sum(rounds.passes[1:]) * step_s

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
