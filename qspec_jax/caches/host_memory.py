"""Arrays in host memory: how they are written and copied, which layers have arrays there, and how a pass reads them.

XLA can copy a whole array from host memory to the device while the device computes something else. On a GPU any other operation on such an
array becomes a kernel that reads or writes host memory in place, at the speed of the bus between the two memories; on a CPU it is an
ordinary operation. XLA's gather of single tokens takes each over the bus three times. SpeCache therefore reads them with a kernel of
`pallas_kernels.gather` where that runs, on NVIDIA Hopper. The cache full:host=all, of which drafts may ask single tokens, takes XLA's
gather (`pallas_kernels.gather.gather_positions`).
"""

import abc
import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.formats.views import DenseView, View
from qspec_jax.caches.cache import NOTHING, AppendedCache
from qspec_jax.errors import InputError
from qspec_jax.settings_text import check_settings, setting

ROWS_AT_ONCE = 16  # rows that a trip of the loop in `written` writes; up to this number are written without a loop
NONE = "none"  # the value of `host` for a cache that is entirely on the device
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def _share(text: str) -> float | None:
    if text != "auto" and not 0 <= float(text) <= 1:
        raise ValueError
    return None if text == "auto" else float(text)


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """The settings that caches share of which each pass copies a part from host memory. A subclass has the setting `host` with its parts.

    Layers whose cache is entirely on the device are called resident. They are spread evenly among the others, so that the others are
    copied while resident ones are computed. A `resident` of None, "auto" in a text, leaves their number to
    `qspec_jax.decoding.host_residence`, by the device's free memory. In a cache that is made without it no layer is resident.
    """

    host: str = NONE
    resident: float | None = setting(
        None,
        "The share of the layers whose cache is entirely on the device, rounded to whole layers; by default those that fit.",
        minimum=0,
        maximum=1,
        parse=_share,
        takes="auto, or a share from 0 to 1",
    )

    def __post_init__(self):
        check_settings("cache", self)
        if self.host == NONE and self.resident is not None:
            raise InputError(f"cache resident {self.resident:g} is for a cache with a part in host memory: give host too")

    @property
    def in_host_memory(self) -> bool:
        """Whether a part of the cache may be in host memory. It is known before the model is, and so before the share is rounded: true for
        every resident below 1, such as 0.99, though with few layers that rounds to all of them, and true for None, though all may fit."""
        return self.host != NONE and (self.resident is None or self.resident < 1)

    def streamed(self, layers: int) -> tuple[bool, ...]:
        """Whether a part of each of `layers` layers is in host memory."""
        others = layers - round((self.resident or 0) * layers)
        return tuple((i + 1) * others // layers > i * others // layers for i in range(layers))


def in_host(x: Array | jax.ShapeDtypeStruct | jax.core.ShapedArray) -> bool:
    """Whether an array, or one of this shape, is in host memory."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is not None and x.sharding.memory_kind == "pinned_host"
    return (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)).memory_space == HOST


def to_host(x: Array) -> Array:
    return jax.device_put(x, HOST)


def to_device(x: Array) -> Array:
    return jax.device_put(x, DEVICE)


def written(held: Array, new: Array, at: Int[Array, "B"]) -> Array:
    """The array, which is in host memory, with its entries of axis 2 from at[b] on overwritten by new[b], which is on the device."""
    zero = jnp.zeros_like(at[0])

    # One row after the other, since XLA's scatter into host memory fails on a GPU (openxla/xla#34565).
    def put(b: Int[Array, ""], held: Array) -> Array:
        row = lax.dynamic_slice_in_dim(new, b, 1)
        return lax.dynamic_update_slice(held, to_host(row), (b.astype(at.dtype), zero, at[b], *(zero,) * (held.ndim - 3)))

    # XLA takes minutes to compile a program with a write for each of hundreds of rows and each layer.
    return lax.fori_loop(0, at.shape[0], put, held, unroll=ROWS_AT_ONCE)


def with_rows(held: Array, rows: Array, slots: Int[Array, "k"]) -> Array:
    """The array with k of its rows replaced by others, which are in the same memory."""
    if not in_host(held):
        return held.at[slots].set(rows)
    # One row after the other, since XLA's scatter into host memory fails on a GPU (openxla/xla#34565). The rows are few: no loop is needed.
    for i in range(rows.shape[0]):
        at = slots[i], *(jnp.zeros_like(slots[i]),) * (held.ndim - 1)
        held = lax.dynamic_update_slice(held, rows[i : i + 1], at)
    return held


class StreamedCache(AppendedCache):
    """A cache of which a part may be in host memory, copied to the device by each pass that reads it. settings: static."""

    settings: HostSettings

    @abc.abstractmethod
    def offloaded_part(self, held: Any) -> Any:
        """A pytree of those arrays of a layer that are in host memory unless the layer is resident: the arrays by name, wherever they are
        now. held: the layer."""

    @abc.abstractmethod
    def part_read(self, held: Any, view: View) -> Any:
        """A pytree of those arrays of a layer's `offloaded_part` that a pass through this view reads. held: the layer."""

    def part_to_copy(self, layer: int, view: View) -> Any:
        """The `part_read` of a layer if it is in host memory, so that the pass copies it to the device; else empty."""
        part = self.part_read(self.layers[layer], view)
        return part if any(map(in_host, jax.tree.leaves(part))) else ()

    def bytes_of_reads(self, layer, reads):
        read, _ = super().bytes_of_reads(layer, reads)
        if reads == NOTHING or not self.settings.streamed(len(self.layers))[layer]:
            return read, 0
        # Arrays are copied whole.
        copied = jax.tree.leaves(self.part_read(self.layers[layer], DenseView(reads.planes)))
        return read, sum(leaf.size * leaf.dtype.itemsize // leaf.shape[0] for leaf in copied)

    @property
    def num_host_bytes(self) -> int:
        far = [self.offloaded_part(held) for held, streamed in zip(self.layers, self.settings.streamed(len(self.layers))) if streamed]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(far))

    @abc.abstractmethod
    def with_part(self, held: Any, part: Any) -> Any:
        """A layer with its `offloaded_part` replaced by these arrays."""

    @abc.abstractmethod
    def attend_to(self, layer: int, copied: Any, qkv, cos, sin, *, view: View) -> tuple[Array, Any, Array | None]:
        """`attend`, where the layer's `part_to_copy` is on the device already: copied."""

    def for_pass(self, views):
        return StreamedPass(super().for_pass(views), views)

    def with_layer_on_device(self, layer, *, after):
        part = self.offloaded_part(held := self.layers[layer])
        if not any(map(in_host, jax.tree.leaves(part))):
            return self, after
        part, after = lax.optimization_barrier((part, after))
        on_device = self.with_part(held, jax.tree.map(to_device, part))
        return dataclasses.replace(self, layers=(*self.layers[:layer], on_device, *self.layers[layer + 1 :])), after

    def with_rows(self, rows: Self, slots: Int[Array, "k"], pages: Int[Array, "k C"] | None = None) -> Self:
        return jax.tree.map(lambda held, new: with_rows(held, new, slots), self, rows)

    def attend(self, layer, qkv, cos, sin, *, view):
        copied = jax.tree.map(to_device, self.part_to_copy(layer, view))
        return self.attend_to(layer, copied, qkv, cos, sin, view=view)


class StreamedPass:
    """One pass over a `StreamedCache`: while a layer is computed, the next that has a part in host memory is copied.

    No copy depends on anything that is computed, so XLA would begin a pass with all of them: every layer's copy was on the device at once,
    and nothing was computed meanwhile (seen in jax 0.11). So each copy is made to wait for the queries of an earlier layer, and at most two
    layers' copies are on the device at a time.
    """

    def __init__(self, cache: StreamedCache, views: tuple[View | None, ...]):
        self._cache = cache
        parts = {layer: cache.part_to_copy(layer, view) for layer, view in enumerate(views) if view is not None}
        self._waiting = {layer: part for layer, part in parts.items() if jax.tree.leaves(part)}
        self._copied: dict[int, Any] = {}

    def attend(self, layer, qkv, cos, sin, *, view):
        if layer in self._waiting:  # the first layer of the pass that has a part to copy
            self._copied[layer] = jax.tree.map(to_device, self._waiting.pop(layer))
        following = min(self._waiting, default=None)
        if following is not None and not any(other > layer for other in self._copied):
            qkv, part = lax.optimization_barrier((qkv, self._waiting.pop(following)))
            self._copied[following] = jax.tree.map(to_device, part)
        return self._cache.attend_to(layer, self._copied.pop(layer, ()), qkv, cos, sin, view=view)
