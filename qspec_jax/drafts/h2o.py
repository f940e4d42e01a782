"""The sparse draft by accumulated attention: it reads heavy hitters, the groups with the most mass in all rounds so far, and the newest.

It is for measurements. H2O itself (arXiv 2306.14048) evicts tokens, and scores only those that it kept. Here the target still reads
everything, so a group's mass is what it got of full attention; and groups take the place of tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qspec_jax.drafts.sparse import SparseDraft, SparseSettings
from qspec_jax.errors import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class H2ODraft(SparseDraft):
    """A sparse draft whose state sums the attention mass of all rounds, and of the last tokens of the prompt."""

    name = "h2o"
    prompt_queries = 32

    def begin(self, prompt):
        queries = jnp.minimum(prompt.n, self.prompt_queries)[:, None, None]
        return tuple(queries * mean for mean in super().begin(prompt))

    def commit(self, state, result, cache):
        return tuple(old + mass.sum(2) for mass, old in zip(result.masses, state))


@dataclasses.dataclass(frozen=True)
class H2OSettings(SparseSettings):
    """The settings of the draft; see `SparseSettings`. H2O reads as many of the newest as of the heavy hitters: newest is 0.5. It forgets
    nothing, and takes no other memory."""

    kind = H2ODraft

    def __post_init__(self):
        super().__post_init__()
        if self.memory:
            raise InputError("draft h2o sums the mass of all rounds; memory is for sparse")
