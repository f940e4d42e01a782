"""A layer between two attentions: random weights and rows, and its exact result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from problems.matmul import random_weight, with_zero_points

from pallas_kernels.formats.weights import NestedWeight, dequantize_weight
from pallas_kernels.fused_layer.arguments import LayerArguments

EPS = 1e-5
# The arguments of the operation for what `random_layer` returns.
arguments = functools.partial(LayerArguments, handoff=None, eps=EPS, biases={}, axis=None)


def random_layer(
    width: int,
    heads: int,
    hidden: int,
    outputs: tuple[int, ...],
    rows: int,
    outliers: bool = False,
    *,
    group_size: int = 128,
    scale_dtype: DTypeLike | None = None,
    lower_steps: int | None = None,
) -> list:
    """The arguments of a layer.

    Args:
        scale_dtype: of scales, with zero points; None: bfloat16, and no zero points.
        lower_steps: of nested weights, see `NestedWeight`; None: INT4.
    """
    r = np.random.default_rng([width, hidden, rows])

    def activations(channels: int) -> jax.Array:
        x = r.standard_normal((rows, channels))
        return jnp.asarray(x * np.where(np.arange(channels) % 97 == 3, 100, 1) if outliers else x, jnp.bfloat16)

    def weight(out: int, inputs: int, seed: int):
        found = random_weight(out, inputs, seed, group_size)
        found = dataclasses.replace(found, scale=found.scale * inputs**-0.5, zero=found.zero * inputs**-0.5)
        if lower_steps is not None:
            return NestedWeight(found, jnp.asarray(np.random.default_rng(seed).integers(0, 256, found.codes.shape, np.uint8)), lower_steps)
        return with_zero_points(found, scale_dtype) if scale_dtype else found

    norm = lambda: jnp.asarray(r.uniform(0.5, 1.5, width), jnp.bfloat16)
    following = [weight(out, width, 4 + i) for i, out in enumerate(outputs)]
    o, gate, up, down = weight(width, heads, 0), weight(hidden, width, 1), weight(hidden, width, 2), weight(width, hidden, 3)
    return [activations(width), activations(heads), o, norm(), gate, up, down, norm() if outputs else None, following]


@jax.jit
def exact(x, attended, o, norm, gate, up, down, following_norm, following) -> tuple[jax.Array, jax.Array]:
    """In float32, with the weights as they are."""
    wide = lambda a: a.astype(jnp.float32)
    times = lambda x, weight: jnp.matmul(x, dequantize_weight(weight, jnp.float32).T, precision="highest")
    normed = lambda x, weight: wide(weight) * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)
    x = wide(x) + times(wide(attended), o)
    h = normed(x, norm)
    y = times(jax.nn.silu(times(h, gate)) * times(h, up), down)
    if following_norm is None:
        return x, y
    h = normed(x + y, following_norm)
    return x + y, jnp.concatenate([times(h, weight) for weight in following], -1)
