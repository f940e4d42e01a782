"""Which row a token is in: the first `kept` tokens of a row are in its first rows, and later ones in a ring after them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.kv_cache import FullLayer


def row_of_token(token: Int[Array, "B T"], kept: Int[Array, "B"], ring: Int[Array, "B"]) -> Int[Array, "B T"]:
    """The row of the token that was taken in as number `token`, until it is overwritten."""
    kept, ring = kept[:, None], ring[:, None]
    return jnp.where(token < kept, token, kept + (token - kept) % ring)


def token_in_row(row: Int[Array, "S"], taken: Int[Array, "B"], kept: Int[Array, "B"], ring: Int[Array, "B"]) -> Int[Array, "B S"]:
    """The number of the last token in a row after taken[b] have been taken in; the row's own number if there is none yet."""
    kept, ring, taken = kept[:, None], ring[:, None], taken[:, None]
    laps = jnp.where((row < kept) | (row >= taken), 0, (taken - 1 - row) // ring)
    return row + laps * ring


def with_tokens(held: FullLayer, keys: Float[Array, "B T K H"], values: Float[Array, "B T K H"], rows: Int[Array, "B T"]) -> FullLayer:
    """The layer with the keys and values of T tokens in these rows."""
    put = jax.vmap(lambda held, new, rows: held.at[:, rows].set(jnp.swapaxes(new, 0, 1).astype(held.dtype)))
    return FullLayer(put(held.keys, keys, rows), put(held.values, values, rows))
