"""TriForce's retrieval cache as a draft: the model reads the chunks of the text that a recent query likes best, and what came since.

The text is cut into chunks of 8 tokens. A chunk's score is the attention that one query pays to the mean of the chunk's keys, for each KV
head its own. The chunks with the highest scores are copied into a compact cache with the first chunk and the most recent tokens; what is
generated joins them. The choice is made behind the prompt with its last token's query, and anew after some tokens or when fewer drafts are
accepted.

Source: TriForce (arXiv 2404.11912), sections 4.1 and 4.3. Unlike there, the most recent tokens are always copied, whatever their scores,
and tokens that come leave the others where they are, up to `generated` of them.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.rounding import accumulation_dtype
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.compact import CompactCache, KeysValues
from qspec_jax.drafts.chunk_means import AskedCache
from qspec_jax.drafts.compact import CompactDraft, CompactSettings, with_generated
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

RECENT = 32  # last tokens of a text that are always copied
SCORED_AT_ONCE = 4096  # tokens, about, whose keys are scored at a time
ROLLING = 0.8  # how much of the acceptance of earlier rounds stays in its rolling average


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RetrievalState:
    """own: the tokens that were copied, and in its ring those that came since. queries: for each layer those of the last pending token, or
    of the prompt's last token. budget: of each row, in tokens; most: that of any. since: tokens emitted since the choice was made.
    accepted: rolling average, over rounds with drafts, of the share of them that was accepted."""

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
        """Refuses nothing: with a budget of more tokens than rows have room for, all of them are copied."""

    def budgets(self, prompt):
        budget, most = super().budgets(prompt)
        most = min(most, max(self.least, prompt.capacity))
        return jnp.minimum(budget, most), most

    def begin(self, prompt):
        budget, most = self.budgets(prompt)
        queries = tuple(q[:, 0] for q in prompt.queries)
        ring = max(1, min(self.most_generated, prompt.capacity - prompt.tokens.shape[1]))
        layers, kept = self.chosen(queries, prompt.cache, budget, most)
        room = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, ring), (0, 0)))
        places = dict(kept=kept, ring=jnp.full_like(kept, ring), taken=kept)
        own = CompactCache.of([tuple(map(room, layer)) for layer in layers], kind=self.kind, **places, appended=prompt.gamma)
        return RetrievalState(own, queries, budget, jnp.zeros_like(prompt.n), jnp.ones(prompt.n.shape, jnp.float32), most)

    @property
    def most_generated(self) -> int:
        """The most tokens that come between two choices and are read."""
        return min(self.generated, self.rebuild or self.generated)

    def chosen(
        self,
        queries: tuple[Float[Array, "R N H"], ...],
        cache: Cache,
        budget: Int[Array, "R"],
        most: int,
        of: Int[Array, "R"] | None = None,
    ) -> tuple[list[KeysValues], Int[Array, "R"]]:
        """Keys and values [R, K, most, H] of the best chunks of what rows of a cache hold, and behind them of their recent tokens; and how
        many of them there are in each row, which is within its budget. of: these rows of the batch; None: all."""
        n, chunk = cache.lengths.total if of is None else cache.lengths.total[of], self.chunk
        # The recent tokens begin with a whole chunk, so that each token is either in a chunk to choose from or recent.
        whole, width = jnp.maximum(n - RECENT, 0) // chunk, RECENT + chunk
        count = jnp.minimum(whole, (budget - width) // chunk)
        row, layers = jnp.arange(most), []
        for i, q in enumerate(queries):
            best = best_chunks(q, cache, i, whole, count, of, most=(most - width) // chunk, chunk=chunk)
            in_chunk = jnp.take(best, jnp.minimum(row // chunk, best.shape[2] - 1), axis=2) * chunk + row % chunk
            recent = ((whole - count) * chunk)[:, None, None] + row
            layers.append(cache.tokens(i, jnp.where(row < (count * chunk)[:, None, None], in_chunk, recent), of))
        return layers, n - (whole - count) * chunk

    def cache_of_steps(self, state, cache):
        return AskedCache(state.own, state.queries, jnp.int32(0))

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

        def choose(carry):
            own, left = carry
            row = jnp.argmax(left)[None]
            layers, kept = self.chosen(tuple(q[row] for q in state.queries), cache, state.budget[row], state.most, row)
            return own.refilled(layers, kept, row), left.at[row].set(False)

        # A row at a time, so that none is chosen for in vain; and lax.cond would copy the caches that it passes through (seen in jax 0.10).
        own, _ = lax.while_loop(lambda carry: carry[1].any(), choose, (own, due))
        return dataclasses.replace(new, own=own, since=jnp.where(due, 0, since), accepted=jnp.where(due, 1, accepted))

    def reads(self, layer, quantized, buffered, group_size):
        """See `ModelDraft.reads`. The ring is counted as full; before that a step reads less."""
        return with_generated(super().reads(layer, quantized, buffered, group_size), self.most_generated, quantized + buffered)


def best_chunks(
    q: Float[Array, "R N H"],
    cache: Cache,
    layer: int,
    whole: Int[Array, "R"],
    count: Int[Array, "R"],
    of: Int[Array, "R"] | None = None,
    *,
    most: int,
    chunk: int,
) -> Int[Array, "R K most"]:
    """The numbers of count[r] of the first whole[r] chunks of rows of a cache, in ascending order in the first columns: the first chunk and
    those to whose mean key the queries of a KV head pay the most attention. of: these rows of the batch; None: all."""
    wide, part = accumulation_dtype(q.dtype), chunk * max(1, SCORED_AT_ONCE // chunk)
    kv_heads = jax.eval_shape(lambda: cache.tokens(layer, jnp.zeros((1, 1, 1), jnp.int32)))[0].shape[1]
    rows = q.reshape(q.shape[0], kv_heads, -1, q.shape[2]).astype(wide) * q.shape[2] ** -0.5

    def of_part(i: Array) -> Float[Array, "R K N/K chunks"]:
        """What the queries make of the mean keys of some chunks."""
        keys = cache.tokens(layer, (i * part + jnp.arange(part))[None, None], of)[0].astype(wide)
        means = keys.reshape(*keys.shape[:2], -1, chunk, keys.shape[3]).mean(3)
        return jnp.einsum("bkrh,bkch->bkrc", rows, means, precision=lax.Precision.HIGHEST)

    logits = jnp.moveaxis(lax.map(of_part, jnp.arange(-(-cache.capacity // part))), 0, 3)
    logits = logits.reshape(*logits.shape[:3], -1)
    number = jnp.arange(logits.shape[3])
    there = (number < whole[:, None])[:, None]
    score = jax.nn.softmax(jnp.where(there[:, :, None], logits, -1e30), -1).sum(2)
    score = jnp.where(there, jnp.where(number == 0, jnp.inf, score), -jnp.inf)
    _, chosen = lax.top_k(score, min(most, number.size))
    return jnp.sort(jnp.where(jnp.arange(chosen.shape[2]) < count[:, None, None], chosen, number.size), -1)


@dataclasses.dataclass(frozen=True)
class RetrievalSettings(CompactSettings):
    """The settings of the draft.

    budget: chosen chunks and recent tokens together; for the other shared ones see `CompactSettings`. chunk: tokens of a chunk. generated:
    of the tokens since the choice the most recent so many are read. rebuild: the choice is made anew after so many tokens; 0: not by their
    number. least_accepted: it is made anew where the rolling average of the share of drafts that are accepted is less; 0: never.
    """

    budget: float = 4096
    chunk: int = 8
    generated: int = 1024
    rebuild: int = 256
    least_accepted: float = 0.0

    @property
    def always(self):
        return RECENT + 2 * self.chunk - 1, "tokens of the most recent and the first chunk"

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
