"""The Llama-family transformer: Flax NNX modules that hold weights and nothing else; a functional forward pass.

    logits, cache = model(tokens, positions, cache, view=BOTH_PLANES)

The cache decides how attention is done (qspec_jax/caches/cache.py); which implementation of an operation runs is `pallas_kernels`' choice.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.formats.views import BOTH_PLANES, View
from pallas_kernels.formats.weights import Int8Weight
from pallas_kernels.matmul import linear
from qspec_jax.errors import InputError
from qspec_jax.models import rope
from qspec_jax.models.block import Angles, Block, MakeWeight, RMSNorm, Weight, rows_of, scaled, stream_eps
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.families import HEAD_AFTER_ROPE


class AttendingCache(Protocol):
    """What the model asks of a cache."""

    observable: ClassVar[bool] = False  # whether passes can give the attention mass of each group

    def for_pass(self, views: tuple[Any | None, ...]) -> Self:
        """The cache as one pass reads it; it may prepare a layer before that layer's turn.

        views: the view of each layer; None for a layer that is not read. Raises ValueError for a view that is observed if the cache is not
        `observable`.
        """
        if not self.observable and any(view is not None and view.observed for view in views):
            raise ValueError(f"{type(self).__name__} has no groups whose attention could be observed; give the cache int8")
        return self

    def attend(
        self,
        layer: int,
        qkv: Float[Array, "B filled channels"],
        cos: Float[Array, "B T half"],
        sin: Float[Array, "B T half"],
        *,
        view: Any,
    ) -> tuple[Float[Array, "B filled N H"], object, Array | None]:
        """Appends keys and values to a layer, after RoPE, and attends to it through a view.

        Args:
            layer: the number of the layer.
            qkv: query heads, then key and value heads, before RoPE; more tokens than T only where a pass is filled up.
            cos, sin: of the tokens' angles.
            view: the part of the cache that the queries read.

        Returns:
            The result of attention, the layer's new entry, and the attention mass of each group, [B, K, T, C] in float32; None if the view
            is not observed.
        """
        ...

    def advance(self, layers: tuple[object, ...], tokens: int) -> Self:
        """The cache with these layers, `tokens` longer in each row."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where a model was loaded from. All origins are equal, so that models from different folders share programs and tree structures."""

    directory: Path | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """What was asked to be seen in a pass.

    Attributes:
        masses: for each layer whose view is observed, the attention mass [B, K, T, C] of each group, in float32; None for another layer.
        features: the residual streams that were asked for, one after the other in the last axis; None if none was.
    """

    masses: tuple[Float[Array, "B K T C"] | None, ...] = ()
    features: Float[Array, "B T F"] | None = None


