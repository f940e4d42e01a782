"""What the choices of the KV quantizer cost: the axes of groups (QuantSpec, arXiv 2502.10424, table 5), and how 8 bits become 4.

Each is measured with an emulated cache and the model's own weights, so that nothing but the cache differs: how far what is read is from
what was cached, how well the model predicts real text with it, as draft and as target, and how many drafts that target accepts.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Group
from rich.text import Text
from tqdm import tqdm

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
from qspec_jax.evaluate import acceptance, perplexity
from qspec_jax.evaluate.emulated import EmulatedConfig, Quantizer, in_groups
from qspec_jax.evaluate.perplexity import Figures, TooShort
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded

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
    """The figures of a cache as a draft or the target reads it. key_error, value_error: the root mean square error of what is read over the
    root mean square of what was cached, in the prompts."""

    key_error: float
    value_error: float


@dataclasses.dataclass(frozen=True)
class QuantizerRow:
    """The figures of a quantizer. variant: its key in `VARIANTS`. acceptance_rate: accepted / drafted, teacher-forced, for a draft with the
    model's own weights."""

    variant: str
    keys: str
    values: str
    scheme: str
    draft: Reading
    target: Reading
    acceptance_rate: float
    accepted: int
    drafted: int


@dataclasses.dataclass(frozen=True)
class QuantizersReport:
    """What `qspec eval quantizers` measured. results: a row for each quantizer. full_perplexity: the perplexity with a cache in the model's
    own precision. tokens, bytes: what was scored, in all texts together."""

    model: str
    device: str
    dtype: str
    group_size: int
    gamma: int
    prompt_tokens: int
    max_new_tokens: int
    texts: int
    tokens: int
    bytes: int
    full_perplexity: float
    results: list[QuantizerRow]
    too_short: list[TooShort]


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
    progress: bool | None = None,
) -> QuantizersReport:
    """Measures these quantizers, keys of `VARIANTS`, on what follows prompts of `prompt_tokens` tokens, at least two groups.

    texts: token ids by name; those that are too short are left out, and named in the report. Raises InputError where all are, for an
    unknown variant, and as `acceptance.teacher_forced` does.
    """
    for variant in variants:
        if variant not in VARIANTS:
            raise InputError(f"variant {variant!r} should be one of {', '.join(VARIANTS)}")
    G = CacheConfig(group_size=group_size).group_size_for(model.config.head_dim)
    if prompt_tokens < 2 * G:
        raise InputError(f"prompt_tokens {prompt_tokens} should be at least {2 * G}: nothing of a shorter prompt is quantized")
    chosen, too_short = perplexity.long_enough(texts, prompt_tokens, max_new_tokens)
    config = GenerationConfig(draft=USUAL, max_new_tokens=max_new_tokens, num_speculative_tokens=GAMMA, group_size=group_size)
    acceptance.check(model, [text[:prompt_tokens] for text in chosen], config)
    quantizers = {variant: VARIANTS[variant] for variant in VARIANTS if variant in variants}
    scored_bytes = perplexity.count_bytes(tokenizer, chosen, max_new_tokens)
    errors = reading_errors(model, [text[:prompt_tokens] for text in chosen], list(quantizers.values()), group_size=G)
    full = perplexity.cache_view(perplexity.FULL)
    rows = []
    bar = tqdm(quantizers.items(), leave=False, disable=None if progress is None else not progress)
    for (variant, quantizer), error in zip(bar, errors):
        cache = EmulatedConfig(quantizer, G)
        views = [full, perplexity.CacheView(cache, UPPER_PLANE), perplexity.CacheView(cache, BOTH_PLANES)]
        scores = perplexity.measure(model, chosen, views, max_new_tokens=max_new_tokens, progress=False)
        draft, target = (
            Reading(**vars(perplexity.figures(scores, i, scored_bytes)), key_error=keys, value_error=values)
            for i, (keys, values) in enumerate(error.tolist(), 1)
        )
        accepted, drafted = _acceptance(model, chosen, config, cache)
        name_and_settings = variant, quantizer.keys, quantizer.values, quantizer.scheme
        rows.append(QuantizerRow(*name_and_settings, draft, target, accepted / drafted, accepted, drafted))
    return QuantizersReport(
        model=name,
        device=jax.devices()[0].device_kind,
        dtype=model.dtype.name,
        group_size=G,
        gamma=GAMMA,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        texts=len(chosen),
        tokens=len(chosen) * max_new_tokens,
        bytes=scored_bytes,
        full_perplexity=math.exp(-scores.logprobs[0].mean()),
        results=rows,
        too_short=too_short,
    )


def _acceptance(model: Llama, texts: Sequence[Sequence[int]], config: GenerationConfig, cache: EmulatedConfig) -> tuple[int, int]:
    """How many drafts were accepted along the texts, and how many drafted, at the config's temperature."""
    draft = drafts.quantspec(model, weight_bits=16)
    walks = [acceptance.teacher_forced(model, draft, rows, config, jax.random.key(0), cache=cache) for rows in perplexity.batches(texts)]
    return sum(walk.accepted for walk in walks), sum(walk.drafted for walk in walks)


