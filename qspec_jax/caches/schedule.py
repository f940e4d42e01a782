"""The schedule: which of a row's cached tokens are quantized, and how many drafts a round may use.

A flush quantizes the oldest G tokens of a row's full-precision buffer at once. G is the schedule's `flush_size`: in the cache int8 one
quantization group, in kivi and specache `residual` tokens, which may be several groups; in h2o, whose flushes forget tokens instead,
`recent` tokens. A row of n cached tokens has `quantized_length(n)` of them quantized, which depends on n alone, and the others, fewer than
2G, in the buffer. A round uses at most 2G - 1 - buffered drafts: with the pending token they fill the buffer to 2G tokens at most, where
one-by-one decoding would flush. With more, the target would read other codes than one-by-one decoding does, and its output would differ.
A full cache quantizes nothing, but its rounds end at multiples of a span of tokens: attention with exact bits divides a row by these.
See QuantSpec (arXiv 2502.10424), section 4.3 and algorithm 1.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.formats.kv_cache import Lengths


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which tokens of a row are quantized when, and how far a round verifies. Raises ValueError for both a flush size and a span.

    Attributes:
        flush_size: how many tokens of a row a flush quantizes at once, G; None: nothing is ever quantized.
        span: where nothing is quantized, a round verifies no token beyond the next multiple of this number of tokens; None: any.
    """

    flush_size: int | None
    span: int | None = None

    def __post_init__(self):
        if self.flush_size is not None and self.span is not None:
            raise ValueError(f"a schedule has a flush size or a span, not both {self.flush_size} and {self.span}")

    def quantized_length(self, n: Array | int) -> Array | int:
        """How many of n cached tokens are quantized: a multiple of G; the last G to 2G - 1 stay unquantized, or all of fewer than 2G. A
        Python int gives a Python int, without JAX."""
        G = self.flush_size
        if G is None:
            return 0 * n
        return (max(0, n // G - 1) if isinstance(n, int) else jnp.maximum(0, n // G - 1)) * G

    def lengths(self, n: Int[Array, "B"]) -> Lengths:
        """The lengths of rows that hold n[b] tokens."""
        quantized = self.quantized_length(n)
        return Lengths(quantized, n - quantized)

    def draft_room(self, lengths: Lengths) -> Int[Array, "B"]:
        """How many drafts a row may verify: with the pending token, up to where one-by-one decoding would flush, or to the span's end."""
        if self.flush_size is not None:
            return 2 * self.flush_size - 1 - lengths.buffered
        if self.span is not None:
            return self.span - 1 - lengths.total % self.span
        return jnp.full_like(lengths.buffered, jnp.iinfo(jnp.int32).max)

    def room(self, n: int) -> int | float:
        """How many tokens a pass may append to a row of n tokens: one more than `draft_room`."""
        return self.until_flush(n) if self.span is None else self.span - n % self.span

    def until_flush(self, n: int) -> int | float:
        """How many tokens a row of n tokens may append until it is to be flushed."""
        return math.inf if self.flush_size is None else 2 * self.flush_size - (n - self.quantized_length(n))

    def due(self, lengths: Lengths) -> Bool[Array, "B"]:
        """Which rows buffer 2G tokens, so that the oldest G of these are to be quantized."""
        if self.flush_size is None:
            return jnp.zeros_like(lengths.buffered, bool)
        return lengths.buffered >= 2 * self.flush_size

    def flushed(self, lengths: Lengths, due: Bool[Array, "B"]) -> Lengths:
        """The lengths once the oldest G buffered tokens of the rows that are due are quantized."""
        moved = (self.flush_size or 0) * due.astype(lengths.buffered.dtype)
        return Lengths(lengths.quantized + moved, lengths.buffered - moved)

    def buffer_rows(self, num_speculative_tokens: int) -> int:
        """Tokens that the buffer has room for: 2G, plus those that a verification appends before rejected ones are rolled back."""
        return 2 * self.flush_size + num_speculative_tokens + 1

    def max_flushes(self, capacity: int) -> int:
        """The maximum number of flushes of a row of at most `capacity` cached tokens. With int8 each fills one quantization group, with
        kivi and specache perhaps several."""
        return max(0, capacity // self.flush_size - 1)

    def max_drafts(self, gamma: int) -> int:
        """The maximum number of drafts, of gamma asked for, that a round of any row may use."""
        room = self.span if self.flush_size is None else 2 * self.flush_size
        return gamma if room is None else min(gamma, room - 1)


def eligible_drafts(gamma: Int[Array, "B"], draft_room: Int[Array, "B"], wanted: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many drafts a row may use in a round.

    Args:
        gamma: the round's limit for the row, by its config and adaptive drafting.
        draft_room: what the schedule has room for.
        wanted: new tokens that are still wanted; the target adds one of its own to the drafts.
    """
    return jnp.maximum(jnp.minimum(jnp.minimum(gamma, draft_room), wanted - 1), 0)
