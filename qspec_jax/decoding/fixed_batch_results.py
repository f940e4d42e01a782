"""A batch that is not refilled as a part of a larger run: the results of its rows, and what it adds to the statistics of the run."""

from collections.abc import Callable, Sequence

from qspec_jax.decoding import state
from qspec_jax.decoding.config import BITS
from qspec_jax.decoding.fixed_batch import Run
from qspec_jax.decoding.prepare import Prepared
from qspec_jax.decoding.results import BatchStats, Result
from qspec_jax.decoding.sampling import Sampler


def results_of(prepared: Prepared, indices: Sequence[int], strategy: Callable[..., Sampler], stats: BatchStats) -> list[Result]:
    """The results of rows that are decoded together until all have ended.

    Args:
        prepared: the requests.
        indices: of the rows in the whole batch.
        strategy: makes a sampler of configs.
        stats: the totals of the run, to which these rows are added.
    """
    # With exact bits, where a run has no sampler of the caller's, the strategy is `make_sampler`, as the run's own is (`run_batch`).
    run = Run(prepared, None if prepared.exact == BITS else strategy(*prepared.configs), state.UNLIMITED)
    for _ in run.updates():
        pass
    done = run.generation()
    found = done.stats
    stats.prompts += len(indices)
    stats.new_tokens += found.new_tokens
    stats.num_draft_tokens += found.num_draft_tokens
    stats.num_accepted_draft_tokens += found.num_accepted_draft_tokens
    stats.compile_s += found.compile_s
    stats.prefill_s += found.prefill_s
    stats.decode_s += found.decode_s
    stats.held_bytes = max(stats.held_bytes, found.cache_bytes)
    # Without a draft there is no histogram, and each round gives one token after the first.
    rounds = [sum(row.acceptance_histogram) or row.new_tokens - 1 for row in found.rows]
    stats.rounds += max(rounds)
    stats.slot_rounds += max(rounds) * len(rounds)
    stats.busy_rounds += sum(rounds)
    texts, nothing = done.text or [None] * len(indices), [None] * len(indices)
    columns = (indices, done.token_ids, texts, done.finish_reason, found.rows, done.logprobs or nothing, done.top_logprobs or nothing)
    return [
        Result(*row[:5], *(row[5:] if config.logprobs is not None else (None, None)))
        for row, config in zip(zip(*columns, strict=True), prepared.configs, strict=True)
    ]
