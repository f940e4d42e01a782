"""Acceptance of a draft: free-running (in generation) and teacher-forced (along a real text).

A model that falls into a loop repeats itself, and its draft with it: such text flatters the free-running figure. So it comes
with the share of repeated 8-grams, and beside it stands the teacher-forced figure, whose context is always the real text.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key

from qspec_jax.caches.registry import Cache, empty_cache
from qspec_jax.decoding import prefill
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate, make_limits, token_lists
from qspec_jax.decoding.round import draft_tokens, eligible_drafts
from qspec_jax.decoding.sampling import Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.state import Counts, DecodeState, Limits, start
from qspec_jax.drafts.cached_model import CachedModel, Step, in_loop
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded

NGRAM = 8


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """accepted / drafted tokens, with the text they were measured on: its new tokens and share of repeated 8-grams.

    mean_acceptance_length: 1 + accepted / rounds, tokens per round. conditional_rate: the chance that a draft is accepted given those
    before it, accepted / (accepted + rounds that rejected a draft); None free-running, where a round that accepted fewer than gamma
    may have rejected none: fewer were eligible.
    """

    acceptance_rate: float
    mean_acceptance_length: float
    conditional_rate: float | None
    accepted: int
    drafted: int
    rounds: int
    new_tokens: int
    repeated_ngrams: float


def free_running(model: Llama, draft: Step, prompts: Sequence[Sequence[int]], config: GenerationConfig, key: Key[Array, ""]) -> Acceptance:
    """Acceptance while the model generates after each prompt (EOS ignored)."""
    check(model, prompts, config)
    config = dataclasses.replace(config, ignore_eos=True)
    out = generate(model, prompts, config=config, key=key, draft=draft)
    stats = out.stats
    return Acceptance(
        stats.draft_acceptance_rate,
        stats.mean_acceptance_length,
        None,
        stats.num_accepted_draft_tokens,
        stats.num_draft_tokens,
        stats.num_spec_steps,
        stats.new_tokens,
        repeated_ngrams(out.token_ids),
    )


def teacher_forced(
    model: Llama,
    draft: Step,
    texts: Sequence[Sequence[int]],
    config: GenerationConfig,
    key: Key[Array, ""],
    *,
    make_cache: Callable[..., Cache] | None = None,
) -> Acceptance:
    """Acceptance along real texts, whose last `config.max_new_tokens` tokens are walked.

    At each stop gamma tokens are drafted and verified as in generation; then the real tokens take their place, as many as the round
    would have emitted, so that the next round drafts in the real context. make_cache: an empty cache of batch=, capacity=,
    num_speculative_tokens=, dtype=; by default that of the config. Raises InputError for a text with no room for a prompt.
    """
    new, gamma = config.max_new_tokens, config.num_speculative_tokens
    if min(map(len, texts)) <= new:
        raise InputError(f"every text should have more than the {new} tokens to walk")
    check(model, [text[:-new] for text in texts], config)
    tokens, n = padded([text[:-new] for text in texts])
    real = np.array([list(text[-new:]) + [0] * (gamma + 1) for text in texts], np.int32)
    limits = make_limits(model, *[dataclasses.replace(config, ignore_eos=True)] * len(texts))
    sampler, keys = make_sampler(config), prompt_keys(key, len(texts))
    make_cache = make_cache or functools.partial(empty_cache, model.config, config.cache_config)
    empty = make_cache(batch=len(texts), capacity=tokens.shape[1] + new, num_speculative_tokens=gamma, dtype=model.dtype)
    args = (model, tokens, n, empty, jnp.asarray(real[:, 0]), keys, limits)
    static = dict(max_new_tokens=new, gamma=gamma)
    run_begin, _ = BEGIN.compile(*args, **static)
    state = run_begin(*args)
    walk_args = (CachedModel(model, 2), in_loop(draft), sampler, state, limits, jnp.asarray(real))
    run_walk, _ = WALK.compile(*walk_args)
    state, rejected = run_walk(*walk_args)
    counts, rejected = jax.device_get((state.counts, rejected))
    accepted, drafted, rounds = (int(count.sum()) for count in (counts.accepted, counts.drafted, counts.rounds))
    return Acceptance(
        accepted / drafted,
        1 + accepted / rounds,
        accepted / (accepted + int(rejected.sum())),
        accepted,
        drafted,
        rounds,
        new * len(texts),
        repeated_ngrams(real[:, :new].tolist()),
    )


def check(model: Llama, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Raises InputError where acceptance after these prompts cannot be measured."""
    if config.num_speculative_tokens < 1 or config.max_new_tokens < 3:
        raise InputError("acceptance needs num_speculative_tokens (gamma) of at least 1 and max_new_tokens of at least 3")
    if config.repetition_penalty != 1:
        raise InputError("acceptance is measured without a repetition penalty")
    if config.adaptive or config.min_draft_confidence:
        raise InputError("acceptance is of a fixed number of drafts; adaptive and min_draft_confidence choose their own")
    token_lists(model, prompts, config)


