"""The first tokens of a text and a window of the most recent ones, numbered without a gap (StreamingLLM, arXiv 2309.17453)."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.rope_append import rotate
from qspec_jax.caches.compact import CompactCache, KeysValues
from qspec_jax.models import rope
from qspec_jax.models.llama import Llama


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SinkWindow:
    """A compact cache whose ring is the window, and whose first tokens, the sinks, have the positions right before it.

    Attention asks for differences of positions alone. So it is not the window that moves down to the sinks, but the sinks that move up to
    the window, by as many positions as tokens have left. sinks: for each layer their keys at the positions that they have in the text, from
    which they are moved, so that errors do not add up; empty where they stay at these positions.
    """

    cache: CompactCache
    sinks: tuple[Float[Array, "B K T H"], ...]

    def take_in(self, model: Llama, tokens: Sequence[KeysValues], count: Int[Array, "B"]) -> Self:
        """As `CompactCache.take_in`, of the model whose keys these are."""
        cache, sinks = self.cache.take_in(tokens, count), self.sinks
        if sinks:
            T = sinks[0].shape[2]
            # None has moved as long as some are still to come.
            arriving = (self.cache.taken < T)[:, None, None, None]
            sinks = tuple(jnp.where(arriving, new, old) for new, old in zip(cache.first_keys(T), sinks, strict=True))
        return dataclasses.replace(self, cache=cache, sinks=sinks).moved(model, count > 0)

    def moved(self, model: Llama, changed: Bool[Array, "B"]) -> Self:
        """With the sinks where they belong, in the rows in which tokens may have left the window."""
        if not self.sinks:
            return self
        c, cache = model.config, self.cache
        left = jnp.maximum(cache.taken - cache.kept - cache.ring, 0)[:, None]
        # The keys have the RoPE type's (YaRN's) attention factor already.
        plain = dataclasses.replace(c.rope, attention_factor=1.0)
        angles = rope.cos_sin(plain, c.head_dim, c.max_position_embeddings, left, cache.taken[:, None])
        keys = [rotate(keys, *model.angles_of(i, *angles)) for i, keys in enumerate(self.sinks)]
        return dataclasses.replace(self, cache=cache.with_first_keys(keys, changed))

    @property
    def in_text(self) -> CompactCache:
        """The cache with the keys of all tokens at the positions that they have in the text."""
        return self.cache.with_first_keys(self.sinks, jnp.ones_like(self.cache.taken, bool)) if self.sinks else self.cache
