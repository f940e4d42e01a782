"""The sparse draft by accumulated attention: it reads heavy hitters, the groups with the most mass in all rounds so far, and the newest.

It is for measurements. H2O itself (arXiv 2306.14048) evicts tokens, and scores only those that it kept. Here the target still reads
everything, so a group's mass is what it got of full attention; and groups take the place of tokens.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from qspec_jax.caches.cache import Cache
from qspec_jax.drafts.draft import Prompt, RoundResult, State
from qspec_jax.drafts.sparse import SparseDraft, SparseSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama


@dataclasses.dataclass(frozen=True)
class H2ODraftSettings(SparseSettings):
    """H2O reads equally many of the newest and of the heavy hitters: `newest` is 0.5. It sums the mass of all rounds, without `memory`."""

    def __post_init__(self):
        super().__post_init__()
        if self.memory:
            raise InputError("draft h2o sums the mass of all rounds; memory is for sparse")

    def make(self, model: Llama, int4: Callable[[], Llama]) -> "H2ODraft":
        return H2ODraft(**self.parts(model, int4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class H2ODraft(SparseDraft):
    """A sparse draft whose state sums the attention mass of all rounds, and of the last tokens of the prompt."""

    name = "h2o"
    prompt_queries = 32

    def begin(self, prompt: Prompt) -> State:
        means = super().begin(prompt)
        return prompt.are_queries(self.prompt_queries).sum(1)[:, None, None, None] * means if prompt.cache.full_layers else means

    def commit(self, state: State, result: RoundResult, cache: Cache) -> State:
        return state + jnp.stack(result.masses, 1).sum(3) if result.masses else state
