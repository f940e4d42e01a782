"""Prefill: its programs, and the order in which they run.

The prompts are read by one program for all layers, or by one for each kind of layer, which compiles in a fraction of the time; other rows
can then have rounds between layers. A last program chooses the first new token of each row.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from qspec_jax.caches.cache import Cache
from qspec_jax.caches.host_memory import in_host
from qspec_jax.caches.prefill import embedded, last_logits, prefill, through_layers
from qspec_jax.caches.registry import CacheChoice
from qspec_jax.decoding.adaptive import Adaptive
from qspec_jax.decoding.compiled import Call, Compiled
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.logits_processors import seen_in, seen_since
from qspec_jax.decoding.round import begin
from qspec_jax.decoding.sampling import TARGET, Sampler
from qspec_jax.decoding.state import RUNNING, DecodeState, Logprobs, start
from qspec_jax.drafts.draft import Draft, Prompt, Taps
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.models.block import Angles, Block, scaled
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that programs are compiled for, and the cache.

    Attributes:
        cache: which cache is made.
        capacity: the maximum number of tokens in a row, prompt and new ones, each padded.
        max_new_tokens: the maximum number of new tokens in a row, padded.
        gamma: the maximum number of drafts in a round.
        extra_rows: tokens beyond the drafts of a round that the draft appends to the cache at a time.
        logprobs: alternatives to each token whose log-probabilities are kept; None: not even the token's own is.
        uniform: whether prompts are computed in blocks of one size, see `qspec_jax.caches.uniform_prefill`.
    """

    cache: CacheChoice
    capacity: int
    max_new_tokens: int
    gamma: int
    extra_rows: int
    logprobs: int | None
    uniform: bool = False

    @property
    def unaccepted_tokens(self) -> int:
        """The maximum number of tokens in the cache that are not accepted: the drafts of a round and the extra rows."""
        return self.gamma + self.extra_rows

    def empty_cache(self, model: Llama, batch: int) -> Cache:
        """A cache without tokens."""
        sizes = dict(batch=batch, capacity=self.capacity, num_speculative_tokens=self.unaccepted_tokens, dtype=model.dtype)
        return self.cache.empty(model.config, **sizes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """The result of reading prompts.

    Attributes:
        logits: the target's after each row's last token.
        cache: the target's, which holds the rows.
        draft: the draft's state.
        queries: see `qspec_jax.drafts.draft.Prompt`.
    """

    logits: Float[Array, "B V"]
    cache: Cache
    draft: Any
    queries: tuple[Float[Array, "B Q N H"], ...] = ()


def _prefilled(
    target: ViewedModel,
    draft: Draft | None,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    *,
    sizes: Sizes,
) -> Reading:
    """All layers at once."""
    empty = sizes.empty_cache(target.model, tokens.shape[0])
    with jax.named_scope("prefill"):
        found = prefill(target.model, tokens, n, empty, num_queries=_num_queries(draft), uniform=sizes.uniform)
    return _read(draft, tokens, n, *found, sizes=sizes)


def _begun(target: ViewedModel, tokens: Int[Array, "B S"], n: Int[Array, "B"], *, sizes: Sizes) -> tuple[Array, tuple[Array, Array], Cache]:
    """Hidden states before the first layer, the tokens' cosines and sines, and an empty cache."""
    return *embedded(target.model, tokens, n), sizes.empty_cache(target.model, tokens.shape[0])


def _ended(
    target: ViewedModel,
    draft: Draft | None,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    x: Float[Array, "B S D"],
    cache: Cache,
    queries: tuple[Array, ...],
    streams: tuple[Float[Array, "B W D"], ...],
    *,
    sizes: Sizes,
) -> Reading:
    """After the last layer. x: its hidden states. cache: with all of its layers filled. streams: what was taken at the draft's taps."""
    logits, cache = last_logits(target.model, x, n, uniform=sizes.uniform), cache.filled(cache.layers, n)
    features = jnp.concatenate(streams, -1) if streams else None
    return _read(draft, tokens, n, logits, cache, queries, features, sizes=sizes)


def _tapped(x: Float[Array, "B S D"], n: Int[Array, "B"], *, taps: Taps, factor: float) -> Float[Array, "B W D"]:
    """The residual stream of the tokens that `Taps.of_prompt` says. factor: the residual multiplier, which it is kept divided by."""
    at = jnp.minimum(taps.of_prompt(n), x.shape[1] - 1)
    return scaled(jnp.take_along_axis(x, at[..., None], 1), factor)


def _read(
    draft: Draft | None,
    tokens: Int[Array, "B S"],
    n: Int[Array, "B"],
    logits: Float[Array, "B V"],
    cache: Cache,
    queries: tuple[Array, ...] = (),
    features: Float[Array, "B W F"] | None = None,
    *,
    sizes: Sizes,
) -> Reading:
    # Of the same width for every prompt, so that a row fits into the state of others.
    padding = sizes.capacity - sizes.max_new_tokens - tokens.shape[1]
    shapes = dict(capacity=sizes.capacity, gamma=sizes.gamma, width=tokens.shape[1], features=features)
    prompt = Prompt(jnp.pad(tokens, ((0, 0), (0, padding))), n, cache, queries, **shapes)
    return Reading(logits, cache, begin(draft, prompt), queries)


def _started(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B S"] | None,
    n: Int[Array, "B"],
    sampler: Sampler,
    keys: Key[Array, "B"],
    limits: Limits,
    pending: Int[Array, "B"] | None = None,
    adaptive: Adaptive | None = None,
    *,
    sizes: Sizes,
) -> DecodeState:
    """The state with the first new token of each row, but without the cache and the draft's state, which would be copied.

    Args:
        logits: after the rows' last tokens.
        tokens: the rows' tokens, if a processor needs them.
        n: the number of tokens of each row.
        sampler, keys, limits: they choose the token.
        pending: the pending token of rows that have one already, which get no other; -1 in other rows. None: no row has one.
        adaptive: the rows' history of acceptance; None: it begins.
        sizes: of the state.
    """
    seen = seen_in(tokens, n, logits.shape[1]) if limits.asks_what_was_seen else None
    processed = limits.processed(logits[:, None], jnp.zeros_like(n), None if seen is None else seen_since(seen, tokens[:, :0]))
    first, _ = sampler.choose(processed[:, 0], keys, n, TARGET)
    of_first = None if sizes.logprobs is None else Logprobs.of(logits[:, None], first[:, None], sizes.logprobs)
    first = first if pending is None else jnp.where(pending < 0, first, pending)
    state = start(None, first, keys, limits, max_new_tokens=sizes.max_new_tokens, gamma=sizes.gamma, seen=seen, logprobs=of_first)
    if pending is not None:
        chosen = pending < 0
        status = jnp.where(chosen, state.status, RUNNING)
        state = dataclasses.replace(state, emitted=jnp.where(chosen, state.emitted, 0), status=status)
    return state if adaptive is None or state.adaptive is None else dataclasses.replace(state, adaptive=adaptive)


def _num_queries(draft: Draft | None) -> int:
    return 0 if draft is None else draft.prompt_queries


PREFILL = Compiled(_prefilled, static_argnames=("sizes",))
BEGIN = Compiled(_begun, static_argnames=("sizes",))
LAYER = Compiled(through_layers, static_argnames=("num_queries", "uniform"), donate_argnames=("x", "cache"))
TAP = Compiled(_tapped, static_argnames=("taps", "factor"))
END = Compiled(_ended, static_argnames=("sizes",), donate_argnames=("cache",))
START = Compiled(_started, static_argnames=("sizes",))


Executables = Mapping[Hashable, jax.stages.Compiled]  # by the key of a call


def kinds_of(layers: Sequence[Block]) -> tuple[int, ...]:
    """A number for each layer; those of layers that can share a program are equal."""
    numbers: dict[Hashable, int] = {}
    kinds = ((jax.tree.structure(layer), tuple((x.shape, x.dtype) for x in jax.tree.leaves(layer))) for layer in layers)
    return tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Prefill of prompts: one program (`PREFILL`), or a first (`BEGIN`), one that each layer runs (`LAYER`), and a last (`END`). Then the
    one that chooses first tokens (`START`).

    Attributes:
        target: the model that reads the prompts.
        draft: the draft that begins with them; None without one, and for a draft that does nothing in prefill.
        tokens: the prompts, padded on the right.
        n: the length of each prompt.
        sampler, keys, limits: they choose the first new token of each row; None where none is chosen (`read`).
        sizes: the sizes that the programs are compiled for.
        layers: layers after which other rows can have rounds; None for all layers in one program.
        kinds: of the layers, see `kinds_of`.
    """

    target: ViewedModel
    draft: Draft | None
    tokens: Int[Array, "B S"]
    n: Int[Array, "B"]
    sampler: Sampler | None
    keys: Key[Array, "B"] | None
    limits: Limits | None
    sizes: Sizes
    layers: int | None = None
    kinds: tuple[int, ...] = ()

    def with_cache(self, cache: CacheChoice) -> Self:
        """The prefill with another cache."""
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, cache=cache))

    @property
    def rows(self) -> tuple[Self, ...]:
        """The prefills whose programs run: this one, see `prefill_by_row`."""
        return (self,)

    @property
    def first(self) -> Call:
        """The first call, which does not depend on the results of others."""
        return self._whole() if self.layers is None else self._begin()

    def run(self, executables: Executables) -> DecodeState:
        """The state after the prompts, with the first new token of each row. The device may still be computing it."""
        return _last(self.run_in_parts(executables))

    def run_in_parts(self, executables: Executables) -> Iterator[Array | DecodeState]:
        """Runs the programs. Yields after every `layers` layers an array that is ready when they are done; at the end the state."""
        return self._in_turn(lambda call: executables[call.key](*call.args))

    def shapes(self) -> DecodeState:
        """Shapes of the state."""
        return _last(self._in_turn(Call.shapes))

    def calls(self) -> list[Call]:
        """The calls in order, and only the first of several that share a program. All but the first have shapes as arguments."""
        calls: dict[Hashable, Call] = {}

        def shapes(call: Call) -> Any:
            calls.setdefault(call.key, call)
            return call.shapes()

        _last(self._in_turn(shapes))
        return list(calls.values())

    def compile(self) -> tuple[Executables, float]:
        """The executables, and the seconds spent on compiling them."""
        made = {call.key: call.compile() for call in self.calls()}
        return {key: executable for key, (executable, _) in made.items()}, sum(seconds for _, seconds in made.values())

    def temporaries(self, executables: Executables) -> int:
        """Bytes that the programs take on the device besides weights and the state that they return."""
        largest = max(executables[call.key].memory_analysis().temp_size_in_bytes for call in self.calls())
        # Hidden states, cosines and sines are kept from the first program to the last.
        return largest + (0 if self.layers is None else bytes_of(self.first.shapes()[:2]))

    def read(self, executables: Executables) -> Reading:
        """The result of reading the prompts, without a new token. The device may still be computing it."""
        return _last(self._parts(lambda call: executables[call.key](*call.args)))

    def _in_turn(self, result: Callable[[Call], Any]) -> Iterator[Any]:
        """Goes through the calls, and yields as `run_in_parts` does. result: returns a call's results, or their shapes."""
        for part in self._parts(result):
            if not isinstance(part, Reading):
                yield part
        if self.limits is None:
            yield part
            return
        started = result(self._start(part.logits))
        yield dataclasses.replace(started, cache=part.cache, draft=part.draft)

    def _parts(self, result: Callable[[Call], Any]) -> Iterator[Any]:
        """Goes through the calls that read the prompts, and yields at the end a `Reading`."""
        if self.layers is None:
            yield result(self._whole())
            return
        x, angles, cache = result(self._begin())
        filled, queries, streams = (), (), {}
        taps = None if self.draft is None else self.draft.taps
        layers = self.target.model.config.num_layers
        for i in range(layers):
            if i and i % self.layers == 0:
                yield x
            if taps and i in taps.layers:
                streams[i] = result(self._tap(taps, x))
            x, of_cache, of_queries = result(self._layer(i, angles, x, cache))
            filled, queries = filled + of_cache, queries + of_queries
        if taps and layers in taps.layers:
            streams[layers] = result(self._tap(taps, x))
        in_order = tuple(streams[i] for i in taps.layers) if taps else ()
        yield result(self._end(x, cache.with_layers(filled), queries, in_order))

    @property
    def _prompts(self) -> tuple:
        return self.draft, self.tokens, self.n

    @property
    def _variant(self) -> Hashable:
        return self.tokens.shape, self.sizes.cache, self.layers

    def _whole(self) -> Call:
        return Call(PREFILL, (self.target, *self._prompts), dict(sizes=self.sizes), self._variant)

    def _begin(self) -> Call:
        return Call(BEGIN, (self.target, self.tokens, self.n), dict(sizes=self.sizes), self._variant)

    def _layer(self, i: int, angles: Angles, x: Array, cache: Cache) -> Call:
        """Takes the hidden states x through layer i. angles, x, cache (of all layers): as `_begin` returns them."""
        cache = cache.part(slice(i, i + 1))
        variant = x.shape[:2], any(map(in_host, jax.tree.leaves(cache.layers))), self.kinds[i]
        args = [self.target.model.layers[i]], angles, x, self.n, cache
        return Call(LAYER, args, dict(num_queries=_num_queries(self.draft), uniform=self.sizes.uniform), variant)

    def _start(self, logits: Array) -> Call:
        seen = self.tokens if self.limits.asks_what_was_seen else None
        args = logits, seen, self.n, self.sampler, self.keys, self.limits
        return Call(START, args, dict(sizes=self.sizes), self.n.shape if seen is None else seen.shape)

    def _tap(self, taps: Taps, x: Array) -> Call:
        factor = self.target.model.config.residual_multiplier
        return Call(TAP, (x, self.n), dict(taps=taps, factor=factor), x.shape[:2])

    def _end(self, x: Array, cache: Cache, queries: tuple, streams: tuple) -> Call:
        return Call(END, (self.target, *self._prompts, x, cache, queries, streams), dict(sizes=self.sizes), self._variant)


def _last(results: Iterator[Any]) -> Any:
    """The last result, without keeping the others."""
    return collections.deque(results, maxlen=1).pop()
