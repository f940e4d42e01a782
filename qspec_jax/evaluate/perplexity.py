"""How well a model predicts real text when it decodes with a quantized cache: perplexity, and divergence from a full-precision cache.

Prefill attends in full precision, so what a cache costs shows only in decoding. So the tokens behind a prompt are fed through decode, a
block at a time, by generation's schedule: a block ends where one-by-one decoding would flush. All caches are fed at once, since whole
distributions are compared and none is kept.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from pallas_kernels.formats.views import BOTH_PLANES, FULL_PRECISION, UPPER_PLANE, View
from qspec_jax import plots
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CACHES, CacheChoice, CacheConfig
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.requests import check_length, checked_prompts
from qspec_jax.errors import InputError
from qspec_jax.evaluate.stream import check_lengths
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded

FULL = "full"  # in the model's own precision
UPPER = "int4"  # the upper plane of the int8 cache alone, which is what a draft reads
DEFAULT_VIEWS = FULL, "int8", UPPER  # of which decoding is made; the others are to compare with
_OTHER_GROUPS = ["kivi and specache: groups of 32 tokens, unless --group-size or the setting group says otherwise."]
WIDTH = 16  # tokens of a block: the most that the GPU kernels of attention take
ROWS = 8  # the most texts of a batch
BUCKETS = 8  # the most parts that distances behind the prompt are cut into


@dataclasses.dataclass(frozen=True)
class CacheView:
    """A cache as a model reads it."""

    cache: CacheChoice
    view: View = BOTH_PLANES

    @property
    def guesses(self) -> bool:
        """Whether each pass also reads the model's guess at the next token, see `CacheConfig.guesses`."""
        return self.cache.guesses

    @property
    def one_by_one(self) -> bool:
        """Whether what a token reads depends on which others are in its pass, so that each has to have one of its own."""
        return not self.cache.takes_drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """How well N tokens in each of B rows were predicted through C caches.

    logprobs: natural logarithm of the probability of the real token, at temperature 1. divergence: KL(first cache || this one), in nats.
    agrees: whether the likeliest token is that of the first cache. likeliest: whether it is the real one.
    """

    logprobs: Float[Array, "C B N"]
    divergence: Float[Array, "C B N"]
    agrees: Bool[Array, "C B N"]
    likeliest: Bool[Array, "C B N"]


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over all tokens. kl: divergence from the full cache, nats a token. perplexity_change: the perplexity over that of the full
    cache, less 1."""

    perplexity: float
    perplexity_change: float
    bits_per_byte: float
    kl: float
    top1_agreement: float


@dataclasses.dataclass(frozen=True)
class Part:
    """The tokens first..last behind the prompt, counted from 1."""

    first: int
    last: int
    perplexity: float
    kl: float


@dataclasses.dataclass(frozen=True)
class CacheFigures(Figures):
    """The figures of one cache, as `cache_view` takes it, over all tokens and by distance from the prompt."""

    cache: str
    by_distance: list[Part]


@dataclasses.dataclass(frozen=True)
class TooShort:
    """A text that was left out, and how many tokens it has."""

    name: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class PerplexityReport:
    """What `qspec eval perplexity` measured. results: a row for each cache. tokens, bytes: what was scored, in all texts together. width:
    tokens of a block."""

    model: str
    device: str
    dtype: str
    scheme: str
    group_size: int
    width: int
    prompt_tokens: int
    max_new_tokens: int
    texts: int
    tokens: int
    bytes: int
    results: list[CacheFigures]
    too_short: list[TooShort]


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

    The first token's is prefill's. width: tokens fed at once; in exact arithmetic it changes nothing. view: what is read of the cache, by
    default what the target reads. The prompts may be of any lengths, and the continuations: NaN stands behind the shorter ones. Raises
    InputError for an empty prompt or continuation, a width below 1, and what `generate` cannot continue.
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

    width: tokens fed at once; 1 if that matters to any of the caches. prompt_of: the index of each continuation's prompt, so that a prompt
    that several continue is read once; None: there are as many of each, in the same order. room: the program has room for continuations of
    so many tokens at least, and then serves for others too. The scores behind the end of a shorter one have no meaning. Raises InputError
    as `token_logprobs` does.
    """
    if width < 1:
        raise InputError(f"width {width} should be at least 1")
    guesses = tuple(view.guesses for view in views)
    width = 1 if any(view.one_by_one for view in views) else width
    if prompt_of is None and len(prompts) != len(continuations):
        raise InputError(f"{len(prompts)} prompts and {len(continuations)} continuations; there should be as many of each")
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
    executable, _ = SCORE.compile(*args, width=width, kinds=tuple(view.cache for view in views), guesses=guesses)
    return jax.tree.map(lambda x: np.asarray(x)[..., : wanted.max()], executable(*args))


