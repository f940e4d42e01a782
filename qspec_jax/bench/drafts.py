"""`qspec bench drafts`: how fast whole decodes are with each draft, against none, on this machine.

Decodes take turns, and a ratio is the median over turns of two decodes of one turn, so that a machine that does other work meanwhile
slows all of them alike. It runs what users run: `generate`, with `auto` as it settles here.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence

from rich.console import RenderableType

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.prepare import Prepared, prepare
from qspec_jax.decoding.resolve import resolve_draft
from qspec_jax.drafts.registry import NONE, make_draft
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import Run, grid, page, this_run


@dataclasses.dataclass(frozen=True)
class DraftRow:
    """Decodes with a draft over a cache, with medians over the turns.

    Attributes:
        draft: as it was asked for.
        settled: the draft that decoded, another text for "auto".
        cache: the target's.
        gamma: drafts of a round, 0 without a draft.
        tokens_per_second: of each turn.
        median: of tokens_per_second.
        tokens_per_round: emitted in a round; 1 without a draft.
        to_none: speed as a share of that of draft none over its own default cache.
        to_same_cache: speed as a share of that of draft none over the same cache.
    """

    draft: str
    settled: str
    cache: str
    gamma: int
    tokens_per_second: list[float]
    median: float
    tokens_per_round: float
    to_none: float
    to_same_cache: float


@dataclasses.dataclass(frozen=True)
class DraftsReport(Run):
    """Decodes with each draft.

    Attributes:
        model: its name.
        parameters: of the model.
        dtype: of its weights.
        context: tokens of the prompt.
        max_new_tokens: tokens that each decode adds.
        turns: decodes with each draft.
        rows: draft none over its own cache, none over the cache of the drafts, and the drafts.
    """

    model: str
    parameters: int
    dtype: str
    context: int
    max_new_tokens: int
    turns: int
    rows: list[DraftRow]

    def table(self) -> RenderableType:
        """A line for each draft and cache."""
        figures = ("gamma", "tokens/s", "lowest", "highest", "tokens a round", "of none", "of none, same cache")
        found = grid("draft", "cache", *figures, left=("draft", "cache"), wraps=("draft", "cache"))
        for row in self.rows:
            draft = row.draft if row.settled == row.draft else f"{row.draft} ({row.settled})"
            speeds = [f"{speed:,.1f}" for speed in (row.median, min(row.tokens_per_second), max(row.tokens_per_second))]
            ratios = [f"{ratio:.2f}" for ratio in (row.tokens_per_round, row.to_none, row.to_same_cache)]
            found.add_row(draft, row.cache, str(row.gamma), *speeds, *ratios)
        title = f"Decode of {self.model} ({self.parameters / 1e6:,.0f} M parameters, {self.dtype}) on {self.device}"
        note = (
            f"{self.max_new_tokens} new tokens after {self.context:,}, batch 1; medians of {self.turns} turns. of none: the speed as a "
            "share of that of draft none with its own cache, full, and with the cache of the line."
        )
        return page(title, f", {self.date}", found, notes=[note])


@dataclasses.dataclass(frozen=True)
class _Way:
    """One of the decodes that take turns: the draft that was asked for, what "auto" became, and the prompt with the draft."""

    asked: str
    config: GenerationConfig
    prepared: Prepared


@dataclasses.dataclass(frozen=True)
class _Decode:
    """One decode in one turn."""

    tokens_per_second: float
    tokens_per_round: float


def _described(found: _Decode) -> str:
    return f"{found.tokens_per_second:,.1f} tokens/s"


def run(
    name: str,
    model: Llama,
    int4: Callable[[], Llama],
    prompt: Sequence[int],
    drafts: Sequence[str],
    *,
    cache: str | None = None,
    gamma: int | None = None,
    max_new_tokens: int = 128,
    turns: int = 7,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> DraftsReport:
    """Decodes greedily after a prompt with each draft, in turns; a first turn, which compiles, does not count.

    Args:
        name: the model's, for the report.
        model: the target.
        int4: makes the model with INT4 weights, see `make_draft`.
        prompt: token ids.
        drafts: texts as --draft takes them, "auto" too.
        cache: of all drafts; None for the default of a draft.
        gamma: drafts of a round; None for each draft's default.
        max_new_tokens: tokens that each decode adds.
        turns: how many.
        kept: the decodes of an earlier run, a row for each.
        progress: see `progress_bar`.
    """
    shared = dict(max_new_tokens=max_new_tokens, num_speculative_tokens=gamma, ignore_eos=True)

    def way(draft: str, cache: str | None) -> _Way:
        config = GenerationConfig(draft=draft, cache=cache, **shared)
        (config,) = resolve_draft(model, [config], [len(prompt)], prompts=[prompt], batch=1)
        made = make_draft(config.draft, model, int4=int4)
        return _Way(draft, config, prepare(model, [prompt], config=dataclasses.replace(config, draft=made or NONE)))

    drafted = [way(draft, cache) for draft in dict.fromkeys(drafts)]
    kinds = dict.fromkeys(each.config.cache or each.config.cache_config.kind for each in drafted)
    ways = [way(NONE, None), *(way(NONE, kind) for kind in kinds if kind != "full"), *drafted]
    caches = [each.config.cache or each.config.cache_config.kind for each in ways]
    names = [f"{each.asked}, {kind} cache" for each, kind in zip(ways, caches)]

    def decoded(i: int) -> _Decode:
        stats = generate(model, ways[i].prepared).stats
        return _Decode(stats.tokens_per_second, stats.mean_acceptance_length or 1.0)

    def label(turn: int, i: int) -> str:
        return f"turn {turn} of {turns}, {names[i]}"

    speeds: list[list[float]] = [[] for _ in ways]
    rounds = [1.0] * len(ways)
    with progress_bar(total=(turns + 1) * len(ways), progress=progress) as bar:
        for turn in range(turns + 1):
            for i in [*range(turn % len(ways), len(ways)), *range(turn % len(ways))]:  # each comes after every other one at times
                if turn:
                    found = kept.measured(label(turn, i), _Decode, functools.partial(decoded, i), _described)
                    speeds[i].append(found.tokens_per_second)
                    rounds[i] = found.tokens_per_round
                elif any(label(later, i) not in kept for later in range(1, turns + 1)):
                    with working(f"warm-up, {names[i]}"):
                        decoded(i)
                bar.update()
    baseline = {kind: i for i, kind in reversed(list(enumerate(caches))) if ways[i].asked == NONE}

    def ratio(i, j):
        return statistics.median(mine / theirs for mine, theirs in zip(speeds[i], speeds[j], strict=True))

    rows = [
        DraftRow(
            draft=each.asked,
            settled=each.config.draft,
            cache=kind,
            gamma=each.config.num_speculative_tokens if each.config.speculative else 0,
            tokens_per_second=speeds[i],
            median=statistics.median(speeds[i]),
            tokens_per_round=rounds[i],
            to_none=ratio(i, 0),
            to_same_cache=ratio(i, baseline[kind]),
        )
        for i, (each, kind) in enumerate(zip(ways, caches, strict=True))
    ]
    return DraftsReport(
        **this_run(),
        model=name,
        parameters=sum(math.prod(weight.shape) for weight in model.weights().values()),
        dtype=model.dtype.name,
        context=len(prompt),
        max_new_tokens=max_new_tokens,
        turns=turns,
        rows=rows,
    )
