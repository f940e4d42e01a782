"""What a program of decode attention works on, and how the partial results of several become one."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

LEAST = -120  # a share of 2^LEAST is as good as any smaller one, and the sum of some is a number in float32
MAX_OUTPUTS = 64 * 128  # rows times channels of a program; more rows are another one's, which reads the cache again


def block_rows(rows: int, head_dim: int) -> int:
    """Query rows of a program, for a KV head that has so many."""
    return min(64, MAX_OUTPUTS // head_dim, max(16, 2 ** math.ceil(math.log2(rows))))


def merged(
    out: Float[Array, "BK splits R H"], top: Float[Array, "BK splits R"], total: Float[Array, "BK splits R"], q: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
    """What all programs of each KV head come to: of weighted values, maxima (base 2) and sums of exponentials."""
    B, T, N, H = q.shape
    weight = jnp.exp2(top - top.max(1, keepdims=True))
    out = (out * weight[..., None]).sum(1) / (total * weight).sum(1)[..., None]
    out = out.reshape(B, -1, T, N * B // out.shape[0], H)
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q.dtype)


def log_total(top: Float[Array, "BK splits R"], total: Float[Array, "BK splits R"]) -> Float[Array, "BK R"]:
    """The logarithm, base 2, of the sum of exponentials that all programs of each KV head come to."""
    most = top.max(1, keepdims=True)
    return most[:, 0] + jnp.log2((total * jnp.exp2(top - most)).sum(1))


def log_share(logits: Float[Array, "*lead heads"], everything: Float[Array, "*of_heads heads"]) -> Float[Array, "*lead"]:
    """The logarithm of the share that a token has in the attention of some heads together, at least 2^LEAST of each.

    logits: with the token. everything: of the sum of exponentials over all tokens; both to base 2. They are read once, where a logsumexp,
    which looks for the largest first, would have XLA read them twice.
    """
    return jnp.log(jnp.exp2(jnp.maximum(logits - everything, LEAST)).sum(-1))