@dataclasses.dataclass(frozen=True)
class _Several:
    """What prefill asks of a cache, of several: one prefill fills them all."""

    caches: tuple[Cache, ...]

    @property
    def prompt_queries(self) -> int:
        return max(cache.prompt_queries for cache in self.caches)

    def fill(self, layer: int, keys: Array, values: Array, n: Array, *queries: Array) -> tuple:
        last = lambda cache: tuple(q[:, -cache.prompt_queries :] for q in queries) if cache.prompt_queries else ()
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
    guesses: tuple[bool, ...],
) -> Scores:
    """The columns of the scores behind wanted[b] are scratch. kinds: the cache of each view. guesses: whether it wants them, see
    `CacheView`."""
    if any(kind.in_host_memory for kind in kinds):
        raise InputError("texts are not scored with a cache in host memory, which scores the same as on the device")
    drafts = width - 1 + any(guesses)
    sizes = dict(batch=tokens.shape[0], capacity=tokens.shape[1] + real.shape[1], num_speculative_tokens=drafts, dtype=model.dtype)
    logits, caches = prefill(model, tokens, n, _Several(tuple(kind.empty(model.config, **sizes) for kind in kinds)))
    if prompt_of is not None:
        logits, n, caches = jax.tree.map(lambda x: x[prompt_of], (logits, n, caches))
    first = _compare([logits[:, None]] * len(caches), real[:, :1])
    room = lambda x: jnp.zeros((*x.shape[:2], real.shape[1]), x.dtype).at[..., :1].set(x)
    take = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width))
    put = jax.vmap(lambda all, new, at: lax.dynamic_update_slice_in_dim(all, new, at, 1), in_axes=(1, 1, 0), out_axes=1)

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
            fed = fed if guess is None else dataclasses.replace(fed, missed=(following[:, 0] != guess) & (done + count < wanted))
            longer.append(fed.commit(cache.lengths, count, wait_for=[predicted[:, 0].argmax(-1)])[0])
        write = lambda all, new: put(all, new, done)
        return done + count, tuple(longer), tuple(new_guesses), jax.tree.map(write, scores, _compare(logits, following))

    def guessing(cache: Cache, view: View) -> tuple[Cache, Int[Array, "B"]]:
        """The cache once the first token alone has chosen what is read next, and the guess at the token behind it."""
        predicted, fed = model(real[:, :1], n[:, None], cache, view=view)
        return fed.rollback(cache.lengths), predicted[:, 0].argmax(-1).astype(real.dtype)

    begun = [guessing(*each) if with_guess else (each[0], None) for *each, with_guess in zip(caches, views, guesses)]
    caches, guessed = (tuple(parts) for parts in zip(*begun))
    carry = jnp.ones_like(n), caches, guessed, jax.tree.map(room, first)
    return lax.while_loop(lambda carry: (carry[0] < wanted).any(), step, carry)[3]


SCORE = Compiled(_score, static_argnames=("width", "kinds", "guesses"))


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
    progress: bool | None = None,
) -> Scores:
    """Scores of the last `max_new_tokens` tokens of texts of one length (token ids), in float64; B is the number of texts.

    progress: a bar on standard error; None where that is a terminal. Raises InputError as `check` does.
    """
    check(model, texts, max_new_tokens)
    parts = []
    with tqdm(total=len(texts), leave=False, disable=None if progress is None else not progress) as bar:
        for rows in batches(texts):
            # The last batch is filled up, so that all are of one shape, which is compiled once.
            full = rows + [rows[0]] * (len(batches(texts)[0]) - len(rows))
            prompts, continuations = [row[:-max_new_tokens] for row in full], [row[-max_new_tokens:] for row in full]
            parts.append(score(model, prompts, continuations, views, width=width))
            bar.update(len(rows))
    joined = jax.tree.map(lambda *arrays: np.concatenate(arrays, 1)[:, : len(texts)], *parts)
    return dataclasses.replace(joined, logprobs=joined.logprobs.astype(np.float64), divergence=joined.divergence.astype(np.float64))


