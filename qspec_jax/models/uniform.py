"""Passes that are computed in parts of one shape, so that the bits of a token's logits do not depend on what else a pass holds.

XLA chooses the order of a sum by shapes and by what surrounds it. Here each part, some tokens of one row, is a computation of its own, with
the same shapes in every program. This is for CPUs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import fixed_order
from qspec_jax.models.llama import AttendingCache, Seen
from qspec_jax.models.viewed import ViewedModel

WIDTH = 16  # tokens of a row in a part of a pass


def alone(function: Callable, *args: Any, never: Array) -> Any:
    """function(*args) as a computation of its own: a loop of one trip, which XLA cannot inline, and out of which it moves nothing.

    Args:
        function: of arrays, or trees of them.
        args: its arguments.
        never: False, of which XLA does not know the value.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def once(carry):
        # XLA would compute what no trip changes, such as weights in another dtype, before the loop, where that may become part of another
        # computation: without the barrier, whose results depend on the count, bits differ between programs.
        inputs, count = lax.optimization_barrier((carry[0], carry[2]))
        found = core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, inputs[0]))(*inputs[1])
        return inputs, jax.tree.unflatten(jax.tree.structure(shapes), found), count + 1

    inputs = traced.consts, jax.tree.leaves(args)
    return lax.while_loop(lambda carry: carry[2] < jnp.where(never, 0, 1), once, (inputs, empty, jnp.int32(0)))[1]


def of_row(tree: Any, b: Array) -> Any:
    """Row b of arrays whose first axis is the batch, as a batch of one."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, b, 1, 0), tree)


def with_row(tree: Any, b: Array, row: Any) -> Any:
    """The arrays with their row b replaced."""
    return jax.tree.map(lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, b, 0), tree, row)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class UniformModel(ViewedModel):
    """A model of which every pass is computed as passes of one row and `WIDTH` tokens, those after the last one without effect.

    The cache has room for `WIDTH` tokens after those of a row, and the arrays of its layers have the batch as their first axis.
    """

    def watched(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: AttendingCache,
        *,
        observe: bool = False,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T V"], AttendingCache, Seen]:
        one_row = functools.partial(super().watched, observe=observe, taps=taps)
        B, T = tokens.shape
        if T > WIDTH:
            raise ValueError(f"a pass of {T} tokens; with passes of one shape it should have at most {WIDTH}")
        tokens = jnp.pad(tokens, ((0, 0), (0, WIDTH - T)))
        positions = positions[:, :1] + jnp.arange(WIDTH)
        if any(getattr(layer, "pages", None) is not None for layer in cache.layers):
            raise ValueError("a pass of one shape is over a cache whose rows share no pages")
        never = cache.lengths.total[0] < 0

        def passed(tokens: Array, positions: Array, row: Any) -> tuple[Array, tuple, Seen]:
            with fixed_order():
                logits, row, seen = one_row(tokens, positions, row)
            return logits, row.layers, seen

        def results(b: Array, layers: tuple) -> tuple[Array, tuple, Seen]:
            return alone(passed, *of_row((tokens, positions, cache.with_layers(layers)), b), never=never)

        def step(b: Array, found: tuple) -> tuple:
            return with_row(found, b, results(b, found[1]))

        shapes = jax.eval_shape(results, jnp.int32(0), cache.layers)
        empty = jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), (shapes[0], shapes[2]))
        logits, layers, seen = lax.fori_loop(0, B, step, (empty[0], cache.layers, empty[1]))
        features = None if seen.features is None else seen.features[:, :T]
        return logits[:, :T], cache.advance(layers, T), Seen(tuple(mass[:, :, :T] for mass in seen.masses), features)
