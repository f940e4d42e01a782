"""From prompts to text: batches of ragged prompts through prefill and the decode loop, with statistics."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from qspec_jax import decode, prefill
from qspec_jax.cache import empty_cache
from qspec_jax.compiled import Compiled
from qspec_jax.config import CacheConfig, GenerationConfig
from qspec_jax.decode import CachedModel, DecodeState, Limits, Step
from qspec_jax.drafts import quantspec
from qspec_jax.errors import InputError
from qspec_jax.model import Llama
from qspec_jax.sampling import TARGET, Sampler, make_sampler, prompt_keys

FINISH_REASONS = {decode.EOS: "eos", decode.LENGTH: "length", decode.STOP: "stop"}


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call to generate did: totals over the prompts, and the same counts for each prompt in `rows`.

    num_spec_steps: draft/verify rounds. draft_acceptance_rate: accepted / drafted tokens (the token that the target adds to
    each round not counted); null where nothing was drafted. mean_acceptance_length: 1 + accepted / rounds, tokens per round.
    acceptance_histogram[a]: rounds that accepted a drafts. Seconds: compile_s apart from prefill_s and decode_s;
    tokens_per_second is of decode_s alone, all rows together. cache_bytes: what the KV cache has allocated.
    """

    prompt_tokens: int
    new_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_histogram: list[int]
    flushes: int
    compile_s: float
    prefill_s: float
    decode_s: float
    tokens_per_second: float
    peak_memory_bytes: int | None
    cache_bytes: int
    rows: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The new tokens of each prompt (an EOS included), their text if a tokenizer was given, why each ended ("eos" or "length")."""

    token_ids: list[list[int]]
    text: list[str] | None
    finish_reason: list[str]
    stats: Stats


def _prepare(
    model: Llama,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    sampler: Sampler,
    keys: Key[Array, "B"],
    limits: Limits,
    *,
    cache: CacheConfig,
    capacity: int,
    max_new_tokens: int,
    gamma: int,
) -> DecodeState:
    empty = empty_cache(model.config, cache, batch=tokens.shape[0], capacity=capacity, num_speculative_tokens=gamma, dtype=model.dtype)
    with jax.named_scope("prefill"):
        logits, filled = prefill.prefill(model, tokens, n, empty)
    first, _ = sampler.choose(logits, keys, n, TARGET)
    return decode.start(filled, first, keys, limits, max_new_tokens=max_new_tokens, gamma=gamma)


PREPARE = Compiled(_prepare, static_argnames=("cache", "capacity", "max_new_tokens", "gamma"))
DECODE = Compiled(decode.decode, donate_argnames=("state",))


def generate(
    model: Llama,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer=None,
    draft: Step | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    rounds_per_update: int = 1,
) -> Generation:
    """Continues each prompt; the prompts are one batch, of any lengths.

    prompts: texts (then a tokenizer is needed) or lists of token ids. key: `jax.random.key(seed)`, for sampling. draft: see
    `qspec_jax.drafts`; by default, with method "quantspec", the INT4 draft is made here: make it once with
    `drafts.quantspec(model)` for many calls. on_tokens is called with the new tokens of each prompt after prefill and after every
    `rounds_per_update` rounds.

    The output is exactly the INT8-KV target's (in exact arithmetic): greedy, its very tokens; sampled, its distribution.
    Raises InputError for an empty prompt, a token id outside the vocabulary, and prompts that are too long.
    """
    config = config or GenerationConfig()
    rows = token_lists(model, prompts, config, tokenizer)
    gamma = most_drafts(model, config)
    if gamma and draft is None:
        draft = quantspec(model)
    sampler = make_sampler(config)
    keys = prompt_keys(jax.random.key(0) if key is None else key, len(rows))
    longest = prefill.bucket(max(map(len, rows)))
    max_new_tokens = prefill.bucket(config.max_new_tokens)
    tokens = np.zeros((len(rows), longest), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    n = np.array([len(row) for row in rows], np.int32)
    limits = make_limits(model, *[config] * len(rows))

    args = (model, jnp.asarray(tokens), jnp.asarray(n), sampler, keys, limits)
    static = dict(cache=config.cache_config, capacity=longest + max_new_tokens, max_new_tokens=max_new_tokens, gamma=gamma)
    run_prepare, prepare_s = PREPARE.compile(*args, **static)
    jax.block_until_ready(draft)
    began = time.perf_counter()
    state = jax.block_until_ready(run_prepare(*args))
    prefill_s = time.perf_counter() - began

    target, draft = CachedModel(model, planes=2), decode.in_loop(draft) if gamma else None
    rounds = jnp.int32(rounds_per_update if on_tokens else decode.UNLIMITED)
    run_decode, decode_compile_s = DECODE.compile(target, draft, sampler, state, limits, rounds)
    cache_bytes = state.cache.num_bytes
    step = functools.partial(run_decode, target, draft, sampler)
    jax.block_until_ready(draft)
    began = time.perf_counter()
    state = _stream(step, state, limits, rounds, on_tokens) if on_tokens else jax.block_until_ready(step(state, limits, rounds))
    decode_s = time.perf_counter() - began

    result = jax.device_get((state.tokens, state.emitted, state.status))
    token_ids = [row[:count].tolist() for row, count in zip(*result[:2])]
    text = None if tokenizer is None else [tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]
    stats = _stats(state, n, prepare_s + decode_compile_s, prefill_s, decode_s, cache_bytes)
    return Generation(token_ids, text, [FINISH_REASONS[int(s)] for s in result[2]], stats)


def make_limits(model: Llama, *configs: GenerationConfig) -> Limits:
    """Of each row. EOS ids are the first one's."""
    eos = configs[0].eos_token_ids if configs[0].eos_token_ids is not None else model.config.eos_token_ids
    if configs[0].ignore_eos or not eos:
        eos = (-1,)
    rows = lambda name: jnp.array([getattr(config, name) for config in configs], jnp.int32)
    return Limits(rows("max_new_tokens"), rows("num_speculative_tokens"), jnp.array(eos, jnp.int32))


