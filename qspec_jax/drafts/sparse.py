"""The sparse draft: the QuantSpec draft that reads only some groups of the cache, chosen by what the last verification attended to.

At long context a dense draft spends its time on the upper plane. This one reads, in each layer and KV head, the first group (the attention
sink), the newest groups, and those with the most attention mass in the last verification. One selection serves a whole round; a round's
verification reads everything anyway, and the mass is a by-product of it (SparseSpec, arXiv 2512.01278, section 4.1; Vegas, arXiv
2602.07223).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.views import UPPER_PLANE, ListedGroups, View
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.drafts.draft import StepwiseDraft
from qspec_jax.drafts.quantspec import check_bits, head_in_loop
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel

TINY_MASS = 1e-30  # less than any group gets that is attended to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseDraft(StepwiseDraft):
    """Single-token steps of a model over listed groups of the target's cache.

    Its state has for each layer the attention mass [B, K, C] that each group got from the tokens that the last round kept.

    step: the model; its view is not used, but made anew for each round. budget: the share of a row's groups that is read, and at least
    `least_groups`. newest: the share of those that are the newest. dense_layers: the first so many layers read every group. head_bits: 8 if
    the decode loop is to quantize the model's head.
    """

    step: ViewedModel
    budget: float = dataclasses.field(metadata={"static": True})
    newest: float = dataclasses.field(metadata={"static": True})
    least_groups: int = dataclasses.field(metadata={"static": True})
    dense_layers: int = dataclasses.field(metadata={"static": True})
    head_bits: int = dataclasses.field(default=16, metadata={"static": True})

    observes = True

    def begin(self, prompt):
        if not isinstance(prompt.cache, HierarchicalCache):
            raise InputError(f"the sparse draft selects groups of the int8 cache, and this is a {type(prompt.cache).__name__}")
        B, K, C = prompt.cache.layers[0].keys.upper.shape[:3]
        # Nothing was attended to yet: the newer a group, the better.
        mass = jnp.broadcast_to(jnp.arange(C, dtype=jnp.float32) * TINY_MASS, (B, K, C))
        return tuple(mass for _ in prompt.cache.layers)

    def step_in_round(self, state, cache):
        views = tuple(self.view_of(i, mass, cache.lengths, cache.group_size) for i, mass in enumerate(state))
        return ViewedModel(self.step.model, views)

    def reads(self, layer, groups):
        return 1, groups if layer < self.dense_layers else min(groups, max(self.least_groups, math.ceil(self.budget * groups)))

    def commit(self, state, result, cache):
        keep = (result.count > 0)[:, None, None]
        return tuple(jnp.where(keep, mass.sum(2), old) for mass, old in zip(result.masses, state))

    def in_loop(self):
        return dataclasses.replace(self, step=head_in_loop(self.step, self.head_bits), head_bits=16)

    def view_of(self, layer: int, mass: Float[Array, "B K C"], lengths: Lengths, group_size: int) -> View:
        """What a layer reads in a round. lengths: the cache's, after the last round's flush."""
        if layer < self.dense_layers or mass.shape[2] == 0:
            return UPPER_PLANE
        return select_groups(mass, lengths.quantized // group_size, budget=self.budget, newest=self.newest, least_groups=self.least_groups)


def select_groups(mass: Float[Array, "B K C"], groups: Int[Array, "B"], *, budget: float, newest: float, least_groups: int) -> ListedGroups:
    """The groups to read in a row that has groups[b] of them: the first, the newest, and those with the most mass, in ascending order."""
    C = mass.shape[2]
    least = min(least_groups, C)
    most = min(C, max(least, math.ceil(budget * C) + 1))  # + 1: the product may be rounded otherwise there
    count = jnp.maximum(least, jnp.ceil(budget * groups).astype(jnp.int32))
    count = jnp.minimum(jnp.minimum(count, groups), most)
    recent = jnp.clip(jnp.round(newest * count).astype(jnp.int32), 1, jnp.maximum(count - 1, 1))
    number = jnp.arange(C)
    always = (number == 0) | (number >= (groups - recent)[:, None])
    rank = jnp.where(always[:, None], jnp.inf, jnp.nan_to_num(mass))
    rank = jnp.where((number < groups[:, None])[:, None], rank, -jnp.inf)
    _, chosen = jax.lax.top_k(rank, most)
    count = jnp.broadcast_to(count[:, None], mass.shape[:2])
    # Ascending, as memory is read best; what is not to be read goes behind.
    chosen = jnp.sort(jnp.where(jnp.arange(most) < count[..., None], chosen, C), -1)
    return ListedGroups(jnp.minimum(chosen, C - 1).astype(jnp.int32), count.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class SparseSettings:
    """The settings of the draft.

    budget: the share of the cached groups that a draft reads, in (0, 1]. newest: which share of those are the newest, in [0, 1]; the others
    are those with the most attention mass. least_groups: so many are read however short the context is. dense_layers: the first so many
    layers read all groups. weight_bits, head_bits: see `QuantSpecSettings`.
    """

    budget: float = 0.06
    newest: float = 0.5
    least_groups: int = 4
    dense_layers: int = 0
    weight_bits: int = 4
    head_bits: int = 8

    def __post_init__(self):
        check_bits(self.weight_bits, self.head_bits)
        if not 0 < self.budget <= 1:
            raise InputError(f"draft budget {self.budget} should be a share of the groups, more than 0 and at most 1")
        if not 0 <= self.newest <= 1:
            raise InputError(f"draft newest {self.newest} should be a share of the budget, from 0 to 1")
        if self.least_groups < 1:
            raise InputError(f"draft least_groups {self.least_groups} should be at least 1")

    def make(self, model: Llama, int4: Callable[[], Llama]) -> SparseDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError for more dense layers than there are."""
        layers = model.config.num_layers
        if not 0 <= self.dense_layers <= layers:
            raise InputError(f"dense_layers {self.dense_layers} should be from 0 to the model's {layers} layers")
        quantized = self.weight_bits == 4
        step = ViewedModel(int4() if quantized else model, UPPER_PLANE)
        chosen = dict(budget=self.budget, newest=self.newest, least_groups=self.least_groups, dense_layers=self.dense_layers)
        return SparseDraft(step, **chosen, head_bits=self.head_bits if quantized else 16)
