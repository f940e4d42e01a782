"""RoPE and append in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.kv_cache import FullLayer


def rotate_and_append(
    qkv: Array, cos: Array, sin: Array, buffer: FullLayer, offset: Int[Array, "B"]
) -> tuple[Float[Array, "B T N H"], FullLayer]:
    q, k, v = split_and_rotate(qkv, cos, sin, kv_heads=buffer.keys.shape[1])
    return q, buffer.append(_two_rows(k), _two_rows(v), jnp.maximum(offset, 0))  # a negative one would count from the end


def split_and_rotate(
    qkv: Float[Array, "B T channels"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"], *, kv_heads: int
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Queries and keys after RoPE, and values."""
    x = qkv.reshape(*qkv.shape[:2], -1, 2 * cos.shape[-1])
    q, k, v = jnp.split(x, [x.shape[2] - 2 * kv_heads, x.shape[2] - kv_heads], axis=2)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x: Float[Array, "B #T N H"], cos: Float[Array, "B #T half"], sin: Float[Array, "B #T half"]) -> Float[Array, "B T N H"]:
    """Rotates channel i with channel i + H/2 (Hugging Face's pairing). Rotations add up: one by an angle and one by another make one by the
    sum."""
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _two_rows(x: Float[Array, "B T K H"]) -> Float[Array, "B _ K H"]:
    """x, followed by a row of zeros where T is 1.

    XLA on a CPU does the update of a full cache by a single row twice, once for attention to read and once to keep, and so copies
    the layer several times in every step; with two rows it does not (seen in jax 0.10; two thirds of the speed were lost).
    """
    return jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) if x.shape[1] == 1 else x
