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

from pallas_kernels.formats import weights as formats
from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.formats.views import BOTH_PLANES, View
from pallas_kernels.fused_layer import between_attentions
from pallas_kernels.matmul import gated_linear, linear
from pallas_kernels.norm import add_rms_norm
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.errors import InputError
from qspec_jax.models import rope
from qspec_jax.models.config import LlamaConfig

Weight = formats.Weight | jax.ShapeDtypeStruct
MakeWeight = Callable[[str, tuple[int, ...]], Weight]


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
        qkv: Float[Array, "B T channels"],
        cos: Float[Array, "B T half"],
        sin: Float[Array, "B T half"],
        *,
        view: Any,
    ) -> tuple[Float[Array, "B T N H"], object, Array | None]:
        """Appends keys and values to a layer, after RoPE, and attends to it through a view.

        Args:
            layer: the number of the layer.
            qkv: query heads, then key and value heads, before RoPE.
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


class Linear(nnx.Module):
    """y = x @ weight.T + bias.

    Args:
        make: supplies weights, see `Llama`.
        path: the path of the layer in the model.
        shape: outputs and inputs; the weight, [out, in], may have any format of `pallas_kernels.matmul.linear`.
        bias: whether there is a bias.
        summed_over: the axis of a mesh over whose devices the inputs are divided, see `linear`; None for one device, and for divided
            outputs.
    """

    def __init__(self, make: MakeWeight, path: str, shape: tuple[int, int], *, bias: bool = False, summed_over: str | None = None):
        self.weight = nnx.Param(make(f"{path}.weight", shape))
        self.bias = nnx.Param(make(f"{path}.bias", shape[:1])) if bias else None
        self.summed_over = summed_over

    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        return linear(x, *_parameters(self), summed_over=self.summed_over)


class RMSNorm(nnx.Module):
    def __init__(self, make: MakeWeight, path: str, size: int, eps: float):
        self.weight = nnx.Param(make(f"{path}.weight", (size,)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self.add(x, None)[1]

    def add(self, x: Float[Array, "*rows D"], added: Float[Array, "*rows D"] | None) -> tuple[Array, Array]:
        """x + added, the residual connection before the norm, and its norm."""
        return add_rms_norm(x, added, self.weight.get_value(), eps=self.eps)


class Block(nnx.Module):
    """One layer: the part before attention and the part after it. axis: see `Llama`."""

    def __init__(self, config: LlamaConfig, make: MakeWeight, path: str, axis: str | None = None):
        c, D, H = config, config.hidden_size, config.head_dim
        self.head_dim, self.axis = H, axis
        self.input_norm = RMSNorm(make, f"{path}.input_norm", D, c.rms_norm_eps)
        self.q_proj = Linear(make, f"{path}.q_proj", (c.num_heads * H, D), bias=c.qkv_bias)
        self.k_proj = Linear(make, f"{path}.k_proj", (c.num_kv_heads * H, D), bias=c.qkv_bias)
        self.v_proj = Linear(make, f"{path}.v_proj", (c.num_kv_heads * H, D), bias=c.qkv_bias)
        self.q_norm = RMSNorm(make, f"{path}.q_norm", H, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(make, f"{path}.k_norm", H, c.rms_norm_eps) if c.qk_norm else None
        self.o_proj = Linear(make, f"{path}.o_proj", (D, c.num_heads * H), bias=c.output_bias, summed_over=axis)
        self.post_attention_norm = RMSNorm(make, f"{path}.post_attention_norm", D, c.rms_norm_eps)
        self.gate_proj = Linear(make, f"{path}.gate_proj", (c.intermediate_size, D), bias=c.mlp_bias)
        self.up_proj = Linear(make, f"{path}.up_proj", (c.intermediate_size, D), bias=c.mlp_bias)
        self.down_proj = Linear(make, f"{path}.down_proj", (D, c.intermediate_size), bias=c.mlp_bias, summed_over=axis)

    @property
    def num_heads(self) -> int:
        """Query heads on this device."""
        return self.q_proj.weight.get_value().shape[0] // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this device."""
        return self.k_proj.weight.get_value().shape[0] // self.head_dim

    def before_attention(
        self, x: Float[Array, "B T D"], cos: Array, sin: Array
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries and keys after RoPE, and values."""
        return split_and_rotate(self.qkv(self.input_norm(x)), cos, sin, kv_heads=self.num_kv_heads)

    def qkv(self, h: Float[Array, "B T D"]) -> Float[Array, "B T channels"]:
        """Heads of queries, then of keys and of values, without RoPE."""
        return self._finish_qkv(linear(h, _weights(self.q_proj, self.k_proj, self.v_proj)))

    def _finish_qkv(self, y: Float[Array, "B T channels"]) -> Float[Array, "B T channels"]:
        """Adds biases and applies the heads' norms, in models that have them."""
        biases = _biases(self.q_proj, self.k_proj, self.v_proj)
        y = y + jnp.concatenate(biases) if biases else y
        if self.q_norm is None:
            return y
        heads = y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=2)
        return jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=2).reshape(y.shape)

    def after_attention(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Output projection and MLP, with their residual connections."""
        x, h = self.add_attention(x, attended)
        return x + self.down_proj(self.mlp_hidden(h))

    def until(
        self, following: Self | None, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"], carry: Array | None = None
    ) -> tuple[Array, Array, Array | None]:
        """Everything between this layer's attention and the following layer's.

        Args:
            following: the following layer; None after the last one.
            x: hidden states before this layer.
            attended: the result of attention.
            carry: the carry that the previous layer returned.

        Returns:
            x after this layer, and the following layer's `qkv`; without one, x before the MLP, and what the MLP adds to it. Then the carry
            for the following layer, which only kernels read.
        """
        own = {"o": self.o_proj, "gate": self.gate_proj, "up": self.up_proj, "down": self.down_proj}
        o, gate, up, down = _weights(*own.values())
        norm, following_norm, projections = self.post_attention_norm, None, []
        if following:
            following_norm = following.input_norm.weight.get_value()
            projections = _weights(following.q_proj, following.k_proj, following.v_proj)
        attended = attended.reshape(*attended.shape[:2], -1)
        args = x, attended, o, norm.weight.get_value(), gate, up, down, following_norm, projections, carry
        biases = {name: layer.bias.get_value() for name, layer in own.items() if layer.bias is not None}
        x, y, carry = between_attentions(*args, eps=norm.eps, biases=biases, axis=self.axis)
        return x, following._finish_qkv(y) if following else y, carry

    def add_attention(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> tuple[Array, Array]:
        """x with attention's output projection [B, T, D], and its norm, the input of the MLP."""
        return self.post_attention_norm.add(x, self.o_proj(attended.reshape(*attended.shape[:2], -1)))

    def mlp_hidden(self, h: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        weights, biases = _parameters(self.gate_proj, self.up_proj)
        return gated_linear(h, *weights, biases)


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where a model was loaded from. All origins are equal, so that models from different folders share programs and tree structures."""

    directory: Path | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


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
        self.layers = nnx.List([Block(config, make, f"layers.{i}", axis) for i in range(config.num_layers)])
        self.norm = RMSNorm(make, "norm", config.hidden_size, config.rms_norm_eps)
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
        return self.with_masses(tokens, positions, cache, view=view, lengths=lengths)[:2]

    def with_masses(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: AttendingCache,
        *,
        view: View | tuple[View, ...],
        lengths: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], AttendingCache, tuple[Float[Array, "B K T C"] | None, ...]]:
        """The results of a call, and for each layer whose view is observed the attention mass of each group, in float32."""
        x = self.embed(tokens)
        cos, sin = self.cos_sin(positions, positions + 1 if lengths is None else lengths)
        y = self.layers[0].qkv(self.layers[0].input_norm(x))
        views = view if isinstance(view, tuple) else (view,) * len(self.layers)
        layers, masses, carry, reading = [], [], None, cache.for_pass(views)
        for i, (block, following) in enumerate(zip(self.layers, [*self.layers[1:], None])):
            attended, layer, mass = reading.attend(i, y, *self.angles_of(i, cos, sin), view=views[i])
            x, y, carry = block.until(following, x, attended, carry)
            layers.append(layer)
            masses.append(None if mass is None else self.sum_of_copies(mass))
        return self.logits(x, y), cache.advance(tuple(layers), tokens.shape[1]), tuple(masses)

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
        model = copy.copy(self)  # shares the layers: making all of them anew would take a tenth of a second
        model._config = dataclasses.replace(self._config, tie_word_embeddings=False)
        model.head = nnx.data(nnx.Param(head))
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
        return self.embedding.get_value().dtype

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = self.embedding.get_value()
        if not self._is_part(table):
            return table[tokens]
        at = tokens - lax.axis_index(self.axis) * table.shape[0]
        here = (at >= 0) & (at < table.shape[0])
        return lax.psum(jnp.where(here[..., None], table[jnp.clip(at, 0, table.shape[0] - 1)], 0), self.axis)

    def cos_sin(self, positions: Int[Array, "B T"], lengths: Int[Array, "B T"]) -> tuple[Array, Array]:
        c = self.config
        return rope.cos_sin(c.rope, c.head_dim, c.max_position_embeddings, positions, lengths)

    def angles_of(self, layer: int, cos: Array, sin: Array) -> tuple[Array, Array]:
        """The cosines and sines of a layer: those of `cos_sin`, or of angles 0 without RoPE."""
        return rope.unrotated(cos, sin) if layer in self.config.nope_layers else (cos, sin)

    def logits(self, x: Float[Array, "B T D"], added: Float[Array, "B T D"] | None = None) -> Float[Array, "B T V"]:
        """Logits of the last hidden states: x, or x + added."""
        head = (self.embedding if self.head is None else self.head).get_value()
        y = linear(self.norm.add(x, added)[1], [head], dtype=accumulation_dtype(x.dtype))
        return lax.all_gather(y, self.axis, axis=y.ndim - 1, tiled=True) if self._is_part(head) else y

    def _is_part(self, table: Weight) -> bool:
        """Whether other devices have the rest of the vocabulary."""
        return self.axis is not None and table.shape[0] < self._config.vocab_size

    def weights(self) -> dict[str, Weight]:
        """Every weight by its path, as `make` was given it."""
        leaves = jax.tree_util.tree_leaves_with_path(self, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        return {".".join(_name(key) for key in path): leaf.get_value() for path, leaf in leaves}


def _name(key) -> str:
    return str(key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.name)


def _parameters(*linears: Linear) -> tuple[list[formats.Weight], list[Array]]:
    """Weights and biases of linear layers with the same input, as `linear` takes them."""
    return _weights(*linears), _biases(*linears)


def _weights(*linears: Linear) -> list[formats.Weight]:
    return [layer.weight.get_value() for layer in linears]


def _biases(*linears: Linear) -> list[Array]:
    """The biases of linear layers with the same input: all of them have one, or none has."""
    return [layer.bias.get_value() for layer in linears if layer.bias is not None]


def check_model(model: Any) -> None:
    """Raises InputError for what is no model, such as the path of one."""
    if not isinstance(model, Llama):
        raise InputError(f"model should be what `load` or `load_model` returns, not {model!r:.60}")
