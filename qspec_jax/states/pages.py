"""The pages of a pool of groups that rows share, counted by reference. The tables are on the device (`HierarchicalCache`)."""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence


class PagePool:
    """Pages 1 to `size` - 1, of which rows reserve some and share them. Page 0 is a dummy: table entries of unused groups point to it.

    A page is free when all rows that hold it have released it. Threads may share a pool.
    """

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._lock = threading.RLock()  # a row that is dropped while the lock is held releases its pages within the same thread

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
        with self._lock:
            if count > self.free:
                return None
            pages = [self._free.pop() for _ in range(count)]
            self._holders |= dict.fromkeys(pages, 1)
            return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to each of these reserved pages."""
        with self._lock:
            for page in pages:
                self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """Takes a holder from each of these pages, and empties the list, so that its owner cannot release them twice."""
        with self._lock:
            for page in reversed(pages):
                self._holders[page] -= 1
                if not self._holders[page]:
                    del self._holders[page]
                    self._free.append(page)
        pages.clear()

    def grow(self, size: int) -> None:
        """Adds free pages up to this size."""
        with self._lock:
            self._free[:0] = range(size - 1, self.size - 1, -1)
            self.size = size


class HeldPages(Sequence[int]):
    """The pages of a row, in the order of its groups. They are released when the object is dropped.

    Args:
        pool: the pool.
        pages: reserved pages, of which this object becomes one of the holders.
    """

    def __init__(self, pool: PagePool, pages: Sequence[int]):
        self._pages = tuple(pages)
        weakref.finalize(self, pool.release, list(pages))

    def __getitem__(self, index):
        return self._pages[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)

    def __len__(self) -> int:
        return len(self._pages)

    @classmethod
    def shared(cls, pool: PagePool, pages: Sequence[int]) -> "HeldPages":
        """A further holder of these pages."""
        pool.share(pages)
        return cls(pool, pages)


def num_shared(rows: Sequence[Sequence[int]]) -> int:
    """How many of their first pages the rows have in common."""
    columns = zip(*rows)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, rows)))
