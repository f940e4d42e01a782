"""How many drafts the target accepts: free-running, while it generates, and teacher-forced, along real texts."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from qspec_jax.caches.registry import CacheChoice
from qspec_jax.decoding.config import GenerationConfig, beside_draft
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import check_traceable, generate
from qspec_jax.decoding.limits import Limits, make_limits
from qspec_jax.decoding.prefill import Executables
from qspec_jax.decoding.requests import check_draft_room, checked_prompts
from qspec_jax.decoding.sampling import Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.traced_rounds import Records
from qspec_jax.decoding.tracing import DecodedRow, trace_of
from qspec_jax.drafts.draft import AcceptanceCounts, Draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.walk import WALK, traced_walk
from qspec_jax.models.llama import Llama
from qspec_jax.progress import working
from qspec_jax.reports import formatted
from qspec_jax.traces.trace import Trace

NGRAM = 8
COMPILED_TOGETHER = 4  # measurements whose programs are made side by side
OnTrace = Callable[[Trace], None]
MODES = TEACHER_FORCED, FREE_RUNNING = "teacher-forced", "free-running"


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Share of draft tokens that the target accepted, and the text on which it was measured.

    Attributes:
        acceptance_rate: accepted / drafted tokens; None if nothing was drafted.
        mean_acceptance_length: tokens per round, 1 + accepted / rounds.
        conditional_rate: the chance that a draft token is accepted given those before it, accepted / (accepted + rounds that rejected a
            draft token); None free-running, where a round that accepted fewer than gamma may have rejected none: fewer were eligible.
        repeated_ngrams: share of the text's 8-grams that occur earlier in it.
        conditional_error: standard error of conditional_rate over texts, whose tokens are not independent of one another; None for fewer
            than two texts.
        covered: share of the target's attention on tokens that the draft reads, the mean over tokens, layers and query heads; None for a
            draft that does not choose, and free-running.
        inner_rate, inner_error: of a cascade, conditional_rate and conditional_error of its first draft's tokens by its middle; None for
            other drafts, and free-running.
        inner_accepted, inner_drafted: tokens of the first draft that the middle accepted, and that it drafted.
    """

    acceptance_rate: float | None
    mean_acceptance_length: float
    conditional_rate: float | None
    accepted: int
    drafted: int
    rounds: int
    new_tokens: int
    repeated_ngrams: float
    conditional_error: float | None = None
    covered: float | None = None
    inner_rate: float | None = None
    inner_error: float | None = None
    inner_accepted: int | None = None
    inner_drafted: int | None = None


def free_running(
    model: Llama,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    key: Key[Array, ""],
    tokenizer: Any = None,
    *,
    on_trace: OnTrace | None = None,
) -> Acceptance:
    """Acceptance while the model generates after each prompt (EOS ignored).

    Args:
        tokenizer: says which ids are padding.
        on_trace: called with the trace of the rounds; None: there is none.
    """
    check(model, prompts, config)
    config = dataclasses.replace(config, draft=draft, ignore_eos=True)
    with working("decoding"):
        out = generate(model, prompts, config=config, key=key, tokenizer=tokenizer, trace=on_trace is not None)
    if on_trace is not None:
        on_trace(out.trace)
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
    draft: Draft,
    texts: Sequence[Sequence[int]],
    config: GenerationConfig,
    key: Key[Array, ""],
    tokenizer: Any = None,
    *,
    cache: CacheChoice | None = None,
    on_trace: OnTrace | None = None,
) -> Acceptance:
    """Acceptance along real texts, whose last `config.max_new_tokens` tokens are walked.

    In each round gamma tokens are drafted and verified as in generation. Then real tokens replace those that the round would have emitted,
    so that the next round drafts in the real context.

    Args:
        draft: for this model.
        texts: token ids.
        config: gamma, temperature, and the tokens to walk.
        key: of the random draws.
        tokenizer: the model's, which says which ids are padding and never drafted; None: any id may be drafted.
        cache: the target's; None: the config's.
        on_trace: called with the trace of the rounds, which then run one at a time; None: there is none.

    Raises:
        InputError: for a text without a token before those that are walked, and for a trace of a model that is divided over devices.
    """
    if on_trace is not None:
        check_traceable(model)
    return _Forced(model, draft, texts, config, key, tokenizer, cache).measured(on_trace)


