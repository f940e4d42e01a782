"""Functions compiled ahead of time, and how many of their programs a process keeps."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import jax
from jax.interpreters import mlir
from jax.sharding import SingleDeviceSharding

from pallas_kernels import dispatch
from qspec_jax.caches.cache import AppendedCache
from qspec_jax.models.sharding import mesh_of, on_each_device, shardings_of
from qspec_jax.progress import working

log = logging.getLogger(__name__)

MAX_PROGRAMS = 256
MIN_PROGRAMS = 8  # kept even if many pieces of memory are mapped: other code may have mapped them
# Linux ends a process, within XLA, that maps more pieces of memory than the second file says. A layer of a program maps some 75 on a CPU.
_MAPS, _MAX_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_lock = threading.Lock()
# Held to trace and lower. Threads that did so side by side, in one interpreter, would all end late, and XLA would be idle until then.
_in_python = threading.RLock()
_clock = itertools.count()


def rounded_up(count: int) -> int:
    """The next power of two, at least 8; 0 for 0. Lists are padded to it, so that few sizes are compiled."""
    return max(8, 1 << (count - 1).bit_length()) if count else 0


@dataclasses.dataclass(eq=False)
class _Program:
    """A function for arguments of certain shapes. Callers hold `_in_python` while tracing and lowering, `lock` while compiling.

    Attributes:
        lock: see above.
        traced: the traced function, until it is lowered.
        lowered: the lowered function, until it is compiled.
        shapes: shapes of its results, once traced.
        executable: the compiled function.
        seconds: the time spent on making it.
        used: when it was last asked for, by `_clock`.
    """

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    traced: jax.stages.Traced | None = None
    lowered: jax.stages.Lowered | None = None
    shapes: Any = None
    executable: jax.stages.Compiled | None = None
    seconds: float = 0.0
    used: int = 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time spent in the context to `seconds`."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class Compiled:
    """A function jitted ahead of time, so that compiling is timed apart from running and every executable can be counted.

    Where a model among the arguments is divided over a mesh, the function runs on each of its devices (`models.sharding`).

    A process keeps the most recently used programs of all such functions together: up to `MAX_PROGRAMS`, and on Linux only while at most
    half of the pieces of memory that a process may map are mapped. A dropped program is compiled again when it is needed.
    """

    _all: ClassVar[WeakSet["Compiled"]] = WeakSet()

    def __init__(self, function: Callable, *, passes: bool = False, **jit_options):
        """
        Args:
            function: its positional arguments are arrays or trees of arrays; the others, by name, are static.
            passes: whether the function runs passes of a model over a cache among its arguments. Then the cache adds options of XLA, see
                `AppendedCache.compiler_options`.
            jit_options: of `jax.jit`.
        """
        self._function, self._passes, self._jit_options = function, passes, jit_options
        self.programs: dict[Any, _Program] = {}
        with _lock:
            self._all.add(self)

    def compile(self, *args, **static) -> tuple[jax.stages.Compiled, float]:
        """The executable for these arguments, or shapes, and the seconds spent on making it, or on waiting for a thread that makes it: 0 if
        it is there.

        Several threads may compile at a time.
        """
        return self.lowered(*args, **static)()

    @working("compiling")
    def lowered(self, *args, **static) -> Callable[[], tuple[jax.stages.Compiled, float]]:
        """Does the part of `compile` that depends on this thread's settings of JAX, such as `jax.enable_x64`, and returns the rest of it,
        which any thread may call."""
        # One lock after the other: tracing may need another program, whose lock may be held by a thread that waits for this one.
        with self._program(args, static) as program, _in_python:
            if program.executable is None and program.lowered is None:
                with program.timed(), _own_mlir_context():
                    program.lowered = (program.traced or self._trace(program, args, static)).lower()
                program.traced = None

        @working("compiling")
        def compile_lowered() -> tuple[jax.stages.Compiled, float]:
            if program.executable is not None:
                return program.executable, 0.0
            began = time.perf_counter()
            with self._kept_unless_it_fails(program), program.lock:
                if program.executable is not None:
                    return program.executable, time.perf_counter() - began
                with program.timed():
                    program.executable = program.lowered.compile()
                program.lowered = None
            _drop_oldest()
            return program.executable, program.seconds

        return compile_lowered

    @working("compiling")
    def shapes(self, *args, **static) -> Any:
        """Shapes of the function's results. `compile` continues from the trace that this makes."""
        with self._program(args, static) as program:
            if program.shapes is None:
                with _in_python:
                    if program.shapes is None:
                        self._trace(program, args, static)
                _drop_traces()
            return program.shapes

    @classmethod
    def forget(cls) -> None:
        """Drops the programs of all such functions. Called by tests."""
        with _lock:
            for compiled in cls._all:
                compiled.programs.clear()

    @contextlib.contextmanager
    def _program(self, args: tuple, static: dict[str, Any]) -> Iterator[_Program]:
        """The program for these arguments, which is dropped if making it fails."""
        leaves, tree = jax.tree.flatten(args)
        usual = _usual_place()
        places = (usual if leaf.sharding is None else leaf.sharding for leaf in leaves)
        key = (tree, tuple((leaf.shape, leaf.dtype, place) for leaf, place in zip(leaves, places)), tuple(sorted(static.items())))
        with _lock:
            program = self.programs.setdefault(key, _Program())
            program.used = next(_clock)
        with self._kept_unless_it_fails(program):
            yield program

    @contextlib.contextmanager
    def _kept_unless_it_fails(self, program: _Program) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with _lock:
                self.programs = {key: each for key, each in self.programs.items() if each is not program}
            raise

    def _trace(self, program: _Program, args: tuple, static: dict[str, Any]) -> jax.stages.Traced:
        mesh = mesh_of(args)
        with dispatch.on(*(() if mesh is None else mesh.devices.flat)):
            options = _options_of(args) if self._passes else {}
            if mesh is None:
                jitted = self._jitted(self._function, options)
                program.traced = self._traced_with_host_memory(args, static, options) or jitted.trace(*args, **static)
                program.shapes = _with_memory_kinds(program.traced)
            else:
                run, program.shapes = on_each_device(functools.partial(self._function, **static), mesh, args)
                jitted = self._jitted(lambda *args, **static: run(*args), options, out_shardings=shardings_of(program.shapes))
                program.traced = jitted.trace(*args, **static)
        return program.traced

    def _traced_with_host_memory(self, args: tuple, static: dict[str, Any], options: dict[str, str]) -> jax.stages.Traced | None:
        """The function traced for arguments that contain shapes of arrays in host memory; None if there are none.

        JAX ignores the memory kind of a `ShapeDtypeStruct` (jax 0.11), so it is given twice: as a memory space for tracing, and as a
        sharding for compiling.
        """
        if not any(map(_is_host_shape, jax.tree.leaves(args))):
            return None

        def in_space(leaf: Any) -> Any:
            host = jax.memory.Space.Host
            return jax.core.ShapedArray(leaf.shape, leaf.dtype, memory_space=host) if _is_host_shape(leaf) else leaf

        def shardings(arg: Any) -> Any:
            # None for a whole argument without any: trees of nnx modules are not equal once their leaves are other than arrays.
            if not any(map(_is_host_shape, jax.tree.leaves(arg))):
                return None
            return jax.tree.map(lambda leaf: leaf.sharding if _is_host_shape(leaf) else None, arg)

        # With shardings JAX takes no arguments by name.
        function, in_shardings = functools.partial(self._function, **static), tuple(map(shardings, args))
        jitted = self._jitted(function, options, in_shardings=in_shardings, static_argnames=())
        return jitted.trace(*jax.tree.map(in_space, args))

    def _jitted(self, function: Callable, options: dict[str, str], **more: Any):
        # Jits a new function: JAX keeps every program of a function for as long as the function exists.
        @functools.wraps(self._function)
        def own(*args, **static):
            return function(*args, **static)

        options = options | self._jit_options.get("compiler_options", {})  # the caller's own count
        return jax.jit(own, **self._jit_options | more | {"compiler_options": options})


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of `Compiled` with its arguments, or with their shapes.

    Attributes:
        program: the function.
        args: its arguments that are arrays, or trees of arrays.
        static: its other arguments, by name.
        variant: distinguishes the executable from those of an engine's other calls of the function. A comparison of all arguments would
            take milliseconds.
    """

    program: Compiled
    args: tuple
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    variant: Hashable = None

    @property
    def key(self) -> Hashable:
        """Identifies the executable among those of an engine."""
        return self.program, self.variant

    def lowered(self) -> Callable[[], tuple[jax.stages.Compiled, float]]:
        """See `Compiled.lowered`."""
        return self.program.lowered(*self.args, **self.static)

    def compile(self) -> tuple[jax.stages.Compiled, float]:
        """See `Compiled.compile`."""
        return self.program.compile(*self.args, **self.static)

    def shapes(self) -> Any:
        """Shapes of what the function returns."""
        return self.program.shapes(*self.args, **self.static)


@contextlib.contextmanager
def _own_mlir_context() -> Iterator[None]:
    """Within it this thread lowers in a context of MLIR that no other program shares.

    From 0.11 on JAX lowers up to eleven programs of a thread in one context. Passes that compile a program load dialects into its context,
    which two threads must not do at a time: processes ended with a segmentation fault, on a GPU one generation in 20 (jax 0.11.2).
    """
    if jax.__version_info__ < (0, 11):
        yield
        return
    _leave_mlir_context()
    try:
        yield
    finally:
        _leave_mlir_context()


def _leave_mlir_context() -> None:
    """Gives this thread a new context of MLIR for what it lowers next. JAX returns the same one a number of times, 11 in jax 0.11.2, before
    it makes another: asking for it uses it up."""
    current = mlir.make_ir_context()
    if all(mlir.make_ir_context() is current for _ in range(64)):
        log.warning("JAX %s lowers all programs of a thread in one context of MLIR: compiling them side by side may fail", jax.__version__)


def _usual_place() -> SingleDeviceSharding:
    """Where shapes that say no place will be."""
    default = jax.config.jax_default_device  # which may be a platform's name
    return SingleDeviceSharding(default if isinstance(default, jax.Device) else jax.local_devices()[0])


def _is_host_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and getattr(leaf.sharding, "memory_kind", None) == "pinned_host"


def _options_of(args: tuple) -> dict[str, str]:
    """The options of XLA that caches among the arguments ask for."""
    options: dict[str, str] = {}
    for node in jax.tree.leaves(args, is_leaf=lambda node: isinstance(node, AppendedCache)):
        if isinstance(node, AppendedCache):
            options |= node.compiler_options
    return options


def _with_memory_kinds(traced: jax.stages.Traced) -> Any:
    """Shapes of a function's results; those of arrays in host memory have a sharding that says so."""
    leaves, tree = jax.tree.flatten(traced.out_info)
    spaces = [aval.memory_space for aval in traced.jaxpr.out_avals]
    if jax.memory.Space.Host not in spaces:
        return traced.out_info
    (device,) = _usual_place().device_set
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    in_host = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host) for x in leaves)
    return jax.tree.unflatten(tree, (far if space == jax.memory.Space.Host else x for x, far, space in zip(leaves, in_host, spaces)))


