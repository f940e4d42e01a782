"""The sparse draft: the QuantSpec draft that reads only some groups of the cache, chosen by what the last verification attended to.

At long context a dense draft spends its time on the upper plane. This one reads, in each layer and KV head, the first group (the attention
sink), the newest groups, and those with the most attention mass in the last verification. One selection serves a whole round; a round's
verification reads everything anyway, and the mass is a by-product of it (SparseSpec, arXiv 2512.01278, section 4.1; Vegas, arXiv
2602.07223).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.views import UPPER_PLANE, DenseView, ListedGroups
from qspec_jax.caches.cache import Gives
from qspec_jax.drafts.choosing import check_budget, check_fits, check_has_groups, parts_asked
from qspec_jax.drafts.draft import Reads
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.skipping import NO_LAYERS, Skipped
from qspec_jax.settings_text import setting

TINY_MASS = 1e-30  # less than any group gets that is attended to
HEADS = ("equal", "by-mass")
MOST_OF_A_HEAD = 4  # where heads share a budget by mass, one reads at most so many times its equal share: the slowest sets the pace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over listed groups of the target's cache.

    Its state has for each layer the attention mass [B, K, C] that each group got from a token, the mean over those that the last round
    kept; before the first round, over the last tokens of the prompt. With memory it is the decaying average of those means over rounds. A
    round counts the same whatever it emitted: rounds differ in length by what was accepted, which says nothing of how far back to look.

    budget, newest, least_groups, dense_layers, memory, heads: see `SparseSettings`.
    """

    budget: float = dataclasses.field(metadata={"static": True})
    newest: float = dataclasses.field(metadata={"static": True})
    least_groups: int = dataclasses.field(metadata={"static": True})
    dense_layers: int = dataclasses.field(metadata={"static": True})
    memory: float = dataclasses.field(metadata={"static": True})
    heads: str = dataclasses.field(metadata={"static": True})

    needs = frozenset({Gives.GROUPS})
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
        for i, queries in enumerate(prompt.queries):
            on_device, state = prompt.cache.with_layer_on_device(i, after=state)
            _, mass = decode_attention(queries, on_device.whole_layer(i), prompt.cache.lengths, DenseView(2, observed=True))
            mass = self.step.model.sum_of_copies(mass)
            seen = jnp.where(real[:, None, :, None], jnp.nan_to_num(mass), 0).sum(2)
            state.append(newer + seen / real.sum(1)[:, None, None])
        return tuple(state)

    def in_prefill(self):
        # `begin` uses none of these settings.
        return dataclasses.replace(self, budget=1, newest=0, least_groups=1, dense_layers=0, memory=0, heads="equal", skipped=NO_LAYERS)

    def step_in_round(self, state, cache):
        dense = state[: self.dense_layers] if state[0].shape[2] else state
        views = (UPPER_PLANE,) * len(dense)
        if chosen_in := state[len(dense) :]:
            # The lengths are those after the last round's flush. All layers at once: a sort for each would take as long as a draft's layer.
            groups, settings = cache.lengths.quantized // cache.group_size, dict(least_groups=self.least_groups, heads=self.heads)
            select = functools.partial(select_groups, groups=groups, group_size=cache.group_size, budget=self.budget, newest=self.newest)
            select = jax.vmap(functools.partial(select, **settings))
            mass = jnp.stack(chosen_in)
            # By mass the heads of a layer share a budget, on whatever devices they are.
            lists = self.step.model.of_all_kv_heads(select, mass) if self.heads == "by-mass" else select(mass)
            views += tuple(ListedGroups(*layer) for layer in zip(lists.groups, lists.count, strict=True))
        return self.through(views)

    def reads(self, layer, quantized, buffered, group_size):
        groups = quantized // group_size
        if layer in self.skipped.attention:
            return Reads(0, 0, 0)
        if layer < self.dense_layers:
            return Reads(1, quantized, buffered)
        asked = max(self.least_groups, math.ceil(parts_asked(self.budget, groups, group_size)))
        return Reads(1, min(groups, asked) * group_size, buffered, listed=True)

    def raised_to(self, quantized: int, group_size: int) -> int | None:
        groups = quantized // group_size
        least = min(groups, self.least_groups)
        return least if least > math.ceil(parts_asked(self.budget, groups, group_size)) else None

    def commit(self, state, result, cache):
        count = result.count[:, None, None]
        averaged = lambda mass, old: self.memory * old + (1 - self.memory) * jnp.nan_to_num(mass.sum(2)) / jnp.maximum(count, 1)
        return tuple(jnp.where(count > 0, averaged(mass, old), old) for mass, old in zip(result.masses, state))


