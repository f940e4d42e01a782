"""What drafts over a compact cache of their own share: their budget, their steps, and how they take in what the target accepted.

Such a draft reads a bounded number of tokens, whose keys and values it takes from the target's cache, after prefill and after every round.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.formats.views import FULL_PRECISION, HeldKeys
from qspec_jax.caches.cache import Cache, Gives
from qspec_jax.caches.compact import KINDS, CompactCache, KeysValues
from qspec_jax.drafts.draft import Prompt, Reads, RoundResult
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

LEAST_TOKENS = 64  # of a budget that is a share: below that, to read less saves nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over a compact cache, which is the draft's state, or a part of it where a subclass says so. A subclass
    also says what the cache holds at first.

    The model reads all of the compact cache, whatever its view. budget: what it takes in of a row's prompt; 1 or more: tokens; below 1: a
    share of the row's prompt, but at least `least` tokens. kind: of the cache, one of `qspec_jax.caches.compact.KINDS`.
    """

    budget: float = dataclasses.field(metadata={"static": True})
    least: int = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})

    needs = frozenset({Gives.TOKENS})
    own_cache = True

    def step_in_round(self, state, cache):
        return self.step

    def cache_of_steps(self, state, cache):
        return state

    def after_steps(self, state, cache, stepped, used):
        return stepped, cache

    def read_in_round(self, state, cache):
        return tuple(HeldKeys(keys, state.rows) for keys in state.keys)

    def commit(self, state: CompactCache, result: RoundResult, cache: Cache) -> CompactCache:
        return state.take_in(*tokens_of_round(result, cache))

    def reads(self, layer, quantized, buffered, group_size):
        """See `ModelDraft.reads`. The row is counted as one that has just been prefilled: what is cached of it, without the token that
        is appended, is the prompt that the budget is a share of."""
        prompt = quantized + buffered - 1
        held = min(prompt, self.budget_of(prompt))
        return Reads(0, 0, held + 1) if self.kind == "full" else Reads(2, held, 1, key_groups=False)

    def budget_of(self, prompt: int) -> int:
        """How many tokens are taken in of a prompt of so many, if it has them."""
        return int(self.budget) if self.budget >= 1 else max(self.least, math.ceil(self.budget * prompt))

    def check_capacity(self, capacity):
        """Raises InputError for a budget of more tokens than a row may come to hold, and where what a share keeps at least, beyond
        `LEAST_TOKENS`, is more."""
        if self.budget >= 1 and self.budget > capacity:
            raise InputError(f"draft budget {int(self.budget)} should be at most {capacity}, the tokens that there is room for in a row")
        if self.budget < 1 and self.least > max(capacity, LEAST_TOKENS):
            room = f"less than {capacity}, the tokens that there is room for in a row"
            raise InputError(f"what the draft always keeps, {self.least - 1} tokens, should be {room}")

    def budgets(self, prompt: Prompt) -> tuple[Int[Array, "B"], int]:
        """The budget of each row, in tokens, and the most of any row. Raises InputError as `check_capacity` does."""
        self.check_capacity(prompt.capacity)
        most = self.budget_of(prompt.tokens.shape[1])
        if self.budget >= 1:
            return jnp.full_like(prompt.n, most), most
        return jnp.clip(jnp.ceil(self.budget * prompt.n).astype(prompt.n.dtype), self.least, most), most


def tokens_of_round(result: RoundResult, cache: Cache) -> tuple[list[KeysValues], Int[Array, "B"]]:
    """The tokens that a round left in the target's cache, for each layer, and how many of them each row has.

    They are taken in from there: so their keys and values are the target's, and none is missing where all drafts were accepted.
    """
    came = jnp.where(result.count > 0, result.accepted + 1, 0)
    positions = (cache.lengths.total - came)[:, None] + jnp.arange(result.tokens.shape[1])
    return [cache.recent_tokens(i, positions[:, None]) for i in range(len(cache.layers))], came


def with_generated(reads: Reads, most: int, tokens: int) -> Reads:
    """What a step reads that also reads the most recent generated ones: as many as there may be, of so many tokens of a row."""
    more, part = min(most, tokens - reads.quantized - reads.full), "quantized" if reads.planes else "full"
    return dataclasses.replace(reads, **{part: getattr(reads, part) + more})


@dataclasses.dataclass(frozen=True)
class CompactSettings(SelfSpeculativeSettings, abc.ABC):
    """The settings that such drafts share.

    budget: how many tokens of its prompt a row's draft takes in; below 1 it is a share of the prompt, and then at least `LEAST_TOKENS`. A
    quarter of the context is what QuantSpec's paper gives its baselines (section 5). cache: "full", in the model's dtype, or "int8".
    weight_bits: 16 by default, as in that paper. head_bits: see `SelfSpeculativeSettings`.
    """

    needs: ClassVar[frozenset[Gives]] = CompactDraft.needs

    budget: float = 0.25
    cache: str = "full"
    weight_bits: int = dataclasses.field(default=16, kw_only=True)

    @property
    @abc.abstractmethod
    def always(self) -> tuple[int, str]:
        """How many tokens are read whatever the budget, so that it must be larger, and what they are called."""

    def __post_init__(self):
        super().__post_init__()
        if self.cache not in KINDS:
            raise InputError(f"draft cache {self.cache!r} should be {' or '.join(KINDS)}")
        budget, (always, name) = float(self.budget), self.always
        if not (0 < budget < 1 or (budget > always and budget.is_integer())):
            number = f"a whole number of tokens, more than the {always} {name}"
            raise InputError(f"draft budget {budget:g} should be a share of the prompt, more than 0 and less than 1, or {number}")

    def shared(self, model: Llama, int4: Callable[[], Llama]) -> dict:
        """The fields of the draft that these settings are about. int4: makes the model's INT4 weights. Raises InputError for more tokens
        than the model has positions for."""
        if self.budget > (positions := model.config.max_length):
            raise InputError(f"draft budget {int(self.budget)} should be at most the model's {positions} positions")
        least = max(LEAST_TOKENS, self.always[0] + 1)
        return dict(budget=float(self.budget), least=least, kind=self.cache, **self.stepped(model, int4, FULL_PRECISION))
