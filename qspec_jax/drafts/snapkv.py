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
from qspec_jax.drafts.compact import CompactDraft, CompactSettings, with_generated
from qspec_jax.drafts.draft import Prompt
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

QUERIES = 32  # last prompt tokens whose queries score the others; they are always kept
NEIGHBOURS = 5  # over which scores are averaged
CHUNK_TOKENS = 1024  # whose keys are scored at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKVDraft(CompactDraft):
    """Steps over chosen tokens of the prompt and what was generated since. Its state is their cache, whose ring has the generated tokens.

    Keys keep their positions. generated: the ring's size; of more generated tokens the oldest leave, and are then in nobody's view.
    See `CompactDraft` for the others.
    """

    generated: int = dataclasses.field(metadata={"static": True})

    prompt_queries = QUERIES

    def begin(self, prompt):
        budget, most = self.budgets(prompt)
        ring = max(1, min(self.generated, prompt.capacity - prompt.tokens.shape[1]))
        kept = jnp.minimum(prompt.n, budget)
        layers = []
        for i in range(len(prompt.cache.layers)):
            model = self.step.model
            on_device, layers = prompt.cache.with_layer_on_device(i, after=layers)
            scores = model.sum_of_copies(prompt_scores(dataclasses.replace(prompt, cache=on_device), i, model.config.num_kv_heads))
            positions = kept_positions(scores, prompt.n, kept, min(most, prompt.tokens.shape[1]))
            layers.append(CompactCache.make_layer(*on_device.tokens(i, positions), kind=self.kind, appended=prompt.gamma, room=ring))
        return CompactCache.of(layers, kept=kept, ring=jnp.full_like(kept, ring), taken=kept)

    def reads(self, layer, quantized, buffered, group_size):
        """See `ModelDraft.reads`. The ring is counted as full, as it is once so many tokens are generated: what the cache then holds is
        also what it has memory for. Before that a step reads less."""
        return with_generated(super().reads(layer, quantized, buffered, group_size), self.generated, quantized + buffered)


def prompt_scores(prompt: Prompt, layer: int, kv_heads: int) -> Float[Array, "B K S"]:
    """How much the last Q tokens of each prompt attended to each token before them, averaged over neighbours; 0 for those tokens themselves
    and behind the prompt."""
    (B, Q, N, H), K = prompt.queries[layer].shape, kv_heads
    S, wide = prompt.tokens.shape[1], accumulation_dtype(prompt.queries[layer].dtype)
    chunk = min(CHUNK_TOKENS, S)
    parts = jnp.arange(-(-S // chunk))
    rows = prompt.queries[layer].reshape(B, Q, K, N // K, H).transpose(0, 2, 3, 1, 4).astype(wide) * H**-0.5
    at = prompt.n[:, None] - Q + jnp.arange(Q)  # the queries' positions, negative before a prompt's first

    def logits(part: Array) -> Float[Array, "B K R Q chunk"]:
        positions = part * chunk + jnp.arange(chunk)
        keys = prompt.cache.tokens(layer, positions[None, None])[0].astype(wide)
        found = jnp.einsum("bkrqh,bksh->bkrqs", rows, keys, precision=lax.Precision.HIGHEST)
        return jnp.where((positions <= at[..., None])[:, None, None], found, -jnp.inf)

    def scores(part: Array) -> Float[Array, "B K chunk"]:
        weights = jnp.exp(logits(part) - total[..., None])
        return jnp.where((at >= 0)[:, None, None, :, None], weights, 0).sum((2, 3))

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


@dataclasses.dataclass(frozen=True)
class SnapKVSettings(CompactSettings):
    """The settings of the draft.

    budget: chosen tokens of the prompt and its last 32 together; for the other shared ones see `CompactSettings`. generated: of the
    generated tokens the most recent so many are read.
    """

    generated: int = 1024

    @property
    def always(self):
        return QUERIES, "last tokens of a prompt"

    def __post_init__(self):
        if self.generated < 1:
            raise InputError(f"draft generated {self.generated} should be at least 1")
        super().__post_init__()

    def make(self, model: Llama, int4: Callable[[], Llama]) -> SnapKVDraft:
        """The draft of a model. int4: makes the model's INT4 weights."""
        return SnapKVDraft(**self.shared(model, int4), generated=self.generated)
