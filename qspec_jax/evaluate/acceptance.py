"""How many drafts the target accepts: free-running, while it generates, and teacher-forced, along real texts; with a table and a plot."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key
from rich.table import Table

from qspec_jax import plots
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.registry import CacheChoice, CacheConfig
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig, beside_draft
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import Limits, make_limits
from qspec_jax.decoding.requests import check_draft_room, checked_prompts
from qspec_jax.decoding.round import current_round, feed, propose, seen_by_accepted, verify
from qspec_jax.decoding.sampling import Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.state import DecodeState
from qspec_jax.drafts.draft import Draft, RoundResult
from qspec_jax.drafts.registry import unbudgeted
from qspec_jax.errors import InputError
from qspec_jax.evaluate.coverage import WatchedCache
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import Step

NGRAM = 8
LONGEST_NAME = 28  # of a draft, or of a part of its name between commas, in one line of the table
COMPILED_TOGETHER = 4  # measurements whose programs are made side by side
STYLES = {"teacher-forced": "-", "free-running": ":"}
MODES = tuple(STYLES)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """accepted / drafted tokens (None where nothing was drafted), with the text they were measured on: its new tokens and share of repeated
    8-grams.

    mean_acceptance_length: 1 + accepted / rounds, tokens per round. conditional_rate: the chance that a draft is accepted given those
    before it, accepted / (accepted + rounds that rejected a draft); None free-running, where a round that accepted fewer than gamma
    may have rejected none: fewer were eligible. conditional_error: its standard error over texts, whose tokens are not independent of one
    another; None for fewer than two texts. covered: the share of the target's attention that falls on what the draft reads, the mean over
    tokens, layers and query heads; None for a draft that does not choose, and free-running.
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


def free_running(model: Llama, draft: Draft, prompts: Sequence[Sequence[int]], config: GenerationConfig, key: Key[Array, ""]) -> Acceptance:
    """Acceptance while the model generates after each prompt (EOS ignored)."""
    check(model, prompts, config)
    config = dataclasses.replace(config, draft=draft, ignore_eos=True)
    out = generate(model, prompts, config=config, key=key)
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
    *,
    cache: CacheChoice | None = None,
) -> Acceptance:
    """Acceptance along real texts, whose last `config.max_new_tokens` tokens are walked.

    At each stop gamma tokens are drafted and verified as in generation; then the real tokens take their place, as many as the round
    would have emitted, so that the next round drafts in the real context. cache: by default the config's. Raises InputError for a text with
    no room for a prompt.
    """
    return _Forced(model, draft, texts, config, key, cache).measured()


Run = tuple[Llama, Draft, Sequence[Sequence[int]], GenerationConfig, Key[Array, ""]]


def teacher_forced_in_turn(runs: Iterable[Run]) -> Iterator[Acceptance]:
    """`teacher_forced` of each of these arguments, one after the other. Programs of some are made side by side, and then these run.

    Nothing runs while something is compiled: cuDNN captures a graph of its kernels when a program with its attention first runs, and CUDA
    gives up the capture, and all that runs then, where another thread loads a program meanwhile.
    """
    runs = iter(runs)
    while together := [_Forced(*run) for run in itertools.islice(runs, COMPILED_TOGETHER)]:
        with ThreadPoolExecutor(COMPILED_TOGETHER) as pool:
            list(pool.map(_Forced.compile, together))
        while together:
            yield together.pop(0).measured()


def compile_side_by_side(runs: Iterable[Run]) -> None:
    """Makes the programs of `teacher_forced` with each of these arguments. What cannot be compiled is left to fail in its turn."""
    pool = ThreadPoolExecutor()
    try:
        for run in runs:
            pool.submit(lambda run=run: _Forced(*run).compile())
        pool.shutdown()
    except BaseException:  # such as an interrupt
        pool.shutdown(wait=False, cancel_futures=True)
        raise


