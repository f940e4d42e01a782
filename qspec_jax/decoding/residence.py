"""How many layers of a cache in host memory stay on the device: where its settings leave it open, as many as fit."""

import dataclasses
import logging
from collections.abc import Callable

import jax

from qspec_jax.caches.host_memory import HostSettings
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.room import free_bytes, free_host_bytes
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.planning.memory import prefill_bytes

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Residence:
    """cache: with a share of resident layers. host_bytes: of the other layers, in host memory. layer_bytes: of each of them."""

    cache: CacheConfig
    host_bytes: int
    layer_bytes: int


def residence(
    cache: CacheConfig,
    model: Llama,
    *,
    batch: int,
    capacity: int,
    num_speculative_tokens: int,
    besides: Callable[[], int] = lambda: 0,
    free: int | None = None,
) -> Residence:
    """The cache for the memory that is free now, model and draft being there.

    besides: bytes that the draft will take on the device, asked for where it matters. free: of the device; None: what it says. Where it
    does not say, no layer is resident. Sizes as of `CacheConfig.empty`.
    """
    config, settings = model.config, cache.settings
    sizes = dict(batch=batch, capacity=capacity, num_speculative_tokens=num_speculative_tokens, dtype=model.dtype)
    with_share = lambda share: dataclasses.replace(cache, settings=HostSettings(share))
    shapes = jax.eval_shape(lambda: with_share(0.0).empty(config, **sizes))
    layers, of_layer = config.num_layers, bytes_of(shapes.streamed_of(shapes.layers[0]))
    resident = settings.resident
    if resident is None:
        free, fitting = free_bytes() if free is None else free, 0
        if free is not None:
            copied = 2 * of_layer  # while a layer is computed, the next is copied
            working = besides() + max(prefill_bytes(config, cache.kind, batch=batch, context=capacity), copied)
            room = free - working - (bytes_of(shapes) - layers * of_layer)
            fitting = min(layers, max(0, int(room // of_layer)))
            log.info("cache %s: %d of %d layers stay on the device", cache.kind, fitting, layers)
        resident = fitting / layers
    streamed = sum(HostSettings(resident).streamed(layers))
    return Residence(with_share(resident), streamed * of_layer, of_layer)


def settled(cache: CacheConfig, model: Llama, **sizes) -> CacheConfig:
    """The cache of `residence`, which has the arguments. Raises InputError where the host has not the memory for the rest."""
    found, free = residence(cache, model, **sizes), free_host_bytes()
    if free is not None and found.host_bytes > free:
        needed, there = f"{found.host_bytes / 1e9:.1f} GB of host memory", f"{free / 1e9:.1f} GB are free"
        raise InputError(f"cache {cache.kind} needs {needed} for these prompts, and {there}; give shorter prompts, or fewer")
    return found.cache
