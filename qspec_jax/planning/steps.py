"""What one step of a draft reads of weights and caches, known from a model's shape alone.

A draft is made of an outline, a model whose weights are shapes, and then asked what its steps read (`ModelDraft.reads`), as the
benchmarks ask those with weights. So a draft that goes by steps of a model is planned without a word of its own, and so is one without a
model that says how much it proposes (`Draft.proposes`).
"""

import dataclasses
from collections.abc import Callable
from typing import Self

from pallas_kernels.formats.views import BOTH_PLANES
from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.caches.cache import Cache, Reads
from qspec_jax.drafts.cascade import CascadeDraft
from qspec_jax.drafts.draft import Draft, Proposes
from qspec_jax.drafts.eagle3 import Eagle3Draft
from qspec_jax.drafts.registry import DraftSettings
from qspec_jax.drafts.step_bytes import cache_bytes_of_step, reads_of_step, skipped_by
from qspec_jax.drafts.stepwise import ModelDraft
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama


@dataclasses.dataclass(frozen=True)
class LayerReads(Reads):
    """What a step reads of one layer: of the cache, see `Reads`, and of weights. weight_bits: 16 for a model's own, 4 for INT4."""

    weight_bits: int = 16


@dataclasses.dataclass(frozen=True)
class StepReads:
    """What a pass, such as a step of one token in each row, reads.

    Attributes:
        config: of the model that makes the step.
        layers: what it reads of each layer.
        head_bits: 16 for the model's own head, 8 for INT8.
        cache_bytes, host_bytes: of keys and values of a row, in all layers: what it reads on the device, and what it copies from host
            memory.
        kernels_measured: whether GPU kernels that read so were measured, where there are any (for `listed` layers on Hopper alone).
    """

    config: LlamaConfig
    layers: tuple[LayerReads, ...]
    head_bits: int
    cache_bytes: int
    host_bytes: int = 0
    kernels_measured: bool = True

    @property
    def listed(self) -> bool:
        """Whether it reads listed groups in any layer."""
        return any(layer.listed for layer in self.layers)


def own_weight_bits(config: LlamaConfig) -> int:
    """Bits of the linear layers of a model itself: 4, 8 where they are nested, or 16."""
    return 4 if config.int4_weights else 8 if config.nested_weights else 16


def own_step(config: LlamaConfig, cache: Cache, tokens: int) -> StepReads:
    """What a pass of the model itself reads of a row with `tokens` tokens, those of the pass included: its own weights, and all of its
    cache in both planes. cache: its shapes."""
    everything = cache.reads(BOTH_PLANES, tokens)
    of_layers = (dataclasses.asdict(cache.reads_of_layer(layer, everything, tokens)) for layer in range(config.num_layers))
    layers = tuple(LayerReads(**each, weight_bits=own_weight_bits(config)) for each in of_layers)
    return StepReads(config, layers, 8 if config.int8_head else 16, *cache.bytes_of_pass(BOTH_PLANES, tokens))


@dataclasses.dataclass(frozen=True)
class OutlinedDraft:
    """A draft of an outline.

    Attributes:
        draft: the draft.
        weight_bits: of each layer of its model, 4 or 16; none without a model.
        levels: the first draft and the middle of a cascade; none of any other.
    """

    draft: Draft
    weight_bits: tuple[int, ...] = ()
    levels: tuple["OutlinedDraft", ...] = ()

    @property
    def parts(self) -> tuple["OutlinedDraft", ...]:
        """The drafts that it is made of, whose weights and caches it has: those of its levels, or itself."""
        return self.levels or (self,)

    @property
    def beyond(self) -> int:
        """`Prompt.beyond` of its drafts."""
        return self.draft.first_gamma if isinstance(self.draft, CascadeDraft) else 0

    def with_first_gamma(self, first_gamma: int) -> Self:
        """The draft with another number of drafts that a cascade's first one makes at a time; any other as it is."""
        if not isinstance(self.draft, CascadeDraft):
            return self
        return dataclasses.replace(self, draft=dataclasses.replace(self.draft, first_gamma=first_gamma))

    @property
    def head(self) -> Eagle3Draft | None:
        """The draft, if it goes by passes of a head that reads the target's hidden states."""
        return self.draft if isinstance(self.draft, Eagle3Draft) else None

    @property
    def model(self) -> ModelDraft | None:
        """The draft, if it goes by steps of a model."""
        return self.draft if isinstance(self.draft, ModelDraft) else None

    @property
    def observes(self) -> bool:
        """Whether it asks verifications what they attended to."""
        return self.draft.observes

    @property
    def always_proposes(self) -> bool:
        return self.draft.proposes == Proposes.ALL

    @property
    def head_bits(self) -> int:
        own = self.model is not None and self.model.step.model.config.int8_head
        return 8 if own else getattr(self.draft, "head_bits", 16)

    def reads(self, cache: Cache, tokens: int) -> StepReads:
        """What one of its steps reads. cache: the shapes of the target's. tokens: that it holds in a row, those that the step appends
        included. Only for one with a model."""
        draft = self.draft
        of_layers = zip(reads_of_step(draft, cache, tokens), self.weight_bits, strict=True)
        layers = tuple(LayerReads(**dataclasses.asdict(each), weight_bits=bits) for each, bits in of_layers)
        # Measured were kernels that read all that is quantized of the target's cache, or listed groups, or a cache in full precision.
        quantized = 0 if draft.own_cache else cache.reads(BOTH_PLANES, tokens).quantized
        measured = all(layer.listed or layer.quantized in (0, quantized) for layer in layers)
        sizes = cache_bytes_of_step(draft, cache, tokens)
        return StepReads(draft.step.model.config, layers, self.head_bits, *sizes, kernels_measured=measured)


def outlined(settings: DraftSettings, model: Llama, int4: Callable[[], Llama]) -> tuple[OutlinedDraft, ...] | None:
    """The draft of an outline: the drafts that its rounds ask in turn. None where one of them says nothing of how much it proposes.

    model: an outline of the target; int4: makes one in INT4. Raises InputError for a setting that does not fit the model, for a checkpoint
    of a draft's own whose config cannot be read, for an oracle, for steps that skip layers, and for a cascade that begins with a `combine`.
    A draft's `make` should pass weights on without computing with them, and load a checkpoint of its own by `drafts.own_model`; one that
    has to compute raises an InputError where they are `jax.ShapeDtypeStruct`s, and is then listed with that reason.
    """
    drafts = tuple(map(outlined_draft, settings.make(model, int4).in_turn()))
    parts = [part.draft for each in drafts for part in each.parts]
    if any(isinstance(draft, ModelDraft) and draft.oracle for draft in parts):
        raise InputError("an oracle, to measure other drafts by: it saves no time")
    if any(map(skipped_by, parts)):
        raise InputError("no cost is known of steps that skip layers")
    if any(len(draft.in_turn()) > 1 for draft in parts):
        raise InputError("no cost is known of a cascade whose first draft is a combine")
    return None if any(draft.proposes is None for draft in parts) else drafts


def outlined_draft(draft: Draft) -> OutlinedDraft:
    """A draft that is made, of an outline or of a model with weights: no `combine`, whose drafts are asked in turn."""
    if isinstance(draft, CascadeDraft):
        return OutlinedDraft(draft, levels=(outlined_draft(draft.first), outlined_draft(draft.middle)))
    if not isinstance(draft, ModelDraft):
        return OutlinedDraft(draft)

    def int4_layer(block):
        return isinstance(block.o_proj.weight.get_value(), Int4Weight)

    return OutlinedDraft(draft, tuple(4 if int4_layer(block) else 16 for block in draft.step.model.layers))
