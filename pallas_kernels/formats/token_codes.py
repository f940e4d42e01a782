"""Keys and values that are stored token by token, and the layer of a cache that is made of them.

* `TokenCodes`: tokens in 8 bits. Each token has a scale and a zero point of its own and belongs to no group, so that tokens can be added
  and replaced one by one. A code is one byte: the upper 4-bit code in its high nibble, the lower one in its low nibble.
* `FullTokens`: tokens in full precision, which are read instead of their codes.
* `TokenCodesLayer`: tokens in codes, `TokenCodes` or those of 1 or 2 bits of `LowBits`, and a full-precision buffer.
"""

import dataclasses
from typing import ClassVar, Self

from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.pytree import pytree
from pallas_kernels.formats.quantization import dequantize, quantize
from pallas_kernels.formats.rounding import accumulation_dtype, parameter_dtype


@pytree()
class TokenCodes:
    """Keys or values of S tokens: the upper 4-bit code in the high nibble, the lower one in the low."""

    codes: UInt8[Array, "B K S H"]
    scale: Float[Array, "B K S 1"]
    zero: Float[Array, "B K S 1"]

    @classmethod
    def of(cls, x: Float[Array, "B K S H"], *, scheme: str) -> Self:
        """x in 8 bits. scheme: a key of `pallas_kernels.formats.quantization.SCHEMES`."""
        upper, lower, scale, zero = quantize(x, -1, scheme=scheme, dtype=parameter_dtype(x.dtype))
        return cls(upper << 4 | lower, scale, zero)

    @property
    def tokens(self) -> int:
        return self.codes.shape[2]

    def dequantized(self, dtype) -> Float[Array, "B K S H"]:
        wide = accumulation_dtype(dtype)
        return dequantize(self.codes >> 4, self.codes & 15, self.scale, self.zero, wide).astype(dtype)


@pytree()
class FullTokens:
    """Tokens that are read in full precision instead of their codes.

    Attributes:
        positions: in the row, no two the same; -1: none.
        keys_values: of each token its key, then its value.
    """

    positions: Int[Array, "B K n"]
    keys_values: Float[Array, "B K n 2 H"]

    @property
    def keys(self) -> Float[Array, "B K n H"]:
        return self.keys_values[:, :, :, 0]

    @property
    def values(self) -> Float[Array, "B K n H"]:
        return self.keys_values[:, :, :, 1]


@pytree()
class TokenCodesLayer:
    """One layer's cache: the first `lengths.quantized` tokens of a row in 8 bits, or in fewer, and a full-precision buffer for the tokens
    after them."""

    groups: ClassVar[int] = 0  # tokens are quantized, and no groups

    keys: TokenCodes | LowBits
    values: TokenCodes | LowBits
    buffer: FullLayer

    def with_buffer(self, buffer: FullLayer) -> Self:
        return dataclasses.replace(self, buffer=buffer)


# A layer's cache in any format: each has a `buffer`, which `with_buffer` replaces, and `groups`, the number that it has room for.
Layer = HierarchicalLayer | TokenCodesLayer | FullLayer
