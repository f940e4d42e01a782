"""How well a model predicts given tokens when it decodes through a cache.

Prefill attends in full precision, so what a cache costs shows only in decoding. The tokens after a prompt are therefore fed through decode,
several in a pass, by generation's schedule: a pass ends where one-by-one decoding would flush. All caches are fed at once, since whole
distributions are compared and none is kept.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.views import BOTH_PLANES, View
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheChoice, CacheConfig
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.requests import check_length, checked_prompts
from qspec_jax.errors import InputError
from qspec_jax.evaluate.cache_views import CacheView
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded
from qspec_jax.progress import progress_bar

WIDTH = 16  # tokens in a pass: the maximum that the GPU kernels of attention take
ROWS = 8  # maximum number of texts in a batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """How well N tokens in each of B rows were predicted through C caches.

    Attributes:
        logprobs: natural logarithm of the probability of the real token, at temperature 1.
        divergence: KL(first cache || this one), in nats.
        agrees: whether the most likely token is that of the first cache.
        is_top: whether the most likely token is the real one.
    """

    logprobs: Float[Array, "C B N"]
    divergence: Float[Array, "C B N"]
    agrees: Bool[Array, "C B N"]
    is_top: Bool[Array, "C B N"]


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over all tokens.

    Attributes:
        perplexity_change: the perplexity divided by that of the full cache, minus 1.
        bits_per_byte: of the text in UTF-8.
        kl: divergence from the full cache, in nats per token.
        top1_agreement: share of the tokens for which the most likely token is that of the full cache.
    """

    perplexity: float
    perplexity_change: float
    bits_per_byte: float
    kl: float
    top1_agreement: float


def token_logprobs(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    cache: CacheConfig,
    *,
    width: int = WIDTH,
    view: View = BOTH_PLANES,
) -> Float[np.ndarray, "B N"]:
    """Natural logarithm of the model's probability (temperature 1, nothing filtered) of each token of each continuation, through decode.

    Args:
        prompts: token ids, of any lengths.
        continuations: token ids, of any lengths; the probability of the first token is prefill's.
        width: tokens fed in a pass; in exact arithmetic it changes nothing.
        view: what is read of the cache, by default what the target reads.

    Returns:
        A row for each continuation, with NaN after the end of a shorter one.

    Raises:
        InputError: for an empty prompt or continuation, a width below 1, and prompts that `generate` cannot continue.
    """
    logprobs = score(model, prompts, continuations, [CacheView(cache, view)], width=width).logprobs[0]
    lengths = np.array([len(continuation) for continuation in continuations])
    return np.where(np.arange(logprobs.shape[1]) < lengths[:, None], logprobs, np.nan)


def score(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    views: Sequence[CacheView],
    *,
    width: int = WIDTH,
    prompt_of: Sequence[int] | None = None,
    room: int = 0,
) -> Scores:
    """Feeds each continuation after its prompt, all as one batch, through several caches side by side; N is the longest continuation.

    Args:
        views: the caches; scores are compared with the first.
        width: tokens fed in a pass; 1 if that matters to any of the caches.
        prompt_of: the index of each continuation's prompt, so that a prompt with several continuations is read once; None: each
            continuation has its own prompt, in the same order.
        room: the program is compiled for continuations of at least this many tokens, so that others can use it too.

    Returns:
        The scores; those after the end of a shorter continuation have no meaning.

    Raises:
        InputError: as `token_logprobs` does.
    """
    if width < 1:
        raise InputError(f"width {width} should be at least 1")
    width = 1 if any(view.one_by_one for view in views) else width
    if prompt_of is None and len(prompts) != len(continuations):
        raise InputError(
            f"{len(prompts)} prompts and {len(continuations)} continuations; without prompt_of each continuation needs its own prompt"
        )
    for i, continuation in enumerate(continuations):
        if not len(continuation):
            raise InputError(f"continuation {i} is empty; it should have at least one token")
    # The last token is predicted and never fed, as in generation.
    own = prompts if prompt_of is None else [prompts[i] for i in prompt_of]
    wholes = [[*prompt, *continuation[:-1]] for prompt, continuation in zip(own, continuations)]
    for rows in (prompts, wholes, [continuation[-1:] for continuation in continuations]):
        checked_prompts(model, rows, GenerationConfig(max_new_tokens=1))
    for i, (prompt, continuation) in enumerate(zip(own, continuations)):
        check_length(model, f"prompt {i}", len(prompt), len(continuation))
    tokens, n = padded(prompts)
    wanted = np.array([len(continuation) for continuation in continuations], np.int32)
    real = np.zeros((len(continuations), max(room, int(wanted.max())) + width), np.int32)
    for row, continuation in zip(real, continuations):
        row[: len(continuation)] = continuation
    of_rows = None if prompt_of is None else jnp.asarray(prompt_of, jnp.int32)
    args = (model, tokens, n, of_rows, jnp.asarray(real), jnp.asarray(wanted), tuple(view.view for view in views))
    executable, _ = SCORE.compile(*args, width=width, kinds=tuple(view.cache for view in views))
    return jax.tree.map(lambda x: np.asarray(x)[..., : wanted.max()], executable(*args))


