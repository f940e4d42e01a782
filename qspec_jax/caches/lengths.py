"""What all caches share."""

import dataclasses
from typing import Self

import jax

from pallas_kernels.formats.kv_cache import Lengths


class _Cache:
    """What both caches share: lengths. Each has `attend` besides, as `model.AttendingCache` says."""

    layers: tuple
    lengths: Lengths

    def advance(self, layers: tuple, tokens: int) -> Self:
        """The cache with these layers, every row `tokens` longer."""
        lengths = dataclasses.replace(self.lengths, buffered=self.lengths.buffered + tokens)
        return dataclasses.replace(self, layers=layers, lengths=lengths)

    def rollback(self, lengths: Lengths) -> Self:
        """The cache at earlier lengths. Nothing is moved: what lies beyond is masked and later overwritten."""
        return dataclasses.replace(self, lengths=lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys, values, codes, scales and zeros."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.layers))


def _longer(lengths: Lengths, tokens: int) -> Lengths:
    return dataclasses.replace(lengths, buffered=lengths.buffered + tokens)
