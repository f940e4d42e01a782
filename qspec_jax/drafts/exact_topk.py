"""An oracle: the QuantSpec draft that reads what its own query attends to most, found by reading all keys first.

It saves nothing. It says how many drafts would be accepted if a choice within a budget were perfect, so that the choices that other drafts
make can be measured against it (TriForce, arXiv 2404.11912, table 1, has it as the ideal top-k).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.formats.views import UPPER_PLANE, LargestMass
from qspec_jax.caches.cache import Gives
from qspec_jax.drafts.choosing import check_budget, check_fits, check_has_groups, parts_asked
from qspec_jax.drafts.draft import Reads
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel

UNITS = ("group", "token")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactTopKDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over the groups, or tokens, with the most attention mass of each step.

    budget, whole_groups, dense_layers: see `ExactTopKSettings`.
    """

    budget: float = dataclasses.field(metadata={"static": True})
    whole_groups: bool = dataclasses.field(metadata={"static": True})
    dense_layers: int = dataclasses.field(metadata={"static": True})

    needs = frozenset({Gives.GROUPS})
    oracle = True

    def begin(self, prompt):
        check_has_groups(prompt.cache, "exact-topk")
        return ()

    def in_prefill(self):
        return dataclasses.replace(self, budget=1, whole_groups=True, dense_layers=0)

    def step_in_round(self, state, cache):
        size = cache.group_size if self.whole_groups else 1
        parts = cache.lengths.quantized // size
        count = jnp.ceil(parts_asked(self.budget, parts, size)).astype(jnp.int32)
        chosen = LargestMass(jnp.minimum(count, parts), self.whole_groups)
        views = tuple(UPPER_PLANE if layer < self.dense_layers else chosen for layer in range(len(cache.layers)))
        return ViewedModel(self.step.model, views)

    def reads(self, layer, quantized, buffered, group_size):
        """See `ModelDraft.reads`. That a step reads all keys to find its choice does not count: no draft that is measured by it does."""
        size = group_size if self.whole_groups else 1
        asked = quantized if layer < self.dense_layers else math.ceil(parts_asked(self.budget, quantized // size, size)) * size
        return Reads(1, min(quantized, asked), buffered)


@dataclasses.dataclass(frozen=True)
class ExactTopKSettings(SelfSpeculativeSettings):
    """The settings of the draft.

    budget: how much of the quantized region a step attends to, a share in (0, 1] or a number of tokens; it attends to all recent tokens
    besides. unit: what it chooses, "group" or "token". dense_layers: the first so many layers read everything. For the shared ones see
    `SelfSpeculativeSettings`.
    """

    needs: ClassVar[frozenset[Gives]] = ExactTopKDraft.needs

    budget: float = 0.06
    unit: str = "group"
    dense_layers: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget)
        if self.unit not in UNITS:
            raise InputError(f"draft unit {self.unit!r} should be {' or '.join(UNITS)}")

    def make(self, model: Llama, int4: Callable[[], Llama]) -> ExactTopKDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError as `check_fits` does."""
        check_fits(model, self.budget, self.dense_layers)
        if model.kv_copies > 1:  # a device would choose by some of a KV head's query heads
            raise InputError("draft exact-topk is for no more devices than there are KV heads")
        settings = dict(budget=self.budget, whole_groups=self.unit == "group", dense_layers=self.dense_layers)
        return ExactTopKDraft(**self.stepped(model, int4, UPPER_PLANE), **settings)
