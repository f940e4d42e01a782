"""The KIVI cache: all but the most recent tokens in 2 bits, or in 1. It is lossy: the model's output differs from that with a full cache.

Source: KIVI (arXiv 2402.02750); with 1 bit by SpeCache's equation 3 (arXiv 2503.16163), if not asked otherwise.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.append_attend import append_and_attend
from pallas_kernels.formats.kv_cache import FullLayer, Lengths, moved_up, rows_from
from pallas_kernels.formats.low_bits import BITS, RULES, LowBits, key_parameter_dtype
from pallas_kernels.formats.rounding import accumulation_dtype, parameter_dtype
from pallas_kernels.formats.token_codes import TokenCodesLayer
from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.cache import MAX_TOKENS, Cache, KeysValues, Reads, at_most_once, bytes_of_tokens, no_tokens
from qspec_jax.caches.schedule import Schedule
from qspec_jax.errors import InputError
from qspec_jax.models.prompts import by_heads
from qspec_jax.settings_text import check_settings, setting


@dataclasses.dataclass(frozen=True)
class KiviSettings:
    """`residual` to 2 `residual` - 1 of the most recent tokens are in full precision; a flush quantizes `residual` tokens at once."""

    bits: int = setting(2, "Bits of a code.", choices=BITS)
    residual: int = setting(
        128,
        "The minimum number of recent tokens in full precision, a multiple of the group size.",
        minimum=1,
        maximum=MAX_TOKENS,
    )
    rule: str = setting(
        "centred",
        "Where the two levels of 1-bit codes are: at a group's minimum and maximum (extremes, as in KIVI), or a quarter of the range "
        "inside them (centred, as in SpeCache).",
        choices=RULES,
    )

    name: ClassVar[str] = "kivi"

    def __post_init__(self):
        check_settings(f"cache {self.name}:", self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KiviCache(Cache):
    """Keys with a scale for each channel and group of tokens, values with one for each token and group of as many channels. A group here is
    a quantization group, 32 tokens or channels by default; a flush quantizes `residual` tokens, which are one or more groups. The
    cache is read in one way, whatever the view."""

    layers: tuple[TokenCodesLayer, ...]
    lengths: Lengths
    settings: KiviSettings = dataclasses.field(metadata={"static": True})

    Settings: ClassVar[type] = KiviSettings
    default_group: ClassVar[int] = 32

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.settings.residual)

    @property
    def capacity(self) -> int:
        return self.layers[0].keys.tokens + self.layers[0].buffer.keys.shape[2]

    @classmethod
    def schedule_of(cls, group_size: int, settings: KiviSettings) -> Schedule:
        if settings.residual % group_size:
            raise InputError(f"cache {settings.name}: residual {settings.residual} should be a multiple of the group size, {group_size}")
        return Schedule(settings.residual)

    @classmethod
    def make(cls, model, *, group_size, scheme, settings, batch, capacity, num_speculative_tokens, dtype):
        """See `RegisteredCache.make`; group_size is of tokens for keys, of channels for values. Raises InputError for a group size that
        does not divide both residual and head_dim, and for a head_dim whose codes do not fill whole bytes: it should be a multiple of
        8 / bits."""
        schedule, (B, K, H) = cls.schedule_of(group_size, settings), (batch, model.num_kv_heads, model.head_dim)
        if H % group_size:
            raise InputError(f"cache {settings.name}: group size {group_size} should divide the model's head_dim, {H}")
        if model.head_dim % (in_a_byte := 8 // settings.bits):
            raise InputError(
                f"cache {settings.name}: bits {settings.bits} need a head_dim that is a multiple of {in_a_byte}, not {model.head_dim}"
            )
        room = schedule.max_flushes(capacity) * settings.residual
        empty = functools.partial(LowBits.zeros, B, K, room, H, bits=settings.bits)

        def keys():
            return empty(key_parameter_dtype(dtype), tokens=group_size, channels=1)

        def values():
            return empty(parameter_dtype(dtype), tokens=1, channels=group_size)

        def buffer():
            return FullLayer.zeros(B, K, schedule.buffer_rows(num_speculative_tokens), H, dtype)

        layers = (TokenCodesLayer(keys(), values(), buffer()) for _ in range(model.num_layers))
        return cls(tuple(layers), no_tokens(batch), settings)

    def reads(self, view, tokens):
        quantized = int(self.schedule.quantized_length(tokens))
        return Reads(1, quantized, tokens - quantized)

    def bytes_of_reads(self, layer, reads):
        held = self.layers[layer]
        coded = bytes_of_tokens((held.keys, held.values), reads.quantized, held.keys.tokens)
        return coded + bytes_of_tokens(held.buffer, reads.full, held.buffer.keys.shape[2]), 0

    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"]) -> TokenCodesLayer:
        old, start = self.layers[layer], self.schedule.quantized_length(n)
        rows = old.buffer.keys.shape[2]
        buffer = FullLayer(rows_from(keys, start, rows), rows_from(values, start, rows))
        whole = min(old.keys.tokens, self.schedule.max_flushes(keys.shape[2]) * self.settings.residual)
        if whole == 0:
            return old.with_buffer(buffer)

        def write(held, new):
            return lax.dynamic_update_slice_in_dim(held, new, 0, axis=2)

        def encoded(held, x):
            return by_heads(lambda x: self._encoded(held, x[:, :, :whole]), x)

        def put(held, x):
            return jax.tree.map(write, held, encoded(held, x))

        return TokenCodesLayer(put(old.keys, keys), put(old.values, values), buffer)

    def _encoded(self, held: LowBits, x: Float[Array, "B K S H"]) -> LowBits:
        """x in the format of what is held."""
        grouped = {"tokens": held.group_tokens, "channels": x.shape[3] // held.scale.shape[3]}
        return LowBits.of(x, bits=self.settings.bits, **grouped, rule=self.settings.rule, dtype=held.scale.dtype)

    def tokens(self, layer: int, positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None) -> KeysValues:
        rows = jnp.arange(self.lengths.quantized.shape[0]) if batch_rows is None else batch_rows
        held, quantized = self.layers[layer], self.lengths.quantized[rows][:, None, None]
        recent = held.buffer.read(positions - quantized, batch_rows)
        if held.keys.tokens == 0:
            return recent
        wide = accumulation_dtype(held.buffer.keys.dtype)
        old = (codes.read(positions, rows, wide) for codes in (held.keys, held.values))

        def choose(old, recent):
            return jnp.where((positions < quantized)[..., None], old.astype(recent.dtype), recent)

        return tuple(map(choose, old, recent))

    def attend(self, layer, qkv, cos, sin, *, view):
        return append_and_attend(qkv, cos, sin, self.layers[layer], self.lengths, BOTH_PLANES)

    def flushed_layers(self, due: Bool[Array, "B"]) -> tuple[TokenCodesLayer, ...]:
        size = self.settings.residual
        if self.layers[0].keys.tokens == 0:
            return self.layers

        def flushed(layer: TokenCodesLayer) -> TokenCodesLayer:
            buffer = layer.buffer
            keys, values = (
                _written(held, self._encoded(held, x[:, :, :size]), self.lengths.quantized, due)
                for held, x in ((layer.keys, buffer.keys), (layer.values, buffer.values))
            )
            return TokenCodesLayer(keys, values, FullLayer(moved_up(buffer.keys, size, due), moved_up(buffer.values, size, due)))

        return at_most_once(due.any(), lambda layers: tuple(map(flushed, layers)), self.layers)


def _written(held: LowBits, new: LowBits, at: Int[Array, "B"], due: Array) -> LowBits:
    """What is held with new tokens from at[b] on, in the rows that are due."""

    def write(held: Array, part: Array) -> Array:
        first = jnp.where(due, at * part.shape[2] // new.tokens, held.shape[2])  # beyond the end, so that nothing is written
        rows = first[:, None] + jnp.arange(part.shape[2])
        return jax.vmap(lambda held, part, rows: held.at[:, rows].set(part, mode="drop"))(held, part, rows)

    return jax.tree.map(write, held, new)
