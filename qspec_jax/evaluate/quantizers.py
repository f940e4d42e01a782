"""Measures what the choices of the KV quantizer (`pallas_kernels/formats/kv_cache.py`) cost.

They are the axes of groups (QuantSpec, arXiv 2502.10424, table 5), and how 8 bits become 4.

Each is measured with an emulated cache and the model's own weights, so that only the cache differs: the error of the keys and values that
are read, how well the model predicts real text with them, as draft and as target, and the share of drafts that the target accepts.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Group

from pallas_kernels.formats.rounding import accumulation_dtype, parameter_dtype
from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE
from qspec_jax import drafts, plots
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts.registry import USUAL
from qspec_jax.errors import InputError
from qspec_jax.evaluate import acceptance
from qspec_jax.evaluate.cache_views import FULL, CacheView, cache_view
from qspec_jax.evaluate.emulated import EmulatedConfig, Quantizer, in_groups
from qspec_jax.evaluate.scoring import Figures, batches, figures, measure
from qspec_jax.evaluate.texts import ScoredTexts, long_enough, scored_texts
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import grid

# The axes by keys and values; the other two have the axes of the first.
VARIANTS = {
    "channel-token": Quantizer(),
    "channel-channel": Quantizer(values="channel"),
    "token-token": Quantizer(keys="token"),
    "token-channel": Quantizer(keys="token", values="channel"),
    "paper": Quantizer(scheme="paper"),
    "truncation": Quantizer(scheme="truncation"),
}
GAMMA = 4
BAR = 0.4  # width of a bar in the plot


@dataclasses.dataclass(frozen=True)
class Reading(Figures):
    """The figures of a cache as a draft or the target reads it.

    Attributes:
        key_error: root mean square error of the keys that are read, divided by the root mean square of the cached ones, in the prompts.
        value_error: the same of values.
    """

    key_error: float
    value_error: float


@dataclasses.dataclass(frozen=True)
class QuantizerRow:
    """The figures of a quantizer.

    Attributes:
        acceptance_rate: accepted / drafted, teacher-forced, for a draft with the model's own weights.
    """

    variant: str
    keys: str
    values: str
    scheme: str
    draft: Reading
    target: Reading
    acceptance_rate: float
    accepted: int
    drafted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizersReport(ScoredTexts):
    """What `qspec eval quantizers` measured.

    Attributes:
        gamma: draft tokens in a round.
        full_perplexity: the perplexity with a cache in the model's own precision.
    """

    gamma: int
    full_perplexity: float
    results: list[QuantizerRow]

    def table(self) -> Group:
        """A table with two lines for each quantizer, as a draft reads it and as the target does."""
        names = "quantizer", "keys by", "values by", "scheme"
        labels = "perplexity", "change", "KL, nats a token", "top-1 agreement", "error of keys", "of values", "accepted"
        columns = grid(*names, "read by", *labels, left=(*names, "read by"))
        for row in self.results:
            for reader, reading in (("draft", row.draft), ("target", row.target)):
                name = (row.variant, row.keys, row.values, row.scheme) if reader == "draft" else [""] * 4
                loss = f"{reading.perplexity:.4f}", f"{reading.perplexity_change:+.3%}", f"{reading.kl:.2e}"
                errors = f"{reading.top1_agreement:.2%}", f"{reading.key_error:.2%}", f"{reading.value_error:.2%}"
                columns.add_row(*name, reader, *loss, *errors, f"{row.acceptance_rate:.4f}" if reader == "draft" else "")
        notes = [
            f"{self.scored_text} With a cache in the model's own precision: perplexity {self.full_perplexity:.4f}.",
            f"Groups of {self.group_size} tokens. errors: rms, relative, in the prompts. accepted: of drafts by the model's own weights,",
            f"teacher-forced, gamma {self.gamma}, temperature 0.",
        ]
        return self.page("KV quantizers", columns, notes)

    def figure(self) -> Any:
        """Two panels: divergence from the full cache as draft and as target, and acceptance; bars for each quantizer."""
        figure, (divergence, accepted) = plots.panels((12, 4.5), 2)
        places = range(len(self.results))
        for offset, name, colour in ((-BAR / 2, "draft", "tab:orange"), (BAR / 2, "target", "tab:blue")):
            heights = [getattr(row, name).kl for row in self.results]
            divergence.bar([place + offset for place in places], heights, BAR, label=f"read by the {name}", color=colour)
        divergence.set_yscale("log")
        divergence.set(ylabel="nats a token", title="KL from the full cache")
        divergence.legend()
        accepted.bar(places, [row.acceptance_rate for row in self.results], BAR, color="tab:orange")
        accepted.set(ylabel="accepted / drafted", title=f"Acceptance, teacher-forced, gamma {self.gamma}", ylim=(None, 1))
        for axes in (divergence, accepted):
            axes.set_xticks(places, [row.variant for row in self.results], rotation=20)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
        figure.suptitle(f"{self.model}: {self.texts} texts, axes of scales by keys-values", fontsize=11)
        return figure


def run(
    name: str,
    model: Llama,
    tokenizer,
    texts: Mapping[str, Sequence[int]],
    variants: Sequence[str],
    *,
    prompt_tokens: int,
    max_new_tokens: int,
    group_size: int | None = None,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> QuantizersReport:
    """Measures quantizers on the tokens after prompts.

    Args:
        texts: token ids by name; those that are too short are left out and named in the report.
        variants: keys of `VARIANTS`.
        prompt_tokens: tokens of each text before the first scored one, at least two groups.
        max_new_tokens: tokens of each text that are scored.
        group_size: tokens in a group; None: the default of the int8 cache.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.

    Raises:
        InputError: if all texts are too short, for an unknown variant, for a model in which every layer has a sliding window, and as
            `acceptance.teacher_forced` does.
    """
    for variant in variants:
        if variant not in VARIANTS:
            raise InputError(f"variant {variant!r} should be one of {', '.join(VARIANTS)}")
    if not model.config.full_layers:
        raise InputError("nothing is quantized of this model: every layer has a sliding window")
    G = CacheConfig(group_size=group_size).group_size_for(model.config.head_dim)
    if prompt_tokens < 2 * G:
        raise InputError(f"prompt_tokens {prompt_tokens} should be at least {2 * G}: nothing of a shorter prompt is quantized")
    chosen, too_short = long_enough(texts, prompt_tokens, max_new_tokens)
    config = GenerationConfig(draft=USUAL, max_new_tokens=max_new_tokens, num_speculative_tokens=GAMMA, group_size=group_size)
    acceptance.check(model, [text[:prompt_tokens] for text in chosen], config)
    quantizers = {variant: VARIANTS[variant] for variant in VARIANTS if variant in variants}
    about = scored_texts(name, model, tokenizer, chosen, max_new_tokens, group_size=G, too_short=too_short)

    def errors_of_all() -> list[list[list[float]]]:
        return reading_errors(model, [text[:prompt_tokens] for text in chosen], list(quantizers.values()), group_size=G).tolist()

    def measured(variant: str, error: list[list[float]]) -> _Measured:
        quantizer, cache = quantizers[variant], EmulatedConfig(quantizers[variant], G)
        views = [cache_view(FULL), CacheView(cache, UPPER_PLANE), CacheView(cache, BOTH_PLANES)]
        scores = measure(model, chosen, views, max_new_tokens=max_new_tokens, progress=False)
        draft, target = (
            Reading(**vars(figures(scores, i, about["bytes"])), key_error=keys, value_error=values)
            for i, (keys, values) in enumerate(error, 1)
        )
        with working("walking"):
            accepted, drafted = _acceptance(model, chosen, config, cache)
        name_and_settings = variant, quantizer.keys, quantizer.values, quantizer.scheme
        row = QuantizerRow(*name_and_settings, draft, target, accepted / drafted, accepted, drafted)
        return _Measured(row, math.exp(-scores.logprobs[0].mean()))

    rows = []
    errors = kept.measured("errors of keys and values", list[list[list[float]]], errors_of_all)
    for variant, error in zip(progress_bar(quantizers, progress=progress), errors):
        rows.append(kept.measured(variant, _Measured, functools.partial(measured, variant, error), _described))
    return QuantizersReport(**about, gamma=GAMMA, full_perplexity=rows[-1].full_perplexity, results=[found.row for found in rows])


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A row, and the perplexity with a cache in the model's own precision, which was measured beside it."""

    row: QuantizerRow
    full_perplexity: float


