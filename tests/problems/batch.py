"""Requests of a batch, and its results in order."""

import dataclasses

import jax
import numpy as np

from qspec_jax.decoding.batch import Request
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.results import Result

CONFIG = GenerationConfig(draft="quantspec", group_size=8, ignore_eos=True, num_speculative_tokens=3)
KEY = jax.random.key(3)
SETTINGS = (
    {},
    {"temperature": 1.3, "top_k": 50, "repetition_penalty": 1.5},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.05, "adaptive": True},
    {"logit_bias": {7: 4.0}, "banned_token_ids": (9,), "top_logprobs": 2},
    {"temperature": 0.7, "min_draft_confidence": 0.01},
)


def some_requests(count: int) -> list[Request]:
    """Requests of different lengths and settings, greedy and sampled."""
    r, requests = np.random.default_rng(0), []
    for i in range(count):
        settings = SETTINGS[i % len(SETTINGS)]
        config = dataclasses.replace(
            CONFIG, max_new_tokens=int(r.integers(1, 40)), num_speculative_tokens=int(r.integers(1, 4)), **settings
        )
        requests.append(Request(r.integers(0, 4096, int(r.integers(1, 60))).tolist(), config, jax.random.fold_in(KEY, i)))
    return requests


def with_settings(request: Request, **settings) -> Request:
    return dataclasses.replace(request, config=dataclasses.replace(request.config, **settings))


class Close(float):
    """A log-probability, equal to four digits: sums of a batch of another size are rounded otherwise."""

    __hash__ = None

    def __eq__(self, other):
        return abs(self - other) <= 5e-5


def outcome(run) -> list:
    """In order."""
    return sorted(map(with_close_logprobs, run), key=lambda result: result.index)


def with_close_logprobs(result: Result) -> Result:
    if result.logprobs is None:
        return result
    top = [[(token, Close(logprob)) for token, logprob in place] for place in result.top_logprobs]
    return dataclasses.replace(result, logprobs=list(map(Close, result.logprobs)), top_logprobs=top)
