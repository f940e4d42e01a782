"""The engine: it alone assembles the arguments of the programs of decoding (`prefill`, `programs`).

`generate`, `stream`, batches, evaluations and benchmarks prefill, run rounds and fetch new tokens with it.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from pallas_kernels import dispatch
from pallas_kernels.formats.views import BOTH_PLANES, View
from qspec_jax.caches.cache import PooledCache
from qspec_jax.decoding.adaptive import Adaptive
from qspec_jax.decoding.compiled import Call, Compiled, rounded_up
from qspec_jax.decoding.config import BITS, GenerationConfig, beside_draft
from qspec_jax.decoding.host_residence import none_resident, settled
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.prefill import START, CacheChoice, Prefill, Reading, Sizes, kinds_of
from qspec_jax.decoding.prefill_by_row import PrefillByRow
from qspec_jax.decoding.programs import DECODE, FORK, REPEAT, REPLACE, WINDOW
from qspec_jax.decoding.rounds_by_row import round_by_row
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import UNLIMITED, Counts, DecodeState, Logprobs
from qspec_jax.drafts.draft import Draft, check_made_for
from qspec_jax.drafts.guess import NextTokenGuess
from qspec_jax.errors import InputError
from qspec_jax.models.fixed_order import FixedOrderModel
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket, padded
from qspec_jax.models.sharding import mesh_of
from qspec_jax.models.uniform import WIDTH, UniformModel
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.progress import working

FEW_LAYERS = 4  # they take less time to compile in one program


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """New tokens of the rows, on the host.

    Attributes:
        tokens: the new token ids of each row.
        logprobs: the log-probabilities of each row's new tokens, if they are kept.
        status: see `DecodeState`.
        counts: statistics of each row since it began.
    """

    tokens: list[list[int]]
    logprobs: list[Logprobs] | None
    status: Int[np.ndarray, "B"]
    counts: Counts


class Engine:
    """Decodes with a model and a draft; its programs are compiled for the sizes given here.

    Args:
        model: the target.
        draft: None decodes one token at a time, as does gamma 0.
        cache: the target's cache.
        gamma: the maximum number of drafts in a round.
        prompt_tokens: the length of the longest prompt.
        max_new_tokens: the maximum number of new tokens of a row.
        logprobs: alternatives to each token whose log-probabilities are kept; None keeps none, not even the token's own.
        appended: the minimum number of tokens, besides one, that a pass may append to the cache.
        view: the part of its cache that the target reads; all of it, except for measurements.
        same_bits: whether a row is to have the same bits whatever else is decoded with it: on a GPU see `qspec_jax.models.fixed_order` and
            `prefill_by_row`, elsewhere `qspec_jax.models.uniform`.
        samples: whether rows with the same bits sample, so that their drafts and random draws are to have the same bits too; on a CPU,
            see `rounds_by_row`.
        on_compile: called with None when programs have to be made, and with the seconds that this took afterwards: 0 if another engine had
            made them.

    Raises:
        InputError: for a cache that is incompatible with the draft, or with the division of the model over devices.
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
        appended: int = 0,
        view: View = BOTH_PLANES,
        same_bits: bool = False,
        samples: bool = False,
        on_compile: Callable[[float | None], None] = lambda seconds: None,
    ):
        cache.check_division(model)
        if draft is not None and gamma and not cache.takes_drafts:
            raise InputError("the only draft that is compatible with this cache is none")
        if cache.guesses:
            draft, gamma = NextTokenGuess(ViewedModel(model, view)), 1
        self._fixed_order = same_bits and dispatch.platform() == "gpu"
        uniform = same_bits and not self._fixed_order
        self._by_row = uniform and samples
        self.target = (UniformModel if uniform else FixedOrderModel if same_bits else ViewedModel)(model, view)
        self.draft = draft if gamma else None
        if self.draft is not None:
            check_made_for(self.draft, model)
        self.gamma = gamma = gamma if draft is not None else 0
        new = bucket(max_new_tokens)
        appended = WIDTH - 1 if uniform else appended
        extra_rows = max(0 if self.draft is None else self.draft.extra_rows, appended - gamma)
        capacity = bucket(prompt_tokens) + new
        if self._fixed_order and (flush_size := cache.schedule_for(model.config.head_dim).flush_size):
            # Room for a group: without any, attention would divide a row that holds none into other runs.
            capacity = max(capacity, 2 * flush_size)
        self.sizes = Sizes(cache, capacity, new, gamma, extra_rows, logprobs, uniform)
        self.compile_s = 0.0
        self._on_compile = on_compile
        self._executables: dict[Hashable, jax.stages.Compiled] = {}
        self._caches: dict[int, CacheChoice] = {}
        self._rows: int | None = None
        self._unseen = 0  # the maximum number of new tokens of a row since the last `start_poll`

    @classmethod
    def for_configs(
        cls, model: Llama, draft: Draft | None, configs: Sequence[GenerationConfig], *, prompt_tokens: int, **settings: Any
    ) -> Self:
        """An engine for rows with any of these configs, which share draft and cache. settings: see the class."""
        configs = list(map(beside_draft, configs))
        largest = {name: max(getattr(config, name) for config in configs) for name in ("max_new_tokens", "num_speculative_tokens")}
        longest = dataclasses.replace(configs[0], **largest)
        alternatives = [config.logprobs for config in configs if config.logprobs is not None]
        return cls(
            model,
            draft,
            cache=longest.cache_config,
            gamma=max_drafts(model, longest),
            prompt_tokens=prompt_tokens,
            max_new_tokens=longest.max_new_tokens,
            same_bits=longest.exact == BITS,
            samples=any(config.temperature > 0 for config in configs),
            logprobs=min(rounded_up(max(alternatives)), model.config.vocab_size) if alternatives else None,
            **settings,
        )

    @property
    def speculative(self) -> bool:
        """Whether rounds have drafts that may be accepted."""
        return self.draft is not None and not self.draft.guesses

    @property
    def _of_round(self) -> dict[str, Callable]:
        """The round that `decode` runs, if it is another than its own."""
        return {"one_round": round_by_row} if self._by_row else {}

    @functools.cached_property
    def draft_in_loop(self) -> Draft | None:
        """The draft as rounds run it. Use it after prefill, during which memory peaks."""
        return None if self.draft is None else self.draft.in_loop()

    @functools.cached_property
    def _kinds(self) -> tuple[int, ...]:
        return kinds_of(self.target.model.layers)

    # Programs with their arguments, for callers that compile and time them ----------------------------------------------

    def settle_for(self, rows: int) -> None:
        """Sets the batch size for which resident layers are chosen; with 0, while it is unknown, none are resident."""
        self._rows = rows

    def prefill_of(
        self,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler | None = None,
        keys: Key[Array, "B"] | None = None,
        limits: Limits | None = None,
        *,
        layers: int | None = None,
    ) -> Prefill | PrefillByRow:
        """The programs that read prompts, with their arguments.

        Args:
            prompts: token ids of each row.
            sampler, keys, limits: of each row; None where no token is chosen.
            layers: layers after which rounds of other rows can come; None: all.

        Raises:
            HostMemoryError: where host memory cannot hold the part of the cache that belongs there.
        """
        in_host_memory = self.sizes.cache.in_host_memory
        # A draft that does nothing in prefill is left out, so that such drafts share the program.
        begins = self.draft is not None and (self.draft.prompt_queries or type(self.draft).begin is not Draft.begin)
        # In one program, XLA (jax 0.11) takes memory as if the parts of all layers that go to host memory, and that a draft then reads
        # there, were on the device at once: for six layers of a 7B model and 64k tokens 5.9 GB, and without the draft 2.4 GB.
        count = len(self._kinds)
        layers = min(layers or count, count)
        # In a fixed order in any case: what a prompt leaves should not depend on how its layers are dealt out among programs.
        by_layer = begins and (in_host_memory or self.draft.taps)  # features are taken between layers
        if count <= FEW_LAYERS and (layers == count or self._fixed_order) and not by_layer:
            layers = None
        draft = self.draft.in_prefill() if begins else None
        prefill = Prefill(self.target, draft, *padded(prompts), sampler, keys, limits, self.sizes, layers, self._kinds)
        if (self._fixed_order or self._by_row) and len(prompts) > 1:
            return PrefillByRow.of(prefill, prompts)
        return self._with_residence(prefill) if in_host_memory else prefill

    def _with_residence(self, prefill: Prefill) -> Prefill:
        """The prefill with the share of resident layers that was chosen at the first prefill of a batch of this size."""
        prompts = len(prefill.tokens)
        # All rows of a batch have the same layers on the device.
        if (rows := prompts if self._rows is None else self._rows) not in self._caches:
            # In a batch, besides its rows, those that are prefilled, and those that are put into it at the same time.
            batch = prompts if self._rows is None else self._rows + 2 * prompts
            self._caches[rows] = settled(prefill, self.draft, batch) if rows else none_resident(prefill.sizes.cache)
        return prefill.with_cache(self._caches[rows])

    def fork_call(self, row: DecodeState, keys: Key[Array, "B"]) -> Call:
        """Makes a batch of rows that continue this one, each with its own key; returns a `DecodeState`."""
        return Call(FORK, (row, keys))

    def rounds_call(
        self, state: DecodeState, sampler: Sampler, limits: Limits, max_rounds: int = UNLIMITED, min_running: int = 1, *, lazy: bool = False
    ) -> Call:
        """Runs rounds; returns a `DecodeState`, and consumes the one given. lazy: compile for the draft's shapes, before it is made."""
        call = self.call(DECODE, state, sampler, limits, jnp.int32(max_rounds), jnp.int32(min_running), lazy=lazy)
        return dataclasses.replace(call, static=self._of_round)

    def call(self, program: Compiled, state: DecodeState, sampler: Sampler, limits: Limits, *more: Array, lazy: bool = False) -> Call:
        """A loop over rounds, a function of target, draft, sampler, state, limits and more. lazy: see `rounds_call`."""
        # Shapes alone do not say how the loop's draft is divided over a mesh.
        lazy = lazy and mesh_of(self.target) is None
        draft = jax.eval_shape(lambda draft: draft and draft.in_loop(), self.draft) if lazy else self.draft_in_loop
        return Call(program, (self.target, draft, sampler, state, limits, *more), variant=_pages_of(state))

    # Running them -------------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], sampler: Sampler, keys: Key[Array, "B"], limits: Limits) -> DecodeState:
        """The state after prompts, with the first new token of each row. The device may still be computing it."""
        return self.prepare_prefill(self.prefill_of(prompts, sampler, keys, limits))()

    def read(self, *prompts: Sequence[int]) -> Reading:
        """The result of reading prompts, without new tokens. The device may still be computing it."""
        prefill = self.prefill_of(prompts)
        self.compile_prefills([prefill])
        return prefill.read(self._executables)

    def resume(
        self,
        logits: Float[Array, "B V"],
        tokens: Int[Array, "B S"] | None,
        n: Int[Array, "B"],
        sampler: Sampler,
        keys: Key[Array, "B"],
        limits: Limits,
        pending: Int[Array, "B"],
        adaptive: Adaptive | None,
    ) -> DecodeState:
        """The state of rows that were read before, without cache and draft; see `qspec_jax.decoding.prefill.START`."""
        self._unseen += 1
        return self.run(Call(START, (logits, tokens, n, sampler, keys, limits, pending, adaptive), dict(sizes=self.sizes), "resumed"))

    def prepare_prefill(self, prefill: Prefill | PrefillByRow) -> Callable[[], DecodeState]:
        """Does the host's part of a prefill, and returns the function that starts the device, with hardly any delay."""
        self.compile_prefills([prefill])

        def begin() -> DecodeState:
            self._unseen += 1
            return prefill.run(self._executables)

        return begin

    def prefill_in_parts(self, prefill: Prefill | PrefillByRow) -> Iterator[Array | DecodeState]:
        """Runs a prefill. Yields between parts, each time an array that is ready when the part is done; at the end the state."""
        self.compile_prefills([prefill])
        self._unseen += 1
        yield from prefill.run_in_parts(self._executables)

    def compile_prefills(self, prefills: Iterable[Prefill | PrefillByRow], *, rounds_after: Prefill | PrefillByRow | None = None) -> None:
        """Compiles the programs of these prefills that the engine does not have, and that of rounds after one of them, in parallel."""
        rows = ((row.first.key, row) for prefill in prefills for row in prefill.rows)
        missing = {key: row for key, row in rows if key not in self._executables}  # rows of one length share their programs
        if not missing:
            return
        rounds = () if rounds_after is None else self._rounds_ahead(rounds_after)
        self._on_compile(None)
        began, making = time.perf_counter(), {}
        pool = ThreadPoolExecutor()
        try:
            with working("compiling"):
                for call in itertools.chain(*(row.calls() for row in missing.values()), rounds):
                    if call.key not in self._executables and call.key not in making:
                        # Traced in this thread: other threads do not have its settings of JAX.
                        making[call.key] = pool.submit(call.lowered())
                made = {key: future.result() for key, future in making.items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self._executables |= {key: executable for key, (executable, _) in made.items()}
        seconds = time.perf_counter() - began if any(seconds for _, seconds in made.values()) else 0.0
        self._on_compile(seconds)
        self.compile_s += seconds

    def _rounds_ahead(self, prefill: Prefill | PrefillByRow) -> Iterator[Call]:
        """The call of rounds after a prefill, for shapes, where these say all that the program depends on."""
        if mesh_of(self.target) is None:
            yield self.rounds_call(prefill.shapes(), prefill.sampler, prefill.limits, lazy=True)

    def prefill_temporaries(self, prefill: Prefill) -> int:
        """Bytes that a prefill takes on the device besides weights and the state that it returns."""
        self.compile_prefills([prefill])
        return prefill.temporaries(self._executables)

    def rounds(
        self, state: DecodeState, sampler: Sampler, limits: Limits, max_rounds: int = UNLIMITED, min_running: int = 1
    ) -> DecodeState:
        """The state after at most `max_rounds` rounds, or when fewer than `min_running` rows run. The state given is consumed."""
        _check_unused(state)
        self.expect(max_rounds)
        return self.run(self.rounds_call(state, sampler, limits, max_rounds, min_running))

    def expect(self, rounds: int) -> None:
        """Notes that this number of rounds runs at most before the next `poll`."""
        self._unseen += rounds * (self.gamma + 1)

    def compile_rounds(self, state: DecodeState, sampler: Sampler, limits: Limits) -> None:
        """Compiles the program of `rounds`, so that compiling is timed apart from running."""
        if (DECODE, _pages_of(state)) not in self._executables:
            self.executable(self.rounds_call(state, sampler, limits))
            jax.block_until_ready(self.draft_in_loop)

    def batch_of(self, rows: DecodeState, batch: int, pages: int | None = None) -> DecodeState:
        """A batch whose rows have all ended, to be replaced by rows like these.

        pages: the size of the pool that they share; None for a cache that is not shared.
        """
        return self.run(self._repeat_call(rows, batch, pages))

    def batch_shapes(self, row: DecodeState, batch: int, pages: int | None = None) -> DecodeState:
        """Shapes of the result of `batch_of`. row: a state, or its shapes."""
        return self._repeat_call(row, batch, pages).shapes()

    def _repeat_call(self, rows: DecodeState, batch: int, pages: int | None) -> Call:
        return Call(REPEAT, (rows,), dict(batch=batch, pages=pages), (rows.status.shape, batch, pages))

    def replace(
        self, state: DecodeState, rows: DecodeState, slots: Sequence[int], pages: Sequence[Sequence[int]] | None = None
    ) -> DecodeState:
        """The batch with some of its rows replaced. The state given is consumed.

        Args:
            state: the batch.
            rows: the new rows.
            slots: the index in the batch of each.
            pages: the pages of each, if the batch has a pool.
        """
        table = None
        if pages is not None:
            table = np.zeros((len(slots), state.cache.groups), np.int32)
            for of_row, own in zip(table, pages):
                of_row[: len(own)] = own
            table = jnp.asarray(table)
        _check_unused(state)
        self._unseen = max(self._unseen, 1)  # their first tokens
        return self.run(Call(REPLACE, (state, rows, jnp.array(slots), table), variant=len(slots)))

    def poll(self, state: DecodeState, seen: Sequence[int]) -> NewTokens:
        """Fetches the new tokens of each row after the first seen[b], and nothing else.

        A row that has ended may be polled again; its further tokens then have no meaning.
        """
        return self.start_poll(state, seen)()

    def start_poll(self, state: DecodeState, seen: Sequence[int]) -> Callable[[], NewTokens]:
        """Starts `poll` on the device, before other work that it may be given, and returns the function that waits for the result."""
        _check_unused(state)
        columns = state.tokens.shape[1]
        width = min(columns, rounded_up(min(self._unseen, columns)))
        starts = np.minimum(seen, columns - width)
        found = (state.tokens, state.logprobs)
        if width < columns:
            found = self.run(Call(WINDOW, (*found, jnp.asarray(starts, jnp.int32)), dict(width=width), width))
        self._unseen = 0

        def fetch() -> NewTokens:
            (tokens, logprobs), emitted, status, counts = jax.device_get((found, state.emitted, state.status, state.counts))
            new = [slice(begin - at, end - at) for begin, at, end in zip(seen, starts, emitted)]
            if logprobs is not None:
                logprobs = [Logprobs(*(x[b][columns] for x in vars(logprobs).values())) for b, columns in enumerate(new)]
            return NewTokens([row[columns].tolist() for row, columns in zip(tokens, new)], logprobs, status, counts)

        return fetch

    def run(self, call: Call) -> Any:
        """The result of a call, whose program is compiled if the engine does not have it."""
        return self.executable(call)(*call.args)

    def executable(self, call: Call) -> jax.stages.Compiled:
        """The program of a call, compiled if the engine does not have it."""
        if call.key not in self._executables:
            self._on_compile(None)
            self._executables[call.key], seconds = call.compile()
            self._on_compile(seconds)
            self.compile_s += seconds
        return self._executables[call.key]


def _pages_of(state: DecodeState) -> int | None:
    """The size of the pool of a state's rows, which can grow between calls; None without a pool."""
    return state.cache.num_pages if isinstance(state.cache, PooledCache) else None


def _check_unused(state: DecodeState) -> None:
    if state.tokens.is_deleted():
        raise InputError("this state was consumed by `rounds` or `replace`; continue with the state that was returned")


def max_drafts(model: Llama, config: GenerationConfig) -> int:
    """The number of drafts that a round is compiled for: the most that can be eligible."""
    if not config.speculative:
        return 0
    gamma = min(beside_draft(config).num_speculative_tokens, bucket(config.max_new_tokens))
    return config.cache_config.schedule_for(model.config.head_dim).max_drafts(gamma)
