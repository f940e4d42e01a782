"""Caches that the stored format cannot hold: groups of keys and values along other axes, and other ways to split a code.

Keys and values are quantized and dequantized group by group, by the schedule of the hierarchical cache and with its precision of scales and
zeros. The dequantized values are kept in at least float32, once as a draft reads them and once as the target does. This serves to compare
quantizers (QuantSpec, arXiv 2502.10424, table 5), not to save memory.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.pytree import pytree
from pallas_kernels.formats.quantization import dequantize, quantize
from pallas_kernels.formats.rounding import accumulation_dtype, parameter_dtype
from pallas_kernels.formats.views import BOTH_PLANES, FULL_PRECISION, UPPER_PLANE
from pallas_kernels.rope_append import rotate_and_append
from qspec_jax.caches.cache import Cache, Reads, bytes_of_tokens, no_tokens
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.caches.sliding import beside_rings
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama

AXES = {"channel": -2, "token": -1}
TRUNCATION = "truncation"


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How keys and values become codes; the defaults are those of the stored format.

    Attributes:
        keys: "channel" (a scale for each channel and group of G tokens) or "token" (a scale for each token, over the channels of its head).
        values: as `keys`.
        scheme: a key of `formats.quantization.SCHEMES`, or "truncation": codes of int8_first, of which a draft reads the upper 4 bits
            rounded down, as in Any-Precision LLM (arXiv 2402.10517).

    Raises:
        InputError: for other names.
    """

    keys: str = "channel"
    values: str = "token"
    scheme: str = CacheConfig.scheme

    def __post_init__(self):
        for name in (self.keys, self.values):
            if name not in AXES:
                raise InputError(f"axis {name!r} should be channel or token")
        if self.scheme != TRUNCATION:
            CacheConfig(scheme=self.scheme)

    def views(
        self, keys: Float[Array, "B K C G H"], values: Float[Array, "B K C G H"], parameters: jnp.dtype
    ) -> tuple[FullLayer, FullLayer]:
        """Whole groups as a draft and as the target read them, in at least float32, with scales and zeros of dtype `parameters`."""
        draft, target = zip(self._views(keys, self.keys, parameters), self._views(values, self.values, parameters))
        return FullLayer(*draft), FullLayer(*target)

    def _views(self, x: Array, axis: str, parameters: jnp.dtype) -> tuple[Array, Array]:
        dtype = accumulation_dtype(x.dtype)
        scheme = CacheConfig.scheme if self.scheme == TRUNCATION else self.scheme
        upper, lower, scale, zero = quantize(x, AXES[axis], scheme=scheme, dtype=parameters)
        draft = dequantize(upper, None, scale, zero, dtype)
        if self.scheme == TRUNCATION:
            # The codes of int8_first are split at multiples of 16, as codes from 0 are; its zero is 8 steps higher.
            draft = draft - scale.astype(dtype) / 2
        return draft, dequantize(upper, lower, scale, zero, dtype)


