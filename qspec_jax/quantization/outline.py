"""Outlines: models whose weights are shapes, of which bytes and FLOPs are known without any weight."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama, Weight
from qspec_jax.quantization.weights import is_linear, weight_group_size


def outline(config: LlamaConfig, *, int4: bool = False, dtype: str = "bfloat16") -> Llama:
    """A model of this shape whose weights are shapes. int4: with linear layers in INT4. dtype: of all other weights."""

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        if not (int4 and is_linear(path)):
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        out, inputs = shape
        size = weight_group_size(inputs)
        groups = -(-inputs // size)
        codes, parameters = jax.ShapeDtypeStruct((out, groups, size // 2), jnp.uint8), jax.ShapeDtypeStruct((out, groups), jnp.dtype(dtype))
        return Int4Weight(codes, parameters, parameters, -inputs % size)

    return Llama(config, make)


def is_outline(model: Llama) -> bool:
    """Whether the weights of a model are shapes."""
    return isinstance(model.embedding.get_value(), jax.ShapeDtypeStruct)
