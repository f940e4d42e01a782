"""The SpeCache cache, which is lossy: every token is kept in 1 or 2 bits, and those that a pass is expected to attend to most are read in
full precision.

A pass reads codes, except for k tokens that the pass before has chosen, whose full-precision keys and values it reads instead: those that
the last token of that pass attended to most, for each KV head its own. With `fetch=now` a pass chooses for itself, and computes attention
twice. With `fetch=checked` it does so where a row's guess was wrong: for that row alone, but the others wait.

Source: SpeCache (arXiv 2503.16163), sections 3.3 and 3.4. There the last token of a pass is a guess at the next one
(`qspec_jax.drafts.specache`), and the whole cache in full precision is in host memory; here that is so with `store=host`.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.dispatch import platform
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.pytree import pytree
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer
from pallas_kernels.formats.views import BOTH_PLANES
from pallas_kernels.gather import gather_tokens
from pallas_kernels.replaced_attention import attend_and_choose
from pallas_kernels.rope_append import rotate_and_append
from qspec_jax.caches.cache import Cache, Gives, check_tokens, no_tokens, where_rows
from qspec_jax.caches.host_memory import in_host, to_host, with_rows, written
from qspec_jax.caches.kivi import KiviCache, KiviSettings
from qspec_jax.caches.schedule import Schedule
from qspec_jax.errors import InputError

FETCH = ("ahead", "checked", "now")
STORE = ("device", "host")


@dataclasses.dataclass(frozen=True)
class SpeCacheSettings(KiviSettings):
    """bits, residual, rule: see `KiviSettings`. k: how many tokens each KV head reads in full precision besides the recent ones.
    fetch: "ahead" reads what the pass before has chosen, by a guess at the next token; "checked" does so in rows whose guess was right, and
    in the others reads what the pass itself chooses; "now" always reads what the pass itself chooses. store: where the whole cache in full
    precision is, "host" or "device" memory."""

    residual: int = 64
    k: int = 64
    fetch: str = "ahead"
    store: str = "device"

    name: ClassVar[str] = "specache"

    def __post_init__(self):
        super().__post_init__()
        check_tokens(self.name, "k", self.k)
        if self.fetch not in FETCH:
            raise InputError(f"cache {self.name}: fetch {self.fetch!r} should be {', '.join(FETCH[:-1])} or {FETCH[-1]}")
        if self.store not in STORE:
            raise InputError(f"cache {self.name}: store {self.store!r} should be {' or '.join(STORE)}")

    @property
    def in_host_memory(self) -> bool:
        return self.store == "host"


@pytree()
class SpeCacheLayer:
    """codes: of all quantized tokens, and the buffer. store: the same tokens in full precision, of each its key and its value, and room for
    those of one flush more. fetched: those that the next pass reads from there."""

    codes: TokenCodesLayer
    store: Float[Array, "B K S 2 H"]
    fetched: Replaced


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeCache(Cache):
    """Codes of everything, and some of it in full precision. There is one way to read it, whatever the view.

    missed: whether what is fetched was chosen by a wrong guess at the token that the next pass begins with. Whoever makes the guess, the
    draft or the loop that scores texts, sets it; `fetch=checked` alone looks at it.
    """

    layers: tuple[SpeCacheLayer, ...]
    lengths: Lengths
    missed: Bool[Array, "B"]
    settings: SpeCacheSettings = dataclasses.field(metadata={"static": True})

    Settings: ClassVar[type] = SpeCacheSettings
    default_group: ClassVar[int] = KiviCache.default_group
    gives: ClassVar[frozenset[Gives]] = frozenset({Gives.TOKENS, Gives.GUESSES})
    chooses_by_head: ClassVar[bool] = True

    @property
    def _codes(self) -> KiviCache:
        """The codes, with which the buffer goes, as a cache of their own."""
        return KiviCache(tuple(layer.codes for layer in self.layers), self.lengths, self.settings)

    @property
    def schedule(self):
        return self._codes.schedule

    @property
    def capacity(self):
        return self._codes.capacity

    @classmethod
    def schedule_of(cls, group_size, settings):
        return Schedule(settings.residual)

    @classmethod
    def make(cls, model, *, dtype, settings, batch, **sizes):
        """See `RegisteredCache.make`. Raises InputError as `KiviCache.make` does."""
        codes = KiviCache.make(model, dtype=dtype, settings=settings, batch=batch, **sizes)
        shape = batch, model.num_kv_heads
        layers = []
        for layer in codes.layers:
            k = min(settings.k, layer.keys.tokens)
            none = Replaced(jnp.full((*shape, k), -1, jnp.int32), jnp.zeros((*shape, k, 2, model.head_dim), dtype))
            room = settings.residual if layer.keys.tokens else 0
            store = jnp.zeros((*shape, layer.keys.tokens + room, 2, model.head_dim), dtype)
            layers.append(SpeCacheLayer(layer, to_host(store) if settings.store == "host" else store, none))
        return cls(tuple(layers), no_tokens(batch), jnp.zeros(batch, bool), settings)

    def bytes_of_pass(self, tokens):
        fetched = [layer.fetched.keys_values for layer in self.layers]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in fetched) // self.lengths.quantized.shape[0]
        coded, _ = self._codes.bytes_of_pass(tokens)
        # Those that the pass reads, and those that it fetches, or fewer: what it has read itself is not fetched again. Where it chooses for
        # itself it reads the codes twice, which is not counted.
        return (coded + size, size) if in_host(self.layers[0].store) else (coded + 2 * size, 0)

    def fill(self, layer, keys, values, n):
        old = self.layers[layer]
        tokens = _side_by_side(keys, values)[:, :, : old.store.shape[2]]
        store = lax.dynamic_update_slice_in_dim(old.store, to_host(tokens) if in_host(old.store) else tokens, 0, axis=2)
        return SpeCacheLayer(self._codes.fill(layer, keys, values, n), store, old.fetched)

    def with_rows(self, rows, slots, pages=None):
        return jax.tree.map(lambda held, new: with_rows(held, new, slots), self, rows)

    def tokens(self, layer, positions, batch_rows=None):
        return self._codes.tokens(layer, positions, batch_rows)

    def attend(self, layer, qkv, cos, sin, *, view, observe=False):
        if observe:
            raise ValueError("a SpeCache cache cannot be observed: it does not give the attention mass of each group")
        old = self.layers[layer]
        q, buffer = rotate_and_append(qkv, cos, sin, old.codes.buffer, self.lengths.buffered)
        codes = dataclasses.replace(old.codes, buffer=buffer)
        lengths = Lengths(self.lengths.quantized, self.lengths.buffered + q.shape[1])
        fetched = old.fetched
        if not self.layers[0].codes.keys.tokens:
            return decode_attention(q, codes, lengths, BOTH_PLANES), SpeCacheLayer(codes, old.store, fetched), None
        if self.settings.fetch == "now":
            fetched = self._chosen_by_first(q, codes, old, jnp.ones_like(self.missed))
        if self.settings.fetch == "checked":
            # A loop of at most one trip: lax.cond would copy what it passes through, see `SpeCacheDraft.propose`.
            again = lambda carry: (self._chosen_by_first(q, codes, old, self.missed), jnp.array(False))
            fetched, _ = lax.while_loop(lambda carry: carry[1], again, (fetched, self.missed.any()))
        attended, positions = attend_and_choose(q, codes, lengths, fetched, fetched.positions.shape[2])
        if self.settings.fetch != "now":
            fetched = self._fetched(old.store, positions, fetched)
        return attended, SpeCacheLayer(codes, old.store, fetched), None

    @property
    def compiler_options(self):
        # Nothing that a layer fetches for the next pass is needed before. The GPU goes on with the following layers meanwhile, if XLA lets
        # its graph start whatever does not wait for results.
        overlapped = self.settings.in_host_memory and platform() == "gpu"
        return {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"} if overlapped else {}

    def advance(self, layers, tokens):
        if not self.settings.in_host_memory:
            return super().advance(layers, tokens)
        # Until all layers have fetched, XLA puts nothing else where one of them writes: the kernels that come later would have to wait.
        fetched = lax.optimization_barrier(tuple(layer.fetched for layer in layers))
        return super().advance(tuple(dataclasses.replace(layer, fetched=new) for layer, new in zip(layers, fetched)), tokens)

    def _chosen_by_first(self, q: Float[Array, "B T N H"], codes: TokenCodesLayer, old: SpeCacheLayer, rows: Bool[Array, "B"]) -> Replaced:
        """What the first token of a pass, whose keys are appended to `codes`, attends to most over codes alone; in other rows than these
        what was fetched before."""
        nothing = dataclasses.replace(old.fetched, positions=jnp.full_like(old.fetched.positions, -1))
        lengths = Lengths(self.lengths.quantized, self.lengths.buffered + 1)
        _, positions = attend_and_choose(q[:, :1], codes, lengths, nothing, old.fetched.positions.shape[2])
        # Other rows get no positions, and whatever token: it is not read.
        new = self._fetched(old.store, jnp.where(rows[:, None, None], positions, -1), old.fetched)
        return where_rows(rows, new, old.fetched)

    def _fetched(self, store: Float[Array, "B K S 2 H"], positions: Int[Array, "B K k"], before: Replaced) -> Replaced:
        """The tokens at these positions, from the store. A position of -1 gets some token. before: what was fetched, much of which is often
        chosen again, and is then not fetched again from host memory."""
        return Replaced(positions, gather_tokens(store, positions, before if in_host(store) else None))

    def flushed_layers(self, due):
        size = self.settings.residual
        if self.layers[0].store.shape[2] == 0:
            return self.layers

        def stored(layer: SpeCacheLayer, store: Array) -> Array:
            # Also of rows that are not due: what is written behind a row's last quantized token is not read until it is written again.
            new, at = _side_by_side(layer.codes.buffer.keys[:, :, :size], layer.codes.buffer.values[:, :, :size]), self.lengths.quantized
            if in_host(store):
                return written(store, new, at)
            return jax.vmap(lambda held, new, at: lax.dynamic_update_slice_in_dim(held, new, at, axis=1))(store, new, at)

        # Behind what the round has fetched, or XLA would write first and copy the store for it.
        stores, fetched = lax.optimization_barrier(tuple(zip(*((layer.store, layer.fetched) for layer in self.layers))))
        once = lambda carry: (tuple(map(stored, self.layers, carry[0])), jnp.array(False))
        stores, _ = lax.while_loop(lambda carry: carry[1], once, (stores, due.any()))
        return tuple(map(SpeCacheLayer, self._codes.flushed_layers(due), stores, fetched))


def _side_by_side(keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"]) -> Float[Array, "B K S 2 H"]:
    return jnp.stack([keys, values], 3)