@dataclasses.dataclass(frozen=True)
class _Several:
    """Several caches in the place of one in prefill, which fills them all."""

    caches: tuple[Cache, ...]

    @property
    def prompt_queries(self) -> int:
        return max(cache.prompt_queries for cache in self.caches)

    def fill(self, layer: int, keys: Array, values: Array, n: Array, *queries: Array) -> tuple:
        def last(cache: Cache) -> tuple:
            return tuple(q[:, -cache.prompt_queries :] for q in queries) if cache.prompt_queries else ()

        return tuple(cache.fill(layer, keys, values, n, *last(cache)) for cache in self.caches)

    def filled(self, layers: tuple[tuple, ...], n: Array) -> tuple[Cache, ...]:
        return tuple(cache.filled(own, n) for cache, own in zip(self.caches, zip(*layers)))


def _score(
    model: Llama,
    tokens: Int[Array, "P S"],
    n: Int[Array, "P"],
    prompt_of: Int[Array, "B"] | None,
    real: Int[Array, "B N+width"],
    wanted: Int[Array, "B"],
    views: tuple[View, ...],
    *,
    width: int,
    kinds: tuple[CacheChoice, ...],
) -> Scores:
    """Scores through the caches `kinds`, each read by its view; columns of a row from wanted[b] on are scratch."""
    if any(kind.in_host_memory for kind in kinds):
        raise InputError("texts are not scored with a cache in host memory; leave host= out, the scores are the same on the device")
    drafts = width - 1 + any(kind.guesses for kind in kinds)
    sizes = dict(batch=tokens.shape[0], capacity=tokens.shape[1] + real.shape[1], num_speculative_tokens=drafts, dtype=model.dtype)
    logits, caches = prefill(model, tokens, n, _Several(tuple(kind.empty(model.config, **sizes) for kind in kinds)))
    if prompt_of is not None:
        logits, n, caches = jax.tree.map(lambda x: x[prompt_of], (logits, n, caches))
    first = _compare([logits[:, None]] * len(caches), real[:, :1])
    scores = jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], real.shape[1]), x.dtype).at[..., :1].set(x), first)
    take = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width))
    put = jax.vmap(lambda rows, new, at: lax.dynamic_update_slice_in_dim(rows, new, at, 1), in_axes=(1, 1, 0), out_axes=1)

    def step(carry):
        done, caches, guessed, scores = carry
        block, following = take(real, done - 1), take(real, done)
        positions = (n + done - 1)[:, None] + jnp.arange(width)
        room = functools.reduce(jnp.minimum, [cache.draft_room for cache in caches])
        count = jnp.minimum(jnp.minimum(room, width - 1) + 1, wanted - done)
        logits, longer, new_guesses = [], [], []
        for cache, view, guess in zip(caches, views, guessed):
            wide = block if guess is None else jnp.concatenate([block, guess[:, None]], 1)
            predicted, fed = model(wide, positions[:, :1] + jnp.arange(wide.shape[1]), cache, view=view)
            new_guesses.append(None if guess is None else predicted[:, 1].argmax(-1).astype(guess.dtype))
            logits.append(predicted[:, :width])
            fed = fed if guess is None else fed.guided(missed=(following[:, 0] != guess) & (done + count < wanted))
            longer.append(fed.commit(cache.lengths, count, wait_for=[predicted[:, 0].argmax(-1)])[0])
        scores = jax.tree.map(lambda rows, new: put(rows, new, done), scores, _compare(logits, following))
        return done + count, tuple(longer), tuple(new_guesses), scores

    def guessing(cache: Cache, view: View) -> tuple[Cache, Int[Array, "B"]]:
        """The cache once the first token alone has chosen what is read next, and the guess at the token after it."""
        predicted, fed = model(real[:, :1], n[:, None], cache, view=view)
        return fed.rollback(cache.lengths), predicted[:, 0].argmax(-1).astype(real.dtype)

    begun = [guessing(cache, view) if kind.guesses else (cache, None) for cache, view, kind in zip(caches, views, kinds)]
    caches, guessed = (tuple(parts) for parts in zip(*begun))
    carry = jnp.ones_like(n), caches, guessed, scores
    return lax.while_loop(lambda carry: (carry[0] < wanted).any(), step, carry)[3]


