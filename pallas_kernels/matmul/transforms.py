"""Under transformations of JAX that kernels for few rows do not know, XLA computes."""

from collections.abc import Callable, Sequence

import jax
from jax.custom_batching import custom_vmap
from jaxtyping import Array


def transformable(kernel: Callable[[Array, Sequence], Array], xla: Callable[[Array, Sequence], Array]) -> Callable:
    """`kernel(x, weights)` with rules for jax.vmap and for derivatives: both run `xla(x, weights)`, which must compute the same.

    Under jax.vmap it computes for all rows at once. Values outside of jax.vmap are the kernel's, also where derivatives are asked for.
    """
    mapped = custom_vmap(kernel)

    @mapped.def_vmap
    def by_xla(size, in_batched, *arguments):
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        return jax.vmap(xla, in_axes=axes, axis_size=size)(*arguments), True

    product = jax.custom_jvp(mapped)
    product.defjvp(lambda values, tangents: (product(*values), jax.jvp(xla, values, tangents)[1]))
    return product
