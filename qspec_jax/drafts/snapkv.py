"""SnapKV as a draft: the model reads the tokens of the prompt that its last tokens attended to, for each KV head its own.

The last 32 queries of the prompt score every key before them. A token's score is the sum of its softmax weights over these queries and the
query heads of a KV head, averaged over five neighbouring tokens; the tokens with the highest scores stay, and the last 32. The selection is
made once: what is generated joins, but the choice of the prompt's tokens never changes.

Source: SnapKV (arXiv 2404.14469), as the baseline of QuantSpec (arXiv 2502.10424, section 5) has it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.rounding import accumulation_dtype
from qspec_jax.caches.compact import CompactCache
from qspec_jax.drafts.compact import CompactDraft, CompactSettings
from qspec_jax.drafts.draft import Prompt
from qspec_jax.models.llama import Llama
from qspec_jax.settings_text import setting

QUERIES = 32  # last prompt tokens whose queries score the others; they are always kept
NEIGHBOURS = 5  # over which scores are averaged
CHUNK_TOKENS = 1024  # whose keys are scored at a time


@dataclasses.dataclass(frozen=True)
class SnapKVSettings(CompactSettings):
    """The budget is of chosen tokens of the prompt and its last ones together."""

    generated: int = setting(1024, "How many of the generated tokens are read, the most recent ones.", minimum=1)

    @property
    def always(self) -> tuple[int, str]:
        return QUERIES, "last tokens of a prompt"

    @property
    def ring_size(self) -> int:
        return self.generated

    def make(self, model: Llama, int4: Callable[[], Llama]) -> "SnapKVDraft":
        """The draft of a model. Raises InputError as `parts` does."""
        return SnapKVDraft(**self.parts(model, int4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKVDraft(CompactDraft):
    """Steps over chosen tokens of the prompt and what was generated since. Its state is their cache, whose ring has the generated tokens.

    Keys keep their positions. Of more than `generated` generated tokens the oldest leave.
    """

    settings: SnapKVSettings = dataclasses.field(metadata={"static": True})

    prompt_queries = QUERIES

    def begin(self, prompt: Prompt) -> CompactCache:
        budget, most = self.budgets(prompt)
        ring = max(1, min(self.settings.generated, prompt.capacity - prompt.tokens.shape[1]))
        kept = jnp.minimum(prompt.n, budget)
        layers = []
        for i in prompt.cache.full_layers:
            model = self.step.model
            on_device, layers = prompt.cache.with_layer_on_device(i, after=layers)
            scores = model.sum_of_copies(prompt_scores(dataclasses.replace(prompt, cache=on_device), i, model.config.num_kv_heads))
            positions = kept_positions(scores, prompt.n, kept, min(most, prompt.tokens.shape[1]))
            kind = self.settings.cache
            layers.append(CompactCache.make_layer(*on_device.tokens(i, positions), kind=kind, appended=prompt.appended, room=ring))
        return CompactCache.of(layers, kept=kept, ring=jnp.full_like(kept, ring), taken=kept)


def prompt_scores(prompt: Prompt, layer: int, kv_heads: int) -> Float[Array, "B K S"]:
    """How much the last Q tokens of each prompt attended to each token before them, averaged over neighbours; 0 for those tokens themselves
    and after the prompt."""
    (B, Q, N, H), K = prompt.queries[layer].shape, kv_heads
    S, wide = prompt.tokens.shape[1], accumulation_dtype(prompt.queries[layer].dtype)
    chunk = min(CHUNK_TOKENS, S)
    parts = jnp.arange(-(-S // chunk))
    rows = prompt.queries[layer].reshape(B, Q, K, N // K, H).transpose(0, 2, 3, 1, 4).astype(wide) * H**-0.5
    at = prompt.n[:, None] - Q + jnp.arange(Q)  # the queries' positions

    def logits(part: Array) -> Float[Array, "B K R Q chunk"]:
        positions = part * chunk + jnp.arange(chunk)
        keys = prompt.cache.tokens(layer, positions[None, None])[0].astype(wide)
        found = jnp.einsum("bkrqh,bksh->bkrqs", rows, keys, precision=lax.Precision.HIGHEST)
        return jnp.where((positions <= at[..., None])[:, None, None], found, -jnp.inf)

    def scores(part: Array) -> Float[Array, "B K chunk"]:
        weights = jnp.exp(logits(part) - total[..., None])
        return jnp.where(prompt.are_queries(Q)[:, None, None, :, None], weights, 0).sum((2, 3))

    # Twice over the keys, a chunk at a time, so that there are never the logits of all of them.
    total = jax.nn.logsumexp(lax.map(lambda part: jax.nn.logsumexp(logits(part), -1), parts), 0)
    weights = jnp.moveaxis(lax.map(scores, parts), 0, 2).reshape(B, K, -1)[..., :S]
    weights = jnp.where(jnp.arange(S) < (prompt.n - Q)[:, None, None], weights, 0)
    padded = jnp.pad(weights, ((0, 0), (0, 0), (NEIGHBOURS // 2, NEIGHBOURS // 2)))
    return sum(padded[..., i : i + S] for i in range(NEIGHBOURS)) / NEIGHBOURS


def kept_positions(
    scores: Float[Array, "B K S"], n: Int[Array, "B"], count: Int[Array, "B"], most: int, last: int = QUERIES
) -> Int[Array, "B K most"]:
    """The positions of count[b] of a prompt's n[b] tokens, in ascending order in the first columns: the last ones, and those with the
    highest scores."""
    position, n = jnp.arange(scores.shape[2]), n[:, None, None]
    rank = jnp.where(position >= n - last, jnp.inf, scores)
    _, chosen = lax.top_k(jnp.where(position < n, rank, -jnp.inf), most)
    return jnp.sort(jnp.where(jnp.arange(most) < count[:, None, None], chosen, scores.shape[2]), -1)
