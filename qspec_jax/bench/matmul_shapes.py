"""Named problems of INT4 matmul, for benchmarks: their random inputs, and the bytes of weights that must be read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.formats.weights import Int4Weight, dequantize_weight

GROUP_SIZE = 128
ITEM_BYTES = 2  # bfloat16: activations, scales, zeros, full weights


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer of a model: M rows of activations times weights that share their input. outputs: output size of each weight."""

    model: str
    layer: str
    rows: int
    inputs: int
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layer}-M{self.rows}"

    @property
    def int4_bytes(self) -> int:
        """Bytes of the INT4 weights: codes, a nibble each, and the scale and zero of every group."""
        return sum(self.outputs) * (self.inputs // 2 + 2 * ITEM_BYTES * self.inputs // GROUP_SIZE)

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the same weights in bfloat16."""
        return sum(self.outputs) * self.inputs * ITEM_BYTES


ROWS = (1, 4, 7, 16, 32, 64)
LAYERS = (
    ("llama-3.1-8b", "qkv", 4096, (4096, 1024, 1024)),
    ("llama-3.1-8b", "o", 4096, (4096,)),
    ("llama-3.1-8b", "gate_up", 4096, (14336, 14336)),
    ("llama-3.1-8b", "down", 14336, (4096,)),
    # Its o has the shape of the one above.
    ("llama-2-7b", "qkv", 4096, (4096, 4096, 4096)),
    ("llama-2-7b", "gate_up", 4096, (11008, 11008)),
    ("llama-2-7b", "down", 11008, (4096,)),
)
LARGE = tuple(Shape(model, layer, rows, inputs, outputs) for model, layer, inputs, outputs in LAYERS for rows in ROWS)
# Small enough for a CPU to take a second.
TINY = (Shape("tiny", "qkv", 1, 256, (64, 32, 32)), Shape("tiny", "down", 7, 512, (48,)))
SHAPES = {shape.name: shape for shape in (*LARGE, *TINY)}


def random_problem(shape: Shape, seed: int) -> tuple[Float[Array, "M in"], tuple[Int4Weight, ...]]:
    """Activations of variance 1 and the weights, in bfloat16, made on the device."""
    return activations(shape), _weights(shape.inputs, shape.outputs, seed)


def bf16_problem(shape: Shape, seed: int) -> tuple[Float[Array, "M in"], Float[Array, "out in"]]:
    """The activations of `random_problem`, and its weights one after the other in bfloat16."""
    return activations(shape), _bf16_weight(shape.inputs, shape.outputs, seed)


def activations(shape: Shape) -> Float[Array, "M in"]:
    """The activations that all problems of a shape share: normal, in bfloat16."""
    return jax.random.normal(jax.random.key(0), (shape.rows, shape.inputs), jnp.bfloat16)


# These take only what every M shares, so that they compile once for all.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _weights(inputs: int, outputs: tuple[int, ...], seed: int | Array) -> tuple[Int4Weight, ...]:
    keys = iter(jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), 2 * len(outputs)))

    def weight(out: int) -> Int4Weight:
        groups = inputs // GROUP_SIZE
        codes = jax.random.bits(next(keys), (out, groups, GROUP_SIZE // 2), jnp.uint8)
        scale = jax.random.uniform(next(keys), (out, groups), minval=0.005, maxval=0.015)
        return Int4Weight(codes, scale.astype(jnp.bfloat16), (-7.4 * scale).astype(jnp.bfloat16))

    return tuple(weight(out) for out in outputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _bf16_weight(inputs: int, outputs: tuple[int, ...], seed: int | Array) -> Float[Array, "out in"]:
    weights = _weights(inputs, outputs, seed)
    return jnp.concatenate([dequantize_weight(weight, jnp.float32).astype(jnp.bfloat16) for weight in weights])
