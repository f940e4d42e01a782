"""Data parallelism: the same work on several devices, each with a copy of the weights and a thread of its own."""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import jax

T = TypeVar("T")


def copied_to(tree: T, device: jax.Device) -> T:
    """The tree on a device. An array that stands in it twice is copied once; one that is there already is not copied."""
    leaves, structure = jax.tree.flatten(tree)
    distinct = {id(leaf): leaf for leaf in leaves}
    copies = dict(zip(distinct, jax.device_put(list(distinct.values()), device), strict=True))
    return jax.tree.unflatten(structure, [copies[id(leaf)] for leaf in leaves])


def side_by_side(devices: Sequence[jax.Device], make: Callable[[jax.Device], Generator[T, None, None]]) -> Generator[T, None, None]:
    """What the generators of all devices yield, as it comes.

    Each is made and run in a thread, in which its device is JAX's default. What one raises ends all, and is raised here. Where this is
    closed early, the others end when they next yield, which is waited for.
    """
    found: queue.SimpleQueue[tuple[T | None, BaseException | None, bool]] = queue.SimpleQueue()
    ended, x64 = threading.Event(), jax.config.jax_enable_x64

    def work(device: jax.Device) -> None:
        failure = None
        try:
            # Threads do not inherit settings of JAX that hold for one alone.
            with jax.enable_x64(x64), jax.default_device(device), contextlib.closing(make(device)) as results:
                for result in results:
                    if ended.is_set():
                        return
                    found.put((result, None, False))
        except BaseException as error:
            failure = error
        finally:
            found.put((None, failure, True))

    threads = [threading.Thread(target=work, args=(device,), name=f"{device}", daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            result, failure, over = found.get()
            if failure is not None:
                raise failure
            if over:
                running -= 1
            else:
                yield result
    finally:
        ended.set()
        for thread in threads:
            thread.join()
