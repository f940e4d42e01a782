"""Which row a token is in: the first `kept` tokens of a row are in its first rows, and later ones in a ring after them."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def row_of_token(token: Int[Array, "B T"], kept: Int[Array, "B"], ring: Int[Array, "B"]) -> Int[Array, "B T"]:
    """The row of the token that was taken in as number `token`, until it is overwritten."""
    kept, ring = kept[:, None], ring[:, None]
    return jnp.where(token < kept, token, kept + (token - kept) % ring)


def token_in_row(row: Int[Array, "S"], taken: Int[Array, "B"], kept: Int[Array, "B"], ring: Int[Array, "B"]) -> Int[Array, "B S"]:
    """The number of the last token in a row after taken[b] have been taken in; the row's own number if there is none yet."""
    kept, ring, taken = kept[:, None], ring[:, None], taken[:, None]
    laps = jnp.where((row < kept) | (row >= taken), 0, (taken - 1 - row) // ring)
    return row + laps * ring
