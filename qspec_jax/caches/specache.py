"""The SpeCache cache, which is lossy: all but the most recent tokens are read in 1 or 2 bits, except for those that a pass is expected to
attend to most, which it reads in full precision.

The most recent tokens are in a full-precision buffer, as in the KIVI cache. All older ones are there twice: as codes of 1 or 2 bits, and in
full precision in what is called the store. A pass reads the codes, except for k tokens of each KV head, whose keys and values in full
precision it reads instead. Where these k come from is the setting `fetch`:

* ahead: the pass before has chosen them, and copied them from the store: the tokens that its last token attended to most.
* now: the pass chooses them itself, those that its first token attends to most. It computes attention twice for that: over codes alone, to
  choose, and again with the tokens in full precision.
* checked: as ahead, but where the guess at the first token of the pass was wrong in any row, the pass chooses as with now. All rows of the
  batch then compute attention twice, and the rows whose guess was right ignore the choice.

Source: SpeCache (arXiv 2503.16163), sections 3.3 and 3.4. There the last token of a pass is a guess at the next one, as it is here
(`qspec_jax.drafts.guess`). There the store is in host memory, as it is here with `host=store`.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import decode_attention
from pallas_kernels.dispatch import platform
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.pytree import pytree
from pallas_kernels.formats.token_codes import FullTokens, TokenCodesLayer
from pallas_kernels.formats.views import BOTH_PLANES
from pallas_kernels.gather import gather_tokens
from pallas_kernels.replaced_attention import attend_and_choose
from pallas_kernels.rope_append import rotate_and_append
from qspec_jax.caches.cache import MAX_TOKENS, Cache, KeysValues, at_most_once, no_tokens, where_rows
from qspec_jax.caches.host_memory import NONE, in_host, to_host, with_rows, written
from qspec_jax.caches.kivi import KiviCache, KiviSettings
from qspec_jax.caches.schedule import Schedule
from qspec_jax.settings_text import setting

STORE = "store"  # the part of the cache that may be in host memory


@dataclasses.dataclass(frozen=True)
class SpeCacheSettings(KiviSettings):
    """The store is all quantized tokens in full precision. On the device the cache takes more memory than a full-precision one, by the
    codes and by what is fetched: it saves bytes that a pass reads, not memory."""

    residual: int = setting(
        64, "The minimum number of recent tokens in full precision, a multiple of the group size.", minimum=1, maximum=MAX_TOKENS
    )
    k: int = setting(64, "How many tokens each KV head reads in full precision besides the recent ones.", minimum=1, maximum=MAX_TOKENS)
    fetch: str = setting(
        "ahead",
        "Which pass chooses these tokens: the pass before by its guess at the next token (ahead), the pass itself where the guess was "
        "wrong (checked), or always the pass itself (now).",
        choices=("ahead", "checked", "now"),
    )
    host: str = setting(NONE, "The part of the cache in host memory: the tokens in full precision.", choices=(NONE, STORE))

    name: ClassVar[str] = "specache"

    @property
    def guesses(self) -> bool:
        """Whether every pass is also fed the model's guess at the next token, which chooses what the next pass reads."""
        return self.fetch != "now"

    @property
    def in_host_memory(self) -> bool:
        """Whether the store is in host memory. Everything else is on the device."""
        return self.host == STORE


