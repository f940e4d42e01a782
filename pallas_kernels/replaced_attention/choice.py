"""Which tokens have the largest shares, in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

RUN = 32  # tokens, one after the other, see `top_k`


def choose_tokens(share: Float[Array, "B K S"], k: int) -> Int[Array, "B K k"]:
    """The positions of the k largest shares; -1 for shares of minus infinity."""
    found, positions = top_k(share, k)
    return jnp.where(found > -jnp.inf, positions, -1).astype(jnp.int32)


def top_k(x: Float[Array, "B K S"], k: int) -> tuple[Float[Array, "B K k"], Int[Array, "B K k"]]:
    """The result of `lax.top_k`, which on a GPU sorts everything.

    The k largest are in the k runs whose own largest come first, so only the numbers of these runs are sorted, and one number of each run.
    Of equal numbers the first are taken here too.
    """
    S = x.shape[2]
    if 2 * RUN * k >= S:
        return lax.top_k(x, k)
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, -S % RUN)), constant_values=-jnp.inf)
    runs = padded.reshape(*x.shape[:2], -1, RUN)
    at = jnp.sort(lax.top_k(runs.max(-1), k)[1])
    found, place = lax.top_k(jnp.take_along_axis(runs, at[..., None], 2).reshape(*x.shape[:2], -1), k)
    return found, jnp.take_along_axis(at, place // RUN, 2) * RUN + place % RUN
