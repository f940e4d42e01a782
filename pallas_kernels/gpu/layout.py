"""Where the parts of a block's shared memory lie."""

from collections.abc import Mapping

from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES

ROOM = SHARED_BYTES - RESERVED_BYTES  # bytes for all parts


class Layout:
    """Parts of shared memory that lie one after the other.

    Attributes:
        sizes: the bytes of each part by its name, in the order in which the parts lie.
        total: the bytes of all parts, with the gaps that alignment leaves.
    """

    def __init__(self, sizes: Mapping[str, int], alignments: Mapping[str, int] | None = None):
        """Places the parts. alignments: a number of bytes of which the start of a part is a multiple, for parts that need one."""
        self.sizes, self.total, self._starts = dict(sizes), 0, {}
        for name, size in sizes.items():
            start = self.total + -self.total % (alignments or {}).get(name, 1)
            self._starts[name], self.total = start, start + size

    def at(self, name: str) -> int:
        """The offset of the first byte of a part."""
        return self._starts[name]
