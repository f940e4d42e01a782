"""One layer of the transformer, for all families: what differs between them is read from the config."""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats import weights as formats
from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.fused_layer import between_attentions
from pallas_kernels.matmul import gated_linear, linear
from pallas_kernels.norm import add_rms_norm
from pallas_kernels.rope_append import rotate, split_and_rotate
from qspec_jax.models import rope
from qspec_jax.models.activations import XIELU, relu2
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.experts import Experts
from qspec_jax.models.families import GELU, HEAD, HEAD_AFTER_ROPE, INPUT, OUTPUT, WIDTH
from qspec_jax.models.families import XIELU as XIELU_NAME

Weight = formats.Weight | jax.ShapeDtypeStruct
MakeWeight = Callable[[str, tuple[int, ...]], Weight]


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
    """RMSNorm over the last axis.

    Args:
        make: supplies weights, see `Llama`.
        path: the path of the norm in the model.
        size: of the last axis, on all devices together.
        eps: is added to the mean of the squares.
        axis: the axis of a mesh over whose devices the last axis is divided; None: it is not divided.
        offset: is added to the weight. If it is not 0, the product is rounded, and not what the weight multiplies.
    """

    def __init__(self, make: MakeWeight, path: str, size: int, eps: float, axis: str | None = None, *, offset: float = 0.0):
        self.weight = nnx.Param(make(f"{path}.weight", (size,)))
        self.eps, self.axis, self.offset = eps, axis, offset

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        if self.axis is None:
            return self.add(x, None)[1]
        wide = x.astype(accumulation_dtype(x.dtype))
        # The devices' means may be averaged: each has the same number of channels, and each KV head has the same number of copies.
        wide = wide * lax.rsqrt(lax.pmean(jnp.mean(wide * wide, -1, keepdims=True), self.axis) + self.eps)
        return self.weight.get_value() * wide.astype(x.dtype)

    def add(self, x: Float[Array, "*rows D"], added: Float[Array, "*rows D"] | None) -> tuple[Array, Array]:
        """x + added, the residual connection before the norm, and its norm."""
        if self.offset:
            x = x if added is None else x + added
            wide = x.astype(accumulation_dtype(x.dtype))
            normed = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
            return x, (normed * (self.offset + self.weight.get_value().astype(wide.dtype))).astype(x.dtype)
        return add_rms_norm(x, added, self.weight.get_value(), eps=self.eps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Angles:
    """The angles of tokens by which layers rotate queries and keys.

    Attributes:
        cos_sin: cosines and sines, for each of `LlamaConfig.ropes`.
        query_scale: the number by which each token's queries are multiplied, in models that have one.
    """

    cos_sin: tuple[tuple[Float[Array, "B T half"], Float[Array, "B T half"]], ...]
    query_scale: Float[Array, "B T"] | None


class Block(nnx.Module):
    """One layer: the part before attention and the part after it.

    The residual stream is kept divided by the config's residual multiplier: what attention and MLP add to it then needs no multiplication.

    Args:
        config, make, axis: see `Llama`.
        layer: the number of the layer.
        input_size: channels of the input of the projections of queries, keys and values; None: the hidden size.

    Attributes:
        window: the number of tokens that a token attends to, itself included; None: all.
    """

    def __init__(self, config: LlamaConfig, make: MakeWeight, layer: int, axis: str | None = None, *, input_size: int | None = None):
        c, D, F, H = config, config.hidden_size, config.intermediate_size, config.head_dim
        E = D if input_size is None else input_size
        eps, path = config.rms_norm_eps, f"layers.{layer}"
        self.head_dim, self.axis, self.is_fusable = H, axis, config.is_fusable
        self.window, self._rope = c.sliding_window if layer in c.windowed_layers else None, c.rope_of(layer)

        def norm(name: str, exists: bool, size: int = D, *, eps: float = eps, axis: str | None = None) -> RMSNorm | None:
            return RMSNorm(make, f"{path}.{name}", size, eps, axis, offset=c.norm_offset) if exists else None

        before, after, of_stream = c.norms != OUTPUT, c.norms != INPUT, stream_eps(c)
        self.input_norm = norm("input_norm", before, eps=of_stream)
        self.q_proj = Linear(make, f"{path}.q_proj", (c.num_heads * H, E), bias=c.qkv_bias)
        self.k_proj = Linear(make, f"{path}.k_proj", (c.num_kv_heads * H, E), bias=c.qkv_bias)
        self.v_proj = Linear(make, f"{path}.v_proj", (c.num_kv_heads * H, E), bias=c.qkv_bias)
        self.q_norm = norm("q_norm", c.qk_norm in (HEAD, HEAD_AFTER_ROPE), H)
        self.k_norm = norm("k_norm", c.qk_norm in (HEAD, HEAD_AFTER_ROPE), H)
        self.q_width_norm = norm("q_width_norm", c.qk_norm == WIDTH, c.num_heads * H, axis=axis)
        self.k_width_norm = norm("k_width_norm", c.qk_norm == WIDTH, c.num_kv_heads * H, axis=axis)
        self.normed_after_rope = c.qk_norm == HEAD_AFTER_ROPE
        self.channel_order = None if (order := rope.channel_order(c.rope, H)) is None else tuple(order.tolist())
        self.query_factor = None if c.attention_scale is None else c.attention_scale * H**0.5  # attention multiplies by H ** -0.5
        self.o_proj = Linear(make, f"{path}.o_proj", (D, c.num_heads * H), bias=c.output_bias, summed_over=axis)
        self.attention_output_norm = norm("attention_output_norm", after)
        self.post_attention_norm = norm("post_attention_norm", before, eps=of_stream)
        has_experts = layer in c.expert_layers
        self.experts = Experts(c, make, f"{path}.experts", axis) if has_experts else None
        self.gate_proj = None if has_experts or not c.gated_mlp else Linear(make, f"{path}.gate_proj", (F, D), bias=c.mlp_bias)
        self.up_proj = None if has_experts else Linear(make, f"{path}.up_proj", (F, D), bias=c.mlp_bias)
        self.activation = XIELU(make, f"{path}.activation") if c.activation == XIELU_NAME else None
        self.is_gelu = c.activation == GELU
        self.down_proj = None if has_experts else Linear(make, f"{path}.down_proj", (D, F), bias=c.mlp_bias, summed_over=axis)
        self.mlp_output_norm = norm("mlp_output_norm", after)

    @property
    def num_heads(self) -> int:
        """Query heads on this device."""
        return self.q_proj.weight.get_value().shape[0] // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this device."""
        return self.k_proj.weight.get_value().shape[0] // self.head_dim

    def angles_of(self, angles: Angles) -> tuple[Array, ...]:
        """The angles of this layer: cosines and sines, those of angles 0 without RoPE; and the scale of queries, if there is one."""
        cos_sin = rope.unrotated(*angles.cos_sin[0]) if self._rope is None else angles.cos_sin[self._rope]
        return cos_sin if angles.query_scale is None else (*cos_sin, angles.query_scale)

    def before_attention(
        self, x: Float[Array, "B T D"], *angles: Array
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries and keys after RoPE, and values. angles: as `angles_of` returns them."""
        return split_and_rotate(*self.for_attention(self.qkv(self.attention_input(x)), *angles), kv_heads=self.num_kv_heads)

    def attention_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The input of the projections of queries, keys and values. x: the residual stream."""
        return x if self.input_norm is None else self.input_norm(x)

    def mlp_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The input of the MLP. x: the residual stream, with what attention adds to it."""
        return x if self.post_attention_norm is None else self.post_attention_norm(x)

    def qkv(self, h: Float[Array, "B T E"]) -> Float[Array, "B T channels"]:
        """Heads of queries, then of keys and of values, without RoPE."""
        return self._finish_qkv(linear(h, _weights(self.q_proj, self.k_proj, self.v_proj)))

    def _finish_qkv(self, y: Float[Array, "B T channels"]) -> Float[Array, "B T channels"]:
        """Adds biases, applies norms of queries and keys that come before RoPE, and orders channels, in models that have any of these."""
        biases = _biases(self.q_proj, self.k_proj, self.v_proj)
        y = y + jnp.concatenate(biases) if biases else y
        if self.q_width_norm is not None:
            ends = [self.num_heads * self.head_dim, (self.num_heads + self.num_kv_heads) * self.head_dim]
            q, k, v = jnp.split(y, ends, axis=-1)
            y = jnp.concatenate([self.q_width_norm(q), self.k_width_norm(k), v], axis=-1)
        if self.q_norm is not None and not self.normed_after_rope:
            q, k, v = self._heads(y)
            y = jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=2).reshape(y.shape)
        if self.channel_order is not None:
            q, k, v = self._heads(y)
            qk = jnp.concatenate([q, k], axis=2)[..., jnp.array(self.channel_order)]
            y = jnp.concatenate([qk, v], axis=2).reshape(y.shape)
        return y

    def _heads(self, y: Float[Array, "B T channels"]) -> list[Array]:
        """Heads of queries, keys and values, [B, T, heads, H] each."""
        return jnp.split(y.reshape(*y.shape[:2], -1, self.head_dim), [self.num_heads, self.num_heads + self.num_kv_heads], axis=2)

    def for_attention(
        self, y: Float[Array, "B T channels"], cos: Array, sin: Array, query_scale: Float[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T channels"], Array, Array]:
        """What `AttendingCache.attend` is given: everything that is done to queries and keys, except for the rotation by its angles.

        Args:
            y: as `qkv` returns it.
            cos, sin: of the tokens' angles.
            query_scale: the number by which each token's queries are multiplied.
        """
        if self.normed_after_rope:
            q, k, v = self._heads(y)
            q, k = self.q_norm(rotate(q, cos, sin)), self.k_norm(rotate(k, cos, sin))
            y, (cos, sin) = jnp.concatenate([q, k, v], axis=2).reshape(y.shape), rope.unrotated(cos, sin)
        factors = [] if self.query_factor is None else [self.query_factor]
        factors += [] if query_scale is None else [query_scale[..., None]]
        if factors:
            q, kv = jnp.split(y, [self.num_heads * self.head_dim], axis=-1)
            for factor in factors:
                q = scaled(q, factor)
            y = jnp.concatenate([q, kv], axis=-1)
        return y, cos, sin

    def turned(self, keys: Float[Array, "B K S H"], cos: Array, sin: Array) -> Float[Array, "B K S H"]:
        """Keys of a cache, rotated by further angles."""
        if not self.normed_after_rope:
            return rotate(keys, cos, sin)
        # The norm's weight comes after RoPE. Where it is 0 nothing of the channel is left to rotate.
        weight = self.k_norm.weight.get_value()
        return rotate(jnp.where(weight == 0, 0, keys / weight), cos, sin) * weight

    def after_attention(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Output projection and MLP, with their residual connections."""
        x, h = self.add_attention(x, attended)
        return x + self.mlp(h)

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
        if not self.is_fusable:
            x, h = self.add_attention(x, attended)
            added = self.mlp(h)
            if following is None:
                return x, added, carry
            if following.input_norm is None:
                x = h = x + added
            else:
                x, h = following.input_norm.add(x, added)
            return x, following.qkv(h), carry
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
        """x with what attention adds to it, [B, T, D], and the input of the MLP."""
        added = self.o_proj(attended.reshape(*attended.shape[:2], -1))
        if self.attention_output_norm is not None:
            added = self.attention_output_norm(added)
        if self.post_attention_norm is None:
            x = x + added
            return x, x
        return self.post_attention_norm.add(x, added)

    def mlp_hidden(self, h: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        """The input of the last projection of an MLP, in layers without experts."""
        if self.gate_proj is not None:
            weights, biases = _parameters(self.gate_proj, self.up_proj)
            if not self.is_gelu:
                return gated_linear(h, *weights, biases)
            gate, up = jnp.split(linear(h, weights, biases), 2, axis=-1)
            return jax.nn.gelu(gate, approximate=True) * up
        return (relu2 if self.activation is None else self.activation)(self.up_proj(h))

    def mlp(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the MLP, or the experts, add to the residual stream. h: as `mlp_input` returns it."""
        added = self.down_proj(self.mlp_hidden(h)) if self.experts is None else self.experts(h)
        return added if self.mlp_output_norm is None else self.mlp_output_norm(added)


def stream_eps(config: LlamaConfig) -> float:
    """The eps of norms of the residual stream, which is kept divided by the residual multiplier."""
    return config.rms_norm_eps / config.residual_multiplier**2


def rows_of(table: Weight, tokens: Int[Array, "*rows"], dtype: jnp.dtype) -> Float[Array, "*rows D"]:
    """The rows of an embedding [V, D], in bfloat16 or the like or in INT8. dtype: of the rows."""
    if not isinstance(table, formats.Int8Weight):
        return table[tokens].astype(dtype)
    return (table.codes[tokens] * table.scale[tokens][..., None]).astype(dtype)


def scaled(x: Float[Array, "*rows D"], factor: float | Array) -> Float[Array, "*rows D"]:
    """x * factor in x's dtype; the product alone is rounded to it."""
    wide = accumulation_dtype(x.dtype)
    return (x.astype(wide) * jnp.asarray(factor, wide)).astype(x.dtype)


def _parameters(*linears: Linear) -> tuple[list[formats.Weight], list[Array]]:
    """Weights and biases of linear layers with the same input, as `linear` takes them."""
    return _weights(*linears), _biases(*linears)


def _weights(*linears: Linear) -> list[formats.Weight]:
    return [layer.weight.get_value() for layer in linears]


def _biases(*linears: Linear) -> list[Array]:
    """The biases of linear layers with the same input: all of them have one, or none has."""
    return [layer.bias.get_value() for layer in linears if layer.bias is not None]
