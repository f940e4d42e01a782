"""Caches by their texts, and what a measurement reads of them."""

import dataclasses

from pallas_kernels.formats.views import BOTH_PLANES, FULL_PRECISION, UPPER_PLANE, View
from qspec_jax.caches.registry import CACHES, CacheChoice, CacheConfig
from qspec_jax.errors import InputError

FULL = "full"  # the cache in the model's own precision
UPPER = "int4"  # the upper plane of the int8 cache alone, which is what a draft reads


@dataclasses.dataclass(frozen=True)
class CacheView:
    """A cache, and what a model reads of it."""

    cache: CacheChoice
    view: View = BOTH_PLANES

    @property
    def one_by_one(self) -> bool:
        """Whether every token needs a pass of its own, since what it reads depends on the other tokens of its pass."""
        return not self.cache.takes_drafts


def cache_view(cache: str, *, scheme: str = CacheConfig.scheme, group_size: int | None = None, upper: bool = True) -> CacheView:
    """A cache by its text, as the target reads it.

    Args:
        cache: as `CacheConfig.parse` takes it, or `UPPER`, the upper plane of int8 alone.
        group_size: tokens in a group; None: the cache's own choice.
        upper: whether `UPPER` is allowed.

    Raises:
        InputError: for an unknown cache or setting, and for a cache in host memory.
    """
    view = {FULL: FULL_PRECISION, UPPER: UPPER_PLANE}.get(cache, BOTH_PLANES)
    known = [*CACHES, UPPER] if upper else CACHES
    if cache not in known and cache.partition(":")[0] not in CACHES:
        raise InputError(f"cache {cache!r} should be one of {', '.join(known)}")
    config = CacheConfig.parse("int8" if cache == UPPER else cache, group_size, scheme)
    if config.in_host_memory:
        raise InputError(f"cache {cache!r} gives the same tokens as on the device: leave host={config.settings.host} out")
    return CacheView(config, view)
