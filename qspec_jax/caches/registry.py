"""Every cache by its name, and the configuration that chooses one. A further cache is a file beside this one, and an entry here."""

import dataclasses
from typing import Protocol

import jax.numpy as jnp

from pallas_kernels.formats.quantization import SCHEMES
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.full import FullCache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.schedule import Schedule
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig


class RegisteredCache(Protocol):
    """What the class of a cache has besides the protocol of `Cache`, so that a name and a few settings are enough to make one."""

    def schedule_of(self, group_size: int) -> Schedule:
        """The schedule of a cache with groups of so many tokens."""
        ...

    def make(
        self,
        model: LlamaConfig,
        *,
        group_size: int,
        scheme: str,
        batch: int,
        capacity: int,
        num_speculative_tokens: int,
        dtype: jnp.dtype,
    ) -> Cache:
        """A cache without tokens, for rows of at most `capacity` cached tokens and rounds of `num_speculative_tokens` drafts.

        group_size, scheme: see `CacheConfig`; a cache that does not quantize has no use for them. dtype: the model's.
        """
        ...


CACHES: dict[str, RegisteredCache] = {"full": FullCache, "int8": HierarchicalCache}


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The KV cache of a call to generate.

    kind: a key of `CACHES`; "int8" is the hierarchical cache, "full" one in the model's own precision. group_size: tokens of a key
    group, even; None is 128, or head_dim when that is smaller. scheme: the quantizer, a key of
    `pallas_kernels.formats.quantization.SCHEMES`.
    """

    kind: str = "int8"
    group_size: int | None = None
    scheme: str = "int8_first"

    def __post_init__(self):
        if self.kind == "hierarchical":  # its name before version 0.2
            object.__setattr__(self, "kind", "int8")
        if self.kind not in CACHES:
            raise InputError(f"cache {self.kind!r} should be {' or '.join(CACHES)}")
        if self.group_size is not None and (self.group_size < 2 or self.group_size % 2):
            raise InputError(f"group size {self.group_size} should be an even number, at least 2")
        if self.scheme not in SCHEMES:
            raise InputError(f"scheme {self.scheme!r} should be one of {', '.join(SCHEMES)}")

    def group_size_for(self, head_dim: int) -> int:
        """Tokens of a group, for a model with heads of this size."""
        return min(128, head_dim) if self.group_size is None else self.group_size

    def schedule_for(self, head_dim: int) -> Schedule:
        """The schedule of the cache, for a model with heads of this size."""
        return CACHES[self.kind].schedule_of(self.group_size_for(head_dim))

    def empty(self, model: LlamaConfig, *, batch: int, capacity: int, num_speculative_tokens: int, dtype: jnp.dtype) -> Cache:
        """A cache without tokens; see `RegisteredCache.make`."""
        choice = dict(group_size=self.group_size_for(model.head_dim), scheme=self.scheme)
        sizes = dict(batch=batch, capacity=capacity, num_speculative_tokens=num_speculative_tokens, dtype=dtype)
        return CACHES[self.kind].make(model, **choice, **sizes)
