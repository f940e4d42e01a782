"""Arrays in host memory: what is done with them, which layers' arrays are there, and how a pass reads them.

XLA copies such an array to the device behind computation. Whatever else is done with it becomes, on a GPU, a kernel that reads or writes
host memory where it lies, at the speed of the bus; on a CPU it is as anywhere. Single tokens are read by `pallas_kernels.gather`, for XLA
takes them over the bus three times.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.formats.views import View
from qspec_jax.caches.cache import AppendedCache
from qspec_jax.errors import InputError

ROWS_AT_ONCE = 16  # rows that a trip of the loop in `written` writes; so many or fewer take no loop
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def _share(text: str) -> float | None:
    if text != "auto" and not 0 <= float(text) <= 1:
        raise ValueError
    return None if text == "auto" else float(text)


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """resident: the share of the layers, from 0 to 1, that are on the device whole. None, or "auto" in a text, leaves it to
    `qspec_jax.decoding.residence` how many fit; a cache that is made without asking that has none. They are spread evenly, so that others
    are copied while these are computed."""

    resident: float | None = dataclasses.field(default=None, metadata={"parse": _share, "values": "auto, or a share from 0 to 1"})

    def __post_init__(self):
        if self.resident is not None and not 0 <= self.resident <= 1:
            raise InputError(f"cache resident {self.resident:g} should be auto, or from 0 to 1, a share of the layers")

    @property
    def in_host_memory(self) -> bool:
        return self.resident is None or self.resident < 1

    def streamed(self, layers: int) -> tuple[bool, ...]:
        """Whether a part of each layer, of so many, is in host memory."""
        others = layers - round((self.resident or 0) * layers)
        return tuple((i + 1) * others // layers > i * others // layers for i in range(layers))


def in_host(x: Array | jax.ShapeDtypeStruct | jax.core.ShapedArray) -> bool:
    """Whether an array, or one of this shape, is in host memory."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is not None and x.sharding.memory_kind == "pinned_host"
    return (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)).memory_space == HOST


def host_bytes(cache: AppendedCache) -> int:
    """Bytes of its layers that are in host memory."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers) if in_host(leaf))


def to_host(x: Array) -> Array:
    return jax.device_put(x, HOST)


def to_device(x: Array) -> Array:
    return jax.device_put(x, DEVICE)


def written(held: Array, new: Array, at: Int[Array, "B"]) -> Array:
    """The array, which is in host memory, with new[b] in place of as many entries of axis 2 from at[b] on. new: on the device."""
    zero = jnp.zeros_like(at[0])

    # One row after the other, for a scatter into host memory goes wrong on a GPU (openxla/xla#34565).
    def put(b: Int[Array, ""], held: Array) -> Array:
        row = lax.dynamic_slice_in_dim(new, b, 1)
        return lax.dynamic_update_slice(held, to_host(row), (b.astype(at.dtype), zero, at[b], *(zero,) * (held.ndim - 3)))

    # XLA takes minutes to compile a program with a write for each of hundreds of rows and each layer.
    return lax.fori_loop(0, at.shape[0], put, held, unroll=ROWS_AT_ONCE)


def with_rows(held: Array, rows: Array, slots: Int[Array, "k"]) -> Array:
    """The array with k others of its rows, which are in the same memory."""
    if not in_host(held):
        return held.at[slots].set(rows)
    for i in range(rows.shape[0]):  # no scatter: see `written`. They are few
        at = slots[i], *(jnp.zeros_like(slots[i]),) * (held.ndim - 1)
        held = lax.dynamic_update_slice(held, rows[i : i + 1], at)
    return held


class StreamedCache(AppendedCache):
    """A cache of which a part may be in host memory, copied to the device by each pass that reads it."""

    @abc.abstractmethod
    def offloaded_part(self, held: Any) -> Any:
        """A pytree of those arrays of a layer that are in host memory where the layer is not resident, wherever they are now."""

    @abc.abstractmethod
    def host_part(self, layer: int, view: View) -> Any:
        """A pytree of what a pass through this view has to copy of a layer; an empty one for a resident layer, and where it reads nothing
        of that."""

    @abc.abstractmethod
    def with_part(self, held: Any, part: Any) -> Any:
        """A layer with other arrays in place of its `offloaded_part`."""

    @abc.abstractmethod
    def attend_to(self, layer: int, copied: Any, qkv, cos, sin, *, view: View, observe: bool) -> tuple[Array, Any, Array | None]:
        """`attend`, where the layer's host part is copied to the device already."""

    def for_pass(self, views):
        return StreamedPass(self, views)

    def with_layer_on_device(self, layer, *, after):
        part = self.offloaded_part(held := self.layers[layer])
        if not any(map(in_host, jax.tree.leaves(part))):
            return self, after
        part, after = lax.optimization_barrier((part, after))
        there = self.with_part(held, jax.tree.map(to_device, part))
        return dataclasses.replace(self, layers=(*self.layers[:layer], there, *self.layers[layer + 1 :])), after

    def with_rows(self, rows, slots, pages=None):
        return jax.tree.map(lambda held, new: with_rows(held, new, slots), self, rows)

    def attend(self, layer, qkv, cos, sin, *, view, observe=False):
        copied = jax.tree.map(to_device, self.host_part(layer, view))
        return self.attend_to(layer, copied, qkv, cos, sin, view=view, observe=observe)


class StreamedPass:
    """One pass over a `StreamedCache`: while a layer is computed, the next that has a part in host memory is copied.

    XLA would begin with all of the copies, none of which needs anything, so that every layer's was on the device at once, and nothing was
    computed meanwhile (seen in jax 0.11). So a copy is made to wait for the queries of an earlier layer, and no more than two layers' are
    there at a time.
    """

    def __init__(self, cache: StreamedCache, views: tuple[View | None, ...]):
        self._cache = cache
        parts = {layer: cache.host_part(layer, view) for layer, view in enumerate(views) if view is not None}
        self._waiting = {layer: part for layer, part in parts.items() if jax.tree.leaves(part)}
        self._copied: dict[int, Any] = {}

    def attend(self, layer, qkv, cos, sin, *, view, observe=False):
        if layer in self._waiting:  # the first
            self._copied[layer] = jax.tree.map(to_device, self._waiting.pop(layer))
        following = min(self._waiting, default=None)
        if following is not None and not any(other > layer for other in self._copied):
            qkv, part = lax.optimization_barrier((qkv, self._waiting.pop(following)))
            self._copied[following] = jax.tree.map(to_device, part)
        return self._cache.attend_to(layer, self._copied.pop(layer, ()), qkv, cos, sin, view=view, observe=observe)