SCORE = Compiled(_score, static_argnames=("width", "kinds"))


def _compare(logits: list[Float[Array, "B T V"]], real: Int[Array, "B T"]) -> Scores:
    logs = [jax.nn.log_softmax(x) for x in logits]
    return Scores(
        jnp.stack([jnp.take_along_axis(x, real[..., None], -1)[..., 0] for x in logs]),
        jnp.stack([divergence(logs[0], x) for x in logs]),
        jnp.stack([x.argmax(-1) == logits[0].argmax(-1) for x in logits]),
        jnp.stack([x.argmax(-1) == real for x in logits]),
    )


def divergence(p: Float[Array, "*rows V"], q: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """KL(p || q) in nats of two distributions, given as their natural logarithms."""
    # Both sum to 1, so to add q - p changes nothing, but no term is negative then and nothing cancels where p and q are close.
    d = q - p
    close = jnp.abs(d) < 1
    terms = jnp.where(close, jnp.exp(p) * (jnp.expm1(jnp.where(close, d, 0)) - d), jnp.exp(q) - jnp.exp(p) * (1 + d))
    return terms.sum(-1)


def measure(
    model: Llama,
    texts: Sequence[Sequence[int]],
    views: Sequence[CacheView],
    *,
    max_new_tokens: int,
    width: int = WIDTH,
    described: Callable[[Scores], str] | None = None,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> Scores:
    """Scores of the last `max_new_tokens` tokens of each text, in float64; B is the number of texts.

    Args:
        texts: token ids; all have one length.
        views: the caches; scores are compared with the first.
        max_new_tokens: tokens of each text that are scored; those before are the prompt.
        width: tokens fed in a pass.
        described: what is said of the scores of a batch of texts once they are known; None: nothing.
        kept: the scores of an earlier run, a row for each batch.
        progress: see `progress_bar`.

    Raises:
        InputError: as `check` does.
    """
    check(model, texts, max_new_tokens)
    in_batches, parts, done = batches(texts), [], 0

    def scored(rows: list[Sequence[int]]) -> dict[str, Any]:
        # The last batch is filled up, so that all are of one shape, which is compiled once.
        full = rows + [rows[0]] * (len(in_batches[0]) - len(rows))
        prompts, continuations = [row[:-max_new_tokens] for row in full], [row[-max_new_tokens:] for row in full]
        found = score(model, prompts, continuations, views, width=width)
        return {name: values[:, : len(rows)].tolist() for name, values in vars(found).items()}

    def restored(row: dict[str, Any]) -> Scores:
        of_kind = {name: float if name in ("logprobs", "divergence") else bool for name in row}
        return Scores(**{name: np.asarray(values, of_kind[name]) for name, values in row.items()})

    with progress_bar(total=len(texts), unit="text", progress=progress) as bar:
        for rows in in_batches:
            which = f"texts {done + 1} to {done + len(rows)}" if len(rows) > 1 else f"text {done + 1}"
            label = f"{which} of {len(texts)}"
            row = kept.measured(
                label,
                dict[str, list[list[list[float]]]],
                functools.partial(scored, rows),
                described and (lambda row: described(restored(row))),
            )
            parts.append(restored(row))
            done += len(rows)
            bar.update(len(rows))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays, 1), *parts)


def batches(texts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """The texts in order, in the smallest number of batches of at most ROWS; all but the last have one size."""
    size = math.ceil(len(texts) / math.ceil(len(texts) / ROWS))
    return [list(texts[i : i + size]) for i in range(0, len(texts), size)]


def check(model: Llama, texts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises InputError unless the texts have one length, with room for a prompt, and fit the model."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens} should be at least 1")
    lengths = {len(text) for text in texts}
    if len(lengths) != 1 or min(lengths) <= max_new_tokens:
        raise InputError(f"texts should all have one length, above the {max_new_tokens} tokens to score, not {sorted(lengths)}")
    checked_prompts(model, [text[:-max_new_tokens] for text in texts], GenerationConfig(max_new_tokens=max_new_tokens))


def figures(scores: Scores, cache: int, scored_bytes: int) -> Figures:
    """The figures of one cache.

    Args:
        scores: whose first cache is the full one.
        cache: the index of the cache in the scores.
        scored_bytes: bytes of the scored text.
    """
    loss = -scores.logprobs.mean((1, 2))
    total_bits = loss[cache] * scores.logprobs[cache].size / math.log(2)
    return Figures(
        perplexity=math.exp(loss[cache]),
        perplexity_change=math.expm1(loss[cache] - loss[0]),
        bits_per_byte=float(total_bits / scored_bytes),
        kl=float(scores.divergence[cache].mean()),
        top1_agreement=float(scores.agrees[cache].mean()),
    )
