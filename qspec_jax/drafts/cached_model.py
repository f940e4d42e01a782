"""A model that reads a view of a cache."""

import dataclasses
import functools
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from qspec_jax.caches.registry import Cache
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.weights import quantize_head


class Step(Protocol):
    """A model over the cache, draft or target: a pytree that can be called."""

    def __call__(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: Cache) -> tuple[Float[Array, "B T V"], Cache]:
        """Logits of T tokens per row and the cache T tokens longer."""
        ...


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A model that reads one plane of the cache (1: a draft) or both (2: the target), or in each layer so many of them.

    head_bits: 8 if `in_loop` is to quantize its head. The model's weights must not be set anew afterwards: they are remembered.
    """

    model: Llama
    planes: int | tuple[int, ...]
    head_bits: int = 16

    @functools.cached_property
    def _flat(self) -> tuple[list, Any]:
        # Once, not with every call: to take a tree of some hundred modules apart takes milliseconds, of the same order as a round.
        return jax.tree.flatten(self.model)

    def tree_flatten(self):
        leaves, tree = self._flat
        return leaves, (tree, self.planes, self.head_bits)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        tree, *settings = static
        return cls(jax.tree.unflatten(tree, leaves), *settings)

    def __call__(self, tokens, positions, cache):
        return self.model(tokens, positions, cache, planes=self.planes)


def in_loop(step: Step) -> Step:
    """The step for a decode: with its head in INT8 if that is its wish. To be made after prefill and not kept, for there memory peaks.

    Not on a CPU, where XLA would keep a float32 copy of the codes.
    """
    if isinstance(step, CachedModel) and step.head_bits == 8 and jax.default_backend() != "cpu":
        return CachedModel(quantize_head(step.model), step.planes)
    return step
