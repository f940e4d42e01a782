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
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.views import UPPER_PLANE, DenseView, ListedGroups
from qspec_jax.caches.cache import NOTHING, Cache, Gives, Reads
from qspec_jax.drafts.choosing import check_budget, check_fits, check_has_groups, is_dense, parts_asked, tokens_asked
from qspec_jax.drafts.draft import Prompt, RoundResult, State
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.models.llama import Llama
from qspec_jax.models.skipping import NO_LAYERS, Skipped
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.settings_text import setting

TINY_MASS = 1e-30  # less than any group gets that is attended to
HEADS = ("equal", "by-mass")
MAX_OF_A_HEAD = 4  # where heads share a budget by mass, one reads at most this multiple of its equal share: the slowest sets the pace


@dataclasses.dataclass(frozen=True)
class SparseSettings(SelfSpeculativeSettings):
    """With heads "by-mass" the KV heads of a layer share the budget: each reads the first group, the newest, and those of its others that
    are among the layer's groups with the most mass, at most `MAX_OF_A_HEAD` times its equal share."""

    needs: ClassVar[frozenset[Gives]] = frozenset({Gives.GROUPS})
    needs_full_layers: ClassVar[bool] = False  # where every layer has a sliding window, a step reads the windows, as a dense draft's does

    budget: float = setting(
        0.06, "How much of the quantized tokens a step reads: a share of at most 1 (0.06 is 6 %), or a number of tokens (6 is 6 tokens)."
    )
    newest: float = setting(
        0.5, "The share of the budget for the newest groups; the others are those with the most attention mass.", minimum=0, maximum=1
    )
    min_groups: int = setting(4, "How many groups are read however short the context is.", minimum=1)
    dense_layers: int = setting(0, "How many of the first layers read all groups.")
    memory: float = setting(
        0.0, "The share of a group's average mass that stays after a round; the rest is the mass of that round.", minimum=0, below=1
    )
    heads: str = setting("equal", "Whether each KV head has the budget, or those of a layer share it by their mass.", choices=HEADS)
    skip: str = setting(
        "none",
        "Layers to leave out: none, auto, or all of layer 3, the attention of 5 and the MLP of 6 as (3,5a,6m).",
        example="skip=(3,5a)",
        kw_only=True,
    )

    def __post_init__(self):
        super().__post_init__()
        Skipped.parse(self.skip)
        check_budget(self.budget)

    def parts(self, model: Llama, int4: Callable[[], Llama]) -> dict[str, Any]:
        """The fields of the draft. Raises InputError as `check_fits` does, and for skipped layers that are not there."""
        check_fits(model, self.budget, self.dense_layers)
        skipped = Skipped.parse(self.skip)
        skipped.check(model.config.num_layers)
        return dict(**self.stepped(model, int4, UPPER_PLANE), settings=self, skipped=skipped)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> "SparseDraft":
        return SparseDraft(**self.parts(model, int4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over listed groups of the target's cache.

    Its state [B, L, K, C] has for each of the L layers without a sliding window the attention mass that each group got from a token: the
    mean over those that the last round kept; before the first round, over the last tokens of the prompt. With memory it is the decaying
    average of those means over rounds. A round counts the same whatever it emitted: rounds differ in length by what was accepted, which
    says nothing of how far back to look.
    """

    settings: SparseSettings = dataclasses.field(metadata={"static": True})

    needs = SparseSettings.needs
    name: ClassVar[str] = "sparse"
    observes = True
    prompt_queries = 8

    def begin(self, prompt: Prompt) -> State:
        if not prompt.cache.full_layers:
            return ()
        check_has_groups(prompt.cache, self.name)
        (B, K), C = prompt.cache.pooled_part.layers[0].buffer.keys.shape[:2], prompt.cache.groups
        # Where nothing attended to a group, the newer, the better.
        newer = jnp.broadcast_to(jnp.arange(C, dtype=jnp.float32) * TINY_MASS, (B, K, C))
        real = prompt.are_queries(self.prompt_queries)
        state = []
        for i in prompt.cache.full_layers:
            on_device, state = prompt.cache.with_layer_on_device(i, after=state)
            _, mass = decode_attention(prompt.queries[i], on_device.whole_layer(i), prompt.cache.lengths, DenseView(2, observed=True))
            mass = self.step.model.sum_of_copies(mass)
            seen = jnp.where(real[:, None, :, None], jnp.nan_to_num(mass), 0).sum(2)
            state.append(newer + seen / real.sum(1)[:, None, None])
        return jnp.stack(state, 1)

    def in_prefill(self) -> Self:
        # `begin` uses none of these settings.
        return dataclasses.replace(self, settings=type(self.settings)(), skipped=NO_LAYERS)

    def step_in_round(self, state: State, cache: Cache) -> ViewedModel:
        layers = len(cache.full_layers)
        dense = min(self.settings.dense_layers, layers) if layers and state.shape[-1] else layers
        views = (UPPER_PLANE,) * dense
        if dense < layers:
            # The lengths are those after the last round's flush. All layers at once: a sort for each would take as long as a draft's layer.
            groups = cache.lengths.quantized // cache.group_size
            select = jax.vmap(functools.partial(select_groups, groups=groups, group_size=cache.group_size, settings=self.settings))
            mass = jnp.moveaxis(state[:, dense:], 1, 0)
            # By mass the heads of a layer share a budget, on whatever devices they are.
            lists = self.step.model.of_all_kv_heads(select, mass) if self.settings.heads == "by-mass" else select(mass)
            views += tuple(ListedGroups(*layer) for layer in zip(lists.groups, lists.count, strict=True))
        of_full = dict(zip(cache.full_layers, views, strict=True))
        return self.through(tuple(of_full.get(i, UPPER_PLANE) for i in range(len(cache.layers))))

    def reads(self, layer: int, cache: Cache, tokens: int) -> Reads:
        if layer in self.skipped.attention:
            return NOTHING
        dense = cache.reads(UPPER_PLANE, tokens)
        if is_dense(cache, layer, self.settings.dense_layers):
            return dense
        check_has_groups(cache, self.name)
        G = cache.group_size
        asked = max(self.settings.min_groups * G, tokens_asked(self.settings.budget, dense.quantized, G))
        return dataclasses.replace(dense, quantized=min(dense.quantized, asked), listed=True)

    def raised_to(self, quantized: int, group_size: int) -> int | None:
        groups = quantized // group_size
        least = min(groups, self.settings.min_groups)
        return least if least * group_size > tokens_asked(self.settings.budget, quantized, group_size) else None

    def commit(self, state: State, result: RoundResult, cache: Cache) -> State:
        if not result.masses:
            return state
        count, memory = result.count[:, None, None, None], self.settings.memory
        mass = jnp.nan_to_num(jnp.stack(result.masses, 1).sum(3))
        return jnp.where(count > 0, memory * state + (1 - memory) * mass / jnp.maximum(count, 1), state)


def select_groups(mass: Float[Array, "B K C"], groups: Int[Array, "B"], *, group_size: int, settings: SparseSettings) -> ListedGroups:
    """The groups to read in a row that has groups[b] of them: the first, the newest, and those with the most mass, in ascending order."""
    B, K, C = mass.shape
    asked = functools.partial(parts_asked, settings.budget, size=group_size)
    least = min(settings.min_groups, C)
    most = min(C, max(least, math.ceil(asked(C)) + 1))  # + 1: the product may be rounded otherwise there
    count = jnp.maximum(least, jnp.ceil(asked(groups)).astype(jnp.int32))
    count = jnp.minimum(jnp.minimum(count, groups), most)
    recent = jnp.clip(jnp.round(settings.newest * count).astype(jnp.int32), 1, jnp.maximum(count - 1, 1))
    number = jnp.arange(C)
    always = (number == 0) | (number >= (groups - recent)[:, None])
    rank = jnp.where(always[:, None], jnp.inf, jnp.nan_to_num(mass))
    rank = jnp.where((number < groups[:, None])[:, None], rank, -jnp.inf)
    width = most if settings.heads == "equal" else min(C, MAX_OF_A_HEAD * most)
    found, chosen = jax.lax.top_k(rank, width)
    if settings.heads == "equal":
        count = jnp.broadcast_to(count[:, None], (B, K))
    else:
        # By the row's own count, not by a width that other rows have a part in.
        found = jnp.where(jnp.arange(width) < MAX_OF_A_HEAD * count[:, None, None], found, -jnp.inf)
        # top_k prefers the first of equals: what is taken of a head is the beginning of its sorted list, and its length says all.
        _, picked = jax.lax.top_k(found.reshape(B, K * width), K * most)
        counted = jnp.arange(K * most) < K * count[:, None]
        count = ((picked // width)[:, None] == jnp.arange(K)[:, None]) & counted[:, None]
        count = count.sum(-1)
    # Ascending, as memory is read best; groups that are not read go last.
    chosen = jnp.sort(jnp.where(jnp.arange(width) < count[..., None], chosen, C), -1)
    return ListedGroups(jnp.minimum(chosen, C - 1).astype(jnp.int32), count.astype(jnp.int32))
