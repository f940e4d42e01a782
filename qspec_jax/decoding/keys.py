"""The keys of random draws: threefry's, whichever generator JAX is set to.

A row's draws depend only on (seed, prompt index, position, purpose). That is true of threefry; with the generators rbg and unsafe_rbg a
batch of draws (`jax.vmap` over keys) comes from the first row's key, so they would depend on other rows.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from qspec_jax.errors import InputError

IMPLEMENTATION = "threefry2x32"
WORDS = 2  # words of 32 bits in a threefry key


def key_of(seed: int) -> Key[Array, ""]:
    """The key of a seed: `jax.random.key(seed)` if JAX's own generator is threefry."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def stacked(keys: Sequence[Key[Array, ""]]) -> Key[Array, "B"]:
    """Threefry keys as one array. It goes by the host: `jnp.stack` would compile a program for each number of keys, 2,048 for seconds."""
    words = jax.device_get([jax.random.key_data(key) for key in keys])
    return jax.random.wrap_key_data(jnp.asarray(np.stack(words)), impl=IMPLEMENTATION)


def as_threefry(key: Key[Array, ""]) -> Key[Array, ""]:
    """A threefry key for a key of any generator; `key_of(seed)` for a key that was made from a seed.

    Args:
        key: `jax.random.key(seed)` or `jax.random.PRNGKey(seed)`, or a key that fold_in or split made from it; one key, not several.

    Raises:
        InputError: for anything else.
    """
    wanted = "key should be one key of JAX, such as jax.random.key(0)"
    if not isinstance(key, jax.Array | np.ndarray):
        raise InputError(f"{wanted}, not {key!r}")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not (typed or key.dtype == np.uint32):
        raise InputError(f"{wanted}, not an array of {key.dtype}")
    words = jax.random.key_data(key) if typed else jnp.asarray(key)
    if key.ndim != 0 if typed else key.shape not in ((WORDS,), (2 * WORDS,)):
        raise InputError(f"{wanted}, not keys of shape {list(key.shape)}")
    if typed and jax.random.key_impl(key) == IMPLEMENTATION:
        return key
    first, *more = words.reshape(-1, WORDS)
    for half in more:
        # rbg repeats the words of a seed's key; those of other keys differ, and all count.
        folded = functools.reduce(jax.random.fold_in, half, jax.random.wrap_key_data(first, impl=IMPLEMENTATION))
        first = jnp.where((half == first).all(), first, jax.random.key_data(folded))
    return jax.random.wrap_key_data(first, impl=IMPLEMENTATION)
