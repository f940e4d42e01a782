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
from jaxtyping import Array, Float, Int

from qspec_jax.caches.cache import Cache
from qspec_jax.caches.compact import CompactCache
from qspec_jax.drafts.chunks import FirstQueriesCache, chunk_scores
from qspec_jax.drafts.compact import CompactDraft, CompactSettings, with_generated
from qspec_jax.drafts.draft import Reads
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

Layer = TypeVar("Layer")
RECENT = 32  # at least so many of a text's last tokens are always copied
ROLLING = 0.8  # how much of the acceptance of earlier rounds stays in its rolling average


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RetrievalState:
    """own: the tokens that were copied, and in its ring those that came since. queries: for each layer those of the last pending token, or
    of the prompt's last token. budget: of each row, in tokens; most: that of any. since: tokens emitted since the choice was made.
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
    """Steps over copied chunks. chunk, generated, rebuild, least_accepted: see `RetrievalSettings`; for the others `CompactDraft`."""

    chunk: int = dataclasses.field(metadata={"static": True})
    generated: int = dataclasses.field(metadata={"static": True})
    rebuild: int = dataclasses.field(metadata={"static": True})
    least_accepted: float = dataclasses.field(metadata={"static": True})

    prompt_queries = 1

    def check_capacity(self, capacity):
        """Refuses no budget: one of more tokens than a row has room for copies the whole row."""

    def budgets(self, prompt):
        budget, most = super().budgets(prompt)
        most = min(most, max(self.least, prompt.capacity + self.chunk))
        return jnp.minimum(budget, most), most

    def begin(self, prompt):
        budget, most = self.budgets(prompt)
        queries = tuple(q[:, 0] for q in prompt.queries)
        ring = max(1, min(self.ring_size, prompt.capacity - prompt.tokens.shape[1]))
        layer = lambda _, *both: CompactCache.make_layer(*both, kind=self.kind, appended=prompt.gamma, room=ring)
        layers, kept = self.copied(queries, prompt.cache, budget, most, make=layer)
        own = CompactCache.of(layers, kept=kept, ring=jnp.full_like(kept, ring), taken=kept)
        return RetrievalState(own, queries, budget, jnp.zeros_like(prompt.n), jnp.ones(prompt.n.shape, jnp.float32), most)

    @property
    def ring_size(self) -> int:
        """How many of the tokens emitted since the last choice a step can read."""
        return min(self.generated, self.rebuild or self.generated)

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
        """Copies the best chunks of what rows of a cache hold, and behind them their recent tokens. Returns what `make` makes of each
        layer; and how many of these tokens there are in each row, which is within its budget.

        batch_rows: these rows of the batch; None: all. make: is called with each layer's number, and its copied keys and values
        [R, K, most, H].
        """
        n, chunk = cache.lengths.total if batch_rows is None else cache.lengths.total[batch_rows], self.chunk
        # The recent tokens begin with a whole chunk, so that each token is either in a chunk to choose from or recent.
        whole, width = jnp.maximum(n - RECENT, 0) // chunk, RECENT + chunk
        count = jnp.minimum(whole, (budget - width) // chunk)
        place, layers = jnp.arange(most), []
        for i, q in enumerate(queries):
            on_device, layers = cache.with_layer_on_device(i, after=layers)
            score = chunk_scores(q, on_device, i, whole, batch_rows, tokens=cache.capacity, chunk=chunk)
            score = self.step.model.sum_of_copies(score)
            best = best_chunks(score, count, most=(most - width) // chunk)
            in_chunk = jnp.take(best, jnp.minimum(place // chunk, best.shape[2] - 1), axis=2) * chunk + place % chunk
            recent = ((whole - count) * chunk)[:, None, None] + place
            positions = jnp.where(place < (count * chunk)[:, None, None], in_chunk, recent)
            layers.append(make(i, *on_device.tokens(i, positions, batch_rows)))
        return layers, n - (whole - count) * chunk

    def cache_of_steps(self, state, cache):
        return FirstQueriesCache(state.own, state.queries, jnp.int32(0))

    def after_steps(self, state, cache, stepped, used):
        return dataclasses.replace(state, own=stepped.cache, queries=stepped.queries_where(used, state.queries)), cache

    def read_in_round(self, state, cache):
        return super().read_in_round(state.own, cache)

    def commit(self, state, result, cache):
        own, running = super().commit(state.own, result, cache), result.count > 0
        share = result.accepted.astype(jnp.float32) / jnp.maximum(result.drafted, 1)
        accepted = jnp.where(running & (result.drafted > 0), ROLLING * state.accepted + (1 - ROLLING) * share, state.accepted)
        since = state.since + result.count
        new = dataclasses.replace(state, own=own, since=since, accepted=accepted)
        due = accepted < self.least_accepted
        if self.rebuild:
            due |= since >= self.rebuild
        elif not self.least_accepted:
            return new
        due &= running

        def choose_for_next_row(carry):
            own, waiting = carry
            row = jnp.argmax(waiting)[None]
            # Each layer is put in its place as it is made, so that no second copy of all of them waits. Over host memory the next layer's
            # copy waits for that, see `with_layer_on_device`.
            put = lambda layer, *both: own.layer_refilled(layer, *both, row)
            queries = tuple(q[row] for q in state.queries)
            layers, kept = self.copied(queries, cache, state.budget[row], state.most, row, make=put)
            return own.refilled(layers, kept, row), waiting.at[row].set(False)

        # A row at a time, so that none is chosen for in vain; and lax.cond would copy the caches that it passes through (seen in jax 0.10).
        own, _ = lax.while_loop(lambda carry: carry[1].any(), choose_for_next_row, (own, due))
        return dataclasses.replace(new, own=own, since=jnp.where(due, 0, since), accepted=jnp.where(due, 1, accepted))

    def reads(self, layer, quantized, buffered, group_size):
        """See `ModelDraft.reads`. The ring is counted as full; before that a step reads less."""
        return with_generated(super().reads(layer, quantized, buffered, group_size), self.ring_size, quantized + buffered)

    def holds(self, layer, prompt, capacity, gamma):
        """See `ModelDraft.holds`: as many as `begin` makes room for."""
        rows = min(self.budget_of(prompt), max(self.least, capacity + self.chunk)) + max(1, min(self.ring_size, capacity - prompt))
        return Reads(0, 0, rows + gamma + 1) if self.kind == "full" else Reads(2, rows, gamma + 1, key_groups=False)


def best_chunks(score: Float[Array, "R K chunks"], count: Int[Array, "R"], *, most: int) -> Int[Array, "R K most"]:
    """The numbers of the count[r] chunks with the highest scores, in ascending order in the first columns."""
    chunks = score.shape[2]
    _, best = lax.top_k(score, min(most, chunks))
    return jnp.sort(jnp.where(jnp.arange(best.shape[2]) < count[:, None, None], best, chunks), -1)


@dataclasses.dataclass(frozen=True)
class RetrievalSettings(CompactSettings):
    """The settings of the draft.

    budget: chosen chunks and recent tokens together; for the other shared ones see `CompactSettings`. chunk: tokens of a chunk. generated:
    of the tokens emitted since the choice the most recent so many are read; it matters only where it is less than rebuild. rebuild: the
    choice is made again after so many tokens; 0: not by their number. least_accepted: it is made again where the rolling average of the
    share of judged drafts that are accepted is less; 0: never.
    """

    budget: float = 4096
    chunk: int = 8
    generated: int = 1024
    rebuild: int = 256
    least_accepted: float = 0.0

    @property
    def always(self):
        return RECENT + 2 * self.chunk - 1, "recent tokens and those of the first chunk"

    def __post_init__(self):
        if self.chunk < 1:
            raise InputError(f"draft chunk {self.chunk} should be at least 1")
        if self.generated < 1:
            raise InputError(f"draft generated {self.generated} should be at least 1")
        if self.rebuild < 0:
            raise InputError(f"draft rebuild {self.rebuild} should be at least 0")
        if not 0 <= self.least_accepted < 1:
            raise InputError(f"draft least_accepted {self.least_accepted:g} should be a share, at least 0 and less than 1")
        super().__post_init__()

    def make(self, model: Llama, int4: Callable[[], Llama]) -> RetrievalDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError for more tokens than it has positions for."""
        own = {name: getattr(self, name) for name in ("chunk", "generated", "rebuild", "least_accepted")}
        return RetrievalDraft(**self.shared(model, int4), **own)
