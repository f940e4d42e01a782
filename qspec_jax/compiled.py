"""Functions compiled ahead of time."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax


class Compiled:
    """A function jitted ahead of time, so that compiling is timed apart from running and every executable can be counted."""

    def __init__(self, function: Callable, **jit_options):
        self._jitted = jax.jit(function, **jit_options)
        self.executables: dict[Any, jax.stages.Compiled] = {}
        self._locks: dict[Any, threading.Lock] = {}

    def compile(self, *args, **static) -> tuple[jax.stages.Compiled, float]:
        """The executable for these arguments, or shapes, and the seconds spent on making it: 0 the second time.

        Threads may compile side by side.
        """
        leaves, tree = jax.tree.flatten(args)
        key = (tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves), tuple(sorted(static.items())))
        with self._locks.setdefault(key, threading.Lock()):
            if key in self.executables:
                return self.executables[key], 0.0
            began = time.perf_counter()
            self.executables[key] = self._jitted.lower(*args, **static).compile()
            return self.executables[key], time.perf_counter() - began

    def shapes(self, *args, **static) -> Any:
        """Shapes of what the function returns."""
        return self._jitted.eval_shape(*args, **static)
