"""A model together with the view through which it reads its cache: the target, or a draft."""

import dataclasses
import functools
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.views import View
from qspec_jax.models.llama import AttendingCache, Llama, Seen


class Step(Protocol):
    """A model over a cache: a callable pytree."""

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache]:
        """Logits of T tokens per row, and the cache with these tokens.

        The target of a draft that observes, or reads features, must also have a method `watched`, as `ViewedModel` has.
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
        return self.watched(tokens, positions, cache)[:2]

    def watched(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: AttendingCache,
        *,
        observe: bool = False,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T V"], AttendingCache, Seen]:
        """The results of a call, and what was asked to be seen.

        Args:
            tokens, positions, cache: see a call.
            observe: whether `Seen.masses` has those of each layer without a sliding window.
            taps: see `Llama.watched`.
        """
        views = tuple(dataclasses.replace(view, observed=True) for view in self.views) if observe else self.view
        logits, cache, seen = self.model.watched(tokens, positions, cache, view=views, filled=self.filled(tokens), taps=taps)
        return logits, cache, dataclasses.replace(seen, masses=tuple(mass for mass in seen.masses if mass is not None))

    def filled(self, tokens: Int[Array, "B T"]) -> int:
        """The number of tokens that a pass over these is filled up to, see `Llama.watched`; 0: it is not."""
        return 0
