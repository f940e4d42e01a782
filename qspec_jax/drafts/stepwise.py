"""Drafts whose tokens come from single-token steps of a model."""

import abc
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import DenseView, View
from qspec_jax.caches.cache import NOTHING, AppendedCache, Cache, Reads
from qspec_jax.drafts.draft import Draft, Proposal, Proposes, Round, State
from qspec_jax.models.viewed import Step, ViewedModel


class ModelDraft(Draft):
    """A draft whose tokens come from single-token steps of a model. A subclass says what they read, for cost estimates (`qspec plan`).

    Attributes:
        step: the model and the view of its cache.
        own_cache: whether the steps append to a cache in the draft's state, and not to the target's.
        own_model: whether the model is another than the target, with its own weights, which also reads the prompts.
        first_pass: tokens of each row in the pass that the first draft of a round comes from; the others come from a step each.
        oracle: whether finding out what to read costs as much as reading everything, so that the draft is for measurements only.
    """

    step: ViewedModel
    own_cache: ClassVar[bool] = False
    own_model: ClassVar[bool] = False
    first_pass: ClassVar[int] = 1
    oracle: ClassVar[bool] = False
    proposes = Proposes.ALL

    def made_for(self) -> tuple[tuple[str, int], ...]:
        names = ("vocab_size",) if self.own_model else ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
        return tuple((name, getattr(self.step.model.checkpoint_config, name)) for name in names)

    @abc.abstractmethod
    def reads(self, layer: int, cache: Cache, tokens: int) -> Reads:
        """What a step reads of a layer of one row, for cost estimates (`qspec plan`).

        cache: the target's, or its shapes. tokens: that the row holds, the one that this step appends included.
        """

    def cache_read(self, cache: Cache) -> AppendedCache:
        """The cache that steps read: the target's, which is given, or the shapes of the draft's own. Its `bytes_of_reads` says the bytes of
        `reads` and of `holds`."""
        return cache

    def holds(self, prompt: int, capacity: int, gamma: int) -> Reads:
        """What the draft's own cache has memory for in each layer of a row; nothing without one.

        prompt: tokens of the prompt. capacity: the maximum number of tokens of the row. gamma: the maximum number of drafts in a round.
        """
        return NOTHING

    def raised_to(self, quantized: int, group_size: int) -> int | None:
        """How many groups a step reads of a row because of a minimum, if the draft's budget asks for fewer; else None."""
        return None

    def reads_of_prompt(self, prompt: int) -> int:
        """How many of a prompt's `prompt` tokens the draft's own model reads in prefill; 0 without one."""
        return prompt if self.own_model else 0

    def check_capacity(self, capacity: int) -> None:
        """Raises InputError if rows of at most `capacity` tokens are too small for the settings."""


class StepwiseDraft(ModelDraft):
    """The common case: nothing but single-token steps of a model over a cache. A subclass says which view they read it through, and which
    cache. As the middle of a cascade its steps have several tokens."""

    @abc.abstractmethod
    def step_in_round(self, state: State, cache: Cache) -> ViewedModel:
        """The step that makes a round's drafts."""

    def cache_of_steps(self, state: State, cache: Cache) -> AppendedCache:
        """The cache that the steps append to and read: the target's, perhaps with another around it, or the draft's own."""
        return cache

    def after_steps(self, state: State, cache: Cache, stepped: AppendedCache, used: Bool[Array, "B"]) -> tuple[State, Cache]:
        """The state and the target's cache, once the steps have returned their cache, rolled back.

        used: the rows that may use drafts. Other rows are stepped only because they are in the same batch, or not at all, so nothing of
        their state may depend on it.
        """
        return state, stepped

    def read_in_round(self, state: State, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        views = self.step_in_round(state, cache).view
        return views if isinstance(views, tuple) and any(not isinstance(view, DenseView) for view in views) else None

    def propose(self, state: State, cache: Cache, current: Round) -> tuple[Proposal, State, Cache]:
        proposal, stepped = propose_by_steps(self.step_in_round(state, cache), self.cache_of_steps(state, cache), current)
        return proposal, *self.after_steps(state, cache, stepped, current.eligible > 0)


def propose_by_steps(
    step: Step, cache: AppendedCache, current: Round, *, first: Float[Array, "B V"] | None = None
) -> tuple[Proposal, AppendedCache]:
    """Drafts by single-token steps of a model over a cache, which comes back rolled back.

    If the number of drafts varies, it stops when no row may use another; later columns are zero then. first: the model's logits after the
    pending token, if the cache holds that already.
    """
    B, gamma, lengths = current.pending.shape[0], current.gamma, cache.lengths

    def step_from(i, token, cache):
        logits, cache = step(token[:, None], (current.position + i)[:, None], cache)
        return logits[:, 0], cache

    def chosen(carry, logits, cache):
        i, _, drafts, distributions, eligible, _ = carry
        token, distribution, eligible = current.choose(i, logits, drafts, eligible)

        def put(chosen_before, new):
            return lax.dynamic_update_index_in_dim(chosen_before, new, i, 1)

        return i + 1, token, put(drafts, token), put(distributions, distribution), eligible, cache

    def one(carry):
        return chosen(carry, *step_from(carry[0], carry[1], carry[-1]))

    drafts = jnp.zeros((B, gamma), jnp.int32)
    logits = jax.eval_shape(step_from, jnp.int32(0), current.pending, cache)[0] if first is None else first
    _, distribution, _ = jax.eval_shape(current.choose, jnp.int32(0), logits, drafts, current.eligible)
    distributions = jnp.zeros((B, gamma, distribution.shape[1]), distribution.dtype)
    carry = (jnp.int32(0), current.pending, drafts, distributions, current.eligible, cache)
    if first is not None:
        carry = chosen(carry, first, cache)
    if current.varies:
        carry = lax.while_loop(lambda carry: carry[0] < carry[4].max(), one, carry)
    else:
        # With a known number of trips, kernels are launched ahead. With a condition the GPU would be idle in each trip until the host has
        # read it, which costs more than the few drafts that no row may use.
        carry = lax.fori_loop(0 if first is None else 1, gamma, lambda _, carry: one(carry), carry)
    _, _, drafts, distributions, eligible, cache = carry
    return Proposal(drafts, distributions, eligible), cache.rollback(lengths)
