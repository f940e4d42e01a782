"""What each warp of a simulated GPU (simulated_gpu.py) knows to have happened, and accesses to shared memory that nothing orders."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from simulated_gpu import Block

LANES = np.arange(32)
SHARED_START = 1024
WRITTEN, COPIED, BULK = -1, 0, 1  # who writes shared memory: lanes, their copies, or copies of whole lines
SEVERAL = -2


@dataclasses.dataclass
class Here:
    """The warp that runs now. Code of warps reads and sets the fields of the one `here`, whose fields change as warps take turns.

    Attributes:
        block: Its block.
        warp: Its number in the block.
        mask: The lanes that run.
        copies: Groups of copies under way, of which the last is not committed.
        products: Products under way.
        past: What the warp knows to have happened.
    """

    block: "Block"
    warp: int
    mask: np.ndarray
    copies: list[list[tuple]]
    products: list[Callable[[], None]]
    past: "Past"


here = Here.__new__(Here)


class Past:
    """What a warp knows to have happened: a vector clock over all lanes of its cluster, and the copies each warp has started.

    Everything that is done carries the number of a step of its warp; `lanes[warp, lane]` is the last step of that lane that is ordered
    before whatever this warp does next, and `copies[kind, warp]` is the same for its lanes' copies (COPIED) and copies of whole lines
    (BULK).
    """

    def __init__(self, warp: int, warps: int):
        self.warp = warp
        self.lanes, self.copies = np.zeros((warps, 32), np.int64), np.zeros((2, warps), np.int64)
        self.step, self.copy_steps = 1, [1, 1]
        self.met = 1  # the step in which the lanes met last: what any of them did before is known to all
        self.landed = 0  # copies of lanes that have landed, which the lanes know each of its own until they meet

    def meet(self) -> None:
        """The lanes of the warp meet."""
        self.step += 1
        self.met, self.lanes[self.warp] = self.step, self.step - 1
        self.copies[COPIED, self.warp] = max(self.copies[COPIED, self.warp], self.landed)

    def hear(self, told: tuple[np.ndarray, np.ndarray]) -> None:
        """The warp hears what others told, and perhaps what a lane of its own did."""
        self.lanes, self.copies = np.maximum(self.lanes, told[0]), np.maximum(self.copies, told[1])

    def tell(self, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What those hear of who wait for these lanes."""
        lanes = self.lanes.copy()
        lanes[self.warp] = np.where(mask, self.step, np.maximum(lanes[self.warp], self.met - 1))
        self.step += 1
        return lanes, self.copies

    def tell_of_copies(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """What those hear of who wait for the copies of that kind so far."""
        copies = np.zeros_like(self.copies)
        copies[kind, self.warp] = self.copy_steps[kind]
        self.copy_steps[kind] += 1
        return np.zeros_like(self.lanes), copies


class Touched:
    """Who wrote each word of a block's shared memory last, and who has read it since and when: to find accesses that nothing orders.

    Copies of the same word by several warps are one write, which a warp knows once its own has landed. As all write the same bytes, one may
    come when others have read these already, but not before what was read until the first of them is over: `read_before`, `reader_before`.
    hidden: words that products of a warpgroup may not see, as the lane that wrote them has not published them.
    """

    def __init__(self, words: int, warps: int):
        self.written, self.writer, self.lane, self.source = (np.zeros(words, np.int64) for _ in range(4))
        self.kind = np.full(words, WRITTEN)
        self.copied = np.zeros((words, warps), np.int64)  # the step of the copies of each warp, where the last write is a copy
        self.read, self.reader = np.zeros((words, warps), np.int64), np.zeros((words, warps), np.int64)  # a step; a lane, or SEVERAL
        self.read_before, self.reader_before = np.zeros_like(self.read), np.zeros_like(self.reader)
        self.hidden = np.zeros(words, bool)
        self.raised = np.zeros((words, warps), np.int64)  # the step in which a lane of each warp raised the word last, since it was written
        self.any_copied = self.any_raised = False  # whether any word ever was; where none was, there is nothing to compare

    def publish(self, mask: np.ndarray) -> None:
        """The lanes of the mask publish what they have written."""
        self.hidden &= ~((self.writer == here.past.warp) & mask[self.lane])

    def reads(self, words: np.ndarray, lanes: np.ndarray) -> None:
        """words: [lane, any]; lanes: the lanes' numbers."""
        past, lanes = here.past, lanes[:, None]
        ordered = self._after_write(words, lanes)
        if self.any_copied and not ordered.all():
            own = self.copied[words, past.warp]
            ordered |= (own > 0) & (own <= past.copies[COPIED, past.warp])
        self._assert(ordered & self._after_raises(words), words, "reads what is written")
        mine = self.reader[:, past.warp]
        readers = np.where((self.read[words, past.warp] >= past.met) & (mine[words] != lanes), SEVERAL, lanes)
        mine[words] = readers
        mine[words[mine[words] != readers]] = SEVERAL  # of one word now
        self.read[words, past.warp] = past.step

    def writes(self, words: np.ndarray, lanes: np.ndarray, kind: int = WRITTEN, source: np.ndarray | int = 0) -> None:
        """As `reads`. kind: who writes. source: the global address [lane, any] of each word that is copied."""
        past, lanes = here.past, lanes[:, None]
        step = past.step if kind == WRITTEN else past.copy_steps[kind]
        ordered = self._after_write(words, lanes) & self._after_copies(words)
        read, reader, again = self.read[words], self.reader[words], None
        if kind == COPIED and ((self.kind[words] == COPIED) & (self.source[words] == source)).any():
            again = (self.kind[words] == COPIED) & (self.source[words] == source)
            ordered |= again
            read = np.where(again[..., None], self.read_before[words], read)
            reader = np.where(again[..., None], self.reader_before[words], reader)
        self._assert(ordered, words, "writes what is written")
        if self.any_raised:
            self._assert(self._after_raises(words), words, "writes what is raised")
        self._assert(self._after_reads(read, reader, lanes), words, "writes what is read")
        self.read_before[words], self.reader_before[words] = read, reader
        new = [(self.writer, past.warp), (self.lane, lanes), (self.written, step), (self.kind, kind), (self.source, source)]
        new += [(self.hidden, kind != BULK)] + [(self.copied, 0)] * self.any_copied + [(self.raised, 0)] * self.any_raised
        for array, value in new:
            array[words] = value if again is None else np.where(again if array.ndim == 1 else again[..., None], array[words], value)
        if kind == COPIED:
            self.copied[words, past.warp], self.any_copied = step, True
        elif self.any_copied:
            self.copied[words, past.warp] = 0

    def raises(self, words: np.ndarray, lanes: np.ndarray) -> None:
        """As `writes`, of a change that commutes with those of other lanes."""
        past, lanes = here.past, lanes[:, None]
        ordered = self._after_write(words, lanes) & self._after_copies(words)
        self._assert(ordered, words, "raises what is written")
        self._assert(self._after_reads(self.read[words], self.reader[words], lanes), words, "raises what is read")
        self.raised[words, past.warp], self.any_raised = past.step, True

    def _after_copies(self, words: np.ndarray) -> np.ndarray | bool:
        return not self.any_copied or (self.copied[words] <= here.past.copies[COPIED]).all(-1)

    def _after_raises(self, words: np.ndarray) -> np.ndarray | bool:
        return not self.any_raised or (self.raised[words] <= here.past.lanes.min(1)).all(-1)

    def _after_reads(self, read: np.ndarray, reader: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        past = here.past
        known = np.where(reader == SEVERAL, past.lanes.min(1), past.lanes[np.arange(len(past.lanes)), np.maximum(reader, 0)])
        known[..., past.warp] = np.where(reader[..., past.warp] == lanes, past.step, past.met - 1)
        return (read <= known).all(-1)

    def _after_write(self, words: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        past, writer, written, lane, kind = here.past, *(a[words] for a in (self.writer, self.written, self.lane, self.kind))
        known = np.where(kind == WRITTEN, past.lanes[writer, lane], past.copies[np.maximum(kind, 0), writer])
        mine = (writer == past.warp) & (lane == lanes)
        known = np.where(mine & (kind == WRITTEN), past.step, known)
        return written <= np.where(mine & (kind == COPIED), np.maximum(known, past.landed), known)

    def _assert(self, ordered: np.ndarray, words: np.ndarray, what: str) -> None:
        if not ordered.all():
            word = words[~ordered][0]
            others = f"written by lane {self.lane[word]} of warp {self.writer[word]}, read by warps {np.flatnonzero(self.read[word])}"
            raise AssertionError(f"a race: warp {here.warp} {what} at {SHARED_START + 4 * word}, and nothing orders the two ({others})")
