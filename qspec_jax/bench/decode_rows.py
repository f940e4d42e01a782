"""Methods of decoding and the rows of figures that `bench decode`, `bench end-to-end` and transformers report of them."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qspec_jax.bench.timing import Timing
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import AUTOREGRESSIVE, fitting
from qspec_jax.drafts.registry import NONE, parse_draft
from qspec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Method:
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
        Method(AUTOREGRESSIVE, "full"),
        Method("autoregressive-int8", "int8"),
        Method("quantspec", "int8", "quantspec"),
        Method("quantspec-kv-only", "int8", "quantspec:weight_bits=16"),
        Method("quantspec-weights-only", "full", "quantspec"),
    )
}


class Case(NamedTuple):
    """A method with the settings to measure it at. gamma: drafts in a round, 0 for methods that do not draft."""

    method: Method
    gamma: int
    temperature: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepTiming:
    """Time of one step; the bytes that it must read on each device (0: not counted), and those that it must copy from host memory
    meanwhile; and its floor, the longer of what the two take at the bandwidths measured in the same run, as a share of the time."""

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

    cache: the text of the target's; None where it was not measured. batch_size: rows that decode each prompt together, alike but for their
    random draws. status: "measured", "failed", or "skipped" where
    fewer rows did not fit the memory.
    decode_s: seconds of all prompts together, for `new_tokens`, after a warm-up; prefill_s: seconds for one prompt. compile_s: seconds from
    when all programs of a context and batch size begin to be compiled, side by side, until prefill and decode are. new_tokens, rounds,
    flushes: of all rows together.
    tokens_per_second: of all rows together; ms_per_token: from one token of a row to its next, in the mean.
    steps: "target" (verifies all drafts and one token more), "draft", "sampling", "flush due", "flush not due".
    simulated_rate: chance that a draft is accepted, given those before it; None where nothing is simulated. simulated_inner_rate: that of
    the level below, in a draft that itself verifies; None where no other is given. simulated_ratio: accepted over
    drafted tokens that this rate gives in the mean; acceptance_ratio: the same as it came out. repeated_ngrams: share of the new text's,
    as in evaluate/acceptance.py.
    speedup: over the autoregressive row of the same context, batch size and temperature. byte_limit: the speed-up by the byte model, if
    every step took no longer than reading its bytes; share_of_limit: speedup over byte_limit. tokens_per_second_limit: tokens_per_second by
    the same model.
    peak_memory_bytes: what the largest of prefill, decode and, between them, the making of a batch of rows holds, by their executables, and
    the draft, on each device. large_operations: operations of the size of a cache or more in the compiled loop; there should be none. None
    where a step alone was measured, which the note says.
    """

    method: str
    context: int
    gamma: int
    status: str
    note: str = ""
    cache: str | None = None
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
        """What the steps of a round take at least; None where they were not measured, or nobody knows what the draft reads."""
        needed = {"target": 1, **({"draft": self.gamma} if self.gamma else {})}
        if not all(name in self.steps and self.steps[name].bytes for name in needed):
            return None
        return sum(times * self.steps[name].floor_us for name, times in needed.items())


def select_methods(
    names: Iterable[str], drafts: Iterable[str] = (), caches: Iterable[str] = (), *, baseline_cache: str = "full"
) -> list[Method]:
    """These methods, and one for each text of a draft over each of these caches ("int8", if there are none), beside the baseline; without
    any, the baseline and quantspec. Draft "none" decodes one by one. A draft and a cache that do not go together are left out, and this is
    logged.

    baseline_cache: of the baseline. Raises InputError for an unknown method, draft or cache, for caches without drafts, and where no draft
    goes with any of them.
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
        chosen[AUTOREGRESSIVE] = Method(AUTOREGRESSIVE, baseline_cache)
    elif baseline_cache != "full":
        raise InputError(f"--baseline-cache is of the method {AUTOREGRESSIVE}, which is not among those asked for")
    pairs = itertools.product(drafts, caches or [None])
    for config in fitting((text, cache) for text, cache in pairs if caches or parse_draft(text) is not None):
        cache = config.cache or config.cache_config.kind
        name = f"{config.draft}, {cache}" if caches else config.draft
        chosen[name] = Method(name, cache, config.draft)
    return list(chosen.values())


def compared(rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    """The rows of one temperature with what the baseline of the same context and batch size makes of them; with the byte model's limit, if
    steps were measured."""
    place = lambda row: (row.context, row.batch_size)
    baselines = {place(row): row for row in rows if row.method == AUTOREGRESSIVE and row.ms_per_token}

    def with_baseline(row: DecodeRow) -> DecodeRow:
        baseline = baselines.get(place(row))
        if baseline is None or row.ms_per_token is None:
            return row
        row = dataclasses.replace(row, speedup=baseline.ms_per_token / row.ms_per_token)
        if row.round_floor_us is None or baseline.round_floor_us is None:
            return row
        limit = baseline.round_floor_us * (row.new_tokens / row.rounds) / row.round_floor_us
        return dataclasses.replace(row, byte_limit=limit, share_of_limit=row.speedup / limit)

    return [with_baseline(row) for row in rows]
