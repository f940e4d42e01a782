"""The compiled programs of decoding, and calls of them: prefill at once, in parts, or apart from where a draft begins; rounds; the rows of
a batch.

Their arguments are assembled in `qspec_jax.decoding.engine`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from qspec_jax.caches.cache import Cache
from qspec_jax.caches.prefill import embedded, last_logits, prefill, through_layers
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.processors import seen_in, seen_since
from qspec_jax.decoding.round import begin, decode
from qspec_jax.decoding.sampling import TARGET, Sampler
from qspec_jax.decoding.state import LENGTH, DecodeState, Logprobs, replace_rows, start
from qspec_jax.drafts.draft import Draft, Prompt
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel


class CacheChoice(Protocol):
    """What says which cache is made, such as `CacheConfig`: hashable, since programs are compiled for it."""

    def empty(self, model: LlamaConfig, *, batch: int, capacity: int, num_speculative_tokens: int, dtype: jnp.dtype) -> Cache:
        """A cache without tokens; see `RegisteredCache.make`."""
        ...


def _prefilled(
    target: ViewedModel,
    draft: Draft | None,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    sampler: Sampler,
    keys: Key[Array, "B"],
    limits: Limits,
    *,
    cache: CacheChoice,
    capacity: int,
    max_new_tokens: int,
    gamma: int,
    logprobs: int | None,
    extra_rows: int,
) -> DecodeState:
    model = target.model
    empty = _empty(model, tokens, cache, capacity, gamma + extra_rows)
    with jax.named_scope("prefill"):
        logits, *found = prefill(model, tokens, n, empty, queries=queries_of(draft))
    sizes = dict(capacity=capacity, max_new_tokens=max_new_tokens, gamma=gamma, logprobs=logprobs)
    return _started(draft, tokens, n, logits, *found, sampler=sampler, keys=keys, limits=limits, **sizes)


def _empty(model: Llama, tokens: Array, cache: CacheChoice, capacity: int, drafts: int) -> Cache:
    return cache.empty(model.config, batch=tokens.shape[0], capacity=capacity, num_speculative_tokens=drafts, dtype=model.dtype)


def queries_of(draft: Draft | None) -> int:
    return 0 if draft is None else draft.prompt_queries


def _started(
    draft: Draft | None,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    logits: Float[Array, "B V"],
    filled: Cache,
    queries: tuple[Array, ...] = (),
    *,
    sampler: Sampler,
    keys: Key[Array, "B"],
    limits: Limits,
    capacity: int,
    max_new_tokens: int,
    gamma: int,
    logprobs: int | None,
) -> DecodeState:
    """The state after a prefill that came to these logits, cache and last queries."""
    # As wide for every prompt, so that states fit where one row takes another's place.
    room = jnp.pad(tokens, ((0, 0), (0, capacity - max_new_tokens - tokens.shape[1])))
    shapes = dict(capacity=capacity, gamma=gamma, width=tokens.shape[1])
    draft_state = begin(draft, Prompt(room, n, filled, *([queries] if queries else []), **shapes))
    seen = seen_in(tokens, n, logits.shape[1]) if limits.asks_what_was_seen else None
    processed = limits.processed(logits[:, None], jnp.zeros_like(n), None if seen is None else seen_since(seen, tokens[:, :0]))
    first, _ = sampler.choose(processed[:, 0], keys, n, TARGET)
    of_first = None if logprobs is None else Logprobs.of(logits[:, None], first[:, None], logprobs)
    sizes = dict(max_new_tokens=max_new_tokens, gamma=gamma)
    return start(filled, first, keys, limits, **sizes, draft=draft_state, seen=seen, logprobs=of_first)


def _parts_begun(
    target: ViewedModel, tokens: Int[Array, "B S"], n: Int[Array, "B"], *, cache: CacheChoice, capacity: int, drafts: int
) -> tuple[Array, tuple[Array, Array], Cache]:
    """What prefill in parts goes on from: hidden states, angles, and an empty cache."""
    return *embedded(target.model, tokens, n), _empty(target.model, tokens, cache, capacity, drafts)


def _parts_ended(
    target: ViewedModel,
    draft: Draft | None,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    x: Float[Array, "B S D"],
    cache: Cache,
    queries: tuple[Array, ...],
    sampler: Sampler,
    keys: Key[Array, "B"],
    limits: Limits,
    **sizes: int | None,
) -> DecodeState:
    """The state after the last part."""
    logits = last_logits(target.model, x, n)
    return _started(draft, tokens, n, logits, cache.filled(cache.layers, n), queries, sampler=sampler, keys=keys, limits=limits, **sizes)


def _repeated(rows: DecodeState, batch: int, pages: int | None) -> DecodeState:
    """A batch of rows like the first of these, which have all ended; where pages are given, without its cached tokens, in a pool of so
    many."""
    row = jax.tree.map(lambda x: x[:1], rows)
    cache = _rows_like(row.cache, batch) if pages is None else row.cache.pooled(batch, pages)
    rows = _rows_like(dataclasses.replace(row, cache=None), batch)
    return dataclasses.replace(rows, cache=cache, status=jnp.full(batch, LENGTH, jnp.int32))


def _forked(row: DecodeState, keys: Key[Array, "B"]) -> DecodeState:
    """A batch of rows that go on from this one, each with a key of its own."""
    return dataclasses.replace(_rows_like(row, keys.shape[0]), keys=keys)


def _rows_like(row: Any, batch: int) -> Any:
    return jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), row)


def _window(tokens: Array, logprobs: Logprobs | None, starts: Int[Array, "B"], width: int) -> tuple[Array, Logprobs | None]:
    """The columns from starts[b] on."""
    take = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width, 0))
    return jax.tree.map(lambda x: take(x, starts), (tokens, logprobs))


PREFILL = Compiled(_prefilled, static_argnames=("cache", "capacity", "max_new_tokens", "gamma", "logprobs", "extra_rows"))
PARTS_BEGIN = Compiled(_parts_begun, static_argnames=("cache", "capacity", "drafts"))
PART = Compiled(through_layers, static_argnames=("nope", "queries"), donate_argnames=("x", "cache"))
PARTS_END = Compiled(_parts_ended, static_argnames=("capacity", "max_new_tokens", "gamma", "logprobs"), donate_argnames=("cache",))
DECODE = Compiled(decode, passes=True, donate_argnames=("state",))


class _Apart:
    """What is called as `PREFILL` is, and does what it does, in three programs: the draft begins in the last.

    In one, XLA (jax 0.11) takes memory as if what goes to host memory, and what a draft then looks up there, were on the device for all
    layers at once: for six layers of a 7B model and 64k tokens 5.9 GB, where prefill without the draft takes 2.4 GB.
    """

    def compile(self, *args, **static) -> tuple["_InTurn", float]:
        return self.lowered(*args, **static)()

    def lowered(self, *args, **static) -> Callable[[], tuple["_InTurn", float]]:
        """See `Compiled.lowered`."""
        parts = [call.program.lowered(*call.args, **call.static) for call in self._calls(*args, **static)]

        def compile():
            made = [part() for part in parts]
            return _InTurn(*(executable for executable, _ in made)), sum(seconds for _, seconds in made)

        return compile

    def shapes(self, *args, **static) -> DecodeState:
        """See `Compiled.shapes`."""
        *_, end = self._calls(*args, **static)
        return end.shapes()

    def _calls(self, target: ViewedModel, draft: Draft | None, tokens: Array, n: Array, *settings: Any, **static: Any) -> list["Call"]:
        begin = begin_call(target, tokens, n, **static)
        x, angles, cache = begin.shapes()
        part = part_call(target, draft, slice(None), angles, x, n, cache)
        x, layers, queries = part.shapes()
        end = end_call(target, draft, tokens, n, x, dataclasses.replace(cache, layers=layers), queries, *settings, **static)
        return [begin, part, end]


@dataclasses.dataclass(frozen=True)
class _InTurn:
    """The executables of `_Apart`, in the place of one."""

    begin: jax.stages.Compiled
    part: jax.stages.Compiled
    end: jax.stages.Compiled

    def __call__(self, target: ViewedModel, draft: Draft | None, tokens: Array, n: Array, *settings: Any) -> DecodeState:
        x, angles, cache = self.begin(target, tokens, n)
        x, layers, queries = self.part(*part_call(target, draft, slice(None), angles, x, n, cache).args)
        return self.end(target, draft, tokens, n, x, dataclasses.replace(cache, layers=layers), queries, *settings)

    def memory_analysis(self) -> Any:
        """XLA's, of that which takes most besides its arguments."""
        return max((each.memory_analysis() for each in (self.part, self.end)), key=lambda found: found.temp_size_in_bytes)


