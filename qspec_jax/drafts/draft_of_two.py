"""The base of drafts that are made of two others, and of their settings."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self

from qspec_jax.caches.cache import Cache, Gives
from qspec_jax.drafts.draft import Draft, DraftSettings, RoundResult, State, Taps, checkpoints_of, needs_full_layers, needs_of
from qspec_jax.drafts.stepwise import StepwiseDraft
from qspec_jax.errors import InputError
from qspec_jax.models.skipping import Skipped
from qspec_jax.models.viewed import ViewedModel


class DraftOfTwo(Draft):
    """A draft that is made of two others: it needs what both need, and its state is that of both.

    Attributes:
        PARTS: the names of the fields that are the two drafts.
    """

    PARTS: ClassVar[tuple[str, str]]

    @property
    def parts(self) -> tuple[Draft, ...]:
        return tuple(getattr(self, name) for name in self.PARTS)

    def _changed(self, change: Callable[[Draft], Draft]) -> Self:
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in self.PARTS})

    @property
    def needs(self) -> frozenset[Gives]:
        return frozenset().union(*(part.needs for part in self.parts))

    @property
    def observes(self) -> bool:
        return any(part.observes for part in self.parts)

    @property
    def prompt_queries(self) -> int:
        return max(part.prompt_queries for part in self.parts)

    @property
    def taps(self) -> Taps | None:
        """Raises InputError for two that read other features: they are taken once for both."""
        found = {part.taps for part in self.parts} - {None}
        if len(found) > 1:
            raise InputError("two drafts that read features of the target should read the same ones, and a window of one size")
        return next(iter(found), None)

    @property
    def independent(self) -> bool:
        return all(part.independent for part in self.parts)

    @property
    def extra_rows(self) -> int:
        return max(part.extra_rows for part in self.parts)

    @property
    def max_length(self) -> int | None:
        return min((part.max_length for part in self.parts if part.max_length is not None), default=None)

    def proposers(self) -> tuple[Draft, ...]:
        return sum((part.proposers() for part in self.parts), ())

    def with_choice(self, choose: Callable[[Draft], Skipped]) -> Self:
        return self._changed(lambda part: part.with_choice(choose))

    def chosen(self) -> tuple[str, ...]:
        return sum((part.chosen() for part in self.parts), ())

    def made_for(self) -> tuple[tuple[str, int], ...]:
        return sum((part.made_for() for part in self.parts), ())

    def commit(self, state: State, result: RoundResult, cache: Cache) -> State:
        return tuple(part.commit(own, result, cache) for part, own in zip(self.parts, state, strict=True))

    def within_round(self, state: State, max_tokens: int) -> State:
        return tuple(part.within_round(own, max_tokens) for part, own in zip(self.parts, state, strict=True))

    def in_prefill(self) -> Self:
        return self._changed(lambda part: part.in_prefill())

    def in_loop(self) -> Self:
        one, other = self.parts
        made = one.in_loop()
        return dataclasses.replace(self, **dict(zip(self.PARTS, (made, _with_head_of(made, one, other).in_loop()), strict=True)))


def _with_head_of(made: Draft, before: Draft, draft: Draft) -> Draft:
    """The draft with the head that another one, `before`, has made for the loop, if they step the same model, so that there is one."""
    steps = all(isinstance(each, StepwiseDraft) for each in (made, before, draft))

    def bits(draft):
        return getattr(draft, "head_bits", 16)

    if made is before or not steps or before.step.model is not draft.step.model or bits(before) == 16 or bits(before) != bits(draft):
        return draft
    return dataclasses.replace(draft, step=ViewedModel(made.step.model, draft.step.view), head_bits=16)


class SettingsOfTwo:
    """The settings of a draft that is made of two others.

    Attributes:
        PARTS: the names of the attributes that are the settings of the two.
    """

    PARTS: ClassVar[tuple[str, str]]

    @property
    def parts(self) -> tuple[DraftSettings, ...]:
        return tuple(getattr(self, name) for name in self.PARTS)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The checkpoints that the two read besides the target's."""
        return sum(map(checkpoints_of, self.parts), ())

    @property
    def needs(self) -> frozenset[Gives]:
        """What the two need of the target's cache."""
        return frozenset().union(*map(needs_of, self.parts))

    @property
    def needs_full_layers(self) -> bool:
        return any(map(needs_full_layers, self.parts))
