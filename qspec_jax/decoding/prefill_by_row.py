"""Prefill of each prompt of a batch by itself, in programs for one prompt: what it leaves does not depend on the other prompts."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Self

import jax
from jaxtyping import Array

from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.prefill import Executables, Prefill, Reading
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import DecodeState
from qspec_jax.decoding.state_arrays import concatenated
from qspec_jax.models.prompts import padded


@dataclasses.dataclass(frozen=True)
class PrefillByRow:
    """Reads prompts one after the other, and gives what a `Prefill` of all of them gives. Its programs are those of `rows`. While rows are
    put together they are in memory twice.

    Attributes:
        rows: the prefill of each prompt.
        sampler, limits: of all rows, see `Prefill`.
    """

    rows: tuple[Prefill, ...]
    sampler: Sampler | None
    limits: Limits | None

    @classmethod
    def of(cls, prefill: Prefill, prompts: Sequence[Sequence[int]]) -> Self:
        """The prefill of the same prompts by row."""

        def row(b: int, prompt: Sequence[int]) -> Prefill:
            tokens, n = padded([prompt])
            sampler, keys, limits = prefill.sampler, prefill.keys, prefill.limits
            if limits is not None:
                sampler, keys = jax.tree.map(lambda x: x[b : b + 1], (sampler, keys))
                limits = limits.of_rows(slice(b, b + 1))
            return dataclasses.replace(prefill, tokens=tokens, n=n, sampler=sampler, keys=keys, limits=limits)

        return cls(tuple(row(b, prompt) for b, prompt in enumerate(prompts)), prefill.sampler, prefill.limits)

    def run(self, executables: Executables) -> DecodeState:
        """See `Prefill`."""
        return concatenated([row.run(executables) for row in self.rows])

    def run_in_parts(self, executables: Executables) -> Iterator[Array | DecodeState]:
        """See `Prefill`."""
        states = []
        for row in self.rows:
            for part in row.run_in_parts(executables):
                if not isinstance(part, DecodeState):
                    yield part
            states.append(part)
        yield concatenated(states)

    def read(self, executables: Executables) -> Reading:
        """See `Prefill`."""
        return concatenated([row.read(executables) for row in self.rows])

    def shapes(self) -> DecodeState:
        """See `Prefill`."""
        return jax.eval_shape(lambda *rows: concatenated(rows), *(row.shapes() for row in self.rows))