def _stream(step: Callable, state: DecodeState, limits: Limits, rounds: Array, on_tokens: Callable) -> DecodeState:
    shown = np.zeros(state.emitted.shape[0], np.int32)
    while True:
        tokens, emitted, status = jax.device_get((state.tokens, state.emitted, state.status))
        on_tokens([row[a:b].tolist() for row, a, b in zip(tokens, shown, emitted)])
        shown = emitted
        if not (status == decode.RUNNING).any():
            return state
        state = step(state, limits, rounds)


def most_drafts(model: Llama, config: GenerationConfig) -> int:
    """Drafts that a round is compiled for: no more than could ever be eligible."""
    if config.method != "quantspec":
        return 0
    gamma = min(config.num_speculative_tokens, prefill.bucket(config.max_new_tokens))
    return gamma if config.cache == "full" else min(gamma, 2 * config.cache_config.group_size_for(model.config.head_dim) - 1)


def token_lists(
    model: Llama, prompts: Sequence[str] | Sequence[Sequence[int]], config: GenerationConfig, tokenizer=None
) -> list[list[int]]:
    """The token ids of each prompt. Raises InputError for whatever `generate` cannot continue."""
    if isinstance(prompts, str) or not len(prompts):
        raise InputError("prompts should be a list with at least one prompt")
    rows = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InputError("prompts are texts, so a tokenizer is needed")
            # A tokenizer may add a BOS token to it; it is empty all the same.
            prompt = tokenizer(prompt)["input_ids"] if prompt else []
        row = [int(token) for token in prompt]
        if not row:
            raise InputError(f"prompt {i} is empty; it should have at least one token")
        if min(row) < 0 or max(row) >= model.config.vocab_size:
            raise InputError(f"prompt {i} has a token id outside the vocabulary of {model.config.vocab_size}")
        rows.append(row)
    _check_lengths(model, rows, config)
    return rows


def _check_lengths(model: Llama, rows: list[list[int]], config: GenerationConfig) -> None:
    most = model.config.max_length
    for i, row in enumerate(rows):
        if len(row) + config.max_new_tokens > most:
            room = most - len(row)
            advice = (
                f"ask for at most {room} new tokens" if room > 0 else f"shorten it to at most {max(1, most - config.max_new_tokens)} tokens"
            )
            raise InputError(
                f"prompt {i} of {len(row)} tokens and {config.max_new_tokens} new ones exceed the model's {most} positions; {advice}"
            )


def _stats(state: DecodeState, n: np.ndarray, compile_s: float, prefill_s: float, decode_s: float, cache_bytes: int) -> Stats:
    counts, emitted = jax.device_get((state.counts, state.emitted))
    of = functools.partial(summary, speculative=state.gamma > 0)
    columns = (n, emitted, counts.rounds, counts.drafted, counts.accepted, counts.histogram, counts.flushes)
    memory = jax.local_devices()[0].memory_stats() or {}
    return Stats(
        **of(*(column.sum(0) for column in columns)),
        compile_s=compile_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        # The first token of each row is prefill's.
        tokens_per_second=float((emitted - 1).sum() / decode_s),
        peak_memory_bytes=memory.get("peak_bytes_in_use"),
        cache_bytes=cache_bytes,
        rows=[of(*row) for row in zip(*columns)],
    )


def summary(prompt_tokens, new_tokens, rounds, drafted, accepted, histogram, flushes, *, speculative: bool) -> dict[str, Any]:
    """The counts of a row, or of several together, by the names of `Stats`."""
    return dict(
        prompt_tokens=int(prompt_tokens),
        new_tokens=int(new_tokens),
        num_spec_steps=int(rounds) if speculative else 0,
        num_draft_tokens=int(drafted),
        num_accepted_draft_tokens=int(accepted),
        draft_acceptance_rate=float(accepted / drafted) if drafted else None,
        mean_acceptance_length=float(1 + accepted / rounds) if speculative and rounds else None,
        acceptance_histogram=histogram.tolist() if speculative else [],
        flushes=int(flushes),
    )
