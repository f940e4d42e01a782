"""How many layers of a cache in host memory are resident, that is, entirely on the device: by default all that fit."""

import dataclasses
import logging
from collections.abc import Callable

import jax

from qspec_jax import host
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.device_memory import bytes_of_round, free_bytes
from qspec_jax.decoding.prefill import Prefill
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.step_bytes import bytes_in_loop, bytes_of
from qspec_jax.errors import HostMemoryError
from qspec_jax.models.llama import Llama
from qspec_jax.planning.memory import prefill_bytes

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Residence:
    """A cache whose share of resident layers is chosen.

    Attributes:
        cache: the cache.
        host_bytes: bytes in host memory of all layers that are not resident.
        layer_bytes: bytes in host memory of one such layer.
    """

    cache: CacheConfig
    host_bytes: int
    layer_bytes: int


def refused(name: str, host_bytes: int) -> str | None:
    """Why host memory cannot hold `host_bytes` of a cache, by its `CacheConfig.name`; None if it can."""
    on_gpu = jax.default_backend() == "gpu"
    room = host.room_bytes(pooled=on_gpu)
    if room is None or host_bytes <= room:
        return None
    sizes = f"{host_bytes / 1e9:.1f} GB of host memory for these prompts, of {room / 1e9:.1f} GB that it may take"
    more = f"; or let it take more, by {host.POOL_LIMIT}={(host_bytes >> 30) + 1} before JAX starts" if on_gpu else ""
    return f"cache {name} needs {sizes}: give shorter prompts, or fewer{more}"


def none_resident(cache: CacheConfig) -> CacheConfig:
    """The cache without resident layers, unless its settings say how many are resident."""
    return cache.with_resident(0.0) if cache.streams and cache.settings.resident is None else cache


def settled(prefill: Prefill, draft: Draft | None, batch: int) -> CacheConfig:
    """The cache of a prefill, a part of which is in host memory, with its share of resident layers.

    Args:
        prefill: the prefill of some of the rows.
        draft: the draft of the rounds.
        batch: the rows that are on the device at a time.

    Raises:
        HostMemoryError: where host memory cannot hold the other layers.
    """
    cache, sizes, prompts = prefill.sizes.cache, prefill.sizes, len(prefill.tokens)

    def draft_bytes() -> int:
        begun = prefill.with_cache(none_resident(cache)).shapes().draft
        return bytes_of(begun) * batch // prompts + bytes_in_loop(draft)

    found = cache
    if cache.streams:
        jax.block_until_ready((prefill.target, draft))  # or their memory may not be counted
        shape = dict(batch=batch, capacity=sizes.capacity, num_speculative_tokens=sizes.unaccepted_tokens)
        found = residence(cache, prefill.target.model, **shape, prompts=prompts, draft_bytes=draft_bytes).cache
    made = prefill.with_cache(found).shapes().cache
    host_bytes = bytes_of(made) - bytes_of(made, on_device=True)
    if reason := refused(cache.name, host_bytes * batch // prompts):
        raise HostMemoryError(reason)
    return found


def residence(
    cache: CacheConfig,
    model: Llama,
    *,
    batch: int,
    capacity: int,
    num_speculative_tokens: int,
    prompts: int | None = None,
    draft_bytes: Callable[[], int] = lambda: 0,
) -> Residence:
    """The cache with the resident layers that its settings ask for; by default all that fit beside model and draft into the free memory.

    Where the device does not say how much memory is free, the default is none.

    Args:
        cache: a cache that `streams`.
        model: the target, whose weights are on the device.
        batch: rows.
        capacity: the maximum number of cached tokens of a row.
        num_speculative_tokens: the maximum number of drafts in a round.
        prompts: rows that are prefilled together; None: all.
        draft_bytes: returns the bytes that the draft will take on the device in addition; called only where they matter.
    """
    config, resident = model.config, cache.settings.resident
    sizes = dict(batch=batch, capacity=capacity, num_speculative_tokens=num_speculative_tokens, dtype=model.dtype)
    shapes = jax.eval_shape(lambda: cache.with_resident(0.0).empty(config, **sizes))
    streamed = shapes.streamed_part
    layers, of_layer = len(streamed.layers), bytes_of(streamed.offloaded_part(streamed.layers[0]))
    if resident is None:
        free, fitting = free_bytes(), 0
        if free is not None:
            copied = 2 * of_layer  # while a layer is computed, the next is copied
            working = draft_bytes() + max(prefill_bytes(config, cache.name, batch=prompts or batch, context=capacity), copied)
            working += batch * bytes_of_round(config, num_speculative_tokens)
            room = free - working - (bytes_of(shapes) - layers * of_layer)
            fitting = min(layers, max(0, int(room // of_layer)))
            log.info("cache %s: %d of %d layers stay on the device", cache.name, fitting, layers)
        resident = fitting / layers
    chosen = cache.with_resident(resident)
    return Residence(chosen, sum(chosen.settings.streamed(layers)) * of_layer, of_layer)
