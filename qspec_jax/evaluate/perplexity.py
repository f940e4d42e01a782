"""`qspec eval perplexity`: perplexity of real text through each cache, and divergence from a cache in full precision."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group

from qspec_jax import plots
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.evaluate.cache_views import FULL, UPPER, cache_view
from qspec_jax.evaluate.scoring import WIDTH, Figures, Scores, figures, measure
from qspec_jax.evaluate.texts import ScoredTexts, long_enough, scored_texts
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.reports import grid

DEFAULT_CACHES = FULL, "int8", UPPER  # the caches of `generate`; others are for comparison
PARTS = 8  # maximum number of parts that distances from the prompt are cut into


@dataclasses.dataclass(frozen=True)
class Part:
    """The tokens first..last after the prompt, counted from 1."""

    first: int
    last: int
    perplexity: float
    kl: float


@dataclasses.dataclass(frozen=True)
class CacheFigures(Figures):
    """The figures of one cache, as `cache_view` takes it, over all tokens and by distance from the prompt."""

    cache: str
    by_distance: list[Part]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityReport(ScoredTexts):
    """What `qspec eval perplexity` measured.

    Attributes:
        width: tokens in a pass.
    """

    scheme: str
    width: int
    results: list[CacheFigures]

    def table(self) -> Group:
        """A table with a line for each cache."""
        columns = grid("cache", "perplexity", "change", "bits per byte", "KL, nats a token", "top-1 agreement", left=("cache",))
        for row in self.results:
            figures = f"{row.perplexity:.4f}", f"{row.perplexity_change:+.3%}", f"{row.bits_per_byte:.4f}", f"{row.kl:.2e}"
            columns.add_row(row.cache, *figures, f"{row.top1_agreement:.2%}")
        notes = [
            self.scored_text,
            f"Groups of {self.group_size} tokens, scheme {self.scheme}. change, KL, agreement: from a cache in the model's own precision.",
        ]
        if any(row.cache not in DEFAULT_CACHES for row in self.results):
            notes.append("kivi and specache: groups of 32 tokens, unless --group-size or the setting group says otherwise.")
        return self.page("Perplexity through decode", columns, notes)

    def figure(self) -> Any:
        """Two panels against the distance from the prompt: perplexity, and divergence from the full cache; a line for each cache."""
        figure, (loss, divergence) = plots.panels((11, 4.5), 2)
        for number, row in enumerate(self.results):
            middles = [(part.first + part.last) / 2 for part in row.by_distance]
            style = dict(color=f"C{number}", marker="o", label=f"{row.cache} ({row.perplexity:.3f}, KL {row.kl:.1e})")
            loss.plot(middles, [part.perplexity for part in row.by_distance], **style)
            divergence.plot(middles, [part.kl for part in row.by_distance], **style)
        # Linear near 0, where the full cache is.
        divergence.set_yscale("symlog", linthresh=1e-7)
        loss.set(ylabel="perplexity", title="Perplexity")
        divergence.set(ylabel="nats a token", title="KL from the full cache")
        for axes in (loss, divergence):
            axes.set_xlabel("tokens after the prompt")
            axes.grid(alpha=0.3)
        loss.legend(fontsize=8)
        figure.suptitle(f"{self.model}: {self.texts} texts, prompts of {self.prompt_tokens:,} tokens", fontsize=11)
        return figure


def run(
    name: str,
    model: Llama,
    tokenizer,
    texts: Mapping[str, Sequence[int]],
    caches: Sequence[str],
    *,
    prompt_tokens: int,
    max_new_tokens: int,
    scheme: str = CacheConfig.scheme,
    group_size: int | None = None,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> PerplexityReport:
    """Perplexity and divergence through each of the caches.

    Args:
        texts: token ids by name; those that are too short are left out and named in the report.
        caches: as `cache_view` takes them.
        prompt_tokens: tokens of each text before the first scored one.
        max_new_tokens: tokens of each text that are scored.
        group_size: tokens in a group; None: the cache's own choice.
        kept: the scores of an earlier run.
        progress: see `progress_bar`.

    Raises:
        InputError: if all texts are too short, and as `measure` does.
    """
    chosen, too_short = long_enough(texts, prompt_tokens, max_new_tokens)
    names = list(dict.fromkeys([FULL, *caches]))
    views = [cache_view(cache, scheme=scheme, group_size=group_size) for cache in names]

    def perplexities(scores: Scores) -> str:
        found = (f"{name} {math.exp(-scores.logprobs[i].mean()):.4f}" for i, name in enumerate(names))
        return f"perplexity {', '.join(found)}"

    scores = measure(model, chosen, views, max_new_tokens=max_new_tokens, described=perplexities, kept=kept, progress=progress)
    G = CacheConfig(group_size=group_size, scheme=scheme).group_size_for(model.config.head_dim)
    about = scored_texts(name, model, tokenizer, chosen, max_new_tokens, group_size=G, too_short=too_short)
    rows = [
        CacheFigures(**vars(figures(scores, i, about["bytes"])), cache=cache, by_distance=by_distance(scores, i))
        for i, cache in enumerate(names)
        if cache in caches
    ]
    width = 1 if any(view.one_by_one for view in views) else WIDTH
    return PerplexityReport(**about, scheme=scheme, width=width, results=rows)


def by_distance(scores: Scores, cache: int) -> list[Part]:
    """The figures of the cache with this index by distance from the prompt, in at most PARTS parts."""
    tokens = scores.logprobs.shape[2]
    edges = np.linspace(0, tokens, min(PARTS, tokens) + 1).astype(int).tolist()
    parts = []
    for first, end in itertools.pairwise(edges):
        perplexity = math.exp(-scores.logprobs[cache, :, first:end].mean())
        parts.append(Part(first + 1, end, perplexity, float(scores.divergence[cache, :, first:end].mean())))
    return parts
