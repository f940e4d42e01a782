"""Shared by drafts whose steps are the target's own model, with its weights or INT4 weights: two settings, and the head in the loop."""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax

from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import View
from qspec_jax.caches.cache import Cache
from qspec_jax.drafts.draft import Draft, State
from qspec_jax.drafts.stepwise import StepwiseDraft
from qspec_jax.models.llama import Llama
from qspec_jax.models.skipping import NO_LAYERS, Deferred, Skipped, SkippingModel
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.quantization.weights import quantize_head
from qspec_jax.settings_text import check_settings, setting


@dataclasses.dataclass(frozen=True)
class SelfSpeculativeDraft(StepwiseDraft):
    """Single-token steps of the target's own model.

    Attributes:
        step: the model; a draft that chooses what it reads in each round does not use its view.
        head_bits: 8 if the decode loop should quantize the model's head.
        skipped: what the steps leave out of the model.
    """

    step: ViewedModel
    head_bits: int = dataclasses.field(default=16, kw_only=True, metadata={"static": True})
    skipped: Skipped | Deferred = dataclasses.field(default=NO_LAYERS, kw_only=True, metadata={"static": True})

    def with_choice(self, choose: Callable[[Draft], Skipped]) -> Self:
        if not isinstance(self.skipped, Deferred):
            return self
        return dataclasses.replace(self, skipped=choose(dataclasses.replace(self, skipped=NO_LAYERS)))

    def chosen(self) -> tuple[str, ...]:
        return () if isinstance(self.skipped, Deferred) or not self.skipped else (str(self.skipped),)

    def through(self, view: View | tuple[View, ...]) -> ViewedModel:
        """The model of the steps, through this view, without what is skipped."""
        return SkippingModel(self.step.model, view, self.skipped) if self.skipped else ViewedModel(self.step.model, view)

    def read_in_round(self, state: State, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        # A layer whose attention is skipped reads nothing, for which there is no view.
        return None if self.skipped.attention else super().read_in_round(state, cache)

    def in_loop(self) -> Self:
        # Not on a CPU, where XLA would keep a float32 copy of the codes.
        if self.head_bits == 16 or jax.default_backend() == "cpu":
            return self
        return dataclasses.replace(self, step=ViewedModel(quantize_head(self.step.model), self.step.view), head_bits=16)


@dataclasses.dataclass(frozen=True)
class SelfSpeculativeSettings:
    """The settings that such drafts share."""

    weight_bits: int = setting(4, "Bits of the weights: INT4, or the target's own.", choices=(4, 16), kw_only=True)
    head_bits: int = setting(8, "Bits of the head, where the other weights are INT4.", choices=(8, 16), kw_only=True)

    def __post_init__(self):
        check_settings("draft", self)

    def stepped(self, model: Llama, int4: Callable[[], Llama], view: View | tuple[View, ...]) -> dict:
        """The fields of `SelfSpeculativeDraft`, for a model that is read through this view. int4: makes the model's INT4 weights."""
        if self.weight_bits == 16:
            return dict(step=ViewedModel(model, view))
        return dict(step=ViewedModel(int4(), view), head_bits=self.head_bits)
