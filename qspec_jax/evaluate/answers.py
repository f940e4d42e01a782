"""Greedy answers to the same prompts by several methods: drafts, and the caches that they decode over."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from tqdm import tqdm

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import AUTOREGRESSIVE, GenerationConfig, fitting
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.results import Result
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import NONE
from qspec_jax.errors import InputError
from qspec_jax.evaluate.cache_views import cache_view
from qspec_jax.models.llama import Llama
from qspec_jax.progress import awaited


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
    """Each of the drafts over each of the caches, which may have settings; `METHODS` if there are none of either.

    Without drafts each cache decodes one token at a time; without caches each draft has its own. A draft and a
    cache that are not compatible are left out, and this is logged.

    Raises:
        InputError: for an unknown draft, cache or setting, for a cache in host memory, and if no draft fits any of the caches.
    """
    if not drafts and not caches:
        return METHODS
    for cache in caches:
        cache_view(cache, upper=False)  # raises InputError for a cache that cannot be compared
    pairs = itertools.product(drafts or [NONE], caches or [None])
    return tuple(dict.fromkeys(map(Method.of, fitting(pairs))))


def caches_of(methods: Sequence[Method]) -> list[CacheConfig]:
    """The caches of the methods."""
    return [CacheConfig.parse(method.cache) for method in methods]


def check(model: Llama, lengths: Sequence[int], depths: Sequence[float], new_tokens: int) -> None:
    """Raises InputError for a length that leaves no room for an answer of `new_tokens`, and for a depth outside 0 to 1."""
    longest = model.config.max_length - new_tokens
    for length in lengths:
        if not 1 <= length <= longest:
            raise InputError(
                f"length {length} should be from 1 to {longest}: of {model.config.max_length} positions {new_tokens} are for the answer"
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
    """Greedy continuations of the prompts (token ids), in their order, by a method and its draft; the bar advances by one for each."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, draft=draft or NONE, cache=method.cache)
    requests = [Request(prompt, config, jax.random.key(0)) for prompt in prompts]
    results = []
    for result in awaited(run_batch(model, requests, batch_size=batch_size, tokenizer=tokenizer), "prompt", len(requests)):
        results.append(result)
        bar.update()
    return sorted(results, key=lambda result: result.index)


def method_name(row: Any) -> str:
    """The name of a row's method in tables and plots."""
    return f"{row.method}, {row.cache} cache"


def by_method(results: Sequence[Any], name: Callable[[Any], str] = method_name) -> dict[str, list[Any]]:
    """The rows of a report, which have the fields of `Method`, by the name of each row's method, in their order."""
    found: dict[str, list[Any]] = {}
    for row in results:
        found.setdefault(name(row), []).append(row)
    return found
