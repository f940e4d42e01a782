"""The steps of an EAGLE-3 head from all positions of rows at once, as it makes them when it drafts, and what the model gives for them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.formats.views import FULL_PRECISION
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.models.eagle3 import Eagle3Head
from qspec_jax.models.llama import AttendingCache, Llama
from qspec_jax.training.pretraining import CausalAttention


@dataclasses.dataclass(frozen=True)
class UnrolledAttention(AttendingCache):
    """The passes of a head over all positions of rows, one for each step: in the first, a pair attends to the pairs before it; in a later
    one, to what the pair it began from attended to, to the steps from there, and to itself.

    Attributes:
        kv_heads: of the head.
        window: the number of pairs that a pair attends to, itself included.
        passes: of each pass before, the keys and values of each layer.
    """

    kv_heads: int
    window: int
    passes: tuple[tuple[tuple[Array, Array], ...], ...] = ()

    def attend(self, layer: int, qkv: Array, cos: Array, sin: Array, *, view: Any) -> tuple[Array, tuple[Array, Array], None]:
        q, k, v = split_and_rotate(qkv, cos, sin, kv_heads=self.kv_heads)
        first, *later = (layers[layer] for layers in (*self.passes, {layer: (k, v)}))
        return _attended(q, first, later, self.window), (k, v), None

    def advance(self, layers: tuple[tuple[Array, Array], ...], tokens: int) -> "UnrolledAttention":
        return dataclasses.replace(self, passes=(*self.passes, layers))


def _attended(
    q: Float[Array, "B A N H"], first: tuple[Array, Array], later: Sequence[tuple[Array, Array]], window: int
) -> Float[Array, "B A N H"]:
    """Attention of each position to a window of `first`, keys and values [B, A, K, H], and to its own position in each of `later`.

    Queries are taken a window at a time, so that scores take memory by the length and not by its square.
    """
    (B, A, N, H), K = q.shape, first[0].shape[2]
    W = min(window, A)
    C, wide = -(-A // W), accumulation_dtype(q.dtype)

    def chunked(x: Float[Array, "B A heads H"]) -> Float[Array, "B C W heads H"]:
        return jnp.pad(x, ((0, 0), (0, C * W - A), (0, 0), (0, 0))).reshape(B, C, W, -1, H)

    def with_before(x: Float[Array, "B C W K H"]) -> Float[Array, "B C V K H"]:
        return jnp.concatenate([jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1], x], 2)

    queries = chunked(q).reshape(B, C, W, K, N // K, H)
    keys, values = (with_before(chunked(x)) for x in first)
    later = [tuple(map(chunked, each)) for each in later]
    scores = jnp.einsum("bcqkgh,bcskh->bckgqs", queries, keys, preferred_element_type=wide)
    column, row, chunk = jnp.arange(2 * W), jnp.arange(W)[:, None], jnp.arange(C)[:, None, None]
    seen = (column > row) & (column <= row + W) & ((chunk > 0) | (column >= W))
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    own = [jnp.einsum("bcqkgh,bcqkh->bckgq", queries, k, preferred_element_type=wide)[..., None] for k, _ in later]
    weights = jax.nn.softmax(jnp.concatenate([scores, *own], -1) * H**-0.5, -1).astype(q.dtype)
    attended = jnp.einsum("bckgqs,bcskh->bcqkgh", weights[..., : 2 * W], values)
    for i, (_, v) in enumerate(later):
        attended = attended + jnp.einsum("bckgq,bcqkh->bcqkgh", weights[..., 2 * W + i], v)
    return attended.reshape(B, C * W, N, H)[:, :A]


def unrolled(
    head: Eagle3Head, features: Float[Array, "B A F"], tokens: Int[Array, "B T"], *, steps: int, window: int
) -> list[Float[Array, "B A draft"]]:
    """The head's logits at each unrolled step from each position.

    Args:
        head: reads the features.
        features: of the tokens at the first A positions.
        tokens: of the rows, at least A + steps; the step i from position a, counted from 0, reads the token of a + i + 1, and its logits
            are those of a + i + 2.
        steps: their number.
        window: the number of pairs that a pair attends to, itself included.
    """
    B, A = features.shape[:2]
    hidden, cache, found = head.fused(features), UnrolledAttention(head.config.num_kv_heads, window), []
    for i in range(steps):
        positions = jnp.broadcast_to(jnp.arange(i, i + A), (B, A))
        logits, hidden, cache = head(hidden, tokens[:, i + 1 : i + 1 + A], positions, cache, view=FULL_PRECISION)
        found.append(logits)
    return found


def read_by(target: Llama, tokens: Int[Array, "B T"], taps: tuple[int, ...]) -> tuple[Float[Array, "B T V"], Float[Array, "B T F"]]:
    """The target's logits after each token, and the features of each, of rows of text from position 0."""
    cache = CausalAttention(target.config.num_kv_heads, tuple(block.window for block in target.layers))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits, _, seen = target.watched(tokens, positions, cache, taps=taps)
    return logits, seen.features