class _Forced:
    """One measurement of `teacher_forced`, whose programs may be compiled before it is made."""

    def __init__(
        self,
        model: Llama,
        draft: Draft,
        texts: Sequence[Sequence[int]],
        config: GenerationConfig,
        key: Key[Array, ""],
        cache: CacheChoice | None = None,
    ):
        config = beside_draft(config)
        new, gamma = config.max_new_tokens, config.num_speculative_tokens
        if min(map(len, texts)) <= new:
            raise InputError(f"every text should have more than the {new} tokens to walk")
        config = dataclasses.replace(config, ignore_eos=True)
        prompts = [list(text[:-new]) for text in texts]
        check(model, prompts, config)
        self.new = new
        self.real = jnp.asarray([list(text[-new:]) + [0] * (gamma + 1) for text in texts], jnp.int32)
        self.engine, settings = _set_up(model, draft, prompts, config, key, cache)
        self.sampler, _, self.limits = settings
        self.prefill = self.engine.prefill_of(prompts, *settings)
        self.programs = None

    def compile(self) -> None:
        """Makes the programs, from shapes alone, so that nothing waits for the device."""
        walk = self.engine.call(WALK, self.prefill.shapes(), self.sampler, self.limits, self.real, lazy=True)
        self.programs = self.prefill.compile()[0], walk.compile()[0]

    def measured(self) -> Acceptance:
        if self.programs is None:
            self.compile()
        prefill, walk = self.programs
        state = self.prefill.run(prefill)
        state = dataclasses.replace(state, pending=self.real[:, 0])
        state, rejected, covered = walk(*self.engine.call(WALK, state, self.sampler, self.limits, self.real).args)
        counts, rejected, covered = jax.device_get((state.counts, rejected, covered))
        accepted, drafted, rounds = (int(count.sum()) for count in (counts.accepted, counts.drafted, counts.rounds))
        rate, error = ratio(counts.accepted, counts.accepted + rejected)
        return Acceptance(
            accepted / drafted if drafted else None,
            1 + accepted / rounds,
            rate,
            accepted,
            drafted,
            rounds,
            self.new * len(self.real),
            repeated_ngrams(self.real[:, : self.new].tolist()),
            error,
            None if covered is None else float(covered.sum() / (counts.accepted + counts.rounds).sum()),
        )