def _begin(
    model: Llama,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    empty: Cache,
    first: Int[Array, "B"],
    keys: Key[Array, "B"],
    limits: Limits,
    *,
    max_new_tokens: int,
    gamma: int,
) -> DecodeState:
    _, cache = prefill.prefill(model, tokens, n, empty)
    return start(cache, first, keys, limits, max_new_tokens=max_new_tokens, gamma=gamma)


def _walk(
    target: Step, draft: Step, sampler: Sampler, state: DecodeState, limits: Limits, real: Int[Array, "B T"]
) -> tuple[DecodeState, Int[Array, "B"]]:
    """The state behind the text, and how many rounds of each row rejected a draft."""
    width = state.gamma + 1
    block_at = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width))

    def walking(carry) -> Array:
        # Stop where no draft can be counted any more; the last token of the text is only ever verified against.
        return (carry[0].emitted < limits.max_new_tokens).any()

    def step(carry):
        state, rejected = carry
        lengths = state.cache.lengths
        active = state.emitted < limits.max_new_tokens
        eligible = jnp.where(active, eligible_drafts(state, limits), 0)
        drafts, proposals, eligible, cache = draft_tokens(draft, sampler, state, eligible, limits)
        positions = lengths.total[:, None] + jnp.arange(width)
        logits, cache = target(jnp.concatenate([state.pending[:, None], drafts], 1), positions, cache)
        logits = limits.processed(logits, state.emitted, None)
        accepted, _ = sampler.verify(logits, drafts, proposals, eligible, state.keys, positions + 1)
        # Once more with the real tokens, whose keys and values are what the cache must hold.
        _, cache = target(block_at(real, state.emitted - 1), positions, cache.rollback(lengths))
        moved = jnp.where(active, accepted + 1, 0)
        cache, flushed = cache.rollback(dataclasses.replace(lengths, buffered=lengths.buffered + moved)).flush()
        old = state.counts
        counts = Counts(
            old.rounds + active,
            old.drafted + eligible,
            old.accepted + jnp.where(active, accepted, 0),
            old.flushes + flushed,
            old.histogram + (active[:, None] & (jnp.arange(width) == accepted[:, None])),
        )
        emitted = state.emitted + moved
        adaptive = None if state.adaptive is None else state.adaptive.after(eligible, accepted, active)
        pending = block_at(real, emitted - 1)[:, 0]
        state = dataclasses.replace(state, cache=cache, pending=pending, emitted=emitted, counts=counts, adaptive=adaptive)
        return state, rejected + (active & (accepted < eligible))

    return lax.while_loop(walking, step, (state, jnp.zeros_like(state.emitted)))


BEGIN = Compiled(_begin, static_argnames=("max_new_tokens", "gamma"), donate_argnames=("empty",))
WALK = Compiled(_walk, donate_argnames=("state",))


def repeated_ngrams(rows: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """Share of the n-grams of each row that stood earlier in the same row."""
    total = repeated = 0
    for row in rows:
        seen = set()
        for i in range(len(row) - n + 1):
            gram = tuple(row[i : i + n])
            repeated += gram in seen
            seen.add(gram)
            total += 1
    return repeated / total if total else 0.0
