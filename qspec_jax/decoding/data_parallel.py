"""Data parallelism: the same work on several devices, each with a copy of the weights and a thread of its own."""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax

T = TypeVar("T")


class Stopped(Exception):
    """Raised by work that was asked to end before it was done."""


class _Message(NamedTuple, Generic[T]):
    """What a thread tells: a result, or that it has ended, perhaps by an error."""

    result: T | None = None
    error: BaseException | None = None
    has_ended: bool = False


def copied_to(tree: T, device: jax.Device) -> T:
    """The tree on a device. An array that stands in it twice is copied once; one that is there already is not copied."""
    leaves, structure = jax.tree.flatten(tree)
    distinct = {id(leaf): leaf for leaf in leaves}
    copies = dict(zip(distinct, jax.device_put(list(distinct.values()), device), strict=True))
    return jax.tree.unflatten(structure, [copies[id(leaf)] for leaf in leaves])


def side_by_side(
    devices: Sequence[jax.Device], make: Callable[[jax.Device, Callable[[], bool]], Generator[T, None, None]]
) -> Generator[T, None, None]:
    """The results of a generator for each device, as they come.

    make(device, is_stopped) is called, and what it returns iterated over, in a thread whose default device that is. Of the other settings
    of JAX that hold for one thread alone, a thread takes over enable_x64. An error of one generator ends all, and is raised here. Where
    this is closed early, is_stopped() becomes true: the generators may raise `Stopped` then, or end when they next yield. They are waited
    for.
    """
    messages: queue.SimpleQueue[_Message[T]] = queue.SimpleQueue()
    stop, x64 = threading.Event(), jax.config.jax_enable_x64

    def work(device: jax.Device) -> None:
        error = None
        try:
            with jax.enable_x64(x64), jax.default_device(device), contextlib.closing(make(device, stop.is_set)) as results:
                for result in results:
                    if stop.is_set():
                        return
                    messages.put(_Message(result))
        except Stopped:
            pass
        except BaseException as caught:
            error = caught
        finally:
            messages.put(_Message(error=error, has_ended=True))

    threads = [threading.Thread(target=work, args=(device,), name=f"{device}", daemon=True) for device in devices]
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            message = messages.get()
            if message.error is not None:
                raise message.error
            if message.has_ended:
                running -= 1
            else:
                yield message.result
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()
