"""Requests that have no slot in a batch yet: the queue that engines take them from, and those that one engine has taken."""

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from qspec_jax.decoding.state import DecodeState


class Queue:
    """The indices of requests that nobody has taken yet, in their order. Several engines may take from it: `first` and `take` go together
    under the lock. Its length may be asked without; who then finds nothing to take waits for others, or is done."""

    def __init__(self, requests: int):
        self.lock, self._indices = threading.Lock(), deque(range(requests))

    def __len__(self) -> int:
        return len(self._indices)

    def first(self, count: int) -> list[int]:
        return list(itertools.islice(self._indices, count))

    def take(self, count: int) -> None:
        for _ in range(count):
            self._indices.popleft()

    def give_back(self, indices: Sequence[int]) -> None:
        """Puts what was taken, and will not be worked on now, before all others."""
        with self.lock:
            self._indices.extendleft(reversed(indices))


@dataclasses.dataclass
class Taken:
    """The requests that an engine puts into slots next. begin: lets the device begin with their prefill, for which the host has done all
    that it has to do. rows: their state once it has begun."""

    indices: list[int]
    begin: Callable[[], DecodeState]
    rows: DecodeState | None = None
