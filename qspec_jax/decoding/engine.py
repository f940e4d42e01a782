"""The engine: it assembles the arguments of the programs of decoding (`qspec_jax.decoding.programs`), which is done nowhere else.

`generate`, `stream`, batches, evaluations and benchmarks prefill, run rounds and look at what is new through it.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from pallas_kernels.formats.views import BOTH_PLANES, View
from qspec_jax.caches.host_memory import in_host
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.decoding.compiled import Compiled, rounded_up
from qspec_jax.decoding.config import SPECACHE, GenerationConfig, beside_draft
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.programs import (
    APART,
    DECODE,
    FORK,
    PREFILL,
    REPEAT,
    REPLACE,
    WINDOW,
    CacheChoice,
    Call,
    begin_call,
    end_call,
    part_call,
)
from qspec_jax.decoding.residence import refused, residence
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import UNLIMITED, Counts, DecodeState, Logprobs, freed, stopped
from qspec_jax.drafts.draft import Draft, check_made_for
from qspec_jax.drafts.specache import SpeCacheDraft
from qspec_jax.drafts.step_bytes import bytes_in_loop, bytes_of
from qspec_jax.errors import HostMemoryError, InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket, padded
from qspec_jax.models.sharding import mesh_of
from qspec_jax.models.viewed import ViewedModel


@dataclasses.dataclass(frozen=True)
class News:
    """What came of the rows since the last look, on the host: new token ids, and with them log-probabilities where they are asked for.

    counts: since each row began.
    """

    tokens: list[list[int]]
    logprobs: list[Logprobs] | None
    status: Int[np.ndarray, "B"]
    counts: Counts


class Engine:
    """Decodes with a model and a draft; its programs are compiled for the sizes given here.

    draft: None for one token at a time; gamma 0 says the same. prompt_tokens: the most of any prompt. max_new_tokens: the most of any row.
    logprobs: how many alternatives to each token have their log-probabilities kept; None: not even the token's own. view: what the target
    reads of its cache, anything but all of it for measurements alone. on_compile: called with None when a program is needed that the engine
    does not hold, and then with the seconds that it took to make, 0 where another engine has made it before. Raises InputError for a cache
    that does not go with the draft, or with how the model is divided over devices.
    """

    def __init__(
        self,
        model: Llama,
        draft: Draft | None,
        *,
        cache: CacheChoice,
        gamma: int,
        prompt_tokens: int,
        max_new_tokens: int,
        logprobs: int | None = None,
        view: View = BOTH_PLANES,
        on_compile: Callable[[float | None], None] = lambda seconds: None,
    ):
        if isinstance(cache, CacheConfig):
            _check_cache(cache, model, draft if gamma else None)
        self.target = ViewedModel(model, view)
        self.draft = draft if gamma else None
        if self.draft is not None:
            check_made_for(self.draft, model)
        self.gamma = gamma = gamma if draft is not None else 0
        new = bucket(max_new_tokens)
        self.static = dict(cache=cache, capacity=bucket(prompt_tokens) + new, max_new_tokens=new, gamma=gamma, logprobs=logprobs)
        self.static["extra_rows"] = 0 if self.draft is None else self.draft.extra_rows
        self.compile_s = 0.0
        self._on_compile = on_compile
        self._executables: dict[Hashable, jax.stages.Compiled] = {}
        self._caches: dict[int, CacheChoice] = {}
        self._rows: int | None = None
        self._unseen = 0  # the most new tokens of any row since the last look

    @classmethod
    def for_configs(
        cls, model: Llama, draft: Draft | None, configs: Sequence[GenerationConfig], *, prompt_tokens: int, **settings: Any
    ) -> Self:
        """An engine with room for what any of these configs asks for; they share draft and cache. settings: see the class."""
        configs = list(map(beside_draft, configs))
        most = lambda name: max(getattr(config, name) for config in configs)
        longest = dataclasses.replace(configs[0], **{name: most(name) for name in ("max_new_tokens", "num_speculative_tokens")})
        alternatives = [config.logprobs for config in configs if config.logprobs is not None]
        return cls(
            model,
            draft,
            cache=longest.cache_config,
            gamma=most_drafts(model, longest),
            prompt_tokens=prompt_tokens,
            max_new_tokens=longest.max_new_tokens,
            logprobs=min(rounded_up(max(alternatives)), model.config.vocab_size) if alternatives else None,
            **settings,
        )

    @functools.cached_property
    def draft_in_loop(self) -> Draft | None:
        """The draft as rounds run it. To be asked for after prefill, during which memory peaks."""
        return None if self.draft is None else self.draft.in_loop()

    # Calls, for those who compile and time them themselves --------------------------------------------------------------

    def settle_for(self, rows: int) -> None:
        """Sets the batch size for which resident layers are chosen; 0 keeps none on the device until it is known."""
        self._rows = rows
        # Those that were made for rows that nobody knew the number of; where they are the same, `Compiled` has them still.
        for name, shape in [key for key in self._executables if key[0] in ("prefill", "parts_begin", "part", "parts_end")]:
            del self._executables[name, shape]

    def prefill_call(self, prompts: Sequence[Sequence[int]], sampler: Sampler, keys: Key[Array, "B"], limits: Limits) -> Call:
        """Reads prompts; returns a `DecodeState`."""
        # A draft that does nothing there is left out: drafts then share the program.
        begins = self.draft is not None and (self.draft.prompt_queries or type(self.draft).begin is not Draft.begin)
        call = Call(
            PREFILL, (self.target, self.draft.in_prefill() if begins else None, *padded(prompts), sampler, keys, limits), self.static
        )
        cache = self.static["cache"]
        if not isinstance(cache, CacheConfig) or not cache.in_host_memory:
            return call
        return self._settled(dataclasses.replace(call, program=APART) if begins else call, len(prompts))

    def _settled(self, call: Call, prompts: int) -> Call:
        """A call that prefills so many rows of a cache in host memory, with what of it stays on the device, as it was when first asked for.

        Raises HostMemoryError where the host cannot hold the rest.
        """
        cache, static = self.static["cache"], self.static
        # In a batch, besides its rows, those that are prefilled, and those put into it meanwhile.
        batch = prompts if self._rows is None else self._rows + 2 * prompts
        with_cache = lambda cache: dataclasses.replace(call, static=static | {"cache": cache})
        none_resident = lambda: with_cache(cache.with_resident(0.0) if cache.streams else cache)
        if self._rows == 0:
            is_open = cache.streams and cache.settings.resident is None
            return none_resident() if is_open else call

        def of_draft() -> int:
            """Bytes of what the draft makes of the prompts, and for the rounds."""
            begun = none_resident().shapes()
            return bytes_of(begun.draft) * batch // prompts + bytes_in_loop(self.draft)

        # The rows of a batch have the same layers on the device, however many are prefilled together.
        if (key := self._rows or prompts) not in self._caches:
            if cache.streams:
                jax.block_until_ready((self.target, self.draft))  # or their memory may not be counted
                sizes = dict(batch=batch, capacity=static["capacity"], num_speculative_tokens=self.gamma + static["extra_rows"])
                cache = residence(cache, self.target.model, **sizes, prompts=prompts, draft_bytes=of_draft).cache
            made = with_cache(cache).shapes().cache
            host_bytes = bytes_of(made) - bytes_of(made, on_device=True)
            if reason := refused(cache.name, host_bytes * batch // prompts):
                raise HostMemoryError(reason)
            self._caches[key] = cache
        return with_cache(self._caches[key])

    def fork_call(self, row: DecodeState, keys: Key[Array, "B"]) -> Call:
        """Makes a batch of rows that go on from this one, each with a key of its own; returns a `DecodeState`."""
        return Call(FORK, (row, keys))

    def rounds_call(
        self, state: DecodeState, sampler: Sampler, limits: Limits, most: int = UNLIMITED, least_running: int = 1, *, lazy: bool = False
    ) -> Call:
        """Runs rounds; returns a `DecodeState`, and takes the one given. lazy: compile for the draft's shapes, before it is made."""
        return self.call(DECODE, state, sampler, limits, jnp.int32(most), jnp.int32(least_running), lazy=lazy)

    def call(self, program: Compiled, state: DecodeState, sampler: Sampler, limits: Limits, *more: Array, lazy: bool = False) -> Call:
        """A loop over rounds, a function of target, draft, sampler, state, limits and more. lazy: see `rounds_call`."""
        # Shapes alone do not say how the loop's draft is divided over a mesh.
        lazy = lazy and mesh_of(self.target) is None
        draft = jax.eval_shape(lambda draft: draft and draft.in_loop(), self.draft) if lazy else self.draft_in_loop
        return Call(program, (self.target, draft, sampler, state, limits, *more))

    # What they come to --------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], sampler: Sampler, keys: Key[Array, "B"], limits: Limits) -> DecodeState:
        """The state after prompts, whose first tokens are chosen. The device may still be at work on it."""
        return self.prepare_prefill(prompts, sampler, keys, limits)()

    def prepare_prefill(
        self, prompts: Sequence[Sequence[int]], sampler: Sampler, keys: Key[Array, "B"], limits: Limits
    ) -> Callable[[], DecodeState]:
        """The host's part of `prefill`, done in advance. Calling what is returned does the rest; the device hardly waits for that."""
        call = self.prefill_call(prompts, sampler, keys, limits)
        executable = self._executable("prefill", call, call.args[2].shape)

        def begin() -> DecodeState:
            self._unseen += 1
            return executable(*call.args)

        return begin

    def prefill_in_parts(
        self, prompts: Sequence[Sequence[int]], sampler: Sampler, keys: Key[Array, "B"], limits: Limits, *, layers: int
    ) -> Iterator[Array | DecodeState]:
        """What `prefill` does, so many layers at a time. Yields an array that is ready when a part is done, and at last the state."""
        if layers >= self.target.model.config.num_layers:
            yield self.prefill(prompts, sampler, keys, limits)
            return
        call = self.prefill_call(prompts, sampler, keys, limits)
        target, draft, tokens, n, *settings = call.args
        x, angles, cache = self._run("parts_begin", begin_call(target, tokens, n, **call.static), tokens.shape)
        filled, queries = (), ()
        for first in range(0, target.model.config.num_layers, layers):
            if first:
                yield x
            part = slice(first, first + layers)
            call = part_call(target, draft, part, angles, x, n, cache)
            x, *found = self._run("part", call, _part_shape(call))
            filled, queries = (old + new for old, new in zip((filled, queries), found))
        self._unseen += 1
        cache = dataclasses.replace(cache, layers=filled)
        yield self._run("parts_end", end_call(target, draft, tokens, n, x, cache, queries, *settings, **self.static), tokens.shape)

    def compile_ahead(self, prefills: Iterable[tuple[tuple, int]]) -> None:
        """Makes, side by side, what `prefill_in_parts` needs. prefills: its arguments, and how many layers at a time."""
        self._on_compile(None)
        began, making = time.perf_counter(), {}
        pool = ThreadPoolExecutor()
        try:
            for args, layers in prefills:
                for key, call in self._prefill_calls(*args, layers=layers).items():
                    if key not in self._executables and key not in making:
                        # Traced in this thread, whose settings of JAX others do not have.
                        making[key] = pool.submit(call.program.lowered(*call.args, **call.static))
            made = {key: future.result() for key, future in making.items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self._executables |= {key: executable for key, (executable, _) in made.items()}
        seconds = time.perf_counter() - began if any(seconds for _, seconds in made.values()) else 0.0
        self._on_compile(seconds)
        self.compile_s += seconds

    def _prefill_calls(
        self, prompts: Sequence[Sequence[int]], sampler: Sampler, keys: Key[Array, "B"], limits: Limits, *, layers: int
    ) -> dict[Hashable, Call]:
        """The programs of `prefill_in_parts`. The keys are those of `_executables`."""
        call = self.prefill_call(prompts, sampler, keys, limits)
        target, draft, tokens, n, *settings = call.args
        if layers >= (all := target.model.config.num_layers):
            return {("prefill", tokens.shape): call}
        begin = begin_call(target, tokens, n, **call.static)
        x, angles, cache = begin.shapes()
        calls: dict[Hashable, Call] = {("parts_begin", tokens.shape): begin}
        filled, queries = (), ()
        for first in range(0, all, layers):
            part = slice(first, first + layers)
            call = part_call(target, draft, part, angles, x, n, cache)
            calls.setdefault(("part", _part_shape(call)), call)
            x, *found = call.shapes()
            filled, queries = (old + new for old, new in zip((filled, queries), found))
        cache = dataclasses.replace(cache, layers=filled)
        return calls | {("parts_end", tokens.shape): end_call(target, draft, tokens, n, x, cache, queries, *settings, **self.static)}

    def prefill_temporaries(
        self, prompts: Sequence[Sequence[int]], sampler: Sampler, keys: Key[Array, "B"], limits: Limits, *, layers: int
    ) -> int:
        """Bytes that reading these prompts takes, so many layers at a time, besides weights and the state that comes of it."""
        call = self.prefill_call(prompts, sampler, keys, limits)
        target, draft, tokens, n, *_ = call.args
        if layers >= target.model.config.num_layers:
            return self._executable("prefill", call, tokens.shape).memory_analysis().temp_size_in_bytes
        x, angles, cache = begin_call(target, tokens, n, **call.static).shapes()
        call = part_call(target, draft, slice(layers), angles, x, n, cache)
        part = self._executable("part", call, _part_shape(call))
        held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves((x, angles)))
        return part.memory_analysis().temp_size_in_bytes + held

    def _run(self, name: str, call: Call, shape: Hashable) -> Any:
        return self._executable(name, call, shape)(*call.args)

    def rounds(self, state: DecodeState, sampler: Sampler, limits: Limits, most: int = UNLIMITED, least_running: int = 1) -> DecodeState:
        """The state after rounds: at most so many, and until fewer than `least_running` rows run. The state given is used up."""
        _check_unused(state)
        call = self.rounds_call(state, sampler, limits, most, least_running)
        executable = self._executable("rounds", call, None)
        self._unseen += most * (self.gamma + 1)
        return executable(*call.args)

    def compile_prefill(self, prompts: Sequence[Sequence[int]], sampler: Sampler, keys: Key[Array, "B"], limits: Limits) -> None:
        """Makes what `prefill` needs, so that compiling is timed apart from running."""
        call = self.prefill_call(prompts, sampler, keys, limits)
        self._executable("prefill", call, call.args[2].shape)
        jax.block_until_ready(self.draft)

    def compile_rounds(self, state: DecodeState, sampler: Sampler, limits: Limits) -> None:
        """Makes what `rounds` needs, where it has not been made, so that compiling is timed apart from running."""
        if ("rounds", None) not in self._executables:
            self._executable("rounds", self.rounds_call(state, sampler, limits), None)
            jax.block_until_ready(self.draft_in_loop)

    def batch_of(self, rows: DecodeState, batch: int, pages: int | None = None) -> DecodeState:
        """A batch whose rows have all ended, to put rows like these in. pages: of the pool that they share; None: each row has room of its
        own, as where the cache does not share pages."""
        call = Call(REPEAT, (rows,), dict(batch=batch, pages=pages))
        return self._executable("repeat", call, (rows.status.shape, batch, pages))(rows)

    def batch_shapes(self, row: DecodeState, batch: int, pages: int | None = None) -> DecodeState:
        """Shapes of what `batch_of` returns; those of the row are enough."""
        return Call(REPEAT, (row,), dict(batch=batch, pages=pages)).shapes()

    def replace(
        self, state: DecodeState, rows: DecodeState, slots: Sequence[int], pages: Sequence[Sequence[int]] | None = None
    ) -> DecodeState:
        """The batch with others in place of some of its rows. The state given is used up. pages: of each row, where there is a pool."""
        table = None
        if pages is not None:
            table = np.zeros((len(slots), state.cache.groups), np.int32)
            for of_row, own in zip(table, pages):
                of_row[: len(own)] = own
            table = jnp.asarray(table)
        _check_unused(state)
        call = Call(REPLACE, (state, rows, jnp.array(slots), table))
        self._unseen = max(self._unseen, 1)  # their first tokens, whenever they were prefilled
        return self._executable("replace", call, len(slots))(*call.args)

    def stop(self, state: DecodeState, rows: Sequence[bool]) -> DecodeState:
        """The state in which these rows run no more."""
        return stopped(state, jnp.asarray(rows))

    def free(self, state: DecodeState, rows: Sequence[bool]) -> DecodeState:
        """The state in which these rows run no more, and cost the others next to nothing."""
        return freed(state, jnp.asarray(rows))

    def look(self, state: DecodeState, looked: Sequence[int]) -> News:
        """What is new behind the first looked[b] new tokens of each row; nothing else is fetched.

        A row that has ended may be looked at again and again; what more of it is returned then has no meaning.
        """
        return self.begin_look(state, looked)()

    def begin_look(self, state: DecodeState, looked: Sequence[int]) -> Callable[[], News]:
        """Lets the device begin with what `look` needs, before other work that it may be given; calling what is returned waits for it."""
        _check_unused(state)
        columns = state.tokens.shape[1]
        width = min(columns, rounded_up(min(self._unseen, columns)))
        starts = np.minimum(looked, columns - width)
        found = (state.tokens, state.logprobs)
        if width < columns:
            call = Call(WINDOW, (*found, jnp.asarray(starts, jnp.int32)), dict(width=width))
            found = self._executable("window", call, width)(*call.args)
        self._unseen = 0

        def news() -> News:
            (tokens, logprobs), emitted, status, counts = jax.device_get((found, state.emitted, state.status, state.counts))
            new = [slice(begin - at, end - at) for begin, at, end in zip(looked, starts, emitted)]
            rows = lambda x: [row[columns] for row, columns in zip(x, new)]
            if logprobs is not None:
                logprobs = [Logprobs(*parts) for parts in zip(*map(rows, (logprobs.tokens, logprobs.top, logprobs.top_ids)))]
            return News([row.tolist() for row in rows(tokens)], logprobs, status, counts)

        return news

    def _executable(self, name: str, call: Call, shape: Hashable) -> jax.stages.Compiled:
        """The executable of a call, which differs from others of its name in nothing but this shape; to find that out from all arguments
        takes milliseconds."""
        if (name, shape) not in self._executables:
            self._on_compile(None)
            self._executables[name, shape], seconds = call.compile()
            self._on_compile(seconds)
            self.compile_s += seconds
        return self._executables[name, shape]


