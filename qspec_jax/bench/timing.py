"""Time of a kernel on its device, without the host's launches, and the device's read bandwidth.

A program calls the kernel on each of several inputs in turn, so that no input is in the L2 cache from the call before, and so often that it
takes longer than the host's launch of the next program, also where a call takes a few microseconds. Each call's query is the output of the
call before, or goes through a barrier with it: calls can neither overlap nor be merged. Batches of many such programs are enqueued without
waiting. The time of a batch of one is subtracted, and with it the host's time to launch the first program and to see the last one end.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qspec_jax.decoding.compiled import Compiled
from qspec_jax.progress import working

# Bytes of all inputs of a program together: many times any L2.
ROTATED_BYTES = 1.5e9
# Bytes that a program reads in several laps over its inputs: enough to hide the launch of the next, which has hundreds of arguments.
LAPPED_BYTES, MAX_LAPS = 2e10, 256
MAX_INPUTS = 64
BATCH_SECONDS = 0.02
# The fewest and the most trips of a loop, long enough for the host to launch the next one meanwhile. If even the fewest take longer than
# LONG_SECONDS, a loop makes fewer.
LOOP_SECONDS, LOOP_TRIPS = 0.05, (16, 1024)
LONG_SECONDS = 1.0

COPIED_BYTES = 1 << 29  # of each of the arrays that are copied to the device
COPIES = 4

BATCHES = "programs enqueued in batches, one block_until_ready, a batch of one subtracted"
JAX_METHOD = f"chained calls in laps over rotated inputs in one jitted program, {BATCHES}"
LOOP_METHOD = f"calls in a compiled loop that keeps its arrays in place, {BATCHES}"
IN_PLACE_METHOD = f"calls in laps over rotated inputs, some of which they update in place, in one jitted program, {BATCHES}"
CALLS_METHOD = f"calls one after the other on rotated inputs in one jitted program, {BATCHES}"
TORCH_METHOD = "chained calls on rotated inputs, enqueued in batches between two CUDA events"
TORCH_CALLS_METHOD = "calls one after the other on rotated inputs, enqueued in batches between two CUDA events"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median and quartiles of batches, each of `calls` calls over `inputs` inputs."""

    median_us: float
    lower_us: float
    upper_us: float
    batches: int
    calls: int
    inputs: int
    method: str


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """GB/s (1e9) at which the device reads its own memory, and copies host memory to it (None: not measured)."""

    read: float
    copy: float | None = None

    def seconds(self, size: int, host_bytes: int = 0) -> float:
        """The least time of reading `size` bytes and copying `host_bytes` others side by side."""
        return max(size / self.read, host_bytes / self.copy if host_bytes else 0) / 1e9


def input_count(size: int) -> int:
    """The number of inputs of `size` bytes to rotate over: 2 to 64."""
    if jax.default_backend() == "cpu":
        return 2
    return max(2, min(MAX_INPUTS, math.ceil(ROTATED_BYTES / size)))


def time_jax(function: Callable, query: jax.Array, inputs: Sequence[tuple], *, repeats: int, size: int | None = None) -> Timing:
    """Times function(query, *inputs[i]), which returns an array of the query's shape and dtype.

    size: bytes that a call reads; None where it reads its whole input.
    """
    # Traced and lowered once, however many inputs there are.
    call = jax.jit(function)
    inputs = list(inputs)
    laps = _laps(inputs, size)

    @jax.jit
    def program(query, inputs):
        def lap(_, query):
            for values in inputs:
                # Otherwise XLA may do before the loop what does not need the query.
                query, values = lax.optimization_barrier((query, values))
                query = call(query, *values)
            return query

        return lax.fori_loop(0, laps, lap, query)

    batch = _enqueued(program, query, inputs)
    return _measure(_without_host(batch, repeats), laps * len(inputs), repeats, JAX_METHOD, inputs=len(inputs))