APART = _Apart()
REPEAT = Compiled(_repeated, static_argnames=("batch", "pages"))
FORK = Compiled(_forked)
REPLACE = Compiled(replace_rows, donate_argnames=("state",))
WINDOW = Compiled(_window, static_argnames=("width",))


@dataclasses.dataclass(frozen=True)
class Call:
    """A program with its arguments, or with their shapes."""

    program: Compiled | _Apart
    args: tuple
    static: dict[str, Any] = dataclasses.field(default_factory=dict)

    def compile(self) -> tuple[jax.stages.Compiled, float]:
        """The executable, and the seconds that it took to make; see `Compiled.compile`."""
        return self.program.compile(*self.args, **self.static)

    def shapes(self) -> Any:
        """Shapes of what the program returns."""
        return self.program.shapes(*self.args, **self.static)


def begin_call(
    target: ViewedModel, tokens: Array, n: Array, *, cache: CacheChoice, capacity: int, gamma: int, extra_rows: int, **_
) -> Call:
    """What comes before the first part of a prefill, whose settings are those of `_prefilled`."""
    return Call(PARTS_BEGIN, (target, tokens, n), dict(cache=cache, capacity=capacity, drafts=gamma + extra_rows))


def part_call(target: ViewedModel, draft: Draft | None, part: slice, angles: tuple, x: Array, n: Array, cache: Cache) -> Call:
    """Takes x through some of the layers. angles, n, cache (of all layers): as `begin_call` returns them, or their shapes."""
    blocks = list(target.model.layers)
    nope = tuple(at for at, layer in enumerate(range(len(blocks))[part]) if layer in target.model.config.nope_layers)
    args = blocks[part], angles, x, n, dataclasses.replace(cache, layers=cache.layers[part])
    return Call(PART, args, dict(nope=nope, queries=queries_of(draft)))


def end_call(*args: Any, cache: CacheChoice, extra_rows: int, **sizes: Any) -> Call:
    """What follows the last part. args: those of `_parts_ended`, or their shapes."""
    return Call(PARTS_END, args, sizes)
