"""What the choices of the KV quantizer cost: the axes of groups (QuantSpec, arXiv 2502.10424, table 5), and how 8 bits become 4.

Each is measured with an emulated cache and the model's own weights, so that nothing but the cache differs: how far what is read is from
what was cached, how well the model predicts real text with it, as draft and as target, and how many drafts that target accepts.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from pallas_kernels.formats.rounding import accumulation_dtype, parameter_dtype
from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE
from qspec_jax import drafts
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.decoding import prefill
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
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


@dataclasses.dataclass(frozen=True)
class Reading(Figures):
    """The cache as a draft or the target reads it. key_error, value_error: rms of the error over rms of what was cached, in the prompts."""

    key_error: float
    value_error: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A quantizer, a key of `VARIANTS`. acceptance_rate: accepted / drafted, teacher-forced, of a draft with the model's own weights."""

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
class Report:
    """A row for each quantizer. full_perplexity: with a cache in the model's own precision. tokens, bytes: scored, of all texts."""

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
    results: list[Row]
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
) -> Report:
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
    config = GenerationConfig(max_new_tokens=max_new_tokens, num_speculative_tokens=GAMMA, group_size=group_size)
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
        rows.append(Row(variant, quantizer.keys, quantizer.values, quantizer.scheme, draft, target, accepted / drafted, accepted, drafted))
    return Report(
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
    """Drafts accepted and drafted along the texts, at the config's temperature."""
    draft = drafts.quantspec(model, weight_bits=16)
    walks = [acceptance.teacher_forced(model, draft, rows, config, jax.random.key(0), cache=cache) for rows in perplexity.batches(texts)]
    return sum(walk.accepted for walk in walks), sum(walk.drafted for walk in walks)


def reading_errors(
    model: Llama, prompts: Sequence[Sequence[int]], quantizers: Sequence[Quantizer], *, group_size: int
) -> Float[np.ndarray, "Q 2 2"]:
    """Root mean square error of what each quantizer makes of the prompts' keys and values, relative to their root mean square.

    By quantizer; as a draft reads it and as the target; keys and values. Over the groups that prefill quantizes, in all layers and
    prompts together.
    """
    squares = 0
    for rows in perplexity.batches(prompts):
        args = (model, *padded(rows))
        executable, _ = SQUARES.compile(*args, quantizers=tuple(quantizers), group_size=group_size)
        squares = squares + np.asarray(executable(*args), np.float64)
    return np.sqrt(squares[1:].reshape(-1, 2, 2) / squares[0])


@dataclasses.dataclass(frozen=True)
class _Squares:
    """What prefill asks of a cache: keeps no keys and values, but sums of squares of theirs and of their errors."""

    quantizers: tuple[Quantizer, ...]
    group_size: int

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
    return prefill.prefill(model, tokens, n, _Squares(quantizers, group_size))[1]


SQUARES = Compiled(_squares, static_argnames=("quantizers", "group_size"))
