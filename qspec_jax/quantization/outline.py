"""Outlines: models whose weights are shapes, of which bytes and FLOPs are known without any weight."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.formats.weights import Int4Weight, NestedWeight
from qspec_jax.models.block import Weight
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.weights import is_linear, quantize_nested, quantize_rows, weight_group_size


@functools.lru_cache(maxsize=8)  # a fifth of a second for each of a model of 32 layers, and a plan wants four
def outline(config: LlamaConfig, *, int4: bool = False, dtype: str = "bfloat16") -> Llama:
    """A model of this shape whose weights are shapes: the same object for the same arguments, not to be changed.

    Args:
        config: the model's shape.
        int4: whether linear layers are in INT4, also where the config does not say so.
        dtype: of all other weights.
    """

    has_int4 = int4 or config.int4_weights

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        if has_int4 and is_linear(path):
            return int4_outline(shape, dtype, config.int4_group_size)
        if config.nested_weights and is_linear(path):
            return nested_outline(shape, dtype)
        if (path == "head" and config.int8_head) or (path == "embedding" and config.int8_embedding):
            return jax.eval_shape(quantize_rows, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return Llama(config, make)


def int4_outline(shape: tuple[int, int], dtype: str = "bfloat16", group_size: int | None = None) -> Int4Weight:
    """The shapes of a weight [out, in] in INT4. dtype: of scales and zeros. group_size: `weight_group_size` unless given."""
    out, inputs = shape
    size = group_size or weight_group_size(inputs)
    groups = -(-inputs // size)
    codes = jax.ShapeDtypeStruct((out, groups, size // 2), jnp.uint8)
    scale, zero = (jax.ShapeDtypeStruct((out, groups), jnp.dtype(dtype)) for _ in range(2))
    return Int4Weight(codes, scale, zero, -inputs % size)


def nested_outline(shape: tuple[int, int], dtype: str = "bfloat16") -> NestedWeight:
    """The shapes of a nested weight [out, in]. dtype: of the weight that it is made of."""
    return jax.eval_shape(quantize_nested, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def is_outline(model: Llama) -> bool:
    """Whether the weights of a model are shapes."""
    return isinstance(jax.tree.leaves(model.embedding.get_value())[0], jax.ShapeDtypeStruct)
