"""TriForce's choice of chunks, read in place: the QuantSpec draft that reads the chunks whose mean keys score highest for a recent query.

It is for measurements. The chosen tokens are read through the target's cache, not copied. Source: TriForce (arXiv 2404.11912, section 4.1):
chunks of 8 tokens are scored by the attention of one query to their mean keys, the first chunk is always kept, the first layers read
everything (as in the paper's table 1), and the choice is made again now and then. What has left the buffer since the last choice is read
besides.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.views import UPPER_PLANE, ChosenTokens
from qspec_jax.caches.cache import AppendedCache, Cache, Gives, Reads
from qspec_jax.drafts.choosing import check_budget, check_fits, check_has_groups, is_dense, parts_asked, tokens_asked
from qspec_jax.drafts.chunks import FirstQueriesCache, chunk_scores
from qspec_jax.drafts.draft import Prompt, RoundResult
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft, SelfSpeculativeSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.settings_text import setting


@dataclasses.dataclass(frozen=True)
class ChunkMeansSettings(SelfSpeculativeSettings):
    """See `SelfSpeculativeSettings`."""

    needs: ClassVar[frozenset[Gives]] = frozenset({Gives.GROUPS})

    budget: float = setting(
        4096, "How much of the quantized tokens a step reads: a share of at most 1 (0.06 is 6 %), or a number of tokens (6 is 6 tokens)."
    )
    chunk: int = setting(8, "How many tokens a chunk has; it divides the cache's groups.", minimum=1)
    rebuild: int = setting(64, "After how many tokens the choice is made again; 0 is never.", minimum=0)
    dense_layers: int = setting(2, "How many of the first layers read everything.")

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> "ChunkMeansDraft":
        """The draft of a model. Raises InputError as `check_fits` does."""
        check_fits(model, self.budget, self.dense_layers)
        return ChunkMeansDraft(**self.stepped(model, int4, UPPER_PLANE), settings=self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkMeansState:
    """chosen: for each layer without a sliding window the tokens of the quantized region that are read. queries: there, those of the last
    pending token, or of the prompt's last token. since: tokens emitted since the choice was made."""

    chosen: tuple[Bool[Array, "B K S"], ...]
    queries: tuple[Float[Array, "B N H"], ...]
    since: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkMeansDraft(SelfSpeculativeDraft):
    """Single-token steps of a model over chosen chunks of the target's cache."""

    settings: ChunkMeansSettings = dataclasses.field(metadata={"static": True})

    needs = ChunkMeansSettings.needs
    prompt_queries = 1

    def begin(self, prompt: Prompt) -> ChunkMeansState:
        check_has_groups(prompt.cache, "chunk-means")
        if prompt.cache.group_size % self.settings.chunk:
            raise InputError(f"draft chunk {self.settings.chunk} should divide the groups of {prompt.cache.group_size} tokens")
        queries = tuple(prompt.queries[i][:, 0] for i in prompt.cache.full_layers)
        return ChunkMeansState(self.choose(queries, prompt.cache), queries, jnp.zeros_like(prompt.n))

    def choose(self, queries: tuple[Float[Array, "B N H"], ...], cache: Cache) -> tuple[Bool[Array, "B K S"], ...]:
        """The tokens to read in each layer without a sliding window: the first chunk, and those whose mean key gets the most attention."""
        settings = self.settings
        tokens, found = cache.groups * cache.group_size, []
        parts, kv_heads = cache.lengths.quantized // settings.chunk, self.step.model.config.num_kv_heads
        count = jnp.minimum(jnp.ceil(parts_asked(settings.budget, parts, settings.chunk)).astype(jnp.int32), parts)[:, None, None]
        for i, q in zip(cache.full_layers, queries, strict=True):
            if is_dense(cache, i, settings.dense_layers) or not tokens:
                found.append(jnp.ones((q.shape[0], kv_heads, tokens), bool))
                continue
            score = self.step.model.sum_of_copies(chunk_scores(q, cache, i, parts, tokens=tokens, chunk=settings.chunk))
            lowest = jnp.take_along_axis(jnp.sort(score, -1, descending=True), jnp.maximum(count - 1, 0), -1)
            found.append(jnp.repeat((score >= lowest) & (score > -jnp.inf), settings.chunk, axis=-1))
        return tuple(found)

    def step_in_round(self, state: ChunkMeansState, cache: Cache) -> ViewedModel:
        chosen = dict(zip(cache.full_layers, map(ChosenTokens, state.chosen), strict=True))
        dense = (is_dense(cache, i, self.settings.dense_layers) for i in range(len(cache.layers)))
        return ViewedModel(self.step.model, tuple(UPPER_PLANE if all_of_it else chosen[i] for i, all_of_it in enumerate(dense)))

    def cache_of_steps(self, state: ChunkMeansState, cache: Cache) -> AppendedCache:
        return FirstQueriesCache(cache, state.queries, jnp.int32(0))

    def after_steps(
        self, state: ChunkMeansState, cache: Cache, stepped: AppendedCache, used: Bool[Array, "B"]
    ) -> tuple[ChunkMeansState, Cache]:
        return dataclasses.replace(state, queries=stepped.queries_where(used, state.queries)), stepped.cache

    def commit(self, state: ChunkMeansState, result: RoundResult, cache: Cache) -> ChunkMeansState:
        position, G = jnp.arange(state.chosen[0].shape[2]), cache.group_size
        came = (position >= (cache.lengths.quantized - G)[:, None]) & (result.flushed > 0)[:, None]
        chosen, since = tuple(old | came[:, None] for old in state.chosen), state.since + result.count
        if not self.settings.rebuild:
            return ChunkMeansState(chosen, state.queries, since)
        due = since >= self.settings.rebuild
        chosen_again = lax.cond(due.any(), lambda: self.choose(state.queries, cache), lambda: chosen)
        chosen = tuple(jnp.where(due[:, None, None], new, old) for new, old in zip(chosen_again, chosen))
        return ChunkMeansState(chosen, state.queries, jnp.where(due, 0, since))

    def reads(self, layer: int, cache: Cache, tokens: int) -> Reads:
        settings, dense = self.settings, cache.reads(UPPER_PLANE, tokens)
        if is_dense(cache, layer, settings.dense_layers):
            return dense
        asked = tokens_asked(settings.budget, dense.quantized, settings.chunk)
        return dataclasses.replace(dense, quantized=min(dense.quantized, asked))
