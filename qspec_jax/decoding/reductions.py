"""Reductions over a vocabulary that are done together, in one pass over it: on a GPU each would be launches of its own."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.formats.rounding import accumulation_dtype

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


def total_of(values: Float[Array, "*B V"]) -> Reduction:
    """To the sum, at least in float32."""
    return Reduction((values.astype(accumulation_dtype(values.dtype)),), (0,), lambda one, other: (one[0] + other[0],))


def best(values: Float[Array, "*B V"]) -> Reduction:
    """To the largest value, and its index: the lowest of several. A NaN counts as the largest."""

    def combine(one: Values, other: Values) -> Values:
        greater = (one[0] > other[0]) | (one[0] != one[0])
        first = greater | ((one[0] == other[0]) & (one[1] < other[1]))
        return jnp.where(greater, one[0], other[0]), jnp.where(first, one[1], other[1])

    return Reduction((values, lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)), (-jnp.inf, 0), combine)


def reduced(*reductions: Reduction, together: bool | None = None) -> list[Values]:
    """The results of reductions of arrays of one shape.

    together: whether in one pass; None: on a GPU, which adds in a tree. A CPU would add one after the other, with larger errors.
    """
    if not (dispatch.platform() == "gpu" if together is None else together):
        return [_in_one_pass(each)[0] for each in reductions]
    return _in_one_pass(*reductions)


def _in_one_pass(*reductions: Reduction) -> list[Values]:
    def parts(values: Values) -> list[Values]:
        rest = iter(values)
        return [tuple(next(rest) for _ in each.arrays) for each in reductions]

    def combine(one: Values, other: Values) -> Values:
        return tuple(x for each, a, b in zip(reductions, parts(one), parts(other), strict=True) for x in each.combine(a, b))

    arrays = tuple(x for each in reductions for x in each.arrays)
    starts = tuple(jnp.asarray(start, x.dtype) for each in reductions for start, x in zip(each.starts, each.arrays, strict=True))
    return parts(lax.reduce(arrays, starts, combine, (arrays[0].ndim - 1,)))