Run = tuple[Any, ...]  # the arguments of `teacher_forced`, without a cache


def teacher_forced_in_turn(runs: Iterable[Run]) -> Iterator[Acceptance]:
    """Yields `teacher_forced` of each run, in their order; the programs of a few runs are compiled side by side before these runs start.

    Nothing runs while something is compiled: cuDNN captures a graph of its kernels when a program with its attention first runs, and CUDA
    aborts the capture, and all that runs then, if another thread loads a program meanwhile.
    """
    runs = iter(runs)
    while together := list(itertools.islice(runs, COMPILED_TOGETHER)):
        compile_side_by_side(together)
        while together:
            yield teacher_forced(*together.pop(0))


def compile_side_by_side(runs: Iterable[Run]) -> None:
    """Compiles the programs of all runs; an error is left for `teacher_forced` to raise."""
    pool = ThreadPoolExecutor()
    try:
        for run in runs:
            pool.submit(lambda run=run: _Forced(*run).compile())
        with working("compiling"):
            pool.shutdown()
    except BaseException:  # such as an interrupt
        pool.shutdown(wait=False, cancel_futures=True)
        raise


class _Forced:
    """One measurement of `teacher_forced`, whose arguments it has; its programs may be compiled before it is made."""

    def __init__(
        self,
        model: Llama,
        draft: Draft,
        texts: Sequence[Sequence[int]],
        config: GenerationConfig,
        key: Key[Array, ""],
        tokenizer: Any = None,
        cache: CacheChoice | None = None,
    ):
        config = dataclasses.replace(beside_draft(config), ignore_eos=True)
        new, gamma = config.max_new_tokens, config.num_speculative_tokens
        if min(map(len, texts)) <= new:
            raise InputError(f"a text has {min(map(len, texts))} tokens; each should have more than the {new} to walk")
        prompts = [list(text[:-new]) for text in texts]
        check(model, prompts, config)
        self.new, self.model, self.config, self.prompts = new, model, config, prompts
        self.real = jnp.asarray([list(text[-new:]) + [0] * (gamma + 1) for text in texts], jnp.int32)
        self.engine, self.sampler, self.limits, self.prefill = _set_up(model, draft, prompts, config, key, tokenizer, cache)
        self.tokenizer = tokenizer

    def compile(self) -> tuple[Executables, jax.stages.Compiled]:
        """The programs, made from shapes alone, so that nothing waits for the device."""
        walk = self.engine.call(WALK, self.prefill.shapes(), self.sampler, self.limits, self.real, lazy=True)
        return self.prefill.compile()[0], walk.compile()[0]

    def measured(self, on_trace: OnTrace | None = None) -> Acceptance:
        """The measurement; see `teacher_forced`."""
        prefill, walk = self.compile() if on_trace is None else (self.prefill.compile()[0], None)
        texts = f"{len(self.real)} texts" if len(self.real) > 1 else "a text"
        with working(f"prefilling {texts}"):
            state = jax.block_until_ready(self.prefill.run(prefill))
        state = dataclasses.replace(state, pending=self.real[:, 0])
        with working(f"walking {texts}"):
            if walk is not None:
                state, sums = walk(*self.engine.call(WALK, state, self.sampler, self.limits, self.real).args)
            else:
                (state, sums), records = traced_walk(self.engine, self.sampler, self.limits, state, self.real)
                on_trace(self._trace(records))
            counts, sums = jax.device_get((state.counts, sums))
        accepted, drafted, rounds = (int(count.sum()) for count in (counts.accepted, counts.drafted, counts.rounds))
        rate, error = ratio(counts.accepted, counts.accepted + sums.rejected)
        return Acceptance(
            acceptance_rate=accepted / drafted if drafted else None,
            mean_acceptance_length=1 + accepted / rounds,
            conditional_rate=rate,
            accepted=accepted,
            drafted=drafted,
            rounds=rounds,
            new_tokens=self.new * len(self.real),
            repeated_ngrams=repeated_ngrams(self.real[:, : self.new].tolist()),
            conditional_error=error,
            covered=None if sums.covered is None else float(sums.covered.sum() / (counts.accepted + counts.rounds).sum()),
            **_of_inner(sums.inner),
        )

    def _trace(self, records: Records) -> Trace:
        walked = self.real[:, : self.new].tolist()
        rows = [DecodedRow(prompt, tokens, None, "the end of the text") for prompt, tokens in zip(self.prompts, walked, strict=True)]
        config = dataclasses.replace(self.config, draft=self.engine.draft)
        about = self.model, self.engine.draft, config, self.sampler, self.tokenizer
        return trace_of(*about, rows, records, forced=True)