def time_in_place(function: Callable, x: jax.Array, kept: Sequence, inputs: Sequence[tuple], *, repeats: int, size: int) -> Timing:
    """Times (any arrays, kept[i]) = function(x, kept[i], *inputs[i]), which reads `size` bytes.

    What is kept is donated, and updated in place.
    """
    call = jax.jit(function)
    inputs = tuple(inputs)
    laps = _laps(inputs, size)

    def lap(x, kept, outs, *inputs):
        new, outs = [], list(outs[-1:])
        for state, values in zip(kept, inputs):
            x, state, values, outs[-1:] = lax.optimization_barrier((x, state, values, outs[-1:]))
            out, state = call(x, state, *values)
            outs.append(out)
            new.append(state)
        return x, tuple(new), tuple(outs[-len(inputs) :])

    # All results are kept: XLA would leave out a call whose result is not used.
    outs = tuple(jax.tree.map(jnp.zeros_like, jax.eval_shape(call, x, state, *values)[0]) for state, values in zip(kept, inputs))
    carry = jnp.copy(x), tuple(kept), outs
    program, _ = loop(lap, laps, one_by_one=True).compile(carry, inputs)
    timing, _ = time_loop(program, laps * len(inputs), carry, inputs, repeats=repeats)
    return dataclasses.replace(timing, inputs=len(inputs), method=IN_PLACE_METHOD)


def time_calls(function: Callable, x: jax.Array, inputs: Sequence[tuple], *, repeats: int) -> Timing:
    """Times function(x, *inputs[i]), which may return any arrays."""
    inputs = list(inputs)
    laps = _laps(inputs)
    batch = _enqueued(calls(function, laps), x, inputs)
    return _measure(_without_host(batch, repeats), laps * len(inputs), repeats, CALLS_METHOD, inputs=len(inputs))


def calls(function: Callable, laps: int) -> Callable:
    """A program of (x, inputs) that calls function(x, *inputs[i]) for each input, one after the other, `laps` times over."""
    call = jax.jit(function)

    @functools.partial(jax.jit, compiler_options=_one_by_one())
    def program(x, inputs):
        def lap(_, carry):
            x, outs = carry[0], []
            for values in inputs:
                # Otherwise XLA may merge calls, whose x is the same, or do part of their work before the loop.
                x, values, outs[-1:] = lax.optimization_barrier((x, values, outs[-1:]))
                outs.append(call(x, *values))
            return x, outs

        # Zeros instead of a first lap outside the loop: XLA would leave that lap out, as the next replaces its results.
        outs = [jax.tree.map(jnp.zeros_like, jax.eval_shape(call, x, *values)) for values in inputs]
        return lax.fori_loop(0, laps, lap, (x, outs))

    return program


