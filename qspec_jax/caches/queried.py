"""A cache around another, whose passes read and append to that one, and also keep something computed from their queries."""

import abc
import dataclasses
from typing import Any, Self

from jaxtyping import Array, Float

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.rope_append import rotate
from qspec_jax.caches.cache import AppendedCache


class QueriedCache(AppendedCache):
    """A subclass is a frozen dataclass registered as a pytree, and defines what a pass keeps. cache: the one that is read and appended
    to."""

    cache: AppendedCache

    @abc.abstractmethod
    def of_queries(self, layer: int, q: Float[Array, "B T N H"], entry: Any) -> Any:
        """What a pass keeps of a layer. q: its queries after RoPE. entry: the layer's new entry, in which its tokens are appended."""

    @abc.abstractmethod
    def after_pass(self, left: tuple[Any, ...]) -> Self:
        """This cache with what a pass kept of each layer."""

    @property
    def layers(self) -> tuple[Any, ...]:
        return self.cache.layers

    @property
    def lengths(self) -> Lengths:
        return self.cache.lengths

    @property
    def full_layers(self) -> tuple[int, ...]:
        return self.cache.full_layers

    def reads_of_layer(self, layer, reads, tokens):
        return self.cache.reads_of_layer(layer, reads, tokens)

    def bytes_of_reads(self, layer, reads):
        return self.cache.bytes_of_reads(layer, reads)

    def for_pass(self, views):
        return dataclasses.replace(self, cache=self.cache.for_pass(views))

    def attend(self, layer, qkv, cos, sin, *, view):
        attended, new, mass = self.cache.attend(layer, qkv, cos, sin, view=view)
        B, T, N, H = attended.shape
        q = rotate(qkv.reshape(B, T, -1, H)[:, :, :N], cos, sin)
        return attended, (new, self.of_queries(layer, q, new)), mass

    def advance(self, layers: tuple[Any, ...], tokens: int) -> Self:
        new, left = zip(*layers)
        return dataclasses.replace(self.after_pass(left), cache=self.cache.advance(new, tokens))

    def rollback(self, lengths: Lengths) -> Self:
        return dataclasses.replace(self, cache=self.cache.rollback(lengths))
