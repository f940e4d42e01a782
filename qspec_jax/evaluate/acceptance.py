"""How many drafts the target accepts: free-running, while it generates, and teacher-forced, along real texts; with a table and a plot."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key
from rich.table import Table

from qspec_jax import plots
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import CacheChoice, Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import Limits, make_limits
from qspec_jax.decoding.requests import checked_prompts
from qspec_jax.decoding.round import current_round, feed, propose, seen_by_accepted, verify
from qspec_jax.decoding.sampling import Sampler, make_sampler, prompt_keys
from qspec_jax.decoding.state import DecodeState
from qspec_jax.drafts.draft import Draft, RoundResult
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import Step

NGRAM = 8
STYLES = {"teacher-forced": "-", "free-running": ":"}


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """accepted / drafted tokens, with the text they were measured on: its new tokens and share of repeated 8-grams.

    mean_acceptance_length: 1 + accepted / rounds, tokens per round. conditional_rate: the chance that a draft is accepted given those
    before it, accepted / (accepted + rounds that rejected a draft); None free-running, where a round that accepted fewer than gamma
    may have rejected none: fewer were eligible.
    """

    acceptance_rate: float
    mean_acceptance_length: float
    conditional_rate: float | None
    accepted: int
    drafted: int
    rounds: int
    new_tokens: int
    repeated_ngrams: float


def free_running(model: Llama, draft: Draft, prompts: Sequence[Sequence[int]], config: GenerationConfig, key: Key[Array, ""]) -> Acceptance:
    """Acceptance while the model generates after each prompt (EOS ignored)."""
    check(model, prompts, config)
    config = dataclasses.replace(config, ignore_eos=True)
    out = generate(model, prompts, config=config, key=key, draft=draft)
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
    new, gamma = config.max_new_tokens, config.num_speculative_tokens
    if min(map(len, texts)) <= new:
        raise InputError(f"every text should have more than the {new} tokens to walk")
    config = dataclasses.replace(config, ignore_eos=True)
    prompts = [list(text[:-new]) for text in texts]
    check(model, prompts, config)
    real = jnp.asarray([list(text[-new:]) + [0] * (gamma + 1) for text in texts], jnp.int32)
    sampler, limits, keys = make_sampler(config), make_limits(model, *[config] * len(texts)), prompt_keys(key, len(texts))
    sizes = dict(gamma=gamma, prompt_tokens=max(map(len, prompts)), max_new_tokens=new)
    engine = Engine(model, draft, cache=cache or config.cache_config, **sizes)
    state = engine.prefill(prompts, sampler, keys, limits)
    state = dataclasses.replace(state, pending=real[:, 0])
    state, rejected = engine.run(WALK, state, sampler, limits, real)
    counts, rejected = jax.device_get((state.counts, rejected))
    accepted, drafted, rounds = (int(count.sum()) for count in (counts.accepted, counts.drafted, counts.rounds))
    return Acceptance(
        accepted / drafted,
        1 + accepted / rounds,
        accepted / (accepted + int(rejected.sum())),
        accepted,
        drafted,
        rounds,
        new * len(texts),
        repeated_ngrams(real[:, :new].tolist()),
    )


def check(model: Llama, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Raises InputError where acceptance after these prompts cannot be measured."""
    if config.num_speculative_tokens < 1 or config.max_new_tokens < 3:
        raise InputError("acceptance needs num_speculative_tokens (gamma) of at least 1 and max_new_tokens of at least 3")
    if config.repetition_penalty != 1:
        raise InputError("acceptance is measured without a repetition penalty")
    if config.adaptive or config.min_draft_confidence:
        raise InputError("acceptance is of a fixed number of drafts; adaptive and min_draft_confidence choose their own")
    checked_prompts(model, prompts, config)


