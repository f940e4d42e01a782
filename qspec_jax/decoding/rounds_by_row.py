"""Rounds of each row alone: a sampled row has the same bits whatever else is decoded with it. This is for CPUs.

Drafts and random draws add up too, over the vocabulary for instance, in an order that XLA chooses by what surrounds them. Here the whole
round of a row is a computation of its own, see `qspec_jax.models.uniform`.
"""

from jax import lax
from jaxtyping import Array

from pallas_kernels.dispatch import fixed_order
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.round import decode_round
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import RUNNING, DecodeState
from qspec_jax.drafts.draft import Draft
from qspec_jax.models.uniform import UniformModel, alone, of_row, with_row


def round_by_row(target: UniformModel, draft: Draft | None, sampler: Sampler, state: DecodeState, limits: Limits) -> DecodeState:
    """What `decode_round` returns, of rows that share no pages."""
    never = state.cache.lengths.total[0] < 0

    def one_round(row: DecodeState, sampler: Sampler, limits: Limits) -> DecodeState:
        with fixed_order():
            return decode_round(target, draft, sampler, row, limits)

    def of(b: Array, state: DecodeState) -> DecodeState:
        row, settings = of_row(state, b), of_row(sampler, b)
        return with_row(state, b, alone(one_round, row, settings, limits.of_rows(b[None]), never=never))

    def of_running(b: Array, state: DecodeState) -> DecodeState:
        return lax.cond(state.status[b] == RUNNING, lambda: of(b, state), lambda: state)

    return lax.fori_loop(0, len(state.status), of_running, state)
