"""Weights of linear layers: INT4 by groups and its way back to full precision, and INT8."""

from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int16, UInt8

from pallas_kernels.formats.pytree import pytree
from pallas_kernels.formats.quantization import unpack


@pytree("padding")
class Int4Weight:
    """A linear layer's weight [out, in] in 4 bits, with one scale and zero per group of inputs.

    A code means code * scale + zero, or (code - zero) * scale where zeros are zero points, whole numbers.

    Attributes:
        codes: [out, C, G/2], byte i of a group holds inputs i (low nibble) and i + G/2 (high).
        scale, zero: [out, C].
        padding: inputs that the last group lacks.
    """

    codes: UInt8[Array, "out C half"]
    scale: Float[Array, "out C"]
    zero: Float[Array, "out C"] | Int16[Array, "out C"]
    padding: int = 0

    @property
    def has_zero_points(self) -> bool:
        """Whether zeros are zero points."""
        return jnp.issubdtype(self.zero.dtype, jnp.integer)

    @property
    def in_features(self) -> int:
        return 2 * self.codes.shape[1] * self.codes.shape[2] - self.padding

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.in_features)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes


@pytree()
class Int8Weight:
    """A weight [out, in] in 8 bits: code * scale, one scale per output."""

    codes: Int8[Array, "out in"]
    scale: Float[Array, "out"]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


Weight: TypeAlias = Array | Int4Weight | Int8Weight
"""A linear layer's weight [out, in] in any format: a plain array is full precision."""


def dequantize_weight(weight: Int4Weight, dtype) -> Float[Array, "out in"]:
    """The weight in `dtype`, without the padding."""
    codes = unpack(weight.codes).astype(dtype)
    scale, zero = (x[..., None].astype(dtype) for x in (weight.scale, weight.zero))
    full = (codes - zero) * scale if weight.has_zero_points else codes * scale + zero
    return full.reshape(full.shape[0], -1)[:, : weight.in_features]