def select_groups(
    mass: Float[Array, "B K C"],
    groups: Int[Array, "B"],
    *,
    budget: float,
    group_size: int,
    newest: float,
    least_groups: int,
    heads: str = "equal",
) -> ListedGroups:
    """The groups to read in a row that has groups[b] of them: the first, the newest, and those with the most mass, in ascending order.

    heads: "equal", or "by-mass": the KV heads read as many together, but each has those of all their groups with the most mass.
    """
    B, K, C = mass.shape
    least = min(least_groups, C)
    most = min(C, max(least, math.ceil(parts_asked(budget, C, group_size)) + 1))  # + 1: the product may be rounded otherwise there
    count = jnp.maximum(least, jnp.ceil(parts_asked(budget, groups, group_size)).astype(jnp.int32))
    count = jnp.minimum(jnp.minimum(count, groups), most)
    recent = jnp.clip(jnp.round(newest * count).astype(jnp.int32), 1, jnp.maximum(count - 1, 1))
    number = jnp.arange(C)
    always = (number == 0) | (number >= (groups - recent)[:, None])
    rank = jnp.where(always[:, None], jnp.inf, jnp.nan_to_num(mass))
    rank = jnp.where((number < groups[:, None])[:, None], rank, -jnp.inf)
    width = most if heads == "equal" else min(C, MOST_OF_A_HEAD * most)
    found, chosen = jax.lax.top_k(rank, width)
    if heads == "equal":
        count = jnp.broadcast_to(count[:, None], (B, K))
    else:
        # By the row's own count, not by a width that other rows have a part in.
        found = jnp.where(jnp.arange(width) < MOST_OF_A_HEAD * count[:, None, None], found, -jnp.inf)
        # top_k prefers the first of equals: what is taken of a head is the beginning of its sorted list, and its length says all.
        _, taken = jax.lax.top_k(found.reshape(B, K * width), K * most)
        counted = jnp.arange(K * most) < K * count[:, None]
        count = ((taken // width)[:, None] == jnp.arange(K)[:, None]) & counted[:, None]
        count = count.sum(-1)
    # Ascending, as memory is read best; what is not to be read goes behind.
    chosen = jnp.sort(jnp.where(jnp.arange(width) < count[..., None], chosen, C), -1)
    return ListedGroups(jnp.minimum(chosen, C - 1).astype(jnp.int32), count.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class SparseSettings(SelfSpeculativeSettings):
    """The settings of the draft.

    budget: how much of the cached groups a draft reads, a share in (0, 1] or a number of tokens. newest: which share of those are the
    newest, in [0, 1]; the others are those with the most attention mass. least_groups: so many are read however short the context is.
    dense_layers: the first so many layers read all groups. memory: how much of a group's mass is what earlier rounds saw, from 0 to less
    than 1: after each round so much of the average stays, and the round's is the rest. heads: "equal" gives each KV head the budget;
    "by-mass" gives it to the KV heads of a layer together, of which each reads the first group, the newest, and those of its others that
    are among the layer's with the most mass, at most four times its equal share. skip: layers whose attention or MLP is left out, see
    `Skipped.parse`. For the shared ones see `SelfSpeculativeSettings`.
    """

    kind: ClassVar[type[SparseDraft]] = SparseDraft
    needs: ClassVar[frozenset[Gives]] = SparseDraft.needs

    budget: float = 0.06
    newest: float = 0.5
    least_groups: int = 4
    dense_layers: int = 0
    memory: float = 0.0
    heads: str = "equal"
    skip: str = setting("none", "Layers whose attention or MLP is left out.", example="skip=(3,5a)", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        Skipped.parse(self.skip)
        check_budget(self.budget)
        if not 0 <= self.newest <= 1:
            raise InputError(f"draft newest {self.newest} should be a share of the budget, from 0 to 1")
        if self.least_groups < 1:
            raise InputError(f"draft least_groups {self.least_groups} should be at least 1")
        if not 0 <= self.memory < 1:
            raise InputError(f"draft memory {self.memory:g} should be at least 0 and less than 1")
        if self.heads not in HEADS:
            raise InputError(f"draft heads {self.heads!r} should be {' or '.join(HEADS)}")

    def make(self, model: Llama, int4: Callable[[], Llama]) -> SparseDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError as `check_fits` does, and for skipped layers that
        are not there."""
        check_fits(model, self.budget, self.dense_layers)
        skipped = Skipped.parse(self.skip)
        skipped.check(model.config.num_layers)
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(SparseSettings) if not field.kw_only}
        return self.kind(**self.stepped(model, int4, UPPER_PLANE), **own, skipped=skipped)