@pytree()
class SpeCacheLayer:
    """codes: all quantized tokens in 1 or 2 bits, and the full-precision buffer of the tokens after them.

    store: the quantized tokens in full precision, the key and then the value of each. It has room for one flush more than the codes
    (`residual` tokens), since a flush also writes in rows that are not due. In the memory that the setting `host` says.

    fetched: the k tokens of each KV head that were chosen last, for the next pass to read in full precision: a copy of them, always on the
    device, and their positions.
    """

    codes: TokenCodesLayer
    store: Float[Array, "B K S 2 H"]
    fetched: FullTokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeCache(Cache):
    """See the module. It is read in one way, whatever the view.

    missed: for each row, whether the fetched tokens were chosen by a wrong guess at the token that the next pass begins with. The code that
    makes the guess sets it (`qspec_jax.drafts.guess`, `qspec_jax.evaluate.scoring`); only `fetch=checked` reads it.

    chooses: the rows for which the next pass chooses tokens. A row that has ended keeps its own, by which a state goes on.
    """

    layers: tuple[SpeCacheLayer, ...]
    lengths: Lengths
    missed: Bool[Array, "B"]
    chooses: Bool[Array, "B"]
    settings: SpeCacheSettings = dataclasses.field(metadata={"static": True})

    Settings: ClassVar[type] = SpeCacheSettings
    default_group: ClassVar[int] = KiviCache.default_group
    takes_drafts: ClassVar[bool] = False  # a draft's tokens would choose what a pass reads
    chooses_by_head: ClassVar[bool] = True

    @property
    def _codes(self) -> KiviCache:
        """The codes and the buffer, as a cache of their own."""
        return KiviCache(tuple(layer.codes for layer in self.layers), self.lengths, self.settings)

    @property
    def schedule(self) -> Schedule:
        return self._codes.schedule

    @property
    def capacity(self) -> int:
        return self._codes.capacity

    @classmethod
    def schedule_of(cls, group_size: int, settings: SpeCacheSettings) -> Schedule:
        return KiviCache.schedule_of(group_size, settings)

    @classmethod
    def make(cls, model, *, dtype, settings, batch, **sizes):
        """See `RegisteredCache.make`. Raises InputError as `KiviCache.make` does."""
        codes = KiviCache.make(model, dtype=dtype, settings=settings, batch=batch, **sizes)
        shape = batch, model.num_kv_heads
        layers = []
        for layer in codes.layers:
            k = min(settings.k, layer.keys.tokens)
            none = FullTokens(jnp.full((*shape, k), -1, jnp.int32), jnp.zeros((*shape, k, 2, model.head_dim), dtype))
            room = settings.residual if layer.keys.tokens else 0
            store = jnp.zeros((*shape, layer.keys.tokens + room, 2, model.head_dim), dtype)
            layers.append(SpeCacheLayer(layer, to_host(store) if settings.in_host_memory else store, none))
        return cls(tuple(layers), no_tokens(batch), jnp.zeros(batch, bool), jnp.ones(batch, bool), settings)

    def reads(self, view, tokens):
        reads = self._codes.reads(view, tokens)
        return dataclasses.replace(reads, full=reads.full + self.layers[0].fetched.positions.shape[2])

    def bytes_of_reads(self, layer, reads):
        # What a pass fetches for the next one. With host=store it may fetch fewer tokens, as the GPU kernel does not read from host memory
        # what was fetched before. Where a pass chooses for itself (fetch=now, and fetch=checked after a wrong guess) it also reads the
        # codes a second time, which is not counted.
        held = self.layers[layer].fetched.keys_values
        fetched = held.size * held.dtype.itemsize // held.shape[0]
        read, _ = self._codes.bytes_of_reads(layer, reads)
        return (read, fetched) if self.settings.in_host_memory else (read + fetched, 0)

    @property
    def num_host_bytes(self) -> int:
        return sum(layer.store.size * layer.store.dtype.itemsize for layer in self.layers) if self.settings.in_host_memory else 0

    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"]) -> SpeCacheLayer:
        old = self.layers[layer]
        tokens = _stacked(keys, values)[:, :, : old.store.shape[2]]
        store = lax.dynamic_update_slice_in_dim(old.store, to_host(tokens) if in_host(old.store) else tokens, 0, axis=2)
        return SpeCacheLayer(self._codes.fill(layer, keys, values, n), store, old.fetched)

    def with_rows(self, rows: Self, slots: Int[Array, "k"], pages: Int[Array, "k C"] | None = None) -> Self:
        return jax.tree.map(lambda held, new: with_rows(held, new, slots), self, rows)

    def guided(self, *, chooses: Bool[Array, "B"] | None = None, missed: Bool[Array, "B"] | None = None) -> Self:
        """The cache with these values of its attributes; None: as it has them."""
        return dataclasses.replace(
            self, chooses=self.chooses if chooses is None else chooses, missed=self.missed if missed is None else missed
        )

    def with_fetched(self, rows: Bool[Array, "B"], before: Self) -> Self:
        """The cache with the tokens that it has fetched in these rows; in the others those of the cache as it was before."""
        layers = (
            dataclasses.replace(new, fetched=where_rows(rows, new.fetched, old.fetched)) for new, old in zip(self.layers, before.layers)
        )
        return dataclasses.replace(self, layers=tuple(layers))

    def tokens(self, layer: int, positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None) -> KeysValues:
        return self._codes.tokens(layer, positions, batch_rows)

    def attend(self, layer, qkv, cos, sin, *, view):
        old = self.layers[layer]
        q, buffer = rotate_and_append(qkv, cos, sin, old.codes.buffer, self.lengths.buffered)
        codes = old.codes.with_buffer(buffer)
        lengths = Lengths(self.lengths.quantized, self.lengths.buffered + q.shape[1])
        fetched = old.fetched
        if not self.layers[0].codes.keys.tokens:
            return decode_attention(q, codes, lengths, BOTH_PLANES)[0], SpeCacheLayer(codes, old.store, fetched), None
        if self.settings.fetch == "now":
            fetched = self._chosen_by_first(q, codes, old, jnp.ones_like(self.missed))
        if self.settings.fetch == "checked":
            fetched = at_most_once(self.missed.any(), lambda _: self._chosen_by_first(q, codes, old, self.missed), fetched)
        attended, positions = attend_and_choose(q, codes, lengths, fetched, fetched.positions.shape[2])
        if self.settings.fetch != "now":
            positions = where_rows(self.chooses, positions, old.fetched.positions)
            fetched = self._fetched(old.store, positions, fetched)
        return attended, SpeCacheLayer(codes, old.store, fetched), None

    @property
    def compiler_options(self) -> dict[str, str]:
        # With fetch=ahead and fetch=checked, what a layer fetches after its attention is for the next pass: nothing in this pass waits for
        # it. With this option XLA builds a CUDA graph whose kernels wait only for those that touch the same buffers, so that the GPU
        # computes the following layers while it fetches. With fetch=now, where a layer waits for what it fetches, the option is set too.
        overlapped = self.settings.in_host_memory and platform() == "gpu"
        return {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"} if overlapped else {}

    def advance(self, layers: tuple[Any, ...], tokens: int) -> Self:
        if not self.settings.in_host_memory:
            return super().advance(layers, tokens)
        # For fetching beside the computing (see `compiler_options`). XLA reuses memory: without this barrier it may put a later layer's
        # activations where an earlier layer's fetched tokens are until they are copied into the cache, and the kernels that write those
        # activations would wait for the fetching. The barrier keeps what each layer fetched in its place until all layers have fetched.
        fetched = lax.optimization_barrier(tuple(layer.fetched for layer in layers))
        return super().advance(tuple(dataclasses.replace(layer, fetched=new) for layer, new in zip(layers, fetched)), tokens)

    def _chosen_by_first(
        self, q: Float[Array, "B T N H"], codes: TokenCodesLayer, old: SpeCacheLayer, rows: Bool[Array, "B"]
    ) -> FullTokens:
        """In these rows, the k tokens that the first token of a pass attends to most when it reads codes alone, fetched from the store; in
        the others, what was fetched before. All rows compute the attention. The pass's tokens are in the buffer of `codes` already."""
        nothing = dataclasses.replace(old.fetched, positions=jnp.full_like(old.fetched.positions, -1))
        lengths = Lengths(self.lengths.quantized, self.lengths.buffered + 1)
        _, positions = attend_and_choose(q[:, :1], codes, lengths, nothing, old.fetched.positions.shape[2])
        # The other rows ask for position -1, for which some token is fetched that nothing reads.
        new = self._fetched(old.store, jnp.where(rows[:, None, None], positions, -1), old.fetched)
        return where_rows(rows, new, old.fetched)

    def _fetched(self, store: Float[Array, "B K S 2 H"], positions: Int[Array, "B K k"], before: FullTokens) -> FullTokens:
        """A copy on the device of the store's tokens at these positions. A position of -1, which is none, gets some token.

        before: what was fetched last. Often many of its tokens are chosen again. With a store in host memory the GPU kernel copies these
        from there and not from the store; with a store on the device everything is read from the store.
        """
        return FullTokens(positions, gather_tokens(store, positions, before if in_host(store) else None))

    def flushed_layers(self, due: Bool[Array, "B"]) -> tuple[SpeCacheLayer, ...]:
        size = self.settings.residual
        if self.layers[0].store.shape[2] == 0:
            return self.layers

        def stored(layer: SpeCacheLayer, store: Array) -> Array:
            # Rows that are not due are written too: nothing reads the place after a row's last quantized token before it is written again.
            new, at = _stacked(layer.codes.buffer.keys[:, :, :size], layer.codes.buffer.values[:, :, :size]), self.lengths.quantized
            if in_host(store):
                return written(store, new, at)
            return jax.vmap(lambda held, new, at: lax.dynamic_update_slice_in_dim(held, new, at, axis=1))(store, new, at)

        # The writes wait for what the round fetched. Otherwise XLA may write first, and copy the store so that fetching reads an old one.
        stores, fetched = lax.optimization_barrier(tuple(zip(*((layer.store, layer.fetched) for layer in self.layers))))
        stores = at_most_once(due.any(), lambda stores: tuple(map(stored, self.layers, stores)), stores)
        return tuple(map(SpeCacheLayer, self._codes.flushed_layers(due), stores, fetched))


def _stacked(keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"]) -> Float[Array, "B K S 2 H"]:
    """Tokens as the store holds them: the key of each, then its value."""
    return jnp.stack([keys, values], 3)
