"""Experts in plain JAX: few rows are multiplied by the matrices of their own experts, many rows by those of all experts or with
`lax.ragged_dot`."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import platform

# XLA copies the matrices that are gathered, and so reads three times their bytes.
COPIES = 3
# There XLA multiplies every row of a `ragged_dot` by the matrices of all experts, and holds the rows once for each expert
# (findings/jax_ragged_dot_expanded.sh). A token has a row for each expert that it goes through: multiplying the token itself by all
# matrices takes less.
EXPANDED = ("cpu", "gpu")
# The maximum size of what all experts read or write in one part of the rows, where rows go through all of them.
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
    rows, (experts, inputs, inner) = chosen.shape[0], gate.shape
    if COPIES * chosen.size <= experts:
        return _by_own(x, chosen, shares, gate, up, down)
    if platform() not in EXPANDED:
        return _sorted(x, chosen, shares, gate, up, down)
    of_row = experts * max(inputs, 2 * inner) * x.dtype.itemsize
    parts = math.ceil(rows / max(1, MAX_BYTES // of_row))
    size = math.ceil(rows / parts)

    def cut(a: Array) -> Array:
        return jnp.pad(a, ((0, parts * size - rows), (0, 0))).reshape(parts, size, a.shape[1])

    out = lax.map(lambda part: _by_all(*part, gate, up, down), (cut(x), cut(chosen), cut(shares)))
    return out.reshape(parts * size, -1)[:rows]


def _by_own(x: Array, chosen: Array, shares: Array, gate: Array, up: Array, down: Array) -> Array:
    """Each row by the matrices of its experts, which are gathered."""

    def product(h: Float[Array, "R C in"], matrices: Float[Array, "E in out"], dtype) -> Float[Array, "R C out"]:
        own = matrices.at[chosen].get(mode="promise_in_bounds")
        return jnp.einsum("rci,rcio->rco", h, own, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)

    of_each = jnp.broadcast_to(x[:, None], (*chosen.shape, x.shape[1]))
    return _summed(product(_hidden(of_each, gate, up, product), down, shares.dtype), shares)


def _by_all(x: Array, chosen: Array, shares: Array, gate: Array, up: Array, down: Array) -> Array:
    """Each row by the matrices of all experts; what those that it does not choose make of it is replaced by 0."""
    experts, rows = gate.shape[0], x.shape[0]
    own = chosen, jnp.arange(rows)[:, None]
    factors = jnp.zeros((experts, rows), shares.dtype).at[own].set(shares)
    is_own = jnp.zeros((experts, rows), bool).at[own].set(True)

    def product(h: Float[Array, "E R in"], matrices: Float[Array, "E in out"], dtype) -> Float[Array, "E R out"]:
        return jnp.einsum("eri,eio->ero", h, matrices, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)

    hidden = _hidden(jnp.broadcast_to(x, (experts, *x.shape)), gate, up, product)
    # Multiplied by the shares before the last product, which then adds up the experts too.
    scaled = jnp.where(is_own[..., None], hidden * factors[..., None], 0).astype(x.dtype)
    return jnp.einsum("eri,eio->ro", scaled, down, precision=lax.Precision.HIGHEST, preferred_element_type=shares.dtype)


def _sorted(x: Array, chosen: Array, shares: Array, gate: Array, up: Array, down: Array) -> Array:
    """Rows sorted by their experts, once for each expert that they go through."""
    of_expert = chosen.reshape(-1)
    order = jnp.argsort(of_expert, stable=True)
    sizes = jnp.bincount(of_expert, length=gate.shape[0]).astype(jnp.int32)

    def product(h: Float[Array, "N in"], matrices: Float[Array, "E in out"], dtype) -> Float[Array, "N out"]:
        return lax.ragged_dot(h, matrices, sizes, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)

    out = product(_hidden(x[order // chosen.shape[1]], gate, up, product), down, shares.dtype)
    return _summed(out[jnp.argsort(order)].reshape(*chosen.shape, -1), shares)


def _hidden(h: Array, gate: Array, up: Array, product: Product) -> Array:
    return jax.nn.silu(product(h, gate, h.dtype)) * product(h, up, h.dtype)


def _summed(outputs: Float[Array, "R C D"], shares: Float[Array, "R C"]) -> Float[Array, "R D"]:
    return (outputs * shares[..., None]).sum(1)