@working("checking the draft")
def check_draft(model: Llama, draft: Draft, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Raises InputError if a draft cannot be used with these prompts; only shapes are computed."""
    _set_up(model, draft, prompts, beside_draft(config), jax.random.key(0))[-1].shapes()


def _set_up(
    model: Llama,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    key: Key[Array, ""],
    tokenizer: Any = None,
    cache: CacheChoice | None = None,
) -> tuple[Engine, Sampler, Limits, Any]:
    """An engine for these prompts, the sampler and limits of its prefill, and the prefill. Raises InputError for too long prompts."""
    sizes = dict(prompt_tokens=max(map(len, prompts)), max_new_tokens=config.max_new_tokens)
    engine = Engine(model, draft, cache=cache or config.cache_config, gamma=config.num_speculative_tokens, **sizes)
    for i, prompt in enumerate(prompts):
        check_draft_room(engine.draft, f"prompt {i}", len(prompt), config.max_new_tokens)
    sampler, limits = make_sampler(config), make_limits(model, *[config] * len(prompts), tokenizer=tokenizer)
    # Layer by layer: one program for all layers, and for all drafts, takes a fraction of the time to compile.
    return engine, sampler, limits, engine.prefill_of(prompts, sampler, prompt_keys(key, len(prompts)), limits, layers=1)


def _of_inner(counts: AcceptanceCounts | None) -> dict[str, float | int | None]:
    """The fields of an `Acceptance` that say what a cascade's middle accepted."""
    if counts is None:
        return {}
    rate, error = ratio(counts.accepted, counts.accepted + counts.rejected)
    return dict(inner_rate=rate, inner_error=error, inner_accepted=int(counts.accepted.sum()), inner_drafted=int(counts.drafted.sum()))


def ratio(parts: Int[np.ndarray, "B"], wholes: Int[np.ndarray, "B"]) -> tuple[float | None, float | None]:
    """The sum of the parts divided by that of the wholes, and its standard error if the B pairs are independent of one another.

    The ratio is None if the wholes are 0, the error if there are fewer than two pairs. It is the linearized variance of a ratio of cluster
    totals (Cochran, Sampling Techniques, 1977, section 6.3).
    """
    parts, wholes = parts.astype(float), wholes.astype(float)
    if not (whole := wholes.sum()):
        return None, None
    rate, B = float(parts.sum() / whole), len(parts)
    if B < 2:
        return rate, None
    return rate, float(np.sqrt(B / (B - 1) * ((parts - rate * wholes) ** 2).sum()) / whole)


def check(model: Llama, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Raises InputError for prompts or settings with which acceptance cannot be measured."""
    config = beside_draft(config)
    if config.num_speculative_tokens < 1:
        raise InputError(
            f"num_speculative_tokens (gamma) {config.num_speculative_tokens} should be at least 1: there is no acceptance without drafts"
        )
    if config.max_new_tokens < 3:
        raise InputError(f"max_new_tokens {config.max_new_tokens} should be at least 3, to measure acceptance")
    if config.repetition_penalty != 1:
        raise InputError(f"repetition_penalty {config.repetition_penalty:g} should be 1: acceptance is measured without a penalty")
    if config.adaptive or config.min_draft_confidence:
        raise InputError("acceptance is measured with a fixed number of drafts: leave adaptive and min_draft_confidence out")
    checked_prompts(model, prompts, config)


def repeated_ngrams(rows: Sequence[Sequence[int]]) -> float:
    """Share of the n-grams of NGRAM tokens that occur earlier in the same row."""
    total = repeated = 0
    for row in rows:
        seen = set()
        for i in range(len(row) - NGRAM + 1):
            gram = tuple(row[i : i + NGRAM])
            repeated += gram in seen
            seen.add(gram)
            total += 1
    return repeated / total if total else 0.0


def with_error(rate: float | None, error: float | None) -> str:
    """A rate for a table, with its standard error if that is known."""
    return formatted(rate, ".3f") + ("" if error is None else f" +- {error:.3f}")
