"""The protocol of KV caches: immutable pytrees with static shapes, one entry per layer, and lengths per row."""

import abc
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.views import View
from qspec_jax.caches.schedule import Schedule
from qspec_jax.models.llama import AttendingCache

Tree = TypeVar("Tree")
KeysValues = tuple[Float[Array, "R K T H"], Float[Array, "R K T H"]]
MAX_TOKENS = 1 << 16  # the maximum of each setting of a cache that is a number of tokens


class Gives(enum.Enum):
    """What drafts may ask of a target's cache besides passes over all of it. The value says what such a draft does."""

    GROUPS = "reads groups of the int8 cache"
    TOKENS = "takes single tokens from the target's cache"


@dataclasses.dataclass(frozen=True)
class Reads:
    """What a pass reads of one layer of a row, in tokens, those that it appends included.

    Attributes:
        planes: 4-bit planes read of each quantized token; codes of fewer bits are one plane.
        quantized: tokens read in codes.
        full: tokens read in full precision.
        listed: whether the quantized tokens are those of listed groups, and not all that the row has.
    """

    planes: int
    quantized: int
    full: int
    listed: bool = dataclasses.field(default=False, kw_only=True)


NOTHING = Reads(0, 0, 0)


class AppendedCache(AttendingCache, abc.ABC):
    """A cache that passes of a model append to and read: `attend` in each layer, then `advance`; `rollback` forgets tokens again.

    A subclass is a frozen dataclass registered as a pytree. It defines a layer, and how it is read.
    """

    layers: tuple[Any, ...]
    lengths: Lengths

    @abc.abstractmethod
    def attend(
        self,
        layer: int,
        qkv: Float[Array, "B T channels"],
        cos: Float[Array, "B T half"],
        sin: Float[Array, "B T half"],
        *,
        view: View,
    ) -> tuple[Float[Array, "B T N H"], Any, Float[Array, "B K T C"] | None]:
        """Appends the keys and values of T tokens to a layer, and attends to what the view says.

        Returns:
            The attended values, the layer's new entry, and the attention mass of each group if the view is observed, else None; see
            `pallas_kernels.attention.decode_attention`.
        """

    @abc.abstractmethod
    def bytes_of_reads(self, layer: int, reads: Reads) -> tuple[int, int]:
        """Bytes that a pass reads of one row of a layer on the device, and bytes that it copies from host memory.

        reads: how many tokens it reads there. The arrays of the cache may be shapes, which need not say in which memory an array is.
        """

    def reads_of_layer(self, layer: int, reads: Reads, tokens: int) -> Reads:
        """What a pass reads of a layer, if it reads `reads` of those that hold every token. tokens: that a row holds, those of the pass
        included."""
        return reads

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers whose passes may read every token of a row, and not those of a window alone."""
        return tuple(range(len(self.layers)))

    def advance(self, layers: tuple[Any, ...], tokens: int) -> Self:
        """The cache with these layers, every row `tokens` longer."""
        new = self.with_layers(layers)
        return new.rollback(longer(new.lengths, tokens))

    def with_layers(self, layers: tuple[Any, ...]) -> Self:
        """The cache with these layers."""
        return dataclasses.replace(self, layers=layers)

    def part(self, part: slice) -> Self:
        """The cache of some of the layers."""
        return dataclasses.replace(self, layers=self.layers[part])

    @property
    def compiler_options(self) -> dict[str, str]:
        """Options of XLA, by their names, for programs that are `Compiled(passes=True)` and have this cache among their arguments."""
        return {}

    def rollback(self, lengths: Lengths) -> Self:
        """The cache at earlier lengths. Nothing is moved: later rows are masked, and overwritten when tokens are appended."""
        return dataclasses.replace(self, lengths=lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the layers."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.layers))


class Cache(AppendedCache):
    """The protocol of a target's cache, which holds every token of a row.

    In a round, drafts and verification call `attend` in each layer, then `advance`; `rollback` to the lengths before the round forgets
    tokens; at last `commit`, the only way in which tokens come to stay.

    Attributes:
        gives: what drafts may ask of it. `GenerationConfig` compares it with the draft's needs (`qspec_jax.drafts.draft.needs_of`).
        takes_drafts: whether any draft but `none` is compatible with it.
        takes_group_size: whether a group size makes any difference to it.
        chooses_by_head: whether each KV head keeps or fetches tokens of its own choice; copies of a head on several devices would then
            choose different ones.
        trims: whether a row can be cut back to an earlier length, since nothing of the tokens before that was forgotten.
        prompt_queries: how many of a prompt's last queries `fill` is also given, after RoPE, [B, Q, N, H], the last one in the last row and
            zeros before a prompt's first; never more than the prompt's S. If it is 0, `fill` gets no argument `queries`.
    """

    gives: ClassVar[frozenset[Gives]] = frozenset({Gives.TOKENS})
    takes_drafts: ClassVar[bool] = True
    takes_group_size: ClassVar[bool] = True
    chooses_by_head: ClassVar[bool] = False
    trims: ClassVar[bool] = True

    prompt_queries: int = 0

    @property
    @abc.abstractmethod
    def schedule(self) -> Schedule:
        """Which tokens are quantized."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """No row ever holds more tokens."""

    @abc.abstractmethod
    def fill(self, layer: int, keys: Float[Array, "B K S H"], values: Float[Array, "B K S H"], n: Int[Array, "B"]) -> Any:
        """A layer that holds the first n[b] of S prompt tokens; keys are after RoPE."""

    @abc.abstractmethod
    def tokens(self, layer: int, positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None) -> KeysValues:
        """Keys, after RoPE, and values of the cached tokens at these positions, as the target reads them.

        batch_rows: in these rows of the batch; None: in all. A position beyond a row's lengths gives numbers without a meaning.
        """

    @abc.abstractmethod
    def reads(self, view: View, tokens: int) -> Reads:
        """What a pass through a view of everything reads of each layer of a row. tokens: that the row holds, those of the pass included."""

    def bytes_of_pass(self, view: View, tokens: int) -> tuple[int, int]:
        """The bytes of that in all layers, see `bytes_of_reads`."""
        reads = self.reads(view, tokens)
        of_layers = (self.reads_of_layer(layer, reads, tokens) for layer in range(len(self.layers)))
        read, copied = zip(*(self.bytes_of_reads(layer, each) for layer, each in enumerate(of_layers)))
        return sum(read), sum(copied)

    @property
    def num_host_bytes(self) -> int:
        """The part of `num_bytes` that is in host memory. It follows from the settings, since shapes need not say it."""
        return 0

    @property
    def streamed_part(self) -> "Cache":
        """The cache of those layers of which a part may be in host memory; of most caches all of it."""
        return self

    def steps_over(self, own: AppendedCache) -> AppendedCache:
        """What the steps of a draft append to and read that has a cache `own` of its own, of the `full_layers`."""
        return own

    def from_steps(self, stepped: AppendedCache) -> tuple[AppendedCache, Self]:
        """The draft's own cache and this one, after its steps. stepped: `steps_over`, as the steps return it, rolled back."""
        return stepped, self

    def with_layer_on_device(self, layer: int, *, after: Tree) -> tuple[Self, Tree]:
        """The cache with this whole layer on the device, for reading many of its tokens; and `after`, which the caller uses from then on.

        A copy from host memory begins when `after` is computed; XLA drops that wait if the returned `after` is not used. A loop over layers
        passes the results of all earlier layers, so that one layer at a time is on the device.
        """
        return self, after

    def recent_tokens(self, layer: int, positions: Int[Array, "B #K T"]) -> KeysValues:
        """As `tokens`, for positions that are among the last T of their row."""
        return self.tokens(layer, positions)

    def min_rollback(self, tokens: int | Int[Array, "B"]) -> int | Int[Array, "B"]:
        """The minimum number of tokens that a row of `tokens` tokens can be rolled back to without losing any that it reads then, codes
        apart, of which a flush has made others."""
        return 0

    def flushed_layers(self, due: Bool[Array, "B"]) -> tuple[Any, ...]:
        """The layers after the oldest G buffered tokens of the rows that are due are quantized."""
        return self.layers

    def with_rows(self, rows: Self, slots: Int[Array, "k"], pages: Int[Array, "k C"] | None = None) -> Self:
        """The cache with k of its rows replaced by those of another cache of the same capacity.

        pages: of a cache whose rows share a pool, the page of each group of these rows, 0 for groups that they will never have.
        """
        return jax.tree.map(lambda x, row: x.at[slots].set(row), self, rows)

    def filled(self, layers: tuple[Any, ...], n: Int[Array, "B"]) -> Self:
        """The cache of these layers, whose rows hold n[b] tokens."""
        return self.with_layers(layers).rollback(self.schedule.lengths(n))

    def commit(self, lengths: Lengths, kept: Int[Array, "B"], *, wait_for: Sequence[Array]) -> tuple[Self, Int[Array, "B"]]:
        """Ends a round that began at these lengths: the first kept[b] of the tokens appended since stay, and rows that are due are flushed.

        Args:
            lengths: before the round.
            kept: how many of the appended tokens stay.
            wait_for: arrays of non-negative numbers, batch first, that were computed from everything that read the cache in this round,
                such as token ids and attention masses. The flush waits for them. Each is made by one kernel or loop, since only the first
                number of a row is waited for.

        Returns:
            The cache, and 1 for each row that was flushed, else 0.
        """
        # None of it is ever negative, but XLA cannot know. Unless the flush depends on what the last reader computed, XLA may flush before
        # that has read the cache, and copies the cache for it (seen in jax 0.10).
        for computed in wait_for:
            if not computed.size:  # masses of no groups: the cache has no room for one
                continue
            # The first number is known when all of the array is. Testing all numbers would cost seconds of compiling if they are constants.
            kept = jnp.where(computed.reshape(computed.shape[0], -1)[:, 0] < 0, 0, kept)
        return self.keep(lengths, kept).flush()

    def keep(self, lengths: Lengths, kept: Int[Array, "B"]) -> Self:
        """`commit` without the flush, for a pass after which no row is due, or which is followed by `flush` in a program of its own."""
        return self.rollback(longer(lengths, kept))

    def flush(self) -> tuple[Self, Int[Array, "B"]]:
        """Quantizes the oldest G buffered tokens of every row that buffers 2G tokens, with G the schedule's `flush_size`. Also returns 1
        for each such row, else 0."""
        due = self.schedule.due(self.lengths)
        flushed = self.with_layers(self.flushed_layers(due)).rollback(self.schedule.flushed(self.lengths, due))
        return flushed, due.astype(self.lengths.buffered.dtype)

    @property
    def draft_room(self) -> Int[Array, "B"]:
        """How many drafts each row may verify in this round; see `Schedule.draft_room`."""
        return self.schedule.draft_room(self.lengths)


