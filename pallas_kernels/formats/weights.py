"""Weights of linear layers: INT4 by groups, nested in 8 bits by groups, and their ways back to full precision; and INT8."""

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


LOWER_MIDDLE = 8  # the lower code that adds nothing
# Steps of a nested weight's lower plane in one of its upper plane: where upper codes are the nearest, and where they may be others.
NEAREST_STEPS, FAR_STEPS = 16, 8


@pytree("steps")
class NestedWeight:
    """A weight [out, in] in 8 bits, whose upper 4 are an INT4 weight of their own.

    Codes u of the upper and l of the lower plane mean (steps * u + l - 8) * scale / steps + zero. With 16 steps the lower plane divides the
    step around an upper code, so that u alone is the middle of it, or almost. With 8 it reaches a whole step to both sides, for upper codes
    that are not the nearest. The number in brackets is one of bfloat16.

    Attributes:
        upper: codes with scales and zeros of a floating dtype.
        lower: codes that lie as those of `upper` do.
        steps: of the lower plane in a step of the upper one, `NEAREST_STEPS` or `FAR_STEPS`.
    """

    upper: Int4Weight
    lower: UInt8[Array, "out C half"]
    steps: int = NEAREST_STEPS

    @property
    def max_error(self) -> float:
        """By how much both planes may miss a weight, in steps of the upper plane, apart from rounding."""
        # Codes that make up for the errors of other inputs are not the nearest: the upper code is one whose lower plane reaches the weight,
        # and the lower code any.
        return 1 / (2 * self.steps) if self.steps == NEAREST_STEPS else (2 * 16 - 1) / (2 * self.steps)

    @property
    def in_features(self) -> int:
        return self.upper.in_features

    @property
    def shape(self) -> tuple[int, int]:
        return self.upper.shape

    @property
    def nbytes(self) -> int:
        return self.upper.nbytes + self.lower.nbytes


CodedWeight: TypeAlias = Int4Weight | NestedWeight  # codes of 4 bits in one plane or two, with scales and zeros of groups of inputs
Weight: TypeAlias = Array | CodedWeight | Int8Weight
"""A linear layer's weight [out, in] in any format: a plain array is full precision."""


def upper_plane(weight: CodedWeight) -> Int4Weight:
    """A nested weight's upper plane, and an INT4 weight itself."""
    return weight.upper if isinstance(weight, NestedWeight) else weight


def dequantize_weight(weight: CodedWeight, dtype) -> Float[Array, "out in"]:
    """The weight in `dtype`, without the padding."""
    upper = upper_plane(weight)
    codes = unpack(upper.codes).astype(dtype)
    if isinstance(weight, NestedWeight):
        codes = codes + (unpack(weight.lower).astype(dtype) - LOWER_MIDDLE) / weight.steps
    scale, zero = (x[..., None].astype(dtype) for x in (upper.scale, upper.zero))
    full = (codes - zero) * scale if upper.has_zero_points else codes * scale + zero
    return full.reshape(full.shape[0], -1)[:, : weight.in_features]
