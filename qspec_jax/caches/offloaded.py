"""Caches with a part in host memory, which each pass that reads it copies to the device layer by layer: for contexts that do not fit.

The target's output is bit for bit that with everything on the device. In `OffloadedCache` with `host=lower` the upper plane, scales, zero
points and buffers are on the device, so drafts that read nothing else are as fast as without; those with `cache=int8` or
`sensitive_layers` read the lower plane too, and `retrieval` reads older tokens of the target's cache when it chooses again. With `host=all`
both planes are in host memory, for drafts with a compact cache of their own. `OffloadedFullCache` is the full-precision cache.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Int

from pallas_kernels.append_attend import append_and_attend
from pallas_kernels.flush import flush
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Planes, moved_up, quantize_groups
from pallas_kernels.gather import gather_positions
from qspec_jax.caches.cache import KeysValues, at_most_once
from qspec_jax.caches.full import FullCache, FullSettings
from qspec_jax.caches.hierarchical import HierarchicalCache, HierarchicalSettings
from qspec_jax.caches.host_memory import StreamedCache, in_host, to_host, written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OffloadedCache(StreamedCache, HierarchicalCache):
    """A `HierarchicalCache` with the arrays `lower`, or `upper` and `lower`, of keys and values in host memory, except in resident layers.
    Such an array is copied to the device whole, and groups are written into it; nothing else reads or writes it. A draft that reads an
    upper plane in host memory copies it in each of its steps.

    A flush writes a group for every row. For a row that is not due it goes after its last group, where nothing reads it; there is room for
    one group more than a row may quantize, so that this place is inside the array.
    """

    settings: HierarchicalSettings = dataclasses.field(default=HierarchicalSettings("lower"), metadata={"static": True})

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The names of the arrays in host memory."""
        return ("lower",) if self.settings.host == "lower" else ("upper", "lower")

    @classmethod
    def make(cls, model, *, capacity, group_size, settings, **sizes):
        cache = super().make(model, capacity=capacity + group_size, group_size=group_size, settings=settings, **sizes)
        cache = dataclasses.replace(cache, settings=settings)

        def offload(planes):
            return dataclasses.replace(planes, **{name: to_host(getattr(planes, name)) for name in cache.offloaded})

        def offload_both(layer):
            return dataclasses.replace(layer, keys=offload(layer.keys), values=offload(layer.values))

        streamed = settings.streamed(model.num_layers)
        layers = tuple(offload_both(layer) if far else layer for layer, far in zip(cache.layers, streamed))
        return dataclasses.replace(cache, layers=layers)

    @property
    def capacity(self) -> int:
        return super().capacity - self.group_size

    def offloaded_part(self, held):
        return self._arrays(held, self.offloaded)

    def part_read(self, held, view):
        return self._arrays(held, [name for name in self.offloaded if view.planes == 2 or name != "lower"])

    def with_part(self, held, part):
        return _with_arrays(held, part)

    def whole_layer(self, layer):
        on_device, _ = self.with_layer_on_device(layer, after=())
        return on_device.layers[layer]

    def _arrays(self, layer: HierarchicalLayer, names: Iterable[str]) -> tuple[dict[str, Array], dict[str, Array]]:
        """These arrays of keys and of values."""

        def of(planes):
            return {name: getattr(planes, name) for name in names}

        return of(layer.keys), of(layer.values)

    def _put(self, held, new):
        if not in_host(held.lower):
            return super()._put(held, new)

        def write(held, new):
            return lax.dynamic_update_slice_in_dim(held, to_host(new) if in_host(held) else new, 0, axis=2)

        return jax.tree.map(write, held, new)

    def attend_to(self, layer, copied, qkv, cos, sin, *, view):
        held = self.layers[layer]
        read = _with_arrays(held, copied)
        if in_host(read.keys.lower):  # a pass that reads the upper plane alone is given it as the lower one too
            read = _with_arrays(read, ({"lower": read.keys.upper}, {"lower": read.values.upper}))
        attended, new, mass = append_and_attend(qkv, cos, sin, read, self.lengths, view)
        return attended, held.with_buffer(new.buffer), mass

    def flushed_layers(self, due: Bool[Array, "B"]) -> tuple[Any, ...]:
        if self.groups == 0:
            return self.layers

        def flushed(layer: HierarchicalLayer) -> HierarchicalLayer:
            if not _streams(layer):
                return flush(layer, self.lengths, due, scheme=self.scheme)
            G, buffer = self.group_size, layer.buffer

            def oldest(x):
                return x[:, :, None, :G]

            codes = quantize_groups(oldest(buffer.keys), oldest(buffer.values), scheme=self.scheme, dtype=layer.keys.scale.dtype)
            keys, values = (_with_group(*both, self.lengths.quantized // G) for both in zip((layer.keys, layer.values), codes))
            return HierarchicalLayer(keys, values, FullLayer(moved_up(buffer.keys, G, due), moved_up(buffer.values, G, due)))

        return at_most_once(due.any(), lambda layers: tuple(map(flushed, layers)), self.layers)


def _streams(layer: HierarchicalLayer) -> bool:
    """Whether a part of the layer is in host memory."""
    return in_host(layer.keys.lower)


def _with_arrays(layer: HierarchicalLayer, arrays: tuple[dict[str, Array], ...]) -> HierarchicalLayer:
    """The layer with these arrays of its keys and of its values; without any, as it is."""
    if not arrays:
        return layer
    keys, values = arrays
    return dataclasses.replace(layer, keys=dataclasses.replace(layer.keys, **keys), values=dataclasses.replace(layer.values, **values))


def _with_group(held: Planes, new: Planes, group: Int[Array, "B"]) -> Planes:
    """The planes with a new group as number group[b] of each row b, after its last group. Nothing has read this place before, and in a row
    that is not due nothing reads it before it is written again."""
    row = jnp.arange(group.shape[0])

    def put(held: Array, new: Array) -> Array:
        # This fixes the layout in memory, the order in which axes follow each other. XLA (jax 0.11) would choose another for `new`, take it
        # over for the whole array that is written to, and transpose that array back in each round for the kernels that read it.
        new = with_layout_constraint(new, Layout(tuple(range(new.ndim))))
        return written(held, new, group) if in_host(held) else held.at[row, :, group].set(new[:, :, 0])

    return jax.tree.map(put, held, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OffloadedFullCache(StreamedCache, FullCache):
    """A `FullCache` whose keys and values are in host memory, but for those of resident layers. Each pass copies a layer's to the device
    whole, drafts' passes too, and writes the new tokens through."""

    settings: FullSettings = dataclasses.field(default=FullSettings("all"), metadata={"static": True})

    @classmethod
    def make(cls, model, *, settings, **sizes):
        cache = super().make(model, settings=settings, **sizes)
        streamed = settings.streamed(model.num_layers)
        layers = (jax.tree.map(to_host, layer) if far else layer for layer, far in zip(cache.layers, streamed))
        return dataclasses.replace(cache, layers=tuple(layers), settings=settings)

    def offloaded_part(self, held):
        return held

    def with_part(self, held, part):
        return part

    def part_read(self, held, view):
        return held

    def _put(self, held, new):
        return super()._put(held, to_host(new) if in_host(held) else new)

    def tokens(self, layer: int, positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None) -> KeysValues:
        held = self.layers[layer]
        if not in_host(held.keys):
            return super().tokens(layer, positions, batch_rows)
        return gather_positions(held.keys, positions, batch_rows), gather_positions(held.values, positions, batch_rows)

    def attend_to(self, layer, copied, qkv, cos, sin, *, view):
        held, at, T = self.layers[layer], self.lengths.buffered, qkv.shape[1]
        read = dataclasses.replace(self, layers=(copied or held,))
        attended, new, mass = FullCache.attend(read, 0, qkv, cos, sin, view=view)
        if not copied:
            return attended, new, mass

        def newest(x):
            return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, T, axis=1))(x, at)

        # Together, or XLA may keep the whole copy until it writes what is new, after other layers.
        attended, *new = lax.optimization_barrier((attended, newest(new.keys), newest(new.values)))
        return attended, jax.tree.map(lambda held, new: written(held, new, at), held, FullLayer(*new)), mass