def check_draft(model: Llama, draft: Draft, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Raises InputError where a draft refuses these prompts, as it would in a measurement; only shapes are computed with."""
    engine, settings = _set_up(model, draft, prompts, config, jax.random.key(0), None)
    engine.prefill_of(prompts, *settings).shapes()


def _set_up(
    model: Llama,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    key: Key[Array, ""],
    cache: CacheChoice | None,
) -> tuple[Engine, tuple[Sampler, Key[Array, "B"], Limits]]:
    """An engine for these prompts, and what it prefills them with. Raises InputError where they are too long for the draft's own model."""
    config = beside_draft(config)
    sizes = dict(prompt_tokens=max(map(len, prompts)), max_new_tokens=config.max_new_tokens)
    engine = Engine(model, draft, cache=cache or config.cache_config, gamma=config.num_speculative_tokens, **sizes)
    for i, prompt in enumerate(prompts):
        check_draft_room(engine.draft, f"prompt {i}", len(prompt), config.max_new_tokens)
    return engine, (make_sampler(config), prompt_keys(key, len(prompts)), make_limits(model, *[config] * len(prompts)))


def ratio(parts: Int[np.ndarray, "B"], wholes: Int[np.ndarray, "B"]) -> tuple[float | None, float | None]:
    """The sum of the parts over that of the wholes, and its standard error where the B pairs, and they alone, are independent.

    None for a ratio without a whole, and for an error of fewer than two pairs. (The linearized variance of a ratio of cluster totals:
    Cochran, Sampling Techniques, 1977, section 6.3.)
    """
    parts, wholes = parts.astype(float), wholes.astype(float)
    if not (whole := wholes.sum()):
        return None, None
    rate, B = float(parts.sum() / whole), len(parts)
    if B < 2:
        return rate, None
    return rate, float(np.sqrt(B / (B - 1) * ((parts - rate * wholes) ** 2).sum()) / whole)


def check(model: Llama, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Raises InputError where acceptance after these prompts cannot be measured."""
    config = beside_draft(config)
    if config.num_speculative_tokens < 1:
        raise InputError(f"num_speculative_tokens (gamma) {config.num_speculative_tokens} should be at least 1: acceptance is of drafts")
    if config.max_new_tokens < 3:
        raise InputError(f"max_new_tokens {config.max_new_tokens} should be at least 3, to measure acceptance")
    if config.repetition_penalty != 1:
        raise InputError("acceptance is measured without a repetition penalty")
    if config.adaptive or config.min_draft_confidence:
        raise InputError("acceptance is of a fixed number of drafts; adaptive and min_draft_confidence choose their own")
    checked_prompts(model, prompts, config)


def _walk(
    target: Step, draft: Draft, sampler: Sampler, state: DecodeState, limits: Limits, real: Int[Array, "B T"]
) -> tuple[DecodeState, Int[Array, "B"], Float[Array, "B"] | None]:
    """The state behind the text, how many rounds of each row rejected a draft, and the sum over its tokens of the share that is covered.

    None for the sum where the draft does not choose, and where the target's cache has no groups that could be weighed.
    """
    width = state.gamma + 1
    block_at = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width))

    def walking(carry) -> Array:
        # Stop where no draft can be counted any more; the last token of the text is only ever verified against.
        return (carry[0].emitted < limits.max_new_tokens).any()

    def step(carry):
        state, rejected, covered = carry
        active = state.emitted < limits.max_new_tokens
        current = current_round(sampler, state, limits, active)
        choice = chosen(state)
        proposal, draft_state, cache = propose(draft, state.draft, state.cache, current)
        verdict, cache = verify(target, proposal, cache, current)
        accepted = verdict.accepted
        moved = jnp.where(active, accepted + 1, 0)
        # Once more with the real tokens, whose keys and values are what the cache must hold, and whose queries the draft may observe.
        cache = cache.rollback(current.lengths)
        cache = cache if choice is None else WatchedCache(cache, choice)
        _, cache, masses = feed(target, block_at(real, state.emitted - 1), cache, current, observe=draft.observes)
        if choice is not None:
            covered += jnp.where(jnp.arange(width) < moved[:, None], cache.shares, 0).sum(1)
            cache = cache.cache
        cache, flushed = cache.commit(current.lengths, moved, wait_for=[verdict.own_token, *masses])
        drafted, taken = jnp.where(active, proposal.eligible, 0), moved - active
        seen = seen_by_accepted(masses, moved)
        result = RoundResult(block_at(real, state.emitted), moved, drafted, taken, flushed, seen)
        counts = state.counts.with_round(active, proposal.eligible, accepted, flushed)
        emitted = state.emitted + moved
        state = dataclasses.replace(
            state,
            cache=cache,
            draft=draft.commit(draft_state, result, cache),
            pending=block_at(real, emitted - 1)[:, 0],
            emitted=emitted,
            counts=counts,
            adaptive=None if state.adaptive is None else state.adaptive.updated(proposal.eligible, accepted, active),
        )
        return state, rejected + (active & (accepted < proposal.eligible)), covered

    def chosen(state):
        return draft.read_in_round(state.draft, state.cache) if isinstance(state.cache, HierarchicalCache) else None

    nothing = jnp.zeros_like(state.emitted)
    covered = None if jax.eval_shape(chosen, state) is None else nothing.astype(jnp.float32)
    return lax.while_loop(walking, step, (state, nothing, covered))


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


@dataclasses.dataclass(frozen=True)
class Walk:
    """Texts to measure acceptance on, of about so many tokens of context and `new_tokens` more that are walked.

    skipped: names of texts that are too short. right: where these are answers to needle prompts, how many of them the model gives itself,
    with a full cache.
    """

    context: int
    texts: Sequence[Sequence[int]]
    new_tokens: int
    skipped: list[str]
    right: int | None = None


@dataclasses.dataclass(frozen=True)
class AcceptanceReport:
    """What `qspec eval acceptance` reports. texts: how many were measured, at the first context; skipped: files too short for it; device,
    date, versions: of the run, as in `reports.Run`; scheme, group_size: of the target's cache; calibration: whether INT4 weights were
    calibrated for the texts.

    results: each an `Acceptance`, with its draft, context (tokens before the first draft), gamma, temperature and mode; step_bytes: what
    one step of the draft reads behind that context, each number as two bytes at most; cache_share: what share its keys and values are of
    the bytes of a whole upper plane and buffer; both None for a draft that is no `ModelDraft` (prompt-lookup, combine); raised_groups: how
    many groups it reads where its budget asks for fewer, see `step_bytes.raised_groups`; texts, right: how many at this context, see
    `Walk`.
    """

    texts: int
    skipped: list[str]
    results: list[dict[str, Any]]
    device: str = ""
    date: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    model: str = ""
    dtype: str = ""
    seed: int = 0
    scheme: str = CacheConfig.scheme
    group_size: int | None = None
    calibration: bool = True


def table(report: AcceptanceReport) -> Table:
    """A table with a line for every draft, context, gamma, temperature and mode."""
    grid = Table(
        title="Acceptance",
        box=None,  # whose lines would leave no room for the names of drafts
        padding=(0, 2, 0, 0),
        caption="covered: share of the target's attention on what a draft reads.\n"
        "of the cache: keys and values that a draft reads, as a share of the bytes of a whole upper plane and buffer.",
    )
    if any(row.get("conditional_error") is not None for row in report.results):
        grid.caption = f"+-: standard error over texts. {grid.caption}"
    columns = (
        "draft",
        "context",
        "gamma",
        "temper-\nature",
        "mode",
        "accepted /\ndrafted",
        "given those\nbefore",
        "covered",
        "MB a\ndraft",
        "of the\ncache",
        "tokens\na round",
        "drafted",
        "repeated\n8-grams",
    )
    names = [row["draft"] for row in report.results]
    longest = max((len(part) for name in names for part in name.split(",")), default=0)
    for label in columns:
        whole = label == "mode" or (label == "draft" and longest <= LONGEST_NAME)
        grid.add_column(label, justify="left" if label in ("draft", "mode") else "right", overflow="fold", no_wrap=whole)
    for row in report.results:
        given = with_error(row["conditional_rate"], row.get("conditional_error"))
        size = None if row.get("step_bytes") is None else row["step_bytes"] / 1e6
        # Between two settings a name may be broken, in a number it may not.
        draft = row["draft"] if len(row["draft"]) <= LONGEST_NAME else row["draft"].replace(",", ",\n")
        name = draft, formatted(row.get("context"), ","), str(row["gamma"]), f"{row['temperature']:g}", row["mode"]
        rates = formatted(row["acceptance_rate"], ".3f"), given, formatted(row.get("covered"), ".3f")
        read = formatted(size, ".2f"), formatted(row.get("cache_share"), ".1%")
        grid.add_row(*name, *rates, *read, f"{row['mean_acceptance_length']:.2f}", f"{row['drafted']:,}", f"{row['repeated_ngrams']:.1%}")
    for context, right, texts in dict.fromkeys(
        (row["context"], row["right"], row["texts"]) for row in report.results if row.get("right") is not None
    ):
        grid.caption += f"\nWith a full cache the model itself finds {right} of {texts} needles of {context:,} tokens."
    raised = {}
    for row in report.results:
        if row.get("raised_groups") is not None:
            raised.setdefault((row["context"], row["raised_groups"]), []).append(row["draft"])
    for (context, groups), found in raised.items():
        few = ", ".join(dict.fromkeys(found))
        grid.caption += f"\nAt {context:,} tokens these read {groups} groups (min_groups), more than their budgets ask for: {few}."
    return grid


def with_error(rate: float | None, error: float | None) -> str:
    """A rate and its standard error for a table, as far as they are known."""
    return formatted(rate, ".3f") + ("" if error is None else f" +- {error:.3f}")


def in_words(found: Acceptance) -> str:
    """The figures of a measurement that a line has room for.

    Args:
        found: the measurement.
    """
    return f"accepted / drafted {formatted(found.acceptance_rate, '.3f')}, {found.mean_acceptance_length:.2f} tokens a round"


def errors_of(errors: Sequence[float | None]) -> list[float] | None:
    """Lengths of error bars; None, which draws none, where there is nothing to compute one from, as with a single text.

    Args:
        errors: the standard errors of a line's points.
    """
    return None if None in errors else list(errors)


def formatted(value: float | None, form: str) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else format(value, form)


def plot(report: AcceptanceReport, path: Path) -> None:
    """Acceptance against the bytes that a draft reads, where drafts are compared, and otherwise against gamma.

    Raises InputError if the file cannot be written.
    """
    drafts, gammas = ({row[name] for row in report.results} for name in ("draft", "gamma"))
    against_bytes = len(drafts) > 1 and len(gammas) == 1
    plots.save(plot_by_bytes(report) if against_bytes else plot_by_gamma(report), path)


def plot_by_bytes(report: AcceptanceReport) -> Any:
    """A panel for each context and temperature, teacher-forced: the chance that a draft is accepted, given those before it, with standard
    errors, against what one reads. Drafts that differ by their budget alone are one line; those that are no `ModelDraft` are levels."""
    from matplotlib.figure import Figure

    found = [row for row in report.results if row["mode"] == "teacher-forced" and row["conditional_rate"] is not None]
    panel_of, line_of = lambda row: (row["context"], row["temperature"]), lambda row: unbudgeted(row["draft"])
    panels, lines = (list(dict.fromkeys(map(of, found))) for of in (panel_of, line_of))
    figure = Figure(figsize=(1 + 5.5 * len(panels), 5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        for i, line in enumerate(lines):
            rows = [row for row in found if panel_of(row) == panel and line_of(row) == line]
            style = dict(color=f"C{i % 10}", marker="osv^D"[i // 10 % 5], label=line)
            for row in (row for row in rows if row["step_bytes"] is None):
                axes.axhline(row["conditional_rate"], linestyle=":", **(style | dict(marker="")))
            if read := sorted((row for row in rows if row["step_bytes"] is not None), key=lambda row: row["step_bytes"]):
                points = [[row["step_bytes"] / 1e6 for row in read], [row["conditional_rate"] for row in read]]
                axes.errorbar(*points, yerr=errors_of([row["conditional_error"] for row in read]), capsize=3, **style)
        axes.set(xlabel="read by a draft (MB)", title=f"context of {panel[0]:,} tokens, temperature {panel[1]:g}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("accepted, given those before")
    max(figure.axes, key=lambda axes: len(axes.get_legend_handles_labels()[1])).legend(fontsize=8)  # not every panel has every line
    return figure


def plot_by_gamma(report: AcceptanceReport) -> Any:
    """Two panels against gamma, accepted / drafted and tokens a round; a line for every draft, context, temperature and mode
    (arXiv 2502.10424, figure 9)."""
    from matplotlib.figure import Figure

    results = report.results
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    accepted, tokens = figure.subplots(1, 2)
    several = len({row.get("context") for row in results}) > 1
    line_of = lambda row: (row["draft"], row.get("context"), row["temperature"], row["mode"])
    colours = list(dict.fromkeys(line_of(row)[:3] for row in results))
    for draft, context, temperature, mode in dict.fromkeys(map(line_of, results)):
        line = sorted((row for row in results if line_of(row) == (draft, context, temperature, mode)), key=lambda row: row["gamma"])
        style = dict(color=f"C{colours.index((draft, context, temperature))}", linestyle=STYLES[mode], marker="o")
        label = f"{draft}{f', context {context:,}' if several else ''}, temperature {temperature:g}, {mode}"
        for axes, name in ((accepted, "acceptance_rate"), (tokens, "mean_acceptance_length")):
            axes.plot([row["gamma"] for row in line], [row[name] for row in line], label=label, **style)
    for axes in (accepted, tokens):
        axes.set(xlabel="gamma (most drafts of a round)", xticks=sorted({row["gamma"] for row in results}))
        axes.grid(alpha=0.3)
    accepted.set(ylabel="accepted / drafted", title="Acceptance", ylim=(0, 1.02))
    tokens.set(ylabel="tokens", title="Tokens a round", ylim=(0, None))
    tokens.legend(fontsize=8)
    return figure