def reading_errors(
    model: Llama, prompts: Sequence[Sequence[int]], quantizers: Sequence[Quantizer], *, group_size: int
) -> Float[np.ndarray, "Q 2 2"]:
    """Root mean square error of what each quantizer makes of the prompts' keys and values, relative to their root mean square.

    The axes are the quantizers; what a draft reads and what the target does; keys and values. Over the groups that prefill quantizes, in
    all layers and prompts together.
    """
    squares = 0
    for rows in perplexity.batches(prompts):
        args = (model, *padded(rows))
        executable, _ = SQUARES.compile(*args, quantizers=tuple(quantizers), group_size=group_size)
        squares = squares + np.asarray(executable(*args), np.float64)
    return np.sqrt(squares[1:].reshape(-1, 2, 2) / squares[0])


@dataclasses.dataclass(frozen=True)
class _Squares:
    """Takes a cache's place in prefill. Instead of keys and values it keeps the sums of their squares, and of their errors' squares."""

    quantizers: tuple[Quantizer, ...]
    group_size: int

    prompt_queries: ClassVar[int] = Cache.prompt_queries

    def fill(self, layer: int, keys: Array, values: Array, n: Array) -> Float[Array, "1+2Q 2"]:
        raw = [in_groups(x, self.group_size) for x in (keys, values)]
        tokens = jnp.arange(raw[0].shape[2] * self.group_size).reshape(1, 1, -1, self.group_size, 1)
        quantized = tokens < Schedule(self.group_size).quantized_length(n).reshape(-1, 1, 1, 1, 1)
        power = lambda x: jnp.where(quantized, x.astype(accumulation_dtype(x.dtype)) ** 2, 0).sum()
        of_both = lambda keys, values: jnp.stack([power(keys), power(values)])
        views = [view for quantizer in self.quantizers for view in quantizer.views(*raw, parameter_dtype(keys.dtype))]
        return jnp.stack([of_both(*raw), *(of_both(view.keys - raw[0], view.values - raw[1]) for view in views)])

    def filled(self, layers: tuple[Array, ...], n: Array) -> Array:
        return jnp.stack(layers).sum(0)


def _squares(
    model: Llama, tokens: Int[Array, "B S"], n: Int[Array, "B"], *, quantizers: tuple[Quantizer, ...], group_size: int
) -> Float[Array, "1+2Q 2"]:
    return prefill(model, tokens, n, _Squares(quantizers, group_size))[1]


SQUARES = Compiled(_squares, static_argnames=("quantizers", "group_size"))


def table(report: QuantizersReport) -> Group:
    """A table with two lines for each quantizer, as a draft reads it and as the target does."""
    labels = "perplexity", "change", "KL, nats a token", "top-1 agreement", "error of keys", "of values", "accepted"
    grid = perplexity.grid_of("quantizer", "keys by", "values by", "scheme", "read by", *labels)
    for row in report.results:
        for reader, reading in (("draft", row.draft), ("target", row.target)):
            name = (row.variant, row.keys, row.values, row.scheme) if reader == "draft" else [""] * 4
            figures = f"{reading.perplexity:.4f}", f"{reading.perplexity_change:+.3%}", f"{reading.kl:.2e}", f"{reading.top1_agreement:.2%}"
            errors = f"{reading.key_error:.2%}", f"{reading.value_error:.2%}"
            grid.add_row(*name, reader, *figures, *errors, f"{row.acceptance_rate:.4f}" if reader == "draft" else "")
    notes = [
        perplexity.scored_text(report) + f" With a cache in the model's own precision: perplexity {report.full_perplexity:.4f}.",
        f"Groups of {report.group_size} tokens. errors: rms, relative, in the prompts. accepted: of drafts by the model's own weights,",
        f"teacher-forced, gamma {report.gamma}, temperature 0.",
        *perplexity.left_out(report.too_short),
    ]
    return Group(perplexity.heading("KV quantizers", report), grid, *(Text(note, "dim") for note in notes))


def plot(report: QuantizersReport, path: Path) -> None:
    """Two panels: divergence from the full cache as draft and as target, and acceptance; bars for each quantizer.

    Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    divergence, accepted = figure.subplots(1, 2)
    places = range(len(report.results))
    for offset, name, colour in ((-BAR / 2, "draft", "tab:orange"), (BAR / 2, "target", "tab:blue")):
        heights = [getattr(row, name).kl for row in report.results]
        divergence.bar([place + offset for place in places], heights, BAR, label=f"read by the {name}", color=colour)
    divergence.set_yscale("log")
    divergence.set(ylabel="nats a token", title="KL from the full cache")
    divergence.legend()
    accepted.bar(places, [row.acceptance_rate for row in report.results], BAR, color="tab:orange")
    accepted.set(ylabel="accepted / drafted", title=f"Acceptance, teacher-forced, gamma {report.gamma}", ylim=(None, 1))
    for axes in (divergence, accepted):
        axes.set_xticks(places, [row.variant for row in report.results], rotation=20)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"{report.model}: {report.texts} texts, axes of scales by keys-values", fontsize=11)
    plots.save(figure, path)
