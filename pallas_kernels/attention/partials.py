"""How the partial results of the programs that share a KV head's tokens become one."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MIN_LOG_SHARE = -120  # log2 of the least share; smaller ones are raised to it, so that float32 does not underflow
MAX_OUTPUTS = 64 * 128  # rows times channels of a program; another program, which reads the cache again, takes more rows


def block_rows(rows: int, head_dim: int) -> int:
    """Query rows of a program, for a KV head with this many rows."""
    return min(64, MAX_OUTPUTS // head_dim, max(16, 2 ** math.ceil(math.log2(rows))))


def merged(
    out: Float[Array, "BK splits R H"], top: Float[Array, "BK splits R"], total: Float[Array, "BK splits R"], q: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
    """The attention of all tokens, from the partial results of the programs that share a KV head's tokens (axis 1, splits).

    The weight of a token is 2^(logit - top), with logits to base 2.

    Args:
        out: sums of weighted values.
        top: for each query row the largest logit of the program's tokens; somewhat less in `mosaic_low_bits`, where weights may exceed 1.
        total: sums of weights.
    """
    B, T, N, H = q.shape
    weight = jnp.exp2(top - top.max(1, keepdims=True))
    out = (out * weight[..., None]).sum(1) / (total * weight).sum(1)[..., None]
    out = out.reshape(B, -1, T, N * B // out.shape[0], H)
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q.dtype)


def log_total(top: Float[Array, "BK splits R"], total: Float[Array, "BK splits R"]) -> Float[Array, "BK R"]:
    """The logarithm, base 2, of the sum over all tokens of 2^logit. top, total: as in `merged`."""
    highest = top.max(1, keepdims=True)
    return highest[:, 0] + jnp.log2((total * jnp.exp2(top - highest)).sum(1))


def log_shares(
    logits: Float[Array, "B K S h"],
    replaced_logits: Float[Array, "B K n h"],
    log_totals: Float[Array, "BK R"],
    quantized: Int[Array, "B"],
    positions: Int[Array, "B K n"],
) -> Float[Array, "B K S"]:
    """The natural logarithm of each token's share of the last token's attention, summed over the query heads of a KV head.

    Each head's share is raised to at least 2^MIN_LOG_SHARE first (`reference.attend_replaced`).

    Logits are read once. With a logsumexp, which looks for the largest first, XLA would read them twice.

    Args:
        logits: of the h query heads of each KV head, with the tokens in codes; to base 2, as `replaced_logits` and `log_totals` are.
        replaced_logits: with the replaced tokens.
        log_totals: results of `log_total`, of R query rows, of which the last h are the last token's.
        quantized: of a row, the number of its tokens in codes.
        positions: of the replaced tokens; -1: none.
    """
    B, K, S, heads = logits.shape
    whole = log_totals.reshape(B, K, 1, -1)[..., -heads:]

    def share(logits: Array) -> Array:
        return jnp.log(jnp.exp2(jnp.maximum(logits - whole, MIN_LOG_SHARE)).sum(-1))

    coded = jnp.where(jnp.arange(S) < quantized[:, None, None], share(logits), -jnp.inf)
    put = jax.vmap(jax.vmap(lambda share, at, new: share.at[at].set(new, mode="drop")))
    return put(coded, jnp.where(positions < 0, S, positions), share(replaced_logits))
