"""Greedy answers to the same prompts by several methods: drafts, and the caches that they decode over."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from tqdm import tqdm

from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import AUTOREGRESSIVE, GenerationConfig, fitting
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.results import Result
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import NONE
from qspec_jax.errors import InputError
from qspec_jax.evaluate.perplexity import cache_view
from qspec_jax.models.llama import Llama


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to decode: "autoregressive", or the text of a draft, and the target's cache."""

    method: str
    cache: str

    @property
    def draft(self) -> str:
        return NONE if self.method == AUTOREGRESSIVE else self.method

    @classmethod
    def of(cls, config: GenerationConfig) -> "Method":
        """The way that a config asks for."""
        return cls(config.draft if config.speculative else AUTOREGRESSIVE, config.cache or config.cache_config.kind)


METHODS = (Method(AUTOREGRESSIVE, "full"), Method("quantspec", "int8"))


def methods_of(drafts: Sequence[str], caches: Sequence[str]) -> tuple[Method, ...]:
    """Each of the drafts over each of the caches, which may have settings; `METHODS` without any.

    Without drafts each cache decodes one token at a time; without caches each draft has the cache that is its
    own. A draft and a cache that do not go together are left out, and this is logged. Raises InputError for an unknown draft, cache or
    setting, for a cache in host memory, and where no draft goes with any of the caches.
    """
    if not drafts and not caches:
        return METHODS
    for cache in caches:
        cache_view(cache, upper=False)  # which may be refused
    pairs = itertools.product(drafts or [NONE], caches or [None])
    return tuple(dict.fromkeys(map(Method.of, fitting(pairs))))


def check(model: Llama, lengths: Sequence[int], depths: Sequence[float], new_tokens: int) -> None:
    """Raises InputError for a length that this model has no positions for, and for a depth that is not from 0 to 1.

    new_tokens: the most of an answer.
    """
    most = model.config.max_length - new_tokens
    for length in lengths:
        if not 1 <= length <= most:
            raise InputError(
                f"length {length} should be from 1 to {most}: of {model.config.max_length} positions {new_tokens} are for the answer"
            )
    for depth in depths:
        if not 0 <= depth <= 1:
            raise InputError(f"depth {depth:g} should be from 0 (the beginning) to 1 (the end)")


def answers_of(
    model: Llama,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    method: Method,
    max_new_tokens: int,
    *,
    batch_size: int,
    draft: Draft | None,
    bar: tqdm,
) -> list[Result]:
    """What a method continues each of the prompts (token ids) with, greedily, in their order. draft: the method's. bar: goes on by one for
    each."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, draft=draft or NONE, cache=method.cache)
    requests = [Request(prompt, config, jax.random.key(0)) for prompt in prompts]
    results = []
    for result in run_batch(model, requests, batch_size=batch_size, tokenizer=tokenizer):
        results.append(result)
        bar.update()
    return sorted(results, key=lambda result: result.index)


def by_method(results: Sequence[Any], name: Callable[[Any], str] = lambda row: f"{row.method}, {row.cache} cache") -> dict[str, list[Any]]:
    """The rows of a report by what each method is called, in their order. results: with the fields of `Method` in each. name: of a row."""
    found: dict[str, list[Any]] = {}
    for row in results:
        found.setdefault(name(row), []).append(row)
    return found
