"""A model together with the view through which it reads its cache: the target, or a draft."""

import dataclasses
import functools
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.views import View
from qspec_jax.models.llama import AttendingCache, Llama


class Step(Protocol):
    """A model over a cache: a callable pytree."""

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache]:
        """Logits of T tokens per row, and the cache with these tokens.

        The target of a draft that observes must also have a method `observed`, as `ViewedModel` has.
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

    @property
    def views(self) -> tuple[View, ...]:
        """The view of each layer."""
        return self.view if isinstance(self.view, tuple) else (self.view,) * len(self.model.layers)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache]:
        return self.model(tokens, positions, cache, view=self.view)

    def observed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache, tuple[Float[Array, "B K T C"], ...]]:
        """The results of a call, and for each layer without a sliding window the attention mass of each group, in float32."""
        return self._observed(tokens, positions, cache)

    def _observed(self, tokens: Array, positions: Array, cache: AttendingCache, *, filled: int = 0) -> tuple:
        """See `observed`. filled: see `Llama.with_masses`."""
        views = tuple(dataclasses.replace(view, observed=True) for view in self.views)
        logits, cache, masses = self.model.with_masses(tokens, positions, cache, view=views, filled=filled)
        return logits, cache, tuple(mass for mass in masses if mass is not None)
