"""The QuantSpec draft: the model itself with INT4 weights and its head in INT8, reading the upper 4 bits of the cache.

Source: QuantSpec (arXiv 2502.10424), algorithm 1 and section 4.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE, View
from qspec_jax.drafts.draft import StepwiseDraft
from qspec_jax.drafts.int4 import int4_model, with_own_layers
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.quantization.weights import quantize_head

DRAFT_VIEWS: dict[str, View] = {"int4": UPPER_PLANE, "int8": BOTH_PLANES}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantSpecDraft(StepwiseDraft):
    """Single-token steps of a model over the target's cache. head_bits: 8 if the decode loop is to quantize its head."""

    step: ViewedModel
    head_bits: int = dataclasses.field(default=16, metadata={"static": True})

    def step_in_round(self, state, cache):
        return self.step

    def reads(self, layer, groups):
        view = self.step.view[layer] if isinstance(self.step.view, tuple) else self.step.view
        return view.planes, groups

    def in_loop(self):
        return dataclasses.replace(self, step=head_in_loop(self.step, self.head_bits), head_bits=16)


def head_in_loop(step: ViewedModel, head_bits: int) -> ViewedModel:
    """The step with its head in as many bits. Not on a CPU, where XLA would keep a float32 copy of the codes."""
    if head_bits == 16 or jax.default_backend() == "cpu":
        return step
    return ViewedModel(quantize_head(step.model), step.view)


@dataclasses.dataclass(frozen=True)
class QuantSpecSettings:
    """The settings of the draft.

    weight_bits: 4, or 16 for the target's own weights. cache: what the draft reads of the target's cache, "int4" (its upper plane) or
    "int8" (both planes). head_bits: 8 quantizes the head of INT4 weights, 16 leaves it as it is. sensitive_layers: the first and the last
    so many layers are the target's own, in weights and cache (QuantSpec, algorithm 1, where they are L_S and not defined).
    """

    weight_bits: int = 4
    cache: str = "int4"
    head_bits: int = 8
    sensitive_layers: int = 0

    def __post_init__(self):
        check_bits(self.weight_bits, self.head_bits)
        if self.cache not in DRAFT_VIEWS:
            raise InputError(f"draft cache {self.cache!r} should be {' or '.join(DRAFT_VIEWS)}")

    def make(self, model: Llama, int4: Callable[[], Llama]) -> QuantSpecDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError for more sensitive layers than there are."""
        layers, own = model.config.num_layers, self.sensitive_layers
        if not 0 <= own <= layers:
            raise InputError(f"sensitive_layers {own} should be from 0 to the model's {layers} layers")
        view, sensitive = DRAFT_VIEWS[self.cache], {*range(own), *range(layers - own, layers)}
        if sensitive:
            view = tuple(BOTH_PLANES if i in sensitive else DRAFT_VIEWS[self.cache] for i in range(layers))
        if self.weight_bits == 16:
            return QuantSpecDraft(ViewedModel(model, view))
        quantized = int4()
        return QuantSpecDraft(ViewedModel(with_own_layers(quantized, model, sensitive) if sensitive else quantized, view), self.head_bits)


def check_bits(weight_bits: int, head_bits: int) -> None:
    """Raises InputError for a number of bits that there is no format for."""
    if weight_bits not in (4, 16):
        raise InputError(f"draft weight_bits {weight_bits} should be 4 or 16")
    if head_bits not in (8, 16):
        raise InputError(f"draft head_bits {head_bits} should be 8 or 16")


def quantspec(
    model: Llama, *, calibration: Sequence[Sequence[int]] | None = None, progress: bool | None = None, **settings: int | str
) -> QuantSpecDraft:
    """The QuantSpec draft of a model; settings: fields of `QuantSpecSettings`. calibration, progress: see `int4_model`.

    Raises InputError for a setting that is out of range.
    """
    return QuantSpecSettings(**settings).make(model, lambda: int4_model(model, calibration=calibration, progress=progress))
