"""Codes of fewer bits that are packed into words of 32 bits, as several formats have them."""

import numpy as np

WORD = 32  # bits


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of words along the last axis, the lowest bits first.

    Args:
        words: integers of 32 bits, [..., W].
        bits: of a code; 2, 4 or 8.

    Returns:
        uint8 [..., W * 32 / bits].
    """
    packed = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return packed
    per_byte = 8 // bits
    codes = np.empty((*packed.shape, per_byte), np.uint8)
    for i in range(per_byte):
        np.right_shift(packed, bits * i, out=codes[..., i])
    codes &= (1 << bits) - 1
    return codes.reshape(*packed.shape[:-1], -1)


def words_for(count: int, bits: int) -> int:
    """The number of words that `count` codes take."""
    return -(-count * bits // WORD)
