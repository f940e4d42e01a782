"""What one step of a draft reads of weights and caches, known from a model's shape alone.

A draft is made of an outline, a model whose weights are shapes, and then asked what its steps read (`StepwiseDraft.reads`), as the
benchmarks ask those with weights. So a draft that goes by steps of a model is planned without a word of its own.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.drafts.draft import Draft, Reads, StepwiseDraft, checkpoints_of
from qspec_jax.drafts.registry import DraftSettings
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama, Weight
from qspec_jax.quantization.weights import is_linear, weight_group_size


@dataclasses.dataclass(frozen=True)
class Row:
    """The target's cache of one row as a step finds it, with the tokens that the step appends: tokens in quantized groups of `group_size`,
    and tokens in full precision."""

    quantized: int
    full: int
    group_size: int


@dataclasses.dataclass(frozen=True)
class LayerReads(Reads):
    """What a step reads of one layer: of the cache, see `Reads`, and weights of so many bits, 16 for a model's own and 4 for INT4."""

    weight_bits: int = 16


@dataclasses.dataclass(frozen=True)
class StepReads:
    """What one step, one token in each row, reads. config: of the model that makes the step. head_bits: 16 for the model's own head, 8 for
    INT8. own_cache: whether that is a cache of the draft's own. note: one sentence, for people, on what times of it leave out."""

    config: LlamaConfig
    layers: tuple[LayerReads, ...]
    head_bits: int
    own_cache: bool = False
    note: str = ""


def own_step(config: LlamaConfig, row: Row) -> StepReads:
    """What a step of the model itself reads: its own weights, and all of the row in both planes."""
    layer = LayerReads(2, row.quantized, row.full)
    return StepReads(config, (layer,) * config.num_layers, head_bits=16)


def outline(config: LlamaConfig, *, int4: bool = False) -> Llama:
    """A model in bfloat16 of this shape whose weights are shapes. int4: with linear layers in INT4."""

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        if not (int4 and is_linear(path)):
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        out, inputs = shape
        size = weight_group_size(inputs)
        groups = -(-inputs // size)
        codes, parameters = jax.ShapeDtypeStruct((out, groups, size // 2), jnp.uint8), jax.ShapeDtypeStruct((out, groups), jnp.bfloat16)
        return Int4Weight(codes, parameters, parameters, inputs)

    return Llama(config, make)


@dataclasses.dataclass(frozen=True)
class OutlinedDraft:
    """A draft of an outline. weight_bits: of each layer of its model, 4 or 16."""

    draft: StepwiseDraft
    weight_bits: tuple[int, ...]

    def reads(self, row: Row) -> StepReads:
        """What one of its steps reads."""
        draft, layers = self.draft, []
        for i, bits in enumerate(self.weight_bits):
            reads = draft.reads(i, row.quantized, row.full, row.group_size)
            layers.append(LayerReads(**dataclasses.asdict(reads), weight_bits=bits))
        own = draft.own_cache
        # Kernels read all that is quantized of the target's cache, or a cache in full precision.
        unsupported = draft.observes or any(layer.quantized not in ((0,) if own else (row.quantized,)) for layer in layers)
        note = "it has no GPU kernels of its own yet; times are as if those that read everything did for what it reads and observes"
        return StepReads(draft.step.model.config, tuple(layers), getattr(draft, "head_bits", 16), own, note if unsupported else "")


def outlined(settings: DraftSettings, model: Llama, int4: Callable[[], Llama]) -> OutlinedDraft | None:
    """The draft of an outline; None for one of which nothing is known before its weights are: it does not go by steps of the target's
    model, or has a checkpoint of its own.

    model: an outline of the target; int4: makes one in INT4. Raises InputError for a setting that does not fit the model, and
    for an oracle. A draft's `make`
    should pass weights on without computing with them; one that has to raises an InputError where they are `jax.ShapeDtypeStruct`s, and is
    then listed with that reason.
    """
    if checkpoints_of(settings):
        return None
    draft: Draft = settings.make(model, int4)
    if not isinstance(draft, StepwiseDraft):
        return None
    if draft.oracle:
        raise InputError("an oracle, to measure other drafts by: it saves no time")
    int4_layer = lambda block: isinstance(block.down_proj.weight.get_value(), Int4Weight)
    return OutlinedDraft(draft, tuple(4 if int4_layer(block) else 16 for block in draft.step.model.layers))
