"""TriForce's retrieval cache as a draft: the model reads the chunks of the text that score highest for a recent query, and what came since.

The text is cut into chunks of 8 tokens. A chunk's score is the attention that one query pays to the mean of the chunk's keys, for each KV
head its own. The chunks with the highest scores are copied into a compact cache with the first chunk and the most recent tokens; what is
generated joins them. The choice is made after prefill with the query of the prompt's last token, and again after `rebuild` tokens and, if
`least_accepted` is set, when the average acceptance falls below it.

Source: TriForce (arXiv 2404.11912), sections 4.1 and 4.3. Unlike there, the most recent tokens are always copied, whatever their scores,
and new tokens take no copied one's place: they go into a ring of their own. As in the paper's own system, every layer reads chunks.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import View
from qspec_jax.caches.cache import AppendedCache, Cache, Reads
from qspec_jax.caches.compact import CompactCache
from qspec_jax.drafts.chunks import FirstQueriesCache, chunk_scores
from qspec_jax.drafts.compact import CompactDraft, CompactSettings
from qspec_jax.drafts.draft import Prompt, RoundResult
from qspec_jax.models.llama import Llama
from qspec_jax.settings_text import setting

Layer = TypeVar("Layer")
RECENT = 32  # the minimum number of a text's last tokens that are copied
ROLLING = 0.8  # how much of the acceptance of earlier rounds stays in its rolling average


@dataclasses.dataclass(frozen=True)
class RetrievalSettings(CompactSettings):
    """The budget is of chosen chunks and recent tokens together. `generated` makes a difference only where it is less than `rebuild`."""

    budget: float = setting(
        4096, "How much of the text a row's draft reads: a share of its prompt (0.06 is 6 %), or a number of tokens (6 is 6 tokens)."
    )
    chunk: int = setting(8, "How many tokens a chunk has.", minimum=1)
    generated: int = setting(1024, "How many of the tokens emitted since the last choice are read, the most recent ones.", minimum=1)
    rebuild: int = setting(256, "After how many tokens the choice is made again; 0 is never.", minimum=0)
    least_accepted: float = setting(
        0.0, "Below which average share of accepted drafts the choice is made again; 0 is never.", minimum=0, below=1
    )

    @property
    def always(self) -> tuple[int, str]:
        return RECENT + 2 * self.chunk - 1, "recent tokens and those of the first chunk"

    @property
    def ring_size(self) -> int:
        """How many of the tokens emitted since the last choice a step can read."""
        return min(self.generated, self.rebuild or self.generated)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> "RetrievalDraft":
        """The draft of a model. Raises InputError as `parts` does."""
        return RetrievalDraft(**self.parts(model, int4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RetrievalState:
    """own: the tokens that were copied, and in its ring those that came since. queries: for each layer of `own` those of the last pending
    token, or of the prompt's last token. budget: of each row, in tokens; most: that of any. since: tokens emitted since the last choice.
    accepted: rolling average, over rounds with drafts, of the share of the judged ones that was accepted; 1 after each choice."""

    own: CompactCache
    queries: tuple[Float[Array, "B N H"], ...]
    budget: Int[Array, "B"]
    since: Int[Array, "B"]
    accepted: Float[Array, "B"]
    most: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalDraft(CompactDraft):
    """Single-token steps of a model over copied chunks of the text and the tokens that were generated since."""

    settings: RetrievalSettings = dataclasses.field(metadata={"static": True})

    prompt_queries = 1

    def check_capacity(self, capacity: int) -> None:
        """Accepts every budget: with one of more tokens than a row has room for, the whole row is copied."""

    def budgets(self, prompt: Prompt) -> tuple[Int[Array, "B"], int]:
        budget, most = super().budgets(prompt)
        most = min(most, max(self.settings.min_tokens, prompt.capacity + self.settings.chunk))
        return jnp.minimum(budget, most), most

    def begin(self, prompt: Prompt) -> RetrievalState:
        budget, most = self.budgets(prompt)
        queries = tuple(prompt.queries[i][:, 0] for i in prompt.cache.full_layers)
        ring = max(1, min(self.settings.ring_size, prompt.capacity - prompt.tokens.shape[1]))

        def layer(_, *both):
            return CompactCache.make_layer(*both, kind=self.settings.cache, appended=prompt.appended, room=ring)

        layers, kept = self.copied(queries, prompt.cache, budget, most, make=layer)
        own = CompactCache.of(layers, kept=kept, ring=jnp.full_like(kept, ring), taken=kept)
        return RetrievalState(own, queries, budget, jnp.zeros_like(prompt.n), jnp.ones(prompt.n.shape, jnp.float32), most)

    def copied(
        self,
        queries: tuple[Float[Array, "R N H"], ...],
        cache: Cache,
        budget: Int[Array, "R"],
        most: int,
        batch_rows: Int[Array, "R"] | None = None,
        *,
        make: Callable[[int, Array, Array], Layer],
    ) -> tuple[list[Layer], Int[Array, "R"]]:
        """Copies the best chunks of rows of a cache, and after them the rows' recent tokens.

        Args:
            queries: those that choose, for each layer of the cache without a sliding window.
            cache: the target's.
            budget: of each row, in tokens.
            most: the maximum budget.
            batch_rows: these rows of the batch; None: all.
            make: makes a layer of its number among those, and its copied keys and values [R, K, most, H].

        Returns:
            The layers, and how many tokens there are in each row, within its budget.
        """
        n, chunk = cache.lengths.total if batch_rows is None else cache.lengths.total[batch_rows], self.settings.chunk
        # The recent tokens begin with a whole chunk, so that each token is either in a chunk to choose from or recent.
        whole, width = jnp.maximum(n - RECENT, 0) // chunk, RECENT + chunk
        count = jnp.minimum(whole, (budget - width) // chunk)
        place, layers = jnp.arange(most), []
        for number, (i, q) in enumerate(zip(cache.full_layers, queries, strict=True)):
            on_device, layers = cache.with_layer_on_device(i, after=layers)
            score = chunk_scores(q, on_device, i, whole, batch_rows, tokens=cache.capacity, chunk=chunk)
            score = self.step.model.sum_of_copies(score)
            best = best_chunks(score, count, most=(most - width) // chunk)
            in_chunk = jnp.take(best, jnp.minimum(place // chunk, best.shape[2] - 1), axis=2) * chunk + place % chunk
            recent = ((whole - count) * chunk)[:, None, None] + place
            positions = jnp.where(place < (count * chunk)[:, None, None], in_chunk, recent)
            layers.append(make(number, *on_device.tokens(i, positions, batch_rows)))
        return layers, n - (whole - count) * chunk

    def cache_of_steps(self, state: RetrievalState, cache: Cache) -> AppendedCache:
        return FirstQueriesCache(cache.steps_over(state.own), state.queries, jnp.int32(0))

    def after_steps(
        self, state: RetrievalState, cache: Cache, stepped: AppendedCache, used: Bool[Array, "B"]
    ) -> tuple[RetrievalState, Cache]:
        own, cache = cache.from_steps(stepped.cache)
        return dataclasses.replace(state, own=own, queries=stepped.queries_where(used, state.queries)), cache

    def read_in_round(self, state: RetrievalState, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        return super().read_in_round(state.own, cache)

    def commit(self, state: RetrievalState, result: RoundResult, cache: Cache) -> RetrievalState:
        own, running = super().commit(state.own, result, cache), result.count > 0
        share = result.accepted.astype(jnp.float32) / jnp.maximum(result.drafted, 1)
        accepted = jnp.where(running & (result.drafted > 0), ROLLING * state.accepted + (1 - ROLLING) * share, state.accepted)
        since = state.since + result.count
        new = dataclasses.replace(state, own=own, since=since, accepted=accepted)
        settings, due = self.settings, accepted < self.settings.least_accepted
        if settings.rebuild:
            due |= since >= settings.rebuild
        elif not settings.least_accepted:
            return new
        due &= running

        def choose_for_next_row(carry):
            own, waiting = carry
            row = jnp.argmax(waiting)[None]

            # Each layer is put in its place as it is made, so that no second copy of all of them waits. Over host memory the next layer's
            # copy waits for that, see `with_layer_on_device`.
            def put(layer, *both):
                return own.layer_refilled(layer, *both, row)

            queries = tuple(q[row] for q in state.queries)
            layers, kept = self.copied(queries, cache, state.budget[row], state.most, row, make=put)
            return own.refilled(layers, kept, row), waiting.at[row].set(False)

        # A row at a time, so that none is chosen for in vain; and lax.cond would copy the caches that it passes through (seen in jax 0.10).
        own, _ = lax.while_loop(lambda carry: carry[1].any(), choose_for_next_row, (own, due))
        return dataclasses.replace(new, own=own, since=jnp.where(due, 0, since), accepted=jnp.where(due, 1, accepted))

    def holds(self, prompt: int, capacity: int, gamma: int) -> Reads:
        """See `ModelDraft.holds`: what `begin` makes room for."""
        settings = self.settings
        chosen = min(settings.budget_of(prompt), max(settings.min_tokens, capacity + settings.chunk))
        rows = chosen + max(1, min(settings.ring_size, capacity - prompt))
        return self.read_of(rows, gamma + 1)


def best_chunks(score: Float[Array, "R K chunks"], count: Int[Array, "R"], *, most: int) -> Int[Array, "R K most"]:
    """The numbers of the count[r] chunks with the highest scores, in ascending order in the first columns."""
    chunks = score.shape[2]
    _, best = lax.top_k(score, min(most, chunks))
    return jnp.sort(jnp.where(jnp.arange(best.shape[2]) < count[:, None, None], best, chunks), -1)
