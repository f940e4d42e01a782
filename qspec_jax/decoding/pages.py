"""The free pages of a pool of groups that the rows of a batch share. The tables are on the device (`HierarchicalCache`)."""


class PagePool:
    """Pages 1 to `size` - 1, of which rows reserve some. Page 0 is a dummy: table entries of unused groups point to it."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, 0, -1))

    @property
    def reserved(self) -> int:
        """The number of reserved pages."""
        return self.size - 1 - self.free

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def reserve(self, count: int) -> list[int] | None:
        """Reserves `count` pages; None if fewer are free."""
        if count > self.free:
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Frees pages, and empties the list."""
        self._free += reversed(pages)
        pages.clear()