def batches(texts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """The texts in order, in as few batches of at most ROWS as there can be, of one size but the last."""
    size = math.ceil(len(texts) / math.ceil(len(texts) / ROWS))
    return [list(texts[i : i + size]) for i in range(0, len(texts), size)]


def check(model: Llama, texts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises InputError unless the texts are of one length, with room for a prompt, and the model takes them."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens} should be at least 1")
    lengths = {len(text) for text in texts}
    if len(lengths) != 1 or min(lengths) <= max_new_tokens:
        raise InputError(f"texts should be of one length, more than the {max_new_tokens} tokens to score, not {sorted(lengths)}")
    checked_prompts(model, [text[:-max_new_tokens] for text in texts], GenerationConfig(max_new_tokens=max_new_tokens))


def cache_view(cache: str, *, scheme: str = CacheConfig.scheme, group_size: int | None = None, upper: bool = True) -> CacheView:
    """A cache by its text, see `CacheConfig.parse`, read as the target reads it; `UPPER`, where `upper` allows it, is that plane of int8.

    Raises InputError for an unknown cache or setting, and for a cache in host memory.
    """
    view = {FULL: FULL_PRECISION, UPPER: UPPER_PLANE}.get(cache, BOTH_PLANES)
    known = [*CACHES, UPPER] if upper else CACHES
    if cache not in known and cache.partition(":")[0] not in CACHES:
        raise InputError(f"cache {cache!r} should be one of {', '.join(known)}")
    config = CacheConfig.parse("int8" if cache == UPPER else cache, group_size, scheme)
    if config.in_host_memory:
        raise InputError(f"cache {cache!r} gives the same tokens as on the device: leave host={config.settings.host} out")
    return CacheView(config, view)


def figures(scores: Scores, cache: int, scored_bytes: int) -> Figures:
    """The figures of one cache. cache: its place in the scores, whose first is the full cache. scored_bytes: bytes of the scored text."""
    loss = -scores.logprobs.mean((1, 2))
    total_bits = loss[cache] * scores.logprobs[cache].size / math.log(2)
    return Figures(
        perplexity=math.exp(loss[cache]),
        perplexity_change=math.expm1(loss[cache] - loss[0]),
        bits_per_byte=float(total_bits / scored_bytes),
        kl=float(scores.divergence[cache].mean()),
        top1_agreement=float(scores.agrees[cache].mean()),
    )


def by_distance(scores: Scores, cache: int) -> list[Part]:
    """The figures of one cache by distance from the prompt, in at most BUCKETS parts. cache: its place in the scores."""
    tokens = scores.logprobs.shape[2]
    edges = np.linspace(0, tokens, min(BUCKETS, tokens) + 1).astype(int)
    part = lambda a, b: Part(
        int(a) + 1, int(b), math.exp(-scores.logprobs[cache, :, a:b].mean()), float(scores.divergence[cache, :, a:b].mean())
    )
    return [part(a, b) for a, b in itertools.pairwise(edges)]


def count_bytes(tokenizer, texts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Bytes, in UTF-8, of the last `max_new_tokens` tokens of the texts."""
    # Those tokens alone may decode to less: some tokenizers drop a space that a text begins with.
    size = lambda ids: len(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).encode())
    return sum(size(text) - size(text[:-max_new_tokens]) for text in texts)


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
    progress: bool | None = None,
) -> PerplexityReport:
    """Perplexity and divergence through each of these caches, as `cache_view` takes them, after prompts of `prompt_tokens` tokens.

    texts: token ids by name; those that are too short are left out, and named in the report. Raises InputError where all are, and as
    `measure` does.
    """
    chosen, too_short = long_enough(texts, prompt_tokens, max_new_tokens)
    config = CacheConfig(group_size=group_size, scheme=scheme)
    names = list(dict.fromkeys([FULL, *caches]))
    views = [cache_view(cache, scheme=scheme, group_size=group_size) for cache in names]
    scores = measure(model, chosen, views, max_new_tokens=max_new_tokens, progress=progress)
    scored_bytes = count_bytes(tokenizer, chosen, max_new_tokens)
    rows = [
        CacheFigures(**vars(figures(scores, i, scored_bytes)), cache=cache, by_distance=by_distance(scores, i))
        for i, cache in enumerate(names)
        if cache in caches
    ]
    return PerplexityReport(
        model=name,
        device=jax.devices()[0].device_kind,
        dtype=model.dtype.name,
        scheme=scheme,
        group_size=config.group_size_for(model.config.head_dim),
        width=1 if any(view.one_by_one for view in views) else WIDTH,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        texts=len(chosen),
        tokens=len(chosen) * max_new_tokens,
        bytes=scored_bytes,
        results=rows,
        too_short=too_short,
    )


def long_enough(texts: Mapping[str, Sequence[int]], prompt_tokens: int, max_new_tokens: int) -> tuple[list[Sequence[int]], list[TooShort]]:
    """The first prompt_tokens + max_new_tokens tokens of each text that has so many, and the others by name.

    Raises InputError where none has.
    """
    check_lengths(prompt_tokens, max_new_tokens)
    length = prompt_tokens + max_new_tokens
    chosen = [text[:length] for text in texts.values() if len(text) >= length]
    if not chosen:
        longest = max(map(len, texts.values()), default=0)
        raise InputError(
            f"no text has the {length} tokens of --prompt-tokens and --max-new-tokens together (the longest has {longest}); "
            "give longer texts, or ask for fewer"
        )
    return chosen, [TooShort(name, len(text)) for name, text in texts.items() if len(text) < length]


def table(report: PerplexityReport) -> Group:
    """A table with a line for each cache."""
    grid = grid_of("cache", "perplexity", "change", "bits per byte", "KL, nats a token", "top-1 agreement")
    for row in report.results:
        figures = f"{row.perplexity:.4f}", f"{row.perplexity_change:+.3%}", f"{row.bits_per_byte:.4f}", f"{row.kl:.2e}"
        grid.add_row(row.cache, *figures, f"{row.top1_agreement:.2%}")
    notes = [
        scored_text(report),
        f"Groups of {report.group_size} tokens, scheme {report.scheme}. change, KL, agreement: from a cache in the model's own precision.",
        *(_OTHER_GROUPS if any(row.cache not in DEFAULT_VIEWS for row in report.results) else []),
        *left_out(report.too_short),
    ]
    return Group(heading("Perplexity through decode", report), grid, *(Text(note, "dim") for note in notes))


def plot(report: PerplexityReport, path: Path) -> None:
    """Two panels against the distance from the prompt: perplexity, and divergence from the full cache; a line for each cache.

    Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    loss, divergence = figure.subplots(1, 2)
    for number, row in enumerate(report.results):
        middles = [(part.first + part.last) / 2 for part in row.by_distance]
        style = dict(color=f"C{number}", marker="o", label=f"{row.cache} ({row.perplexity:.3f}, KL {row.kl:.1e})")
        loss.plot(middles, [part.perplexity for part in row.by_distance], **style)
        divergence.plot(middles, [part.kl for part in row.by_distance], **style)
    # Linear near 0, which is the full cache's.
    divergence.set_yscale("symlog", linthresh=1e-7)
    loss.set(ylabel="perplexity", title="Perplexity")
    divergence.set(ylabel="nats a token", title="KL from the full cache")
    for axes in (loss, divergence):
        axes.set_xlabel("tokens behind the prompt")
        axes.grid(alpha=0.3)
    loss.legend(fontsize=8)
    figure.suptitle(f"{report.model}: {report.texts} texts, prompts of {report.prompt_tokens:,} tokens", fontsize=11)
    plots.save(figure, path)


def grid_of(*labels: str) -> Table:
    """A table with these columns: names at the left, figures at the right."""
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in labels:
        grid.add_column(
            label, justify="left" if label in ("cache", "method", "quantizer", "keys by", "values by", "scheme", "read by") else "right"
        )
    return grid


def heading(title: str, report) -> Text:
    """The first line of a report on a model: what was measured, and on which device."""
    return Text.assemble((f"{title} of {report.model}", "bold"), f" in {report.dtype} on {report.device}\n")


def scored_text(report) -> str:
    """A note on how much text was scored."""
    return (
        f"\n{report.tokens:,} tokens ({report.bytes:,} bytes): {report.max_new_tokens:,} behind {report.prompt_tokens:,} of each of "
        f"{report.texts} texts."
    )


def left_out(texts: Sequence[TooShort]) -> list[str]:
    """A note on the texts that were too short; none where there are none."""
    if not texts:
        return []
    longest = max(texts, key=lambda text: text.tokens)
    count = "1 text" if len(texts) == 1 else f"{len(texts)} texts"
    return [f"{count} left out, too short; the longest of them is {longest.name}, {longest.tokens:,} tokens."]
