"""The first tokens of a text and a window of the most recent ones, numbered without a gap (StreamingLLM, arXiv 2309.17453)."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qspec_jax.caches.cache import KeysValues
from qspec_jax.caches.compact import CompactCache
from qspec_jax.models import rope
from qspec_jax.models.block import Angles
from qspec_jax.models.eagle3 import Eagle3Head
from qspec_jax.models.llama import Llama


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SinkWindow:
    """A compact cache whose ring is the window, and whose first tokens, the sinks, have the positions right before it.

    Attention asks for differences of positions alone. So it is not the window that moves down to the sinks, but the sinks that move up to
    the window, by as many positions as tokens have left it. sinks: for each layer of the model without a sliding window, the keys of the
    sinks as they were taken in. They are moved from there each time, so that errors do not add up; empty where there are no sinks, or they
    stay at these positions.
    """

    cache: CompactCache
    sinks: tuple[Float[Array, "B K S H"], ...]

    def take_in(self, model: Llama | Eagle3Head, tokens: Sequence[KeysValues], count: Int[Array, "B"]) -> Self:
        """Takes in the first count[b] of T tokens as `CompactCache.take_in` does, and moves the sinks on. model: the one whose keys these
        are."""
        number = self.cache.taken[:, None]

        def with_arrived(sinks: Array, keys: Array) -> Array:
            at = jnp.arange(sinks.shape[2]) - number
            new = jnp.take_along_axis(keys, jnp.clip(at, 0, keys.shape[2] - 1)[:, None, :, None], 2)
            return jnp.where(((at >= 0) & (at < count[:, None]))[:, None, :, None], new, sinks)

        sinks = tuple(with_arrived(held, keys) for held, (keys, _) in zip(self.sinks, tokens))
        return dataclasses.replace(self, cache=self.cache.take_in(tokens, count), sinks=sinks).moved(model, count > 0)

    def moved(self, model: Llama | Eagle3Head, changed: Bool[Array, "B"]) -> Self:
        """With the sinks right before the window, in the rows that have changed; nothing is written in the others."""
        if not self.sinks:
            return self
        c, cache = model.config, self.cache
        gone = jnp.maximum(cache.taken - cache.kept - cache.ring, 0)[:, None]
        # The keys have the RoPE type's (YaRN's) attention factor already.
        plain = (dataclasses.replace(each, attention_factor=1.0) for each in c.ropes)
        cos_sin = (rope.cos_sin(each, c.head_dim, c.max_position_embeddings, gone, cache.taken[:, None]) for each in plain)
        angles = Angles(tuple(cos_sin), None)
        keys = [model.layers[i].turned(keys, *model.layers[i].angles_of(angles)) for i, keys in zip(c.full_layers, self.sinks, strict=True)]
        return dataclasses.replace(self, cache=cache.with_first_keys(keys, changed))


def tokens_of_sinks(sinks: int) -> int:
    """The memory of what a `SinkWindow` holds besides its cache, the keys of its sinks without values, as a number of tokens."""
    return -(-sinks // 2)