@pytree("group_size")
class EmulatedLayer:
    """All tokens of a layer [B, K, S, H], token t in row t, in at least float32; quantized ones as they are read."""

    draft: FullLayer
    target: FullLayer
    group_size: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EmulatedCache(Cache):
    """A cache with the schedule of the hierarchical one and another quantizer; `parameters` is the dtype of scales and zeros."""

    layers: tuple[EmulatedLayer, ...]
    lengths: Lengths
    quantizer: Quantizer = dataclasses.field(metadata={"static": True})
    parameters: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def schedule(self):
        return Schedule(self.layers[0].group_size)

    @property
    def capacity(self):
        return self.layers[0].target.keys.shape[2]

    def reads(self, view, tokens):
        return Reads(view.planes, 0, tokens)

    def bytes_of_reads(self, layer, reads):
        held = self.layers[layer]
        return bytes_of_tokens(held.draft if reads.planes == 1 else held.target, reads.full, self.capacity), 0

    def attend(self, layer, qkv, cos, sin, *, view):
        if view not in (UPPER_PLANE, BOTH_PLANES):
            raise ValueError("an emulated cache is read as a draft or as the target reads it")
        old, total = self.layers[layer], self.lengths.total
        q, draft = rotate_and_append(qkv, cos, sin, old.draft, total)
        _, target = rotate_and_append(qkv, cos, sin, old.target, total)
        lengths = Lengths(jnp.zeros_like(total), total + q.shape[1])
        attended, _ = decode_attention(q, draft if view == UPPER_PLANE else target, lengths, FULL_PRECISION)
        return attended, EmulatedLayer(draft, target, old.group_size), None

    def fill(self, layer, keys, values, n):
        """The layer with the prompt's tokens, whose whole groups are quantized."""
        old, G = self.layers[layer], self.layers[layer].group_size
        tokens = keys.shape[2] // G * G
        views = self.quantizer.views(*(in_groups(x, G) for x in (keys, values)), self.parameters)
        coarse = (jnp.arange(tokens) < self.schedule.quantized_length(n)[:, None])[:, None, :, None]

        def write(old: Array, raw: Array, view: Array) -> Array:
            raw = raw.astype(old.dtype)
            mixed = jnp.where(coarse, view.reshape(*raw.shape[:2], tokens, -1), raw[:, :, :tokens])
            return lax.dynamic_update_slice_in_dim(old, jnp.concatenate([mixed, raw[:, :, tokens:]], 2), 0, axis=2)

        raw = FullLayer(keys, values)
        return EmulatedLayer(*(jax.tree.map(write, kept, raw, view) for kept, view in zip((old.draft, old.target), views)), G)

    def tokens(self, layer, positions, batch_rows=None):
        return self.layers[layer].target.read(positions, batch_rows)

    def flushed_layers(self, due):
        start = self.lengths.quantized
        put = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis=1))

        def once(layer: EmulatedLayer) -> EmulatedLayer:
            # Before the flush both views have these tokens in full precision.
            G = layer.group_size
            raw = jax.tree.map(lambda x: jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, G, axis=1))(x, start), layer.target)
            views = self.quantizer.views(raw.keys[:, :, None], raw.values[:, :, None], self.parameters)

            def write(old: Array, raw: Array, view: Array) -> Array:
                return put(old, jnp.where(due[:, None, None, None], view[:, :, 0], raw), start)

            return EmulatedLayer(*(jax.tree.map(write, old, raw, view) for old, view in zip((layer.draft, layer.target), views)), G)

        return tuple(map(once, self.layers))


@dataclasses.dataclass(frozen=True)
class EmulatedConfig:
    """Which emulated cache to make, as a `CacheConfig` says it of others; for group_size see there."""

    quantizer: Quantizer
    group_size: int | None = None
    in_host_memory: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    takes_drafts: ClassVar[bool] = True
    guesses: ClassVar[bool] = False

    def check_division(self, model: Llama) -> None:
        """Every KV head is quantized by itself, so any division will do."""

    def empty(self, model: LlamaConfig, *, batch: int, capacity: int, num_speculative_tokens: int, dtype: jnp.dtype) -> Cache:
        """A cache without tokens; the dtype of scales and zeros follows from the model's, `dtype`."""
        choice = CacheConfig(group_size=self.group_size)
        G = choice.group_size_for(model.head_dim)

        def make(model: LlamaConfig) -> EmulatedCache:
            rows = max(G, capacity + num_speculative_tokens + 1)
            shape = dict(batch=batch, kv_heads=model.num_kv_heads, rows=rows, head_dim=model.head_dim, dtype=accumulation_dtype(dtype))
            layers = tuple(EmulatedLayer(FullLayer.zeros(**shape), FullLayer.zeros(**shape), G) for _ in range(model.num_layers))
            return EmulatedCache(layers, no_tokens(batch), self.quantizer, parameter_dtype(dtype))

        if not model.windowed_layers:
            return make(model)
        sizes = dict(batch=batch, capacity=capacity, num_speculative_tokens=num_speculative_tokens, dtype=dtype)
        return beside_rings(make, model, choice.schedule_for(model.head_dim), **sizes)


def in_groups(x: Float[Array, "B K S H"], group_size: int) -> Float[Array, "B K C G H"]:
    """The whole groups of S tokens."""
    groups = x.shape[2] // group_size
    return x[:, :, : groups * group_size].reshape(*x.shape[:2], groups, group_size, x.shape[3])
