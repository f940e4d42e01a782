"""The QuantSpec draft: the model itself with INT4 weights and its head in INT8, reading the upper 4 bits of the cache.

Source: QuantSpec (arXiv 2502.10424), algorithm 1 and section 4.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE, View
from qspec_jax.caches.cache import NOTHING, Cache, Reads
from qspec_jax.drafts.draft import State
from qspec_jax.drafts.int4 import int4_model, with_own_layers
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.skipping import Deferred, Skipped
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.settings_text import setting

DRAFT_VIEWS: dict[str, View] = {"int4": UPPER_PLANE, "int8": BOTH_PLANES}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantSpecDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over the target's cache."""

    def step_in_round(self, state: State, cache: Cache) -> ViewedModel:
        return self.through(self.step.view) if self.skipped else self.step

    def reads(self, layer: int, cache: Cache, tokens: int) -> Reads:
        if layer in self.skipped.attention:
            return NOTHING
        return cache.reads(self.step.view[layer] if isinstance(self.step.view, tuple) else self.step.view, tokens)


@dataclasses.dataclass(frozen=True)
class QuantSpecSettings(SelfSpeculativeSettings):
    """Sensitive layers are L_S in algorithm 1 of the paper, which does not define them."""

    cache: str = setting("int4", "What is read of the target's cache: the upper plane, or both.", choices=tuple(DRAFT_VIEWS))
    sensitive_layers: int = setting(0, "How many of the first and of the last layers are the target's own, in weights and cache.")
    skip: str = setting(
        "none",
        "Layers to leave out: none, auto, or all of layer 3, the attention of 5 and the MLP of 6 as (3,5a,6m).",
        example="skip=(3,5a)",
    )

    def __post_init__(self):
        super().__post_init__()
        Skipped.parse(self.skip)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> QuantSpecDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError for more sensitive layers than there are, and for
        skipped ones that are not there."""
        layers, own, skipped = model.config.num_layers, self.sensitive_layers, Skipped.parse(self.skip)
        skipped.check(layers)
        if not 0 <= own <= layers:
            raise InputError(f"sensitive_layers {own} should be from 0 to the model's {layers} layers")
        view, sensitive = DRAFT_VIEWS[self.cache], {*range(own), *range(layers - own, layers)}
        if sensitive and not isinstance(skipped, Deferred) and (both := sorted(sensitive & (skipped.attention | skipped.mlp))):
            raise InputError(f"draft skip leaves out layer {both[0]}, which sensitive_layers={own} keeps as the target's own")
        if sensitive:
            view = tuple(BOTH_PLANES if i in sensitive else DRAFT_VIEWS[self.cache] for i in range(layers))
        steps = self.stepped(model, lambda: with_own_layers(int4(), model, sensitive) if sensitive else int4(), view)
        return QuantSpecDraft(**steps, skipped=skipped)


def quantspec(
    model: Llama, *, calibration: Sequence[Sequence[int]] | None = None, progress: bool | None = None, **settings: int | str
) -> QuantSpecDraft:
    """The QuantSpec draft of a model; settings: fields of `QuantSpecSettings`. calibration, progress: see `int4_model`.

    Raises InputError for a setting that is out of range.
    """
    return QuantSpecSettings(**settings).make(model, lambda: int4_model(model, calibration=calibration, progress=progress))
