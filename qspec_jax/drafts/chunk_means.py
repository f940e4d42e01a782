"""TriForce's choice of chunks, read in place: the QuantSpec draft that reads the chunks whose mean keys score highest for a recent query.

It is for measurements. The chosen tokens are read through the target's cache, not copied. Source: TriForce (arXiv 2404.11912, section 4.1):
chunks of 8 tokens are scored by the attention of one query to their mean keys, the first chunk is always kept, the first layers read
everything (as in the paper's table 1), and the choice is made again now and then. What has left the buffer since the last choice is read
besides.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.views import UPPER_PLANE, ChosenTokens
from qspec_jax.caches.cache import Cache, Gives
from qspec_jax.drafts.choosing import check_budget, check_fits, check_has_groups, parts_asked
from qspec_jax.drafts.chunks import FirstQueriesCache, chunk_scores
from qspec_jax.drafts.draft import Reads
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkMeansState:
    """chosen: for each layer the tokens of the quantized region that are read. queries: those of the last pending token, or of the prompt's
    last token. since: tokens emitted since the choice was made."""

    chosen: tuple[Bool[Array, "B K S"], ...]
    queries: tuple[Float[Array, "B N H"], ...]
    since: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkMeansDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over chosen chunks of the target's cache. budget, chunk, rebuild, dense_layers: see
    `ChunkMeansSettings`."""

    budget: float = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})
    rebuild: int = dataclasses.field(metadata={"static": True})
    dense_layers: int = dataclasses.field(metadata={"static": True})

    needs = frozenset({Gives.GROUPS})
    prompt_queries = 1

    def begin(self, prompt):
        check_has_groups(prompt.cache, "chunk-means")
        if prompt.cache.group_size % self.chunk:
            raise InputError(f"draft chunk {self.chunk} should divide the groups of {prompt.cache.group_size} tokens")
        queries = tuple(q[:, 0] for q in prompt.queries)
        return ChunkMeansState(self.choose(queries, prompt.cache), queries, jnp.zeros_like(prompt.n))

    def choose(self, queries: tuple[Float[Array, "B N H"], ...], cache: Cache) -> tuple[Bool[Array, "B K S"], ...]:
        """The tokens to read in each layer: the first chunk, and those whose mean key gets the most attention."""
        tokens, found = cache.groups * cache.group_size, []
        parts, kv_heads = cache.lengths.quantized // self.chunk, self.step.model.config.num_kv_heads
        count = jnp.minimum(jnp.ceil(parts_asked(self.budget, parts, self.chunk)).astype(jnp.int32), parts)[:, None, None]
        for i, q in enumerate(queries):
            if i < self.dense_layers or not tokens:
                found.append(jnp.ones((q.shape[0], kv_heads, tokens), bool))
                continue
            score = self.step.model.sum_of_copies(chunk_scores(q, cache, i, parts, tokens=tokens, chunk=self.chunk))
            least = jnp.take_along_axis(jnp.sort(score, -1, descending=True), jnp.maximum(count - 1, 0), -1)
            found.append(jnp.repeat((score >= least) & (score > -jnp.inf), self.chunk, axis=-1))
        return tuple(found)

    def step_in_round(self, state, cache):
        views = [UPPER_PLANE if i < self.dense_layers else ChosenTokens(chosen) for i, chosen in enumerate(state.chosen)]
        return ViewedModel(self.step.model, tuple(views))

    def cache_of_steps(self, state, cache):
        return FirstQueriesCache(cache, state.queries, jnp.int32(0))

    def after_steps(self, state, cache, stepped, used):
        return dataclasses.replace(state, queries=stepped.queries_where(used, state.queries)), stepped.cache

    def commit(self, state, result, cache):
        position, G = jnp.arange(state.chosen[0].shape[2]), cache.group_size
        came = (position >= (cache.lengths.quantized - G)[:, None]) & (result.flushed > 0)[:, None]
        chosen, since = tuple(old | came[:, None] for old in state.chosen), state.since + result.count
        if not self.rebuild:
            return ChunkMeansState(chosen, state.queries, since)
        due = since >= self.rebuild
        anew = lax.cond(due.any(), lambda: self.choose(state.queries, cache), lambda: chosen)
        chosen = tuple(jnp.where(due[:, None, None], new, old) for new, old in zip(anew, chosen))
        return ChunkMeansState(chosen, state.queries, jnp.where(due, 0, since))

    def reads(self, layer, quantized, buffered, group_size):
        asked = math.ceil(parts_asked(self.budget, quantized // self.chunk, self.chunk)) * self.chunk
        return Reads(1, quantized if layer < self.dense_layers else min(quantized, asked), buffered)


@dataclasses.dataclass(frozen=True)
class ChunkMeansSettings(SelfSpeculativeSettings):
    """The settings of the draft.

    budget: how much of the quantized region is chosen, a share in (0, 1] or a number of tokens. chunk: tokens of a chunk; it divides the
    cache's groups. rebuild: the choice is made anew after so many tokens; 0: never. dense_layers: the first so many layers read everything.
    For the shared ones see `SelfSpeculativeSettings`.
    """

    needs: ClassVar[frozenset[Gives]] = ChunkMeansDraft.needs

    budget: float = 4096
    chunk: int = 8
    rebuild: int = 64
    dense_layers: int = 2

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget)
        if self.chunk < 1:
            raise InputError(f"draft chunk {self.chunk} should be at least 1")
        if self.rebuild < 0:
            raise InputError(f"draft rebuild {self.rebuild} should be at least 0")

    def make(self, model: Llama, int4: Callable[[], Llama]) -> ChunkMeansDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError as `check_fits` does."""
        check_fits(model, self.budget, self.dense_layers)
        settings = dict(budget=self.budget, chunk=self.chunk, rebuild=self.rebuild, dense_layers=self.dense_layers)
        return ChunkMeansDraft(**self.stepped(model, int4, UPPER_PLANE), **settings)
