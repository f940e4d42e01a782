"""Reductions over a vocabulary that are done together, in one pass over it: on a GPU each would be launches of its own."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Values = tuple[Array, ...]


class Reduction(NamedTuple):
    """A reduction over the last axis.

    Attributes:
        arrays: what is reduced, of one shape.
        starts: what nothing is reduced to, a number for each array.
        combine: what two results of parts, in any order, are together.
    """

    arrays: Values
    starts: tuple[float | int, ...]
    combine: Callable[[Values, Values], Values]


def weights(scaled: Float[Array, "*B V"]) -> Reduction:
    """To the largest of logarithms of weights, and the sum of all weights where the largest is 1."""

    def combine(one: Values, other: Values) -> Values:
        largest = jnp.maximum(one[0], other[0])
        # Of two infinite ones the difference is no number.
        factors = (jnp.where(part[0] == largest, 1, jnp.exp(part[0] - largest)) for part in (one, other))
        return largest, sum(part[1] * factor for part, factor in zip((one, other), factors, strict=True))

    return Reduction((scaled, jnp.ones_like(scaled)), (-jnp.inf, 0), combine)


def best(values: Float[Array, "*B V"]) -> Reduction:
    """To the largest value, and its index: of several the least one, and that of a NaN before all numbers, as `jnp.argmax` has it."""

    def combine(one: Values, other: Values) -> Values:
        greater = (one[0] > other[0]) | (one[0] != one[0])
        first = greater | ((one[0] == other[0]) & (one[1] < other[1]))
        return jnp.where(greater, one[0], other[0]), jnp.where(first, one[1], other[1])

    return Reduction((values, lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)), (-jnp.inf, 0), combine)


def reduced(*reductions: Reduction) -> list[Values]:
    """The results of reductions of arrays of one shape."""

    def parts(values: Values) -> list[Values]:
        rest = iter(values)
        return [tuple(next(rest) for _ in each.arrays) for each in reductions]

    def combine(one: Values, other: Values) -> Values:
        return tuple(x for each, a, b in zip(reductions, parts(one), parts(other), strict=True) for x in each.combine(a, b))

    arrays = tuple(x for each in reductions for x in each.arrays)
    starts = tuple(jnp.asarray(start, x.dtype) for each in reductions for start, x in zip(each.starts, each.arrays, strict=True))
    return parts(lax.reduce(arrays, starts, combine, (arrays[0].ndim - 1,)))