def _described(found: _Measured) -> str:
    row = found.row
    return f"perplexity {row.draft.perplexity:.4f} as a draft, {row.target.perplexity:.4f} as a target, accepted {row.acceptance_rate:.4f}"


def _acceptance(model: Llama, texts: Sequence[Sequence[int]], config: GenerationConfig, cache: EmulatedConfig) -> tuple[int, int]:
    """Accepted and drafted tokens along the texts, at the config's temperature."""
    draft = drafts.quantspec(model, weight_bits=16)
    walks = [acceptance.teacher_forced(model, draft, rows, config, jax.random.key(0), cache=cache) for rows in batches(texts)]
    return sum(walk.accepted for walk in walks), sum(walk.drafted for walk in walks)


def reading_errors(
    model: Llama, prompts: Sequence[Sequence[int]], quantizers: Sequence[Quantizer], *, group_size: int
) -> Float[np.ndarray, "Q 2 2"]:
    """Root mean square error of the prompts' quantized keys and values, relative to their root mean square.

    Returns:
        Errors over the groups that prefill quantizes, in all layers without a sliding window and all prompts together; axes: the
        quantizers; draft and target; keys and values.
    """
    squares = 0
    for rows in batches(prompts):
        args = (model, *padded(rows))
        executable, _ = SQUARES.compile(*args, quantizers=tuple(quantizers), group_size=group_size)
        squares = squares + np.asarray(executable(*args), np.float64)
    return np.sqrt(squares[1:].reshape(-1, 2, 2) / squares[0])


