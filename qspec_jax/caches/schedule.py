"""The schedule: which tokens of a row are quantized, as a function of its length alone (QuantSpec, section 4.3)."""

import jax.numpy as jnp
from jaxtyping import Array


def quantized_length(n: Array | int, group_size: int) -> Array | int:
    """Of n cached tokens, how many are quantized: whole groups, and the last G to 2G - 1 tokens never."""
    return jnp.maximum(0, n // group_size - 1) * group_size