def _walk(
    target: Step, draft: Draft, sampler: Sampler, state: DecodeState, limits: Limits, real: Int[Array, "B T"]
) -> tuple[DecodeState, Int[Array, "B"]]:
    """The state behind the text, and how many rounds of each row rejected a draft."""
    width = state.gamma + 1
    block_at = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width))

    def walking(carry) -> Array:
        # Stop where no draft can be counted any more; the last token of the text is only ever verified against.
        return (carry[0].emitted < limits.max_new_tokens).any()

    def step(carry):
        state, rejected = carry
        active = state.emitted < limits.max_new_tokens
        round = current_round(sampler, state, limits, active)
        proposal, draft_state, cache = propose(draft, state.draft, state.cache, round)
        verdict, cache = verify(target, proposal, cache, round)
        accepted = verdict.accepted
        moved = jnp.where(active, accepted + 1, 0)
        # Once more with the real tokens, whose keys and values are what the cache must hold, and whose queries the draft may observe.
        _, cache, masses = feed(target, block_at(real, state.emitted - 1), cache.rollback(round.lengths), round, observe=draft.observes)
        cache, flushed = cache.commit(round.lengths, moved, wait_for=[verdict.own_token, *masses])
        result = RoundResult(block_at(real, state.emitted), moved, moved - active, flushed, seen_by_accepted(masses, moved))
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
        return state, rejected + (active & (accepted < proposal.eligible))

    return lax.while_loop(walking, step, (state, jnp.zeros_like(state.emitted)))


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
class AcceptanceReport:
    """What `qspec eval acceptance` reports. texts: how many were measured; skipped: files too short; results: each an `Acceptance`, with
    its draft, gamma, temperature and mode."""

    texts: int
    skipped: list[str]
    results: list[dict[str, Any]]


def table(report: AcceptanceReport) -> Table:
    """A table with a line for every draft, gamma, temperature and mode."""
    grid = Table(title="Acceptance")
    columns = (
        "draft",
        "gamma",
        "temperature",
        "mode",
        "accepted / drafted",
        "given those before",
        "tokens a round",
        "drafted",
        "repeated 8-grams",
    )
    for label in columns:
        grid.add_column(label, justify="left" if label in ("draft", "mode") else "right")
    for row in report.results:
        conditional = "-" if row["conditional_rate"] is None else f"{row['conditional_rate']:.3f}"
        rates = f"{row['acceptance_rate']:.3f}", conditional, f"{row['mean_acceptance_length']:.2f}"
        name = row["draft"], str(row["gamma"]), f"{row['temperature']:g}", row["mode"]
        grid.add_row(*name, *rates, f"{row['drafted']:,}", f"{row['repeated_ngrams']:.1%}")
    return grid


def plot(report: AcceptanceReport, path: Path) -> None:
    """Two panels against gamma, accepted / drafted and tokens a round; a line for every draft, temperature and mode (arXiv 2502.10424,
    figure 9).

    Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    results = report.results
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    accepted, tokens = figure.subplots(1, 2)
    line_of = lambda row: (row["draft"], row["temperature"], row["mode"])
    colours = list(dict.fromkeys(line_of(row)[:2] for row in results))
    for draft, temperature, mode in dict.fromkeys(map(line_of, results)):
        line = sorted((row for row in results if line_of(row) == (draft, temperature, mode)), key=lambda row: row["gamma"])
        style = dict(color=f"C{colours.index((draft, temperature))}", linestyle=STYLES[mode], marker="o")
        label = f"{draft}, temperature {temperature:g}, {mode}"
        for axes, name in ((accepted, "acceptance_rate"), (tokens, "mean_acceptance_length")):
            axes.plot([row["gamma"] for row in line], [row[name] for row in line], label=label, **style)
    for axes in (accepted, tokens):
        axes.set(xlabel="gamma (most drafts of a round)", xticks=sorted({row["gamma"] for row in results}))
        axes.grid(alpha=0.3)
    accepted.set(ylabel="accepted / drafted", title="Acceptance", ylim=(0, 1.02))
    tokens.set(ylabel="tokens", title="Tokens a round", ylim=(0, None))
    tokens.legend(fontsize=8)
    plots.save(figure, path)
