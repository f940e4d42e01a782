"""Tiny random models, and decoding round by round, so that tests see the state after each one."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import Limits, make_limits
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.decoding.state import DecodeState
from qspec_jax.drafts import Draft, make_draft
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama


def random_model(dtype, *, vocab_size: int = 64, spread: float = 0.15, seed: int = 0, **changes: Any) -> Llama:
    """Two layers of grouped-query attention; `spread` is the standard deviation of the matrices."""
    settings = {"head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    config = LlamaConfig.from_hf(hf_config(vocab_size=vocab_size, **(settings | changes)))
    rng = np.random.default_rng(seed)
    return Llama(config, lambda path, shape: jnp.asarray(rng.normal(0, spread if len(shape) >= 2 else 1, shape), dtype))


def random_prompts(lengths: list[int], vocab_size: int = 64, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def with_draft(given: Any, draft: Any) -> Any:
    """A config, or a list of requests, with this draft, made or named; None: as they are."""
    if draft is None:
        return given
    if isinstance(given, GenerationConfig):
        return dataclasses.replace(given, draft=draft)
    return [dataclasses.replace(request, config=dataclasses.replace(request.config, draft=draft)) for request in given]


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
    model: Llama, prompts: list[list[int]], config: GenerationConfig, *, draft: Draft | None = None, keys=None, limits: Limits | None = None
) -> tuple[DecodeState, Callable[[DecodeState], DecodeState], Limits]:
    """The state after prefill, and what runs one round, by the programs that `generate` uses."""
    longest = max(map(len, prompts))
    gamma = config.num_speculative_tokens if config.speculative else 0
    sizes = dict(gamma=gamma, prompt_tokens=longest, max_new_tokens=config.max_new_tokens)
    engine = Engine(model, draft, cache=config.cache_config, **sizes)
    configs = [config] * len(prompts)
    sampler, limits = make_sampler(*configs), limits or make_limits(model, *configs)
    keys = prompt_keys(jax.random.key(0), len(prompts)) if keys is None else keys
    return engine.prefill(prompts, sampler, keys, limits), lambda state: engine.rounds(state, sampler, limits, 1), limits


def run_rounds(
    model: Llama, prompts: list[list[int]], config: GenerationConfig, *, draft: Draft | None = None, keys=None, limits: Limits | None = None
) -> Run:
    """Decodes to the end, one round at a time."""
    if draft is None and config.num_speculative_tokens:
        draft = make_draft(config.draft, model)
    state, step, _ = prepared(model, prompts, config, draft=draft, keys=keys, limits=limits)
    rounds = [look(state)]
    while (rounds[-1].status == 0).any():
        state = step(state)
        rounds.append(look(state))
    return Run([row[:n].tolist() for row, n in zip(np.asarray(state.tokens), rounds[-1].emitted)], rounds)


def look(state: DecodeState) -> Round:
    lengths, counts = state.cache.lengths, state.counts
    parts = (lengths.quantized, lengths.buffered, state.emitted, state.status, counts.drafted, counts.accepted, counts.flushes)
    return Round(*(np.asarray(part) for part in parts))


@contextlib.contextmanager
def interrupted_rounds() -> Iterator[None]:
    """A block that has to end by Ctrl-C, which comes after rounds have consumed the pages of states, and before they are given back."""

    def interrupted(self, *arguments):
        rounds(self, *arguments)
        raise KeyboardInterrupt

    rounds = Engine.rounds
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Engine, "rounds", interrupted)
        yield
