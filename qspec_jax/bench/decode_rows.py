"""Methods of decoding and the rows of figures that `bench decode`, `bench end-to-end` and transformers report of them."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pallas_kernels.attention.support import MAX_ROUND_TOKENS
from qspec_jax.bench.timing import Timing
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import AUTOREGRESSIVE, BITS, TOKENS, GenerationConfig, fitting
from qspec_jax.drafts.registry import AUTO, NONE, parse_draft
from qspec_jax.errors import DraftRoomError, HostMemoryError, InputError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DecodeMethod:
    """A method of decoding. cache: the text of the target's, such as "full" or "int8:host=lower". draft: that of its draft, or "none"."""

    name: str
    cache: str
    draft: str = NONE

    @property
    def speculative(self) -> bool:
        """Whether it has drafts for the target to verify."""
        return self.draft != NONE

    def gammas(self, asked: Sequence[int]) -> Sequence[int]:
        """Returns those of the asked numbers of drafts a round that the method is measured with."""
        return asked if self.speculative else [0]


METHODS = {
    method.name: method
    for method in (
        DecodeMethod(AUTOREGRESSIVE, "full"),
        DecodeMethod("autoregressive-int8", "int8"),
        DecodeMethod("quantspec", "int8", "quantspec"),
        DecodeMethod("quantspec-kv-only", "int8", "quantspec:weight_bits=16"),
        DecodeMethod("quantspec-weights-only", "full", "quantspec"),
    )
}


class Case(NamedTuple):
    """A method with the settings to measure it at.

    Attributes:
        method: the method.
        gamma: drafts of a round, 0 for methods that do not draft.
        temperature: that tokens are drawn with.
        exact: see `GenerationConfig`.
    """

    method: DecodeMethod
    gamma: int
    temperature: float = 0.0
    exact: str = AUTO

    def config(self, max_new_tokens: int) -> GenerationConfig:
        """The settings of its decodes."""
        return GenerationConfig(
            draft=self.method.draft,
            cache=self.method.cache,
            num_speculative_tokens=self.gamma,
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            exact=self.exact,
            ignore_eos=True,
        )


@dataclasses.dataclass(frozen=True)
class StepTiming:
    """Time of one step of a round.

    Attributes:
        timing: of the step.
        bytes: that it must read on each device; 0: not counted.
        share: the longer of the times of reading `bytes` and copying `host_bytes`, at bandwidths measured in the same run, over the time.
        host_bytes: that it must copy from host memory meanwhile.
    """

    timing: Timing
    bytes: int
    share: float
    host_bytes: int = 0

    @property
    def floor_us(self) -> float:
        return self.share * self.timing.median_us


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """Figures of one method at one context, over one prompt or several that were decoded one after the other.

    Attributes:
        method: its name.
        context: tokens of each prompt.
        gamma: drafts of a round; 0 without drafts.
        status: "measured", "failed", or "skipped" if fewer rows did not fit the memory.
        note: why there are no figures, or how they came about.
        cache: the text of the target's cache; None if it was not measured.
        exact: "bits" or "tokens", see `GenerationConfig`; None if neither was asked for and nothing was measured.
        temperature: that tokens were drawn with.
        batch_size: rows that decode each prompt together; they differ in their random draws alone.
        simulated_rate: the chance that a draft is accepted, given those before it; None: drafts are verified.
        simulated_inner_rate: that of the level below, in a draft that itself verifies; None: the same.
        simulated_ratio: accepted over drafted tokens that simulated_rate gives on average.
        prefill_s: seconds for one prompt.
        compile_s: seconds from when all programs of a context and batch size begin to be compiled, side by side, until prefill and decode
            are compiled.
        decode_s: seconds of all prompts together, for `new_tokens`, after a warm-up.
        new_tokens, rounds, flushes: of all rows together.
        acceptance_ratio: accepted over drafted tokens.
        repeated_ngrams: share of the new text's n-grams, as in evaluate/acceptance.py.
        tokens_per_second: of all rows together.
        tokens_per_second_limit: the same by the byte model, if every step took no longer than reading its bytes.
        ms_per_token: from one token of a row to its next, on average.
        speedup: over the autoregressive row of the same context, batch size and temperature.
        byte_limit: the speed-up by the byte model.
        share_of_limit: speedup over byte_limit.
        steps: "target" (verifies all drafts and one token more), "draft" (of one token), of a cascade "middle" (verifies what the first
            drafts at a time and one token more), of an EAGLE-3 head, alone or as the first of a cascade, "head" (one token), "sampling",
            "flush due", "flush not due".
        cache_bytes: of all layers and rows.
        peak_memory_bytes: the most that prefill, decode or, between them, the making of a batch of rows holds on each device, by their
            executables, with the draft.
        large_operations: operations of the size of a cache or more in the compiled loop; there should be none. None if a step alone was
            measured, which the note says.
    """

    method: str
    context: int
    gamma: int
    status: str
    note: str = ""
    cache: str | None = None
    exact: str | None = None
    temperature: float = 0.0
    batch_size: int = 1
    simulated_rate: float | None = None
    simulated_inner_rate: float | None = None
    simulated_ratio: float | None = None
    prefill_s: float | None = None
    compile_s: float | None = None
    decode_s: float | None = None
    new_tokens: int | None = None
    rounds: int | None = None
    flushes: int | None = None
    acceptance_ratio: float | None = None
    repeated_ngrams: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_limit: float | None = None
    ms_per_token: float | None = None
    speedup: float | None = None
    byte_limit: float | None = None
    share_of_limit: float | None = None
    steps: dict[str, StepTiming] = dataclasses.field(default_factory=dict)
    cache_bytes: int | None = None
    peak_memory_bytes: int | None = None
    large_operations: list[str] | None = dataclasses.field(default_factory=list)

    @property
    def round_floor_us(self) -> float | None:
        """The least time of the steps of a round; None if they were not measured, or if the bytes that the draft reads are not counted."""
        needed = {"target": 1, **({"draft": self.gamma} if self.gamma else {})}
        if not all(name in self.steps and self.steps[name].bytes for name in needed):
            return None
        return sum(times * self.steps[name].floor_us for name, times in needed.items())


