"""Functions compiled ahead of time, and how many programs a process keeps of them."""

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
from jax.sharding import SingleDeviceSharding

from pallas_kernels import dispatch
from qspec_jax.caches.cache import AppendedCache
from qspec_jax.models.sharding import mesh_of, on_each_device, shardings_of

log = logging.getLogger(__name__)

MOST_PROGRAMS = 256
FEWEST_PROGRAMS = 8  # that are kept however much memory is mapped: what else maps it is not ours
# Linux ends a process, within XLA, that maps more pieces of memory than this file says. On a CPU each layer of a program maps some 75.
_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_lock = threading.Lock()
# Traced and lowered one program at a time. Side by side, threads that share one interpreter would all be late, and XLA idle until then.
_in_python = threading.RLock()
_clock = itertools.count()


def rounded_up(count: int) -> int:
    """The next power of two, at least 8: the size of a list that is padded, so that few sizes are compiled. 0 stays 0."""
    return max(8, 1 << (count - 1).bit_length()) if count else 0


@dataclasses.dataclass(eq=False)
class _Program:
    """Traced and lowered by whoever holds `_in_python`, and then compiled by whoever holds the lock. shapes: of what it returns, once
    traced. seconds: what making it took so far. used: when it was asked for last."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    traced: jax.stages.Traced | None = None
    lowered: jax.stages.Lowered | None = None
    shapes: Any = None
    executable: jax.stages.Compiled | None = None
    seconds: float = 0.0
    used: int = 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds to `seconds` what is done within."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class Compiled:
    """A function jitted ahead of time, so that compiling is timed apart from running and every executable can be counted.

    Where a model among the arguments is divided over a mesh, the function runs on each of its devices (`models.sharding`).

    Of all such functions together a process keeps the programs used last: `MOST_PROGRAMS`, and on Linux no more than map half of the
    pieces of memory that a process may. What is dropped is compiled again when it is needed.
    """

    _all: ClassVar[WeakSet["Compiled"]] = WeakSet()

    def __init__(self, function: Callable, *, passes: bool = False, **jit_options):
        """passes: whether the function runs passes of a model over a cache among its arguments. Then the cache adds options of XLA, see
        `AppendedCache.compiler_options`."""
        self._function, self._passes, self._jit_options = function, passes, jit_options
        self.programs: dict[Any, _Program] = {}
        with _lock:
            self._all.add(self)

    def compile(self, *args, **static) -> tuple[jax.stages.Compiled, float]:
        """The executable for these arguments, or shapes, and the seconds spent on making it: 0 the second time.

        Threads may compile side by side.
        """
        return self.lowered(*args, **static)()

    def lowered(self, *args, **static) -> Callable[[], tuple[jax.stages.Compiled, float]]:
        """Does what `compile` has to do in Python, which goes by this thread's settings of JAX (`jax.enable_x64`, for one), and returns the
        rest of it, which any thread may do."""
        # One lock after the other: what is traced may come to another program, whose lock a thread may hold that waits for this one.
        with self._program(args, static) as program, _in_python:
            if program.executable is None and program.lowered is None:
                with program.timed():
                    program.lowered = (program.traced or self._trace(program, args, static)).lower()
                program.traced = None

        def compile() -> tuple[jax.stages.Compiled, float]:
            with self._kept_unless_it_fails(program), program.lock:
                if program.executable is not None:
                    return program.executable, 0.0
                with program.timed():
                    program.executable = program.lowered.compile()
                program.lowered = None
            _drop_oldest()
            return program.executable, program.seconds

        return compile

    def shapes(self, *args, **static) -> Any:
        """Shapes of what the function returns. What is traced for them is what `compile` goes on from."""
        with self._program(args, static) as program:
            if program.shapes is None:
                with _in_python:
                    if program.shapes is None:
                        self._trace(program, args, static)
                _drop_traces()
            return program.shapes

    @classmethod
    def forget(cls) -> None:
        """Drops the programs of all such functions, and frees those that nobody runs."""
        with _lock:
            for compiled in cls._all:
                compiled.programs.clear()

    @contextlib.contextmanager
    def _program(self, args: tuple, static: dict[str, Any]) -> Iterator[_Program]:
        """The program for these arguments, which is dropped where making it fails."""
        leaves, tree = jax.tree.flatten(args)
        key = (tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves), tuple(sorted(static.items())))
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
        """The function traced for arguments among which are shapes of arrays in host memory; None where there are none.

        JAX does not look at the memory kind of a `ShapeDtypeStruct` (jax 0.11), so that it is told twice: as a memory space for tracing,
        and as a sharding for compiling.
        """
        far = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct) and getattr(leaf.sharding, "memory_kind", None) == "pinned_host"
        if not any(map(far, jax.tree.leaves(args))):
            return None
        in_space = lambda leaf: jax.core.ShapedArray(leaf.shape, leaf.dtype, memory_space=jax.memory.Space.Host) if far(leaf) else leaf
        of_leaf = lambda leaf: leaf.sharding if far(leaf) else None
        # None for a whole argument without any: trees of nnx modules are not equal once their leaves are other than arrays.
        shardings = tuple(jax.tree.map(of_leaf, arg) if any(map(far, jax.tree.leaves(arg))) else None for arg in args)
        # With shardings JAX takes no arguments by name.
        jitted = self._jitted(functools.partial(self._function, **static), options, in_shardings=shardings, static_argnames=())
        return jitted.trace(*jax.tree.map(in_space, args))

    def _jitted(self, function: Callable, options: dict[str, str], **more: Any):
        # Jits a function of its own: JAX keeps every program of a function for as long as the function is there.
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
        variant: what tells the executable from those of an engine's other calls of the function; to find that out from all arguments takes
            milliseconds.
    """

    program: Compiled
    args: tuple
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    variant: Hashable = None

    @property
    def key(self) -> Hashable:
        """What tells the executable from those of an engine's other calls."""
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


