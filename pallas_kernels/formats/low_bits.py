"""KIVI's format: keys and values in 1 or 2 bits, keys with a scale for each channel and group of tokens, values with one for each token and
group of channels.

Source: KIVI (arXiv 2402.02750), section 3.2; with 1 bit also SpeCache (arXiv 2503.16163), equation 3.
"""

from typing import Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.formats.pytree import pytree
from pallas_kernels.formats.rounding import accumulation_dtype, parameter_dtype

BITS = (1, 2)
RULES = ("centred", "extremes")


def key_parameter_dtype(dtype) -> jnp.dtype:
    """Dtype of the scales and zeros of keys: float16 for 16-bit models, else the model's own.

    A query times such a scale, rounded to float16, has the digits that a logit needs; rounded to bfloat16 it does not. Keys of 65,520 and
    more, which float16 does not hold, are not expected: their groups read as NaN.
    """
    return jnp.dtype(jnp.float16) if jnp.dtype(dtype).itemsize == 2 else jnp.dtype(dtype)


@pytree("bits")
class LowBits:
    """Keys or values of S tokens in a few bits: code * scale + zero.

    Attributes:
        codes: a byte holds the codes of 8 / bits channels, which are H * bits / 8 apart, the first in its lowest bits.
        scale, zero: each is shared by a group of S / Sg tokens and H / Hg channels.
        bits: of a code, one of `BITS`.
    """

    codes: UInt8[Array, "B K S bytes"]
    scale: Float[Array, "B K Sg Hg"]
    zero: Float[Array, "B K Sg Hg"]
    bits: int

    @classmethod
    def of(cls, x: Float[Array, "B K S H"], *, bits: int, tokens: int, channels: int, rule: str, dtype=None) -> Self:
        """x in codes. A group with a number that is not finite, or with parameters beyond their dtype, reads as NaN.

        Args:
            bits: of a code.
            tokens, channels: of a group, which has a scale and a zero; they divide S and H.
            rule: "extremes" spaces the levels evenly from the group's minimum to its maximum; with 1 bit "centred" puts the two of them a
                quarter of that range inside of it (SpeCache, equation 3), and with 2 bits it is the same as "extremes".
            dtype: of scales and zeros; `parameter_dtype` by default.
        """
        B, K, S, H = x.shape
        dtype, wide = dtype or parameter_dtype(x.dtype), accumulation_dtype(x.dtype)
        groups = x.astype(wide).reshape(B, K, S // tokens, tokens, H // channels, channels)
        low, high = groups.min((3, 5)), groups.max((3, 5))
        inside = (high - low) / 4 if bits == 1 and rule == "centred" else jnp.zeros_like(low)
        # Codes are those of the parameters as they are stored.
        zero = (low + inside).astype(dtype)
        scale = ((high - low - 2 * inside) / (2**bits - 1)).astype(dtype)
        finite = jnp.isfinite(groups).all((3, 5)) & jnp.isfinite(scale) & jnp.isfinite(zero)
        steps = jnp.maximum(scale.astype(wide), jnp.finfo(wide).tiny)[:, :, :, None, :, None]
        codes = jnp.clip(jnp.rint((groups - zero.astype(wide)[:, :, :, None, :, None]) / steps), 0, 2**bits - 1)
        codes = jnp.where(jnp.isfinite(codes), codes, 0).astype(jnp.uint8).reshape(B, K, S, 8 // bits, -1)
        packed = (codes << (bits * jnp.arange(8 // bits, dtype=jnp.uint8))[:, None]).sum(3, dtype=jnp.uint8)
        return cls(packed, jnp.where(finite, scale, jnp.nan), jnp.where(finite, zero, 0), bits)

    @classmethod
    def zeros(cls, batch: int, kv_heads: int, size: int, head_dim: int, dtype, *, bits: int, tokens: int, channels: int) -> Self:
        """Room for `size` tokens. tokens, channels: of a group. dtype: of scales and zeros."""
        parameters = (batch, kv_heads, size // tokens, head_dim // channels)
        # Two arrays, never one object twice: a donated buffer may be given away once only.
        scale, zero = (jnp.zeros(parameters, dtype) for _ in range(2))
        return cls(jnp.zeros((batch, kv_heads, size, head_dim * bits // 8), jnp.uint8), scale, zero, bits)

    @property
    def tokens(self) -> int:
        return self.codes.shape[2]

    @property
    def head_dim(self) -> int:
        return self.codes.shape[3] * 8 // self.bits

    @property
    def group_tokens(self) -> int:
        """Tokens of a group."""
        return self.tokens // max(1, self.scale.shape[2])

    def dequantized(self, dtype) -> Float[Array, "B K S H"]:
        wide = accumulation_dtype(dtype)
        B, K, S, _ = self.codes.shape
        codes = self._unpacked().reshape(B, K, self.scale.shape[2], -1, self.scale.shape[3], self.head_dim // self.scale.shape[3])
        scale, zero = (x.astype(wide)[:, :, :, None, :, None] for x in (self.scale, self.zero))
        return (codes.astype(wide) * scale + zero).reshape(B, K, S, -1).astype(dtype)

    def read(self, tokens: Int[Array, "#R #K T"], rows: Int[Array, "R"], dtype) -> Float[Array, "R K T H"]:
        """Single tokens of these rows of the batch; a number beyond either end means the token at that end."""
        at = jnp.clip(tokens, 0, self.tokens - 1)
        row, head = rows[:, None, None], jnp.arange(self.codes.shape[1])[:, None]
        codes = LowBits(self.codes[row, head, at], self.scale[:, :, :0], self.zero[:, :, :0], self.bits)._unpacked()
        each = self.head_dim // self.scale.shape[3]
        scale, zero = (jnp.repeat(x[row, head, at // self.group_tokens], each, axis=-1).astype(dtype) for x in (self.scale, self.zero))
        return codes.astype(dtype) * scale + zero

    def _unpacked(self) -> UInt8[Array, "B K S H"]:
        each = [(self.codes >> (self.bits * i)) & (2**self.bits - 1) for i in range(8 // self.bits)]
        return jnp.concatenate(each, -1)