def select_methods(
    names: Iterable[str], drafts: Iterable[str] = (), caches: Iterable[str] = (), *, baseline_cache: str = "full"
) -> list[DecodeMethod]:
    """The methods to measure: those of `names`, and each draft over each cache, beside the baseline.

    A draft and a cache that are not compatible are left out, and this is logged.

    Args:
        names: keys of `METHODS`; without names and drafts the baseline and quantspec.
        drafts: texts of drafts; "none" decodes one token at a time.
        caches: texts of the caches of the drafts; "int8", if there are none.
        baseline_cache: the cache of the baseline.

    Raises:
        InputError: for an unknown method, draft or cache, for caches without drafts, and if no draft is compatible with any of the caches.
    """
    caches = list(caches)
    for cache in (*caches, baseline_cache):
        CacheConfig.parse(cache)
    names, drafts = list(names), list(drafts)
    for name in names:
        if name not in METHODS:
            raise InputError(f"no method {name!r}; there are {', '.join(METHODS)}")
    if drafts and not names:
        names = [AUTOREGRESSIVE]
    if caches and not drafts:
        raise InputError("--cache is the cache of drafts; give one with --draft, or --draft none")
    chosen = {name: METHODS[name] for name in names or ([] if drafts else [AUTOREGRESSIVE, "quantspec"])}
    if AUTOREGRESSIVE in chosen:
        chosen[AUTOREGRESSIVE] = DecodeMethod(AUTOREGRESSIVE, baseline_cache)
    elif baseline_cache != "full":
        raise InputError(f"--baseline-cache is of the method {AUTOREGRESSIVE}, which is not among those asked for")
    pairs = itertools.product(drafts, caches or [None])
    for config in fitting((text, cache) for text, cache in pairs if caches or parse_draft(text) is not None):
        cache = config.cache or config.cache_config.kind
        name = f"{config.draft}, {cache}" if caches else config.draft
        chosen[name] = DecodeMethod(name, cache, config.draft)
    return list(chosen.values())


def select_gammas(given: Sequence[int] | None, default: Sequence[int], max_new_tokens: int, methods: Sequence[DecodeMethod]) -> list[int]:
    """The numbers of drafts a round to measure with, each once.

    Args:
        given: those that were asked for; None or none: `default`.
        max_new_tokens: tokens that each decode adds.
        methods: that are measured.

    Raises:
        InputError: for a number that the kernels cannot verify, and if one of the methods has fewer than four rounds.
    """
    gammas = list(dict.fromkeys(given or default))
    if given and not any(method.speculative for method in methods):
        log.warning("--gamma makes no difference: no method has drafts for the target to verify")
    for gamma in gammas:
        check_gamma(gamma)
    for gamma in (gamma for method in methods for gamma in method.gammas(gammas)):
        if max_new_tokens < 4 * (gamma + 1):
            raise InputError(f"--max-new-tokens {max_new_tokens} should be at least {4 * (gamma + 1)}, four rounds of --gamma {gamma}")
    return gammas


def check_gamma(gamma: int) -> None:
    """Raises InputError for more drafts than the rounds have that are measured."""
    if not 1 <= gamma < MAX_ROUND_TOKENS:
        raise InputError(f"--gamma {gamma} should be from 1 to {MAX_ROUND_TOKENS - 1}")


def attempt(function: Callable, *args):
    """Calls a function for one row of many, and returns its result, or the exception that it raised.

    Raises InputError for a mistake that is not of this row alone.
    """
    try:
        return function(*args)
    except (HostMemoryError, DraftRoomError) as error:  # one row of many, as where the device's memory is too small
        return error.with_traceback(None)
    except InputError:  # a draft's settings that do not fit the model, for one
        raise
    except Exception as error:
        return error.with_traceback(None)  # whose frames would keep what they had made


def compared(rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    """The rows of one temperature with what the baseline of the same context and batch size makes of them; with the byte model's limit, if
    steps were measured.

    Of several baselines it is that with the row's `exact`, and for rows of other programs the one with exact tokens.
    """
    baselines = {(row.context, row.batch_size, row.exact): row for row in rows if row.method == AUTOREGRESSIVE and row.ms_per_token}

    def with_baseline(row: DecodeRow) -> DecodeRow:
        places = ((row.context, row.batch_size, exact) for exact in (row.exact, TOKENS, BITS))
        baseline = next((baselines[place] for place in places if place in baselines), None)
        if baseline is None or row.ms_per_token is None:
            return row
        row = dataclasses.replace(row, speedup=baseline.ms_per_token / row.ms_per_token)
        if row.round_floor_us is None or baseline.round_floor_us is None:
            return row
        limit = baseline.round_floor_us * (row.new_tokens / row.rounds) / row.round_floor_us
        return dataclasses.replace(row, byte_limit=limit, share_of_limit=row.speedup / limit)

    return [with_baseline(row) for row in rows]
