"""Requests that have no slot in a batch yet: the queue that engines take them from, and those that are next for the slots of one engine."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Hashable, Sequence

from qspec_jax.decoding.state import DecodeState


class Queue:
    """The indices of requests that no engine has taken, in their order.

    Several engines may take from it: `lock` is to be held around whatever goes together. The length may be read without; an engine that
    finds nothing left waits for its own rows to end, or is done. An engine may reserve requests that it is about to take: others then take
    later ones, as long as there are any.
    """

    def __init__(self, requests: int):
        self.lock, self._reserved_by = threading.Lock(), dict.fromkeys(range(requests))

    def __len__(self) -> int:
        return len(self._reserved_by)

    def first(self, count: int, engine: Hashable) -> list[int]:
        """The first `count` requests that this engine may take: those that no other has reserved, or if there are none, any."""
        mine = (index for index, other in self._reserved_by.items() if other in (None, engine))
        return list(itertools.islice(mine, count)) or list(itertools.islice(self._reserved_by, count))

    def reserve(self, indices: Sequence[int], engine: Hashable | None) -> None:
        """Notes that this engine, or with None no engine, is about to take them. Those that have been taken already are left out."""
        self._reserved_by |= {index: engine for index in indices if index in self._reserved_by}

    def take(self, indices: Sequence[int]) -> bool:
        """Takes them all, or none where another engine has taken one; returns whether they were taken."""
        if not all(index in self._reserved_by for index in indices):
            return False
        for index in indices:
            del self._reserved_by[index]
        return True


@dataclasses.dataclass
class Ahead:
    """Requests that are next for the slots of an engine. begin: starts their prefill on the device, for which the host has done its part.
    rows: their state; None until `begin` has been called, and until then they are reserved and not taken."""

    indices: list[int]
    begin: Callable[[], DecodeState]
    rows: DecodeState | None = None