def _drop_traces() -> None:
    """Drops all traces but the `MIN_PROGRAMS` most recently used: a function that is traced for its shapes alone is never compiled."""
    with _lock:
        traced = [program for compiled in Compiled._all for program in compiled.programs.values() if program.traced is not None]
        for program in sorted(traced, key=lambda program: program.used)[:-MIN_PROGRAMS]:
            program.traced = None


def _drop_oldest() -> None:
    """Evicts the least recently used programs until the rest are within the limits that `Compiled` describes."""
    while True:
        with _lock:
            kept = [
                (program.used, compiled, key)
                for compiled in Compiled._all
                for key, program in compiled.programs.items()
                if program.executable is not None
            ]
            if len(kept) <= (MIN_PROGRAMS if _too_many_maps() else MAX_PROGRAMS):
                return
            _, compiled, key = min(kept, key=lambda one: one[0])
            del compiled.programs[key]
        log.warning(
            "the least recently used compiled program, of %s, is dropped, %d are kept; it is compiled again when it is needed",
            compiled._function.__name__,
            len(kept) - 1,
        )


def _too_many_maps() -> bool:
    """Whether more than half of the pieces of memory that a process may map are mapped; False where /proc does not say."""
    try:
        with _MAPS.open("rb") as maps:
            return 2 * sum(1 for _ in maps) > int(_MAX_MAPS.read_text())
    except OSError:
        return False
