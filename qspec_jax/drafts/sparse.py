"""The sparse draft: the QuantSpec draft that reads only some groups of the cache, chosen by what the last verification attended to.

At long context a dense draft spends its time on the upper plane. This one reads, in each layer and KV head, the first group (the attention
sink), the newest groups, and those with the most attention mass in the last verification. One selection serves a whole round; a round's
verification reads everything anyway, and the mass is a by-product of it (SparseSpec, arXiv 2512.01278, section 4.1; Vegas, arXiv
2602.07223).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE, ListedGroups, View
from qspec_jax.drafts.choosing import check_budget, check_fits, check_has_groups, parts_asked
from qspec_jax.drafts.draft import Reads
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel

TINY_MASS = 1e-30  # less than any group gets that is attended to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over listed groups of the target's cache.

    Its state has for each layer the attention mass [B, K, C] that each group got from the tokens that the last round kept; before the first
    round, from the last tokens of the prompt.

    budget: how much of a row's groups is read, and at least `least_groups`. newest: the share of those that are the newest. dense_layers:
    the first so many layers read every group.
    """

    budget: float = dataclasses.field(metadata={"static": True})
    newest: float = dataclasses.field(metadata={"static": True})
    least_groups: int = dataclasses.field(metadata={"static": True})
    dense_layers: int = dataclasses.field(metadata={"static": True})

    name: ClassVar[str] = "sparse"
    observes = True
    prompt_queries = 8

    def begin(self, prompt):
        check_has_groups(prompt.cache, self.name)
        B, K, C = prompt.cache.layers[0].keys.upper.shape[:3]
        # Where nothing attended to a group, the newer, the better.
        newer = jnp.broadcast_to(jnp.arange(C, dtype=jnp.float32) * TINY_MASS, (B, K, C))
        # Rows before a prompt's first token are no queries.
        real = jnp.arange(self.prompt_queries) >= self.prompt_queries - prompt.n[:, None]
        state = []
        for layer, queries in zip(prompt.cache.layers, prompt.queries, strict=True):
            _, mass = decode_attention(queries, layer, prompt.cache.lengths, BOTH_PLANES, observe=True)
            state.append(newer + jnp.where(real[:, None, :, None], jnp.nan_to_num(mass), 0).sum(2))
        return tuple(state)

    def step_in_round(self, state, cache):
        views = tuple(self.view_of(i, mass, cache.lengths, cache.group_size) for i, mass in enumerate(state))
        return ViewedModel(self.step.model, views)

    def reads(self, layer, quantized, buffered, group_size):
        groups = quantized // group_size
        if layer < self.dense_layers:
            return Reads(1, quantized, buffered)
        asked = max(self.least_groups, math.ceil(parts_asked(self.budget, groups, group_size)))
        return Reads(1, min(groups, asked) * group_size, buffered, listed=True)

    def commit(self, state, result, cache):
        keep = (result.count > 0)[:, None, None]
        return tuple(jnp.where(keep, mass.sum(2), old) for mass, old in zip(result.masses, state))

    def view_of(self, layer: int, mass: Float[Array, "B K C"], lengths: Lengths, group_size: int) -> View:
        """What a layer reads in a round. lengths: the cache's, after the last round's flush."""
        if layer < self.dense_layers or mass.shape[2] == 0:
            return UPPER_PLANE
        groups, settings = lengths.quantized // group_size, dict(newest=self.newest, least_groups=self.least_groups)
        return select_groups(mass, groups, budget=self.budget, group_size=group_size, **settings)


def select_groups(
    mass: Float[Array, "B K C"], groups: Int[Array, "B"], *, budget: float, group_size: int, newest: float, least_groups: int
) -> ListedGroups:
    """The groups to read in a row that has groups[b] of them: the first, the newest, and those with the most mass, in ascending order."""
    C = mass.shape[2]
    least = min(least_groups, C)
    most = min(C, max(least, math.ceil(parts_asked(budget, C, group_size)) + 1))  # + 1: the product may be rounded otherwise there
    count = jnp.maximum(least, jnp.ceil(parts_asked(budget, groups, group_size)).astype(jnp.int32))
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
class SparseSettings(SelfSpeculativeSettings):
    """The settings of the draft.

    budget: how much of the cached groups a draft reads, a share in (0, 1] or a number of tokens. newest: which share
    of those are the newest, in [0, 1]; the others are those with the most attention mass. least_groups: so many are read however short the
    context is. dense_layers: the first so many layers read all groups. For the shared ones see `SelfSpeculativeSettings`.
    """

    kind: ClassVar[type[SparseDraft]] = SparseDraft

    budget: float = 0.06
    newest: float = 0.5
    least_groups: int = 4
    dense_layers: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget)
        if not 0 <= self.newest <= 1:
            raise InputError(f"draft newest {self.newest} should be a share of the budget, from 0 to 1")
        if self.least_groups < 1:
            raise InputError(f"draft least_groups {self.least_groups} should be at least 1")

    def make(self, model: Llama, int4: Callable[[], Llama]) -> SparseDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError as `check_fits` does."""
        check_fits(model, self.budget, self.dense_layers)
        settings = dict(budget=self.budget, newest=self.newest, least_groups=self.least_groups, dense_layers=self.dense_layers)
        return self.kind(**self.stepped(model, int4, UPPER_PLANE), **settings)
