"""A compact cache: for each row and KV head a bounded number of tokens that stay, a ring of the most recent ones, and room after them.

It is a part of the state of drafts that read no more than that of a long context. Tokens are taken from the target's cache
(`Cache.tokens`), so their keys and values are the target's; the single-token steps of a draft append after them and are rolled back.
The order of rows makes no difference to attention, so a row's tokens are in its first rows, wherever the ring begins. In full precision
the kernels of a full-precision cache read them; in 8 bits the reference path does, without a kernel.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.append_attend import append_and_attend
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.token_codes import TokenCodes, TokenCodesLayer
from pallas_kernels.formats.views import BOTH_PLANES, FULL_PRECISION
from qspec_jax.caches.cache import AppendedCache, KeysValues, bytes_of_tokens, no_tokens
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.ring import row_of_token
from qspec_jax.models.config import LlamaConfig

KINDS = ("full", "int8")
Layer = FullLayer | TokenCodesLayer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompactCache(AppendedCache):
    """The first kept[b] tokens that a row took in, which stay until it is `refilled`, and the last ring[b] of those that came after.

    Token t of a row, in the order in which they were taken in, is in row t; from t = kept + ring on, it overwrites the ring's oldest token.
    Which tokens of the text these are, for each KV head, is decided by the code that fills the cache. Keys have the RoPE of their own
    positions.

    Attributes:
        layers: in full precision ("full"), or in 8 bits with a full-precision buffer for the tokens of a round ("int8").
        lengths: numbers of tokens in 8 bits and in full precision, the appended ones of a round included.
        kept: how many tokens stay.
        ring: how many tokens the ring has room for.
        taken: how many tokens a row has taken in.
    """

    layers: tuple[Layer, ...]
    lengths: Lengths
    kept: Int[Array, "B"]
    ring: Int[Array, "B"]
    taken: Int[Array, "B"]

    @classmethod
    def of(cls, layers: Sequence[Layer], *, kept: Int[Array, "B"], ring: Int[Array, "B"], taken: Int[Array, "B"]) -> Self:
        """A cache of layers from `make_layer`, whose first `taken` tokens are where the class says (`qspec_jax.caches.ring`).

        kept + ring is at most the number of rows of keys that `make_layer` was given plus its `room`, and ring at least 1.
        """
        made = cls(tuple(layers), no_tokens(kept.shape[0]), kept, ring, taken)
        return made.rollback(made.committed)

    @classmethod
    @functools.cache
    def outline(cls, model: LlamaConfig, kind: str) -> Self:
        """The shapes of a cache with a row of one token, in bfloat16, of the layers without a sliding window. kind: one of `KINDS`."""
        token = jax.ShapeDtypeStruct((1, model.num_kv_heads, 1, model.head_dim), jnp.bfloat16)
        layer = jax.eval_shape(functools.partial(cls.make_layer, kind=kind, appended=1), token, token)
        number = jax.ShapeDtypeStruct((1,), jnp.int32)
        return cls((layer,) * len(model.full_layers), Lengths(number, number), number, number, number)

    def bytes_of_reads(self, layer, reads):
        held = self.layers[layer]
        if self.kind == "full":
            return bytes_of_tokens(held, reads.full, held.keys.shape[2]), 0
        coded = bytes_of_tokens((held.keys, held.values), reads.quantized, held.keys.tokens)
        return coded + bytes_of_tokens(held.buffer, reads.full, held.buffer.keys.shape[2]), 0

    @staticmethod
    def make_layer(keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], *, kind: str, appended: int, room: int = 0) -> Layer:
        """A layer that holds these rows, and has room for `room` more. kind: one of `KINDS`. appended: the maximum number of tokens that a
        round appends before it rolls back."""
        spare = appended + 1  # a single token is appended together with the row after it, see `rotate_and_append`

        def with_room(x, rows):
            return jnp.pad(x, ((0, 0), (0, 0), (0, rows), (0, 0)))

        if kind == "full":
            return FullLayer(with_room(keys, room + spare), with_room(values, room + spare))
        B, K, _, H = keys.shape

        def codes(x):
            return _encoded(with_room(x, room))

        return TokenCodesLayer(codes(keys), codes(values), FullLayer.zeros(B, K, spare, H, keys.dtype))

    @property
    def rows(self) -> Int[Array, "B"]:
        """How many rows hold a token that was taken in."""
        return jnp.minimum(self.taken, self.kept + self.ring)

    @property
    def keys(self) -> tuple[Float[Array, "B K S H"], ...]:
        """The keys of each layer in full precision; those that were taken in are in the first `rows`."""
        return tuple(layer.keys if self.kind == "full" else layer.keys.dequantized(layer.buffer.keys.dtype) for layer in self.layers)

    @property
    def committed(self) -> Lengths:
        """The lengths without what a round has appended."""
        rows, zero = self.rows, jnp.zeros_like(self.taken)
        return Lengths(zero, rows) if self.kind == "full" else Lengths(rows, zero)

    @property
    def kind(self) -> str:
        return "full" if isinstance(self.layers[0], FullLayer) else "int8"

    def attend(self, layer, qkv, cos, sin, *, view):
        """See `AppendedCache.attend`. The cache is read in one way, whatever the view."""
        view = FULL_PRECISION if self.kind == "full" else BOTH_PLANES
        return append_and_attend(qkv, cos, sin, self.layers[layer], self.lengths, view)

    def take_in(self, tokens: Sequence[KeysValues], count: Int[Array, "B"]) -> Self:
        """The cache after taking in the first count[b] of these T tokens of each layer, which overwrite the oldest of the ring.

        The tokens that a round has appended are forgotten. A row with a count of 0 does not change otherwise.
        """
        i = jnp.arange(tokens[0][0].shape[2])
        number, taken = self.taken[:, None] + i, self.taken + count
        # Where more come than the ring holds, only the last of a row's tokens is written: the order of a scatter is not defined.
        stays = (number < self.kept[:, None]) | (number + self.ring[:, None] >= taken[:, None])
        row = jnp.where((i < count[:, None]) & stays, row_of_token(number, self.kept, self.ring), self._room)
        layers = tuple(self._written(layer, *both, row) for layer, both in zip(self.layers, tokens, strict=True))
        new = dataclasses.replace(self, layers=layers, taken=taken)
        return new.rollback(new.committed)

    def layer_refilled(self, layer: int, keys: Float[Array, "R K T H"], values: Float[Array, "R K T H"], rows: Int[Array, "R"]) -> Layer:
        """The layer with these T tokens written over the first T of R rows of the batch; `refilled` then takes all layers."""

        def write(held, new):
            return jax.tree.map(lambda held, new: held.at[rows, :, : new.shape[2]].set(new), held, self._stored(new))

        held = self.layers[layer]
        return dataclasses.replace(held, keys=write(held.keys, keys), values=write(held.values, values))

    def refilled(self, layers: Sequence[Layer], kept: Int[Array, "R"], rows: Int[Array, "R"]) -> Self:
        """The cache with these layers, all from `layer_refilled`. Of the tokens written there each of R rows holds the first kept[r] alone.

        The ring is empty then; with its size it still has room.
        """
        new = dataclasses.replace(self, layers=tuple(layers), kept=self.kept.at[rows].set(kept), taken=self.taken.at[rows].set(kept))
        return new.rollback(new.committed)

    def with_first_keys(self, keys: Sequence[Float[Array, "B K T H"]], changed: Bool[Array, "B"]) -> Self:
        """The cache with other keys of the first T tokens that stay, in each layer of the rows that are to change."""

        def put(held, new):
            return held.at[:, :, : new.shape[2]].set(jnp.where(changed[:, None, None, None], new, held[:, :, : new.shape[2]]))

        def write(layer, new):
            return dataclasses.replace(layer, keys=jax.tree.map(put, layer.keys, self._stored(new)))

        return dataclasses.replace(self, layers=tuple(map(write, self.layers, keys)))

    @property
    def _room(self) -> int:
        """The index of a row beyond the last."""
        return jax.tree.leaves(self.layers[0].keys)[0].shape[2]

    def _stored(self, x: Float[Array, "B K T H"]) -> Array | TokenCodes:
        return x if self.kind == "full" else _encoded(x)

    def _written(self, layer: Layer, keys: Array, values: Array, row: Int[Array, "B T"]) -> Layer:
        one = jax.vmap(lambda held, new, row: held.at[:, row].set(new, mode="drop"))

        def write(held, new):
            return jax.tree.map(lambda held, new: one(held, new, row), held, self._stored(new))

        return dataclasses.replace(layer, keys=write(layer.keys, keys), values=write(layer.values, values))


def _encoded(x: Float[Array, "B K T H"]) -> TokenCodes:
    return TokenCodes.of(x, scheme=CacheConfig.scheme)
