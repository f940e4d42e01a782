"""Tiny random models, and decoding round by round, so that tests see the state after each one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import hf_config
from qspec_jax.drafts.cached_model import CachedModel, Step

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import DECODE, PREPARE, make_limits
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.decoding.state import DecodeState, Limits
from qspec_jax.drafts import quantspec
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket, padded


def random_model(dtype, *, vocab_size: int = 64, spread: float = 0.15, seed: int = 0, **changes: Any) -> Llama:
    """Two layers of grouped-query attention; `spread` is the standard deviation of the matrices."""
    settings = {"head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    config = LlamaConfig.from_hf(hf_config(vocab_size=vocab_size, **(settings | changes)))
    rng = np.random.default_rng(seed)
    return Llama(config, lambda path, shape: jnp.asarray(rng.normal(0, spread if len(shape) == 2 else 1, shape), dtype))


def random_prompts(lengths: list[int], vocab_size: int = 64, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


@dataclasses.dataclass(frozen=True)
class Round:
    """The state after prefill (the first entry) or a round, [B] each, on the host."""

    quantized: np.ndarray
    buffered: np.ndarray
    emitted: np.ndarray
    status: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    flushes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    rounds: list[Round]


def prepared(
    model: Llama, prompts: list[list[int]], config: GenerationConfig, *, keys=None, limits: Limits | None = None
) -> tuple[DecodeState, Limits]:
    """The state after prefill, by the executables that `generate` uses."""
    gamma = config.num_speculative_tokens if config.method == "quantspec" else 0
    tokens, n = padded(prompts)
    limits = limits or make_limits(model, *[config] * len(prompts))
    keys = prompt_keys(jax.random.key(0), len(prompts)) if keys is None else keys
    new = bucket(config.max_new_tokens)
    args = (CachedModel(model, planes=2), tokens, n, make_sampler(config), keys, limits)
    static = dict(cache=config.cache_config, capacity=tokens.shape[1] + new, max_new_tokens=new, gamma=gamma)
    return PREPARE.compile(*args, **static)[0](*args), limits


def run_rounds(
    model: Llama, prompts: list[list[int]], config: GenerationConfig, *, draft: Step | None = None, keys=None, limits: Limits | None = None
) -> Run:
    """Decodes to the end, one round at a time."""
    state, limits = prepared(model, prompts, config, keys=keys, limits=limits)
    if state.gamma and draft is None:
        draft = quantspec(model)
    args = (CachedModel(model, 2), draft if state.gamma else None, make_sampler(config))
    step, _ = DECODE.compile(*args, state, limits, jnp.int32(1))
    rounds = [look(state)]
    while (rounds[-1].status == 0).any():
        state = step(*args, state, limits, jnp.int32(1))
        rounds.append(look(state))
    return Run([row[:n].tolist() for row, n in zip(np.asarray(state.tokens), rounds[-1].emitted)], rounds)


def look(state: DecodeState) -> Round:
    lengths, counts = state.cache.lengths, state.counts
    parts = (lengths.quantized, lengths.buffered, state.emitted, state.status, counts.drafted, counts.accepted, counts.flushes)
    return Round(*(np.asarray(part) for part in parts))
