"""The fingerprint of weights: equal for equal numbers, wherever they are stored, and computed where they are."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

_SEEDS = (0x9E3779B1, 0x85EBCA77)


def fingerprint(tree: Any) -> str:
    """A text of 32 hexadecimal digits that differs where an array of the tree has another value, shape, dtype or place.

    Sums of all numbers, mixed with their places, are formed on the device in integers, so that their order makes no difference.
    """
    arrays = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    # One after the other: simulated devices wait for each other in vain where programs that exchange something queue up (XLA, CPU).
    sums = [jax.device_get(_sums(leaf)) for _, leaf in arrays]
    digest = hashlib.sha256()
    for (path, leaf), of_leaf in zip(arrays, sums, strict=True):
        digest.update(repr((path, leaf.shape, str(leaf.dtype), of_leaf.tolist())).encode())
    return digest.hexdigest()[:32]


@jax.jit
def _sums(x: Array) -> Int[Array, "2"]:
    """Two sums modulo 2**32 of an array's bits, each number mixed with its place by another seed."""
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    words = lax.bitcast_convert_type(x, jnp.uint32 if x.dtype.itemsize >= 4 else jnp.dtype(f"uint{8 * x.dtype.itemsize}")).ravel()
    place = lax.iota(jnp.uint32, words.size)

    def mixed(seed: int) -> Array:
        mix = (words.astype(jnp.uint32) + jnp.uint32(seed)) * ((place * jnp.uint32(seed)) | 1)
        mix = (mix ^ (mix >> 15)) * jnp.uint32(seed | 1)
        return (mix ^ (mix >> 13)).sum(dtype=jnp.uint32)

    return jnp.stack([mixed(seed) for seed in _SEEDS])
