"""The pages of a pool of groups that rows of a batch share, and which of them are free. The device has the tables (`HierarchicalCache`)."""


class PagePool:
    """Pages 1 to `size` - 1 are handed out; page 0 is nobody's, and stands in tables for what a row will never have."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, 0, -1))

    @property
    def taken(self) -> int:
        """How many pages are handed out."""
        return self.size - 1 - self.free

    @property
    def free(self) -> int:
        """How many pages are left to hand out."""
        return len(self._free)

    def reserve(self, count: int) -> list[int] | None:
        """So many free pages, or None where there are not as many."""
        if count > self.free:
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Gives pages back, which the list that is given has no more."""
        self._free += reversed(pages)
        pages.clear()
