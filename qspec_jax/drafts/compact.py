"""Shared by drafts over a compact cache of their own: their budget, their steps, and how they take in accepted tokens.

Such a draft reads a bounded number of tokens, whose keys and values it takes from the target's cache, after prefill and after every round.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import FULL_PRECISION, View
from qspec_jax.caches.cache import AppendedCache, Cache, Gives, KeysValues, Reads
from qspec_jax.caches.compact import KINDS, CompactCache
from qspec_jax.drafts.draft import Prompt, RoundResult, State
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.settings_text import setting

MIN_TOKENS = 64  # of a budget that is a share: below that, to read less saves nothing


@dataclasses.dataclass(frozen=True)
class CompactSettings(SelfSpeculativeSettings, abc.ABC):
    """The settings that such drafts share. A quarter of the context and the target's own weights are what QuantSpec's paper gives its
    baselines (section 5)."""

    needs: ClassVar[frozenset[Gives]] = frozenset({Gives.TOKENS})

    budget: float = setting(
        0.25, f"How much of its prompt a row's draft reads: a share, but at least {MIN_TOKENS} tokens; or a number of tokens."
    )
    cache: str = setting("full", "How the draft keeps its tokens: in the model's dtype, or in 8 bits.", choices=KINDS)
    weight_bits: int = setting(16, "Bits of the weights: INT4, or the target's own.", choices=(4, 16), kw_only=True)

    @property
    @abc.abstractmethod
    def always(self) -> tuple[int, str]:
        """How many tokens are read whatever the budget, which must be larger, and what they are called."""

    @property
    def ring_size(self) -> int:
        """How many of the most recent generated tokens are read besides the budget."""
        return 0

    def __post_init__(self):
        super().__post_init__()
        budget, (always, name) = float(self.budget), self.always
        if not (0 < budget < 1 or (budget > always and budget.is_integer())):
            number = f"a whole number of tokens, more than the {always} {name}"
            raise InputError(f"draft budget {budget:g} should be a share of the prompt, more than 0 and less than 1, or {number}")

    @property
    def min_tokens(self) -> int:
        """The minimum number of tokens of a budget that is a share."""
        return max(MIN_TOKENS, self.always[0] + 1)

    def budget_of(self, prompt: int) -> int:
        """How many tokens are taken in of a prompt of `prompt` tokens, if it has them."""
        return int(self.budget) if self.budget >= 1 else max(self.min_tokens, math.ceil(self.budget * prompt))

    def parts(self, model: Llama, int4: Callable[[], Llama]) -> dict[str, Any]:
        """The fields of the draft. Raises InputError for more tokens than the model has positions for."""
        if self.budget > (positions := model.config.max_length):
            raise InputError(f"draft budget {int(self.budget)} should be at most the model's {positions} positions")
        return dict(**self.stepped(model, int4, FULL_PRECISION), settings=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over a compact cache, which is the draft's state, or a part of it where a subclass says so. A subclass
    also says what the cache holds at first. The model reads all of the compact cache, whatever its view. Layers with a sliding window are
    not in it: there the steps read the target's cache."""

    settings: CompactSettings = dataclasses.field(metadata={"static": True})

    needs = CompactSettings.needs
    own_cache = True

    def step_in_round(self, state: State, cache: Cache) -> ViewedModel:
        return self.step

    def cache_of_steps(self, state: State, cache: Cache) -> AppendedCache:
        return cache.steps_over(state)

    def after_steps(self, state: State, cache: Cache, stepped: AppendedCache, used: Bool[Array, "B"]) -> tuple[State, Cache]:
        return cache.from_steps(stepped)

    def read_in_round(self, state: State, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        return tuple(HeldKeys(keys, state.rows) for keys in state.keys)

    def commit(self, state: CompactCache, result: RoundResult, cache: Cache) -> CompactCache:
        return state.take_in(*tokens_of_round(result, cache))

    def reads(self, layer: int, cache: Cache, tokens: int) -> Reads:
        return self.held(tokens)

    def held(self, tokens: int) -> Reads:
        """What a step reads of the compact cache. The row is counted as one that has just been prefilled: its tokens, without the one that
        is appended, are the prompt that the budget is a share of. A ring of generated tokens is counted as full, as it is when the cache's
        memory is used up; before that a step reads less."""
        chosen = min(tokens - 1, self.settings.budget_of(tokens - 1))
        return self.read_of(chosen + min(self.settings.ring_size, tokens - 1 - chosen), 1)

    def read_of(self, taken_in: int, appended: int) -> Reads:
        """What is read of the compact cache with these numbers of tokens."""
        return Reads(0, 0, taken_in + appended) if self.settings.cache == "full" else Reads(2, taken_in, appended)

    def cache_read(self, cache: Cache) -> AppendedCache:
        return cache.steps_over(CompactCache.outline(self.step.model.config, self.settings.cache))

    def holds(self, prompt: int, capacity: int, gamma: int) -> Reads:
        return self.held(prompt + 1)

    def check_capacity(self, capacity: int) -> None:
        """Raises InputError for a budget of more tokens than a row has room for, and for a share that must be more than that."""
        budget, needed = self.settings.budget, self.settings.min_tokens
        if budget >= 1 and budget > capacity:
            raise InputError(f"draft budget {int(budget)} should be at most {capacity}, the tokens that there is room for in a row")
        if budget < 1 and needed > max(capacity, MIN_TOKENS):
            room = f"less than {capacity}, the tokens that there is room for in a row"
            raise InputError(f"what the draft always keeps, {needed - 1} tokens, should be {room}")

    def budgets(self, prompt: Prompt) -> tuple[Int[Array, "B"], int]:
        """The budget of each row, in tokens, and the most of any row. Raises InputError as `check_capacity` does."""
        self.check_capacity(prompt.capacity)
        most = self.settings.budget_of(prompt.tokens.shape[1])
        if self.settings.budget >= 1:
            return jnp.full_like(prompt.n, most), most
        return jnp.clip(jnp.ceil(self.settings.budget * prompt.n).astype(prompt.n.dtype), self.settings.min_tokens, most), most


def tokens_of_round(result: RoundResult, cache: Cache) -> tuple[list[KeysValues], Int[Array, "B"]]:
    """The keys and values of the tokens that a round added to the target's cache, for each layer without a sliding window, and how many
    there are in each row.

    They are the target's, so none is missing if all drafts were accepted.
    """
    came = jnp.where(result.count > 0, result.accepted + 1, 0)
    positions = (cache.lengths.total - came)[:, None] + jnp.arange(result.tokens.shape[1])
    return [cache.recent_tokens(i, positions[:, None]) for i in cache.full_layers], came
