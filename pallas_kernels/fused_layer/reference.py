"""A kernel for each step: the INT4 matmul, and the residual connection with its norm."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.formats.weights import Int4Weight
from pallas_kernels.matmul import int4_matmul
from pallas_kernels.norm import add_rms_norm


def between_attentions(
    x: Float[Array, "*rows D"],
    attended: Float[Array, "*rows channels"],
    o: Int4Weight,
    norm: Float[Array, "D"],
    gate: Int4Weight,
    up: Int4Weight,
    down: Int4Weight,
    following_norm: Float[Array, "D"] | None,
    following: Sequence[Int4Weight],
    handoff: Array | None = None,
    *,
    eps: float,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows out"], Array | None]:
    """See `pallas_kernels.fused_layer.between_attentions`."""
    x, h = add_rms_norm(x, int4_matmul(attended, [o]), norm, eps=eps)
    gates, ups = jnp.split(int4_matmul(h, [gate, up]), 2, axis=-1)
    added = int4_matmul(jax.nn.silu(gates) * ups, [down])
    if following_norm is None:
        return x, added, handoff
    x, h = add_rms_norm(x, added, following_norm, eps=eps)
    return x, int4_matmul(h, following), handoff
