"""Random problems of matmul that all its tests share, and how wrong an answer is."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.weights import Int4Weight, Int8Weight, NestedWeight, Weight, dequantize_weight


def random_weight(out: int, inputs: int, seed: int, group_size: int = 128) -> Int4Weight:
    r = np.random.default_rng([seed, out, inputs])
    groups = inputs // group_size
    scale = r.uniform(0.1, 0.4, (out, groups)) * np.where(r.random((out, groups)) < 0.05, 50, 1)
    codes = jnp.asarray(r.integers(0, 256, (out, groups, group_size // 2), np.uint8))
    return Int4Weight(codes, jnp.asarray(scale, jnp.bfloat16), jnp.asarray(-7.3 * scale, jnp.bfloat16))


def with_zero_points(weight: Int4Weight, scale_dtype) -> Int4Weight:
    """The weight with scales in that dtype, and zero points of 0 to 16."""
    r = np.random.default_rng(weight.scale.shape)
    zeros = r.integers(0, 17, weight.zero.shape)
    # Not all of them numbers of bfloat16.
    scale = np.asarray(weight.scale, np.float32) * r.uniform(0.9, 1.1, weight.scale.shape)
    return dataclasses.replace(weight, scale=jnp.asarray(scale, scale_dtype), zero=jnp.asarray(zeros, jnp.int16))


def nested_weight(out: int, inputs: int, seed: int, group_size: int = 128, steps: int = 16) -> NestedWeight:
    upper = random_weight(out, inputs, seed, group_size)
    r = np.random.default_rng([seed, inputs, out])
    return NestedWeight(upper, jnp.asarray(r.integers(0, 256, upper.codes.shape, np.uint8)), steps)


def plain_weight(out: int, inputs: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (out, inputs), jnp.bfloat16)


def int8_weight(out: int, inputs: int, seed: int) -> Int8Weight:
    codes, scale = jax.random.split(jax.random.key(seed))
    codes = jax.random.randint(codes, (out, inputs), -128, 128, jnp.int8)
    return Int8Weight(codes, jax.random.uniform(scale, (out,), jnp.float32, 1e-3, 0.1))


def activations(rows: int, inputs: int, outliers: bool) -> jax.Array:
    r = np.random.default_rng(rows)
    x = r.standard_normal((rows, inputs))
    return jnp.asarray(x * np.where(np.arange(inputs) % 97 == 3, 1000, 1) if outliers else x, jnp.bfloat16)


def separate(y: jax.Array, weights: Sequence[Weight]) -> list[np.ndarray]:
    """The outputs of each weight."""
    return np.split(np.asarray(y), np.cumsum([weight.shape[0] for weight in weights])[:-1], axis=-1)


@jax.jit  # or each operation would be compiled by itself
def relative_error(y: jax.Array, x: jax.Array, weight: Weight) -> jax.Array:
    """The norm of the difference between y and the product in float32, with the weight as it is read, by the norm of that product."""
    if isinstance(weight, Int4Weight | NestedWeight):
        full = dequantize_weight(weight, jnp.float32)
    elif isinstance(weight, Int8Weight):
        full = weight.codes.astype(jnp.float32) * weight.scale[:, None]
    else:
        full = weight.astype(jnp.float32)
    wide = jnp.matmul(x.astype(jnp.float32), full.T, precision="highest")
    return jnp.linalg.norm(y.astype(jnp.float32) - wide) / jnp.linalg.norm(wide)
