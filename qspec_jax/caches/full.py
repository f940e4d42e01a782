"""The full-precision cache: keys and values in the model's own dtype."""

import dataclasses
from typing import ClassVar

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.append_attend import append_and_attend
from pallas_kernels.attention.support import PASS_SPAN
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.views import FULL_PRECISION
from qspec_jax.caches.cache import Cache, KeysValues, Reads, bytes_of_tokens, no_tokens
from qspec_jax.caches.host_memory import NONE, HostSettings
from qspec_jax.caches.schedule import Schedule
from qspec_jax.settings_text import setting


@dataclasses.dataclass(frozen=True)
class FullSettings(HostSettings):
    """See `HostSettings`."""

    host: str = setting(NONE, "The part of the cache in host memory, which each pass copies to the device.", choices=(NONE, "all"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FullCache(Cache):
    """Keys and values as they are. They are read in one way, whatever the view; `lengths.quantized` is always 0."""

    layers: tuple[FullLayer, ...]
    lengths: Lengths

    Settings: ClassVar[type] = FullSettings
    takes_group_size: ClassVar[bool] = False

    @property
    def schedule(self) -> Schedule:
        # Bits of attention in a fixed order depend on the span in which a pass begins (docs/exact.md).
        return Schedule(None, PASS_SPAN)

    @property
    def capacity(self) -> int:
        return self.layers[0].keys.shape[2]

    @classmethod
    def schedule_of(cls, group_size: int, settings: FullSettings) -> Schedule:
        return Schedule(None, PASS_SPAN)

    @classmethod
    def make(cls, model, *, group_size, scheme, settings, batch, capacity, num_speculative_tokens, dtype):
        rows = capacity + num_speculative_tokens + 1
        shape = dict(batch=batch, kv_heads=model.num_kv_heads, rows=rows, head_dim=model.head_dim, dtype=dtype)
        return cls(tuple(FullLayer.zeros(**shape) for _ in range(model.num_layers)), no_tokens(batch))

    def reads(self, view, tokens):
        return Reads(0, 0, tokens)

    def bytes_of_reads(self, layer, reads):
        return bytes_of_tokens(self.layers[layer], reads.full, self.capacity), 0

    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"]) -> FullLayer:
        old = self.layers[layer]
        return FullLayer(self._put(old.keys, keys), self._put(old.values, values))

    def _put(self, held: Float[Array, "B K C H"], new: Float[Array, "B K S H"]) -> Float[Array, "B K C H"]:
        """The held array with its first tokens overwritten by the new ones, as far as there is room."""
        return lax.dynamic_update_slice_in_dim(held, new[:, :, : held.shape[2]], 0, axis=2)

    def tokens(self, layer: int, positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None) -> KeysValues:
        return self.layers[layer].read(positions, batch_rows)

    def attend(self, layer, qkv, cos, sin, *, view):
        return append_and_attend(qkv, cos, sin, self.layers[layer], self.lengths, FULL_PRECISION)
