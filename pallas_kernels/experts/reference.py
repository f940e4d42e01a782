"""Experts in plain JAX: of few rows by the matrices of their experts alone, of many rows sorted by expert, with `lax.ragged_dot`."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# XLA copies the matrices that are gathered for few rows: it reads three times their bytes. `ragged_dot` reads those of all experts.
COPIES = 3
# XLA for CPUs multiplies all rows by every expert, and holds a copy of the rows for each; rows are worked on in parts of at most this size.
MAX_BYTES = 1 << 28

Product = Callable[[Array, Array, jnp.dtype], Array]  # rows, the matrices of all experts, and the dtype of the result


def expert_mlps(
    x: Float[Array, "R D"],
    chosen: Int[Array, "R C"],
    shares: Float[Array, "R C"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "R D"]:
    rows, experts = chosen.shape[0], gate.shape[0]
    if COPIES * chosen.size <= experts:
        return _gathered(x, chosen, shares, gate, up, down)
    of_row = experts * chosen.shape[1] * max(gate.shape[1:]) * x.dtype.itemsize
    parts = math.ceil(rows / max(1, MAX_BYTES // of_row))
    size = math.ceil(rows / parts)

    def cut(a: Array) -> Array:
        return jnp.pad(a, ((0, parts * size - rows), (0, 0))).reshape(parts, size, a.shape[1])

    out = lax.map(lambda part: _sorted(*part, gate, up, down), (cut(x), cut(chosen), cut(shares)))
    return out.reshape(parts * size, -1)[:rows]


def _gathered(x: Array, chosen: Array, shares: Array, gate: Array, up: Array, down: Array) -> Array:
    def product(h: Float[Array, "R C in"], matrices: Float[Array, "E in out"], dtype) -> Float[Array, "R C out"]:
        own = matrices.at[chosen].get(mode="promise_in_bounds")
        return jnp.einsum("rci,rcio->rco", h, own, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)

    of_each = jnp.broadcast_to(x[:, None], (*chosen.shape, x.shape[1]))
    return _summed(_mlp(of_each, gate, up, down, product, shares.dtype), shares)


def _sorted(x: Array, chosen: Array, shares: Array, gate: Array, up: Array, down: Array) -> Array:
    of_expert = chosen.reshape(-1)
    order = jnp.argsort(of_expert, stable=True)
    sizes = jnp.bincount(of_expert, length=gate.shape[0]).astype(jnp.int32)

    def product(h: Float[Array, "N in"], matrices: Float[Array, "E in out"], dtype) -> Float[Array, "N out"]:
        return lax.ragged_dot(h, matrices, sizes, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)

    out = _mlp(x[order // chosen.shape[1]], gate, up, down, product, shares.dtype)
    return _summed(out[jnp.argsort(order)].reshape(*chosen.shape, -1), shares)


def _mlp(h: Array, gate: Array, up: Array, down: Array, product: Product, dtype) -> Array:
    return product(jax.nn.silu(product(h, gate, h.dtype)) * product(h, up, h.dtype), down, dtype)


def _summed(outputs: Float[Array, "R C D"], shares: Float[Array, "R C"]) -> Float[Array, "R D"]:
    return (outputs * shares[..., None]).sum(1)
