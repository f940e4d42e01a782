"""The hierarchical cache with its lower plane in host memory, which verifications copy to the device layer by layer.

On the device are the upper plane, scales, zero points and the buffers. Drafts that read no more than that are as fast as ever (all but
those with `cache=int8` or `sensitive_layers`), and the target still reads all 8 bits: it says bit for bit what it says with everything on
the device.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.append_attend import append_and_attend
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Planes, moved_up, quantize_groups
from qspec_jax.caches.hierarchical import HierarchicalCache

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OffloadedCache(HierarchicalCache):
    """A `HierarchicalCache` whose `lower` arrays are in host memory: they are copied to the device whole, and groups are written into them,
    and nothing else is done with them.

    A flush writes a group for every row. For a row that is not due it goes behind its last group, where nothing reads it; there is room for
    one group more than a row may quantize, so that this place is inside the array.
    """

    in_host_memory: ClassVar[bool] = True

    @classmethod
    def make(cls, model, *, capacity, group_size, **settings):
        cache = super().make(model, capacity=capacity + group_size, group_size=group_size, **settings)
        offloaded = lambda planes: dataclasses.replace(planes, lower=jax.device_put(planes.lower, HOST))
        layers = (dataclasses.replace(each, keys=offloaded(each.keys), values=offloaded(each.values)) for each in cache.layers)
        return dataclasses.replace(cache, layers=tuple(layers))

    @property
    def capacity(self):
        return super().capacity - self.group_size

    def whole_layer(self, layer):
        copied = lambda planes: dataclasses.replace(planes, lower=jax.device_put(planes.lower, DEVICE))
        held = self.layers[layer]
        return dataclasses.replace(held, keys=copied(held.keys), values=copied(held.values))

    def _put(self, held: Planes, new: Planes) -> Planes:
        write = lambda held, new: lax.dynamic_update_slice_in_dim(held, new, 0, axis=2)
        on_device = {name: write(getattr(held, name), getattr(new, name)) for name in ("upper", "scale", "zero")}
        return Planes(lower=write(held.lower, jax.device_put(new.lower, HOST)), **on_device)

    def attend(self, layer, qkv, cos, sin, *, view, observe=False):
        held = self.layers[layer]
        # A pass that reads the upper plane alone gets it in place of the lower one too, which then is not copied.
        half = lambda planes: dataclasses.replace(planes, lower=planes.upper)
        upper = dataclasses.replace(held, keys=half(held.keys), values=half(held.values))
        read = self.whole_layer(layer) if view.planes == 2 else upper
        attended, new, mass = append_and_attend(qkv, cos, sin, read, self.lengths, view, observe=observe)
        return attended, dataclasses.replace(held, buffer=new.buffer), mass

    def flushed_layers(self, due):
        def flushed(layer: HierarchicalLayer) -> HierarchicalLayer:
            G, buffer = self.group_size, layer.buffer
            oldest = lambda x: x[:, :, None, :G]
            codes = quantize_groups(oldest(buffer.keys), oldest(buffer.values), scheme=self.scheme, dtype=layer.keys.scale.dtype)
            keys, values = (_with_group(*both, self.lengths.quantized // G) for both in zip((layer.keys, layer.values), codes))
            return HierarchicalLayer(keys, values, FullLayer(moved_up(buffer.keys, G, due), moved_up(buffer.values, G, due)))

        once = lambda carry: (tuple(map(flushed, carry[0])), jnp.array(False))
        # A loop of at most one trip: lax.cond would copy the caches that it passes through (seen in jax 0.10).
        return lax.while_loop(lambda carry: carry[1], once, (self.layers, due.any()))[0]


def _with_group(held: Planes, new: Planes, group: Int[Array, "B"]) -> Planes:
    """The planes with a new group in this place of each row. No row has read what was there: it is the place behind its last group."""
    row = jnp.arange(group.shape[0])
    on_device = {name: getattr(held, name).at[row, :, group].set(getattr(new, name)[:, :, 0]) for name in ("upper", "scale", "zero")}
    lower, zero = held.lower, jnp.zeros_like(group[0])
    for b in range(group.shape[0]):  # for a scatter into host memory goes wrong on a GPU (openxla/xla#34565)
        start = (zero + b, zero, group[b], *(zero,) * (lower.ndim - 3))
        lower = lax.dynamic_update_slice(lower, jax.device_put(new.lower[b : b + 1], HOST), start)
    return Planes(lower=lower, **on_device)
