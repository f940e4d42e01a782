"""A model together with the view through which it reads its cache: the target, or a draft."""

import dataclasses
import functools
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.views import View
from qspec_jax.models.llama import AttendingCache, Llama


class Step(Protocol):
    """A model over a cache: a pytree that can be called."""

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache]:
        """Logits of T tokens per row and the cache T tokens longer.

        As the target of a draft that observes, it must also accept `observe=True`, and then return the masses too, as `Llama` does.
        """
        ...


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class ViewedModel:
    """A model that reads its cache through a view: one for all layers, or one for each.

    The model's weights must not be replaced afterwards: they are kept here.
    """

    model: Llama
    view: View | tuple[View, ...]

    @functools.cached_property
    def _flat(self) -> tuple[list, Any]:
        # Once, not in every call: flattening a tree of some hundred modules takes milliseconds, of the same order as a round.
        return jax.tree.flatten(self.model)

    def tree_flatten(self):
        leaves, tree = self._flat
        return (leaves, self.view), tree

    @classmethod
    def tree_unflatten(cls, tree, children):
        leaves, view = children
        return cls(jax.tree.unflatten(tree, leaves), view)

    def __call__(self, tokens, positions, cache, *, observe: bool = False):
        return self.model(tokens, positions, cache, view=self.view, observe=observe)
