"""An oracle: the QuantSpec draft that reads what its own query attends to most, found by reading all keys first.

It saves nothing. It says how many drafts would be accepted if a choice within a budget were perfect, so that the choices that other drafts
make can be measured against it (TriForce, arXiv 2404.11912, table 1, has it as the ideal top-k).
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from pallas_kernels.formats.views import UPPER_PLANE, LargestMass
from qspec_jax.caches.cache import Cache, Gives, Reads
from qspec_jax.drafts.choosing import check_budget, check_fits, check_has_groups, is_dense, parts_asked, tokens_asked
from qspec_jax.drafts.draft import Prompt, State
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.settings_text import setting


@dataclasses.dataclass(frozen=True)
class ExactTopKSettings(SelfSpeculativeSettings):
    """A step attends to all recent tokens besides those that it chooses."""

    needs: ClassVar[frozenset[Gives]] = frozenset({Gives.GROUPS})

    budget: float = setting(
        0.06, "How much of the quantized tokens a step reads: a share of at most 1 (0.06 is 6 %), or a number of tokens (6 is 6 tokens)."
    )
    unit: str = setting("group", "What a step chooses.", choices=("group", "token"))
    dense_layers: int = setting(0, "How many of the first layers read everything.")

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> "ExactTopKDraft":
        """The draft of a model. Raises InputError as `check_fits` does."""
        check_fits(model, self.budget, self.dense_layers)
        if model.kv_copies > 1:  # a device would choose by some of a KV head's query heads
            raise InputError("draft exact-topk is for no more devices than there are KV heads")
        return ExactTopKDraft(**self.stepped(model, int4, UPPER_PLANE), settings=self)

    def size(self, group_size: int) -> int:
        """Tokens of what a step chooses."""
        return group_size if self.unit == "group" else 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactTopKDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over the groups, or tokens, with the most attention mass of each step."""

    settings: ExactTopKSettings = dataclasses.field(metadata={"static": True})

    needs = ExactTopKSettings.needs
    oracle = True

    def begin(self, prompt: Prompt) -> State:
        check_has_groups(prompt.cache, "exact-topk")
        return ()

    def in_prefill(self) -> Self:
        return dataclasses.replace(self, settings=ExactTopKSettings())

    def step_in_round(self, state: State, cache: Cache) -> ViewedModel:
        size = self.settings.size(cache.group_size)
        parts = cache.lengths.quantized // size
        count = jnp.ceil(parts_asked(self.settings.budget, parts, size)).astype(jnp.int32)
        chosen = LargestMass(jnp.minimum(count, parts), self.settings.unit == "group")
        views = tuple(UPPER_PLANE if is_dense(cache, layer, self.settings.dense_layers) else chosen for layer in range(len(cache.layers)))
        return ViewedModel(self.step.model, views)

    def reads(self, layer: int, cache: Cache, tokens: int) -> Reads:
        """See `ModelDraft.reads`. That a step reads all keys to find its choice does not count: no draft that is measured by it does."""
        check_has_groups(cache, "exact-topk")
        settings, dense = self.settings, cache.reads(UPPER_PLANE, tokens)
        if is_dense(cache, layer, settings.dense_layers):
            return dense
        asked = tokens_asked(settings.budget, dense.quantized, settings.size(cache.group_size))
        return dataclasses.replace(dense, quantized=min(dense.quantized, asked))