@dataclasses.dataclass(frozen=True)
class _Squares:
    """A cache for prefill that keeps sums of squares of keys and values, and of their errors, instead of keys and values. full_layers: the
    layers that are quantized."""

    quantizers: tuple[Quantizer, ...]
    group_size: int
    full_layers: tuple[int, ...]

    prompt_queries: ClassVar[int] = Cache.prompt_queries

    def fill(self, layer: int, keys: Array, values: Array, n: Array) -> Float[Array, "1+2Q 2"]:
        raw = [in_groups(x, self.group_size) for x in (keys, values)]
        tokens = jnp.arange(raw[0].shape[2] * self.group_size).reshape(1, 1, -1, self.group_size, 1)
        quantized = tokens < Schedule(self.group_size).quantized_length(n).reshape(-1, 1, 1, 1, 1)

        def squares(keys: Array, values: Array) -> Float[Array, "2"]:
            return jnp.stack([jnp.where(quantized, x.astype(accumulation_dtype(x.dtype)) ** 2, 0).sum() for x in (keys, values)])

        views = [view for quantizer in self.quantizers for view in quantizer.views(*raw, parameter_dtype(keys.dtype))]
        return jnp.stack([squares(*raw), *(squares(view.keys - raw[0], view.values - raw[1]) for view in views)])

    def filled(self, layers: tuple[Array, ...], n: Array) -> Array:
        return jnp.stack([layers[i] for i in self.full_layers]).sum(0)


def _squares(
    model: Llama, tokens: Int[Array, "B S"], n: Int[Array, "B"], *, quantizers: tuple[Quantizer, ...], group_size: int
) -> Float[Array, "1+2Q 2"]:
    return prefill(model, tokens, n, _Squares(quantizers, group_size, model.config.full_layers))[1]


SQUARES = Compiled(_squares, static_argnames=("quantizers", "group_size"))