def _one_by_one() -> dict | None:
    """Compiler options without which XLA's graphs run several calls at once where none needs another's result."""
    return {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"} if jax.default_backend() == "gpu" else None


def _laps(inputs: Sequence[tuple], size: int | None = None) -> int:
    """How often a program goes through these inputs: until it has read enough to hide the launch of the next program.

    size: bytes read of an input; None: all of it.
    """
    if jax.default_backend() == "cpu":
        return 2
    lap = sum(array.nbytes for array in jax.tree.leaves(inputs)) if size is None else size * len(inputs)
    return min(MAX_LAPS, math.ceil(LAPPED_BYTES / lap))


def loop(function: Callable, trips: int, *, one_by_one: bool = False, options: dict | None = None) -> Compiled:
    """A program (carry, inputs) -> carry that does carry = function(*carry, *inputs) `trips` times, in place.

    one_by_one: whether calls that do not need each other's results wait for each other all the same. options: of XLA, besides.
    """

    def program(carry, inputs):
        return lax.fori_loop(0, trips, lambda _, carry: function(*carry, *inputs), carry)

    return Compiled(program, passes=True, donate_argnums=0, compiler_options=(_one_by_one() or {} if one_by_one else {}) | (options or {}))


def loop_trips(seconds: float) -> int:
    """The number of trips that a loop should make, each of which takes about `seconds`."""
    least, most = LOOP_TRIPS
    return min(most, max(min(least, math.ceil(LONG_SECONDS / seconds)), math.ceil(LOOP_SECONDS / seconds)))


def time_loop(program: Callable, trips: int, carry, inputs: tuple, *, repeats: int) -> tuple[Timing, object]:
    """Times one of the `trips` of a program that `loop` made; also returns the last carry."""

    def again() -> Any:
        nonlocal carry
        carry = program(carry, inputs)
        return carry

    batch = _enqueued(again)
    timing = _measure(_without_host(batch, repeats), trips, repeats, LOOP_METHOD, inputs=1)
    return timing, carry


def time_torch(function: Callable, query, inputs: Sequence[tuple], *, repeats: int, chained: bool = True) -> Timing:
    """Times function(query, *inputs[i]) on torch's current CUDA stream. chained: whether it
    returns the next query; if not, any tensor."""
    import torch

    def batch(programs: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(programs):
            out = query
            for values in inputs:
                result = function(out, *values)
                out = result if chained else query
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    with torch.inference_mode():
        return _measure(batch, len(inputs), repeats, TORCH_METHOD if chained else TORCH_CALLS_METHOD)


def _enqueued(program: Callable, *args) -> Callable[[int], float]:
    """A function that gives the seconds of n calls of a program, enqueued one after the other."""

    def batch(programs: int) -> float:
        began = time.perf_counter()
        for _ in range(programs):
            out = program(*args)
        jax.block_until_ready(out)
        return time.perf_counter() - began

    return batch


def _without_host(batch: Callable[[int], float], repeats: int) -> Callable[[int], float]:
    """A function that gives the seconds of n programs without what the host adds to a batch of any size: milliseconds, where a whole model
    is among the arguments: that is right where the device takes longer for a program than the host for its launch. Of a program that takes
    longer than `LONG_SECONDS` they are no part worth the time to find them out, and stay."""
    batch(1)  # compiles
    # The shortest: a hiccup of the host in this one would make others look too fast.
    one = min(batch(1), batch(1))
    if one > LONG_SECONDS:
        return batch
    one = min(one, *(batch(1) for _ in range(max(1, repeats - 2))))
    return lambda programs: batch(programs + 1) - one


def _measure(batch: Callable[[int], float], calls: int, repeats: int, method: str, *, inputs: int | None = None) -> Timing:
    """Times a call. batch(n) gives the seconds of n programs, each of `calls` calls over `inputs` inputs (by default one for each call)."""
    batch(1)  # compiles
    programs = 1
    # Doubles until a batch is long enough, which warms up too. Twice, or a hiccup of the host would make a short one look long: without
    # what the host adds, the next could then take less than no time.
    while (seconds := min(batch(programs), batch(programs))) < BATCH_SECONDS:
        programs = max(2 * programs, math.ceil(programs * BATCH_SECONDS / max(seconds, BATCH_SECONDS / 100)))
    each = np.array([batch(programs) for _ in range(repeats)]) / (programs * calls) * 1e6
    lower, median, upper = np.percentile(each, [25, 50, 75])
    return Timing(float(median), float(lower), float(upper), repeats, programs * calls, inputs or calls, method)


@working("measuring the read bandwidth")
def read_bandwidth(*, repeats: int) -> float:
    """GB/s (1e9) at which the default device reads 4 GB of bfloat16 to sum its rows: the best of several row lengths. A CPU
    reads 32 MB."""
    cpu = jax.default_backend() == "cpu"
    size = 1 << (24 if cpu else 31)  # bytes of each of the two inputs

    def of_rows(columns: int) -> float:  # a function, so that one row length's inputs are gone before the next one's are made
        rows = size // 2 // columns
        keys = [jax.random.key(seed, impl="unsafe_rbg") for seed in range(2)]
        inputs = [(jax.random.normal(key, (rows, columns), jnp.bfloat16),) for key in keys]

        # The sums of the call before enter, as a query would.
        def total(before, x):
            return x.sum(1, dtype=jnp.float32) + 0 * before

        return size / time_jax(total, jnp.zeros(rows, jnp.float32), inputs, repeats=repeats).median_us / 1e3

    return max(map(of_rows, (16384,) if cpu else (4096, 16384, 65536)))


@working("measuring the bandwidth of copies")
def copy_bandwidth(*, repeats: int) -> float:
    """GB/s (1e9) at which arrays of 512 MB are copied from host memory to the default device, one after the other: what its copy engine
    reaches. On a CPU arrays of 16 MB are."""
    size = COPIED_BYTES >> (5 if jax.default_backend() == "cpu" else 0)
    held = [jax.device_put(jnp.full(size, i, jnp.uint8), jax.memory.Space.Host) for i in range(COPIES)]
    program = jax.jit(lambda held: [jax.device_put(x, jax.memory.Space.Device) for x in held])
    timing = _measure(_enqueued(program, held), COPIES, repeats, "copies one after the other in one jitted program")
    return size / timing.median_us / 1e3