def _check_unused(state: DecodeState) -> None:
    if state.tokens.is_deleted():
        raise InputError("this state was used up when it was given to `rounds` or `replace`; go on from the one that was returned")


def _part_shape(call: Call) -> Hashable:
    """What tells programs of prefill apart that go through other parts of the model: how many layers, which of their caches are in host
    memory, and which are without RoPE."""
    *_, x, _, cache = call.args
    return x.shape[:2], tuple(any(map(in_host, jax.tree.leaves(layer))) for layer in cache.layers), call.static["nope"]


def _check_cache(cache: CacheConfig, model: Llama, draft: Draft | None) -> None:
    if cache.in_host_memory and model.axis is not None:
        raise InputError(f"cache {cache.name} with a part in host memory is for one device, and the model is divided over several")
    if CACHES[cache.kind].chooses_by_head and model.kv_copies > 1:
        raise InputError(f"cache {cache.kind} is for no more devices than there are KV heads")
    if cache.kind == SPECACHE and not isinstance(draft, SpeCacheDraft | None):
        raise InputError(f"cache {SPECACHE} goes with draft {SPECACHE}, or with none")


def most_drafts(model: Llama, config: GenerationConfig) -> int:
    """How many drafts a round is compiled for: no more than could ever be eligible."""
    if not config.speculative:
        return 0
    gamma = min(beside_draft(config).num_speculative_tokens, bucket(config.max_new_tokens))
    return config.cache_config.schedule_for(model.config.head_dim).most_drafts(gamma)