class Llama(nnx.Module):
    """The model.

    A model whose weights are divided over the devices of a mesh (see sharding.py) is called within `jax.shard_map` over that mesh, where
    each device has its part of the weights. All devices return the same logits.

    Args:
        config: the configuration.
        make: make(path, shape) supplies each weight: read from a checkpoint, drawn at random, or quantized from another model.
        axis: the axis of the mesh; None for one device.
        kv_copies: the number of devices that have a copy of the same KV head.

    Attributes:
        origin: the checkpoint directory of a model that was loaded.
    """

    def __init__(self, config: LlamaConfig, make: MakeWeight, *, axis: str | None = None, kv_copies: int = 1):
        self._config, self.axis, self.kv_copies = config, axis, kv_copies
        self.origin = Origin()
        self.embedding = nnx.Param(make("embedding", (config.vocab_size, config.hidden_size)))
        self.layers = nnx.List([Block(config, make, i, axis) for i in range(config.num_layers)])
        self.norm = RMSNorm(make, "norm", config.hidden_size, stream_eps(config), offset=config.norm_offset)
        self.head = None if config.tie_word_embeddings else nnx.Param(make("head", (config.vocab_size, config.hidden_size)))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: AttendingCache,
        *,
        view: View | tuple[View, ...] = BOTH_PLANES,
        lengths: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], AttendingCache]:
        """Logits (at least float32) of T tokens per row, and the cache with these tokens.

        Args:
            tokens: token ids.
            positions: the position of each in its row.
            cache: holds the tokens before them.
            view: the part of the cache that is read, for all layers or for each (see `pallas_kernels.formats.views`); by default all of it.
            lengths: see rope.py; by default position + 1.
        """
        return self.watched(tokens, positions, cache, view=view, lengths=lengths)[:2]

    def watched(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: AttendingCache,
        *,
        view: View | tuple[View, ...] = BOTH_PLANES,
        lengths: Int[Array, "B T"] | None = None,
        filled: int = 0,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T V"], AttendingCache, Seen]:
        """The results of a call, and what was asked to be seen.

        Args:
            tokens, positions, cache, view, lengths: see a call.
            filled: the number of tokens that the pass is filled up to, between attentions, by others that nothing depends on. For models
                that are `fillable`, over caches whose `attend` passes over them.
            taps: the layers before which the residual stream is taken as features; the number of layers for what the last one leaves.
        """
        x = self.embed(tokens)
        x = jnp.pad(x, ((0, 0), (0, max(0, filled - tokens.shape[1])), (0, 0)))
        angles = self.angles(positions, positions + 1 if lengths is None else lengths)
        y = self.layers[0].qkv(self.layers[0].attention_input(x))
        views = view if isinstance(view, tuple) else (view,) * len(self.layers)
        layers, masses, streams, carry, reading = [], [], {}, None, cache.for_pass(views)
        for i, (block, following) in enumerate(zip(self.layers, [*self.layers[1:], None])):
            streams[i] = x
            attended, layer, mass = reading.attend(i, *block.for_attention(y, *block.angles_of(angles)), view=views[i])
            x, y, carry = block.until(following, x, attended, carry)
            layers.append(layer)
            masses.append(None if mass is None else self.sum_of_copies(mass))
        T = tokens.shape[1]
        if len(self.layers) in taps:
            streams[len(self.layers)] = x + y
        features = [scaled(streams[i], self._config.residual_multiplier)[:, :T] for i in taps]
        seen = Seen(tuple(masses), jnp.concatenate(features, -1) if features else None)
        return self.logits(x, y)[:, :T], cache.advance(tuple(layers), T), seen

    @property
    def fillable(self) -> bool:
        """Whether only attention knows of tokens' positions."""
        return self._config.qk_norm != HEAD_AFTER_ROPE and not self._config.rope.query_scale_beta

    @property
    def checkpoint_config(self) -> LlamaConfig:
        """The configuration of the whole model."""
        return self._config

    @property
    def config(self) -> LlamaConfig:
        """The configuration with the number of heads that the weights have here.

        For a divided model those are one device's within `jax.shard_map`; outside of it those of all devices, where a KV head counts once
        for each device that has it.
        """
        block = self.layers[0]
        if self.axis is None:
            return self._config
        return dataclasses.replace(self._config, num_heads=block.num_heads, num_kv_heads=block.num_kv_heads)

    def with_weights(self, weights: Mapping[str, Weight], **changes: Any) -> Self:
        """The model with other weights, by their paths, in any format, divided as this one. changes: other fields of its configuration."""
        config = dataclasses.replace(self._config, **changes)
        return Llama(config, lambda path, shape: weights[path], axis=self.axis, kv_copies=self.kv_copies)

    def with_head(self, head: Weight) -> Self:
        """The model with a head of its own, in any format, also where its head was the embedding."""
        model = copy.copy(self)  # shares the layers: making new ones would take a tenth of a second
        model._config = dataclasses.replace(self._config, tie_word_embeddings=False, int8_head=isinstance(head, Int8Weight))
        model.head = nnx.data(nnx.Param(head))
        return model

    def with_embedding(self, embedding: Weight) -> Self:
        """The model with another embedding, in any format, which is its head too where it was before."""
        model, in_int8 = copy.copy(self), isinstance(embedding, Int8Weight)
        tied = {"int8_head": in_int8} if self.head is None else {}
        model._config = dataclasses.replace(self._config, int8_embedding=in_int8, **tied)
        model.embedding = nnx.data(nnx.Param(embedding))
        return model

    def sum_of_copies(self, x: Float[Array, "B K *rest"]) -> Float[Array, "B K *rest"]:
        """Sums over the query heads of each KV head, with the sums of other devices that have the same KV head added."""
        if self.kv_copies == 1:
            return x
        return self.of_all_kv_heads(lambda heads: heads, x.reshape(1, *x.shape), added=True)[0]

    def of_all_kv_heads(self, function: Callable, x: Float[Array, "L B K *rest"], *, added: bool = False) -> Any:
        """Applies a function to the KV heads of all devices, and returns the results, arrays [L, B, K, ...], of those on this device.

        Args:
            function: takes and returns arrays with all KV heads.
            x: the KV heads on this device.
            added: whether the function is given the sum over the copies of a KV head; otherwise it is given the first copy.
        """
        if self.axis is None:
            return function(x)
        gathered, copies = lax.all_gather(x, self.axis, axis=2, tiled=True), self.kv_copies
        by_copy = gathered.reshape(*x.shape[:2], -1, copies, *x.shape[3:])
        first = lax.axis_index(self.axis) * x.shape[2]

        def on_this_device(y: Array) -> Array:
            return lax.dynamic_slice_in_dim(jnp.repeat(y, copies, 2), first, x.shape[2], 2)

        return jax.tree.map(on_this_device, function(by_copy.sum(3) if added else by_copy[:, :, :, 0]))

    @property
    def dtype(self) -> jnp.dtype:
        return self.norm.weight.get_value().dtype  # which no format of weights changes

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x, factor = self._embedded(tokens), self._config.embedding_multiplier / self._config.residual_multiplier
        return x if factor == 1 else scaled(x, factor)

    def _embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = self.embedding.get_value()
        if not self._is_part(table):
            return rows_of(table, tokens, self.dtype)
        at = tokens - lax.axis_index(self.axis) * table.shape[0]
        here = (at >= 0) & (at < table.shape[0])
        rows = rows_of(table, jnp.clip(at, 0, table.shape[0] - 1), self.dtype)
        return lax.psum(jnp.where(here[..., None], rows, 0), self.axis)

    def angles(self, positions: Int[Array, "B T"], lengths: Int[Array, "B T"]) -> Angles:
        """The tokens' angles. lengths: see `rope.cos_sin`."""
        c = self.config
        found = [rope.cos_sin(each, c.head_dim, c.max_position_embeddings, positions, lengths) for each in c.ropes]
        return Angles(tuple(found), rope.query_scale(c.rope, positions) if c.rope.query_scale_beta else None)

    def logits(self, x: Float[Array, "B T D"], added: Float[Array, "B T D"] | None = None) -> Float[Array, "B T V"]:
        """Logits of the last hidden states: x, or x + added."""
        head = (self.embedding if self.head is None else self.head).get_value()
        y = linear(self.norm.add(x, added)[1], [head], dtype=accumulation_dtype(x.dtype))
        y = y if self._config.logits_scaling == 1 else y / self._config.logits_scaling
        return lax.all_gather(y, self.axis, axis=y.ndim - 1, tiled=True) if self._is_part(head) else y

    def _is_part(self, table: Weight) -> bool:
        """Whether other devices have the rest of the vocabulary."""
        return self.axis is not None and table.shape[0] < self._config.vocab_size

    def weights(self) -> dict[str, Weight]:
        """Every weight by its path, as `make` was given it."""
        return weights_of(self)


def weights_of(module: nnx.Module) -> dict[str, Weight]:
    """Every weight of a module by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return {".".join(_name(key) for key in path): leaf.get_value() for path, leaf in leaves}


def _name(key) -> str:
    return str(key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.name)


def check_model(model: Any) -> None:
    """Raises InputError for what is no model, such as the path of one."""
    if not isinstance(model, Llama):
        raise InputError(f"model should be what `load` or `load_model` returns, not {model!r:.60}")
