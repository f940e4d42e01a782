"""What a program of decode attention works on, and how the partial results of several become one."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LEAST = -120  # a share of 2^LEAST is as good as any smaller one, and the sum of some is a number in float32
MAX_OUTPUTS = 64 * 128  # rows times channels of a program; more rows are another one's, which reads the cache again


def block_rows(rows: int, head_dim: int) -> int:
    """Query rows of a program, for a KV head that has so many."""
    return min(64, MAX_OUTPUTS // head_dim, max(16, 2 ** math.ceil(math.log2(rows))))


def merged(
    out: Float[Array, "BK splits R H"], top: Float[Array, "BK splits R"], total: Float[Array, "BK splits R"], q: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
    """The attention of all tokens, from the partial results of the programs that share a KV head's tokens (axis 1, splits).

    The weight of a token is 2^(logit - top), with logits to base 2. out: sums of weighted values. total: sums of weights. top: for each
    query row the largest logit of the program's tokens, or somewhat less than that in `mosaic_low_bits`, where weights may exceed 1.
    """
    B, T, N, H = q.shape
    weight = jnp.exp2(top - top.max(1, keepdims=True))
    out = (out * weight[..., None]).sum(1) / (total * weight).sum(1)[..., None]
    out = out.reshape(B, -1, T, N * B // out.shape[0], H)
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q.dtype)


def log_total(top: Float[Array, "BK splits R"], total: Float[Array, "BK splits R"]) -> Float[Array, "BK R"]:
    """The logarithm, base 2, of the sum over all tokens of 2^logit. top, total: as in `merged`."""
    most = top.max(1, keepdims=True)
    return most[:, 0] + jnp.log2((total * jnp.exp2(top - most)).sum(1))


def log_shares(
    logits: Float[Array, "B K S N"],
    replaced_logits: Float[Array, "B K n N"],
    everything: Float[Array, "BK R"],
    quantized: Int[Array, "B"],
    positions: Int[Array, "B K n"],
) -> Float[Array, "B K S"]:
    """The shares of `reference.attend_replaced`: their logarithms, at least 2^LEAST for each of the last token's N query heads.

    logits: with the tokens in codes, of which a row has so many. replaced_logits: with those at these positions. everything: `log_total`,
    whose last N query rows are the last token's. All to base 2. Logits are read once, where a logsumexp, which looks for the largest first,
    would have XLA read them twice.
    """
    B, K, S, N = logits.shape
    whole = everything.reshape(B, K, 1, -1)[..., -N:]
    share = lambda logits: jnp.log(jnp.exp2(jnp.maximum(logits - whole, LEAST)).sum(-1))
    coded = jnp.where(jnp.arange(S) < quantized[:, None, None], share(logits), -jnp.inf)
    put = jax.vmap(jax.vmap(lambda share, at, new: share.at[at].set(new, mode="drop")))
    return put(coded, jnp.where(positions < 0, S, positions), share(replaced_logits))