def _options_of(args: tuple) -> dict[str, str]:
    """The options of XLA that caches among the arguments ask for."""
    options: dict[str, str] = {}
    is_cache = lambda node: isinstance(node, AppendedCache)
    for node in filter(is_cache, jax.tree.leaves(args, is_leaf=is_cache)):
        options |= node.compiler_options
    return options


def _with_memory_kinds(traced: jax.stages.Traced) -> Any:
    """Shapes of what a function returns; those of arrays in host memory have a sharding that says so."""
    leaves, tree = jax.tree.flatten(traced.out_info)
    spaces = [aval.memory_space for aval in traced.jaxpr.out_avals]
    if jax.memory.Space.Host not in spaces:
        return traced.out_info
    default = jax.config.jax_default_device  # which may be a platform's name
    device = default if isinstance(default, jax.Device) else jax.local_devices()[0]
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    there = lambda x, space: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host) if space == jax.memory.Space.Host else x
    return jax.tree.unflatten(tree, map(there, leaves, spaces))


def _drop_traces() -> None:
    """But those of the few programs asked for last: what is traced for its shapes alone is never compiled."""
    with _lock:
        traced = [program for compiled in Compiled._all for program in compiled.programs.values() if program.traced is not None]
        for program in sorted(traced, key=lambda program: program.used)[:-FEWEST_PROGRAMS]:
            program.traced = None


def _drop_oldest() -> None:
    """Until few enough programs are kept."""
    while True:
        with _lock:
            kept = [
                (program.used, compiled, key)
                for compiled in Compiled._all
                for key, program in compiled.programs.items()
                if program.executable is not None
            ]
            if len(kept) <= (FEWEST_PROGRAMS if _too_many_maps() else MOST_PROGRAMS):
                return
            _, compiled, key = min(kept, key=lambda one: one[0])
            del compiled.programs[key]
        log.warning(
            "the compiled program of %s that was used longest ago is dropped, %d are kept; it is compiled again when it is needed",
            compiled._function.__name__,
            len(kept) - 1,
        )


def _too_many_maps() -> bool:
    """Whether more than half of the pieces of memory are mapped that may be; nobody counts them but Linux."""
    try:
        with _MAPS.open("rb") as maps:
            return 2 * sum(1 for _ in maps) > int(_MOST_MAPS.read_text())
    except OSError:
        return False