class PooledCache(Cache):
    """The protocol of a cache whose rows may share a pool of pages, each of which has room for one group.

    pages: the page of each of a row's groups; None if each row has its own memory. Page 0 is a dummy page, to which nothing is written:
    entries of groups that a row will never have point to it.
    """

    pages: Int[Array, "B C"] | None

    @property
    @abc.abstractmethod
    def groups(self) -> int:
        """Capacity of the quantized region of a row, in groups."""

    @property
    @abc.abstractmethod
    def num_pages(self) -> int | None:
        """The size of the pool; None if each row has its own memory."""

    @abc.abstractmethod
    def pooled(self, batch: int, pages: int) -> Self:
        """An empty batch of rows with the capacity of this cache's, which share a pool of `pages` pages, page 0 included."""

    @property
    def pooled_part(self) -> Self:
        """The cache of those layers that have groups; of most caches all of it."""
        return self

    def with_pooled_part(self, part: Self) -> Self:
        """The cache with this `pooled_part`."""
        return part


def at_most_once(due: Bool[Array, ""], function: Callable[[Tree], Tree], carry: Tree) -> Tree:
    """function(carry) if it is due, else the carry: a loop of at most one trip. lax.cond would copy the caches that it passes through (seen
    in jax 0.10)."""
    return lax.while_loop(lambda state: state[1], lambda state: (function(state[0]), jnp.array(False)), (carry, due))[0]


def no_tokens(batch: int) -> Lengths:
    """The lengths of rows that hold nothing."""
    return Lengths(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))


def longer(lengths: Lengths, tokens: int | Int[Array, "B"]) -> Lengths:
    """The lengths with `tokens` more in the buffer."""
    return dataclasses.replace(lengths, buffered=lengths.buffered + tokens)


def where_rows(rows: Bool[Array, "B"], new: Tree, old: Tree) -> Tree:
    """The arrays of `new` in these rows of a batch, those of `old` in the others. Both are pytrees of one structure, and the first axis of
    each array is the batch."""
    return jax.tree.map(lambda new, old: jnp.where(rows.reshape(-1, *(1,) * (old.ndim - 1)), new, old), new, old)


def bytes_of_tokens(arrays: Tree, tokens: int, room: int) -> int:
    """Bytes of `tokens` tokens of one row, in arrays, or shapes of them, whose rows, their first axis, have room for `room` tokens."""
    leaves = jax.tree.leaves(arrays)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) * tokens // (leaves[0].shape[0] * room) if room else 0
