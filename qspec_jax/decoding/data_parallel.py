"""Data parallelism: the same work in several places, each with a copy of the weights and a thread of its own.

A place is a device, or a mesh of devices that a copy is divided over.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qspec_jax.errors import InputError
from qspec_jax.models.sharding import mesh_of, normal

T = TypeVar("T")
Place = jax.Device | Mesh


class Stopped(Exception):
    """Raised by work that was asked to end before it was done."""


class _Message(NamedTuple, Generic[T]):
    """A message of a thread: a result, or that it has ended, perhaps by an error."""

    result: T | None = None
    error: BaseException | None = None
    has_ended: bool = False


def is_at(tree: object, place: Place) -> bool:
    """Whether all arrays are in this place already. A device has to be this thread's default one besides."""
    leaves = jax.tree.leaves(tree)
    if isinstance(place, Mesh):
        return all(isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == normal(place) for leaf in leaves)
    return place == (jax.config.jax_default_device or jax.local_devices()[0]) and all(leaf.devices() == {place} for leaf in leaves)


def copied_to(tree: T, place: Place) -> T:
    """The tree on a device, or divided over a mesh in the way in which it is over another. An array that it has twice is copied once;
    one that is there already is not copied.

    Raises InputError for a mesh of another size than the model's own, and for a mesh where the model is on one device, or the reverse.
    """
    own, size = mesh_of(tree), place.size if isinstance(place, Mesh) else 1
    if size != (1 if own is None else own.size):
        held = "on one device" if own is None else f"divided over {own.size} devices"
        wanted = "on a device" if size == 1 else f"divided over {size}"
        raise InputError(
            f"the model is {held}, and a copy of it should be {wanted}; load it with a mesh of that size (`load(..., mesh=...)`)"
        )
    place = normal(place) if isinstance(place, Mesh) else place
    leaves, structure = jax.tree.flatten(tree)
    distinct = {id(leaf): leaf for leaf in leaves}
    spec = lambda leaf: leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
    there = [NamedSharding(place, spec(leaf)) if isinstance(place, Mesh) else place for leaf in distinct.values()]
    copies = dict(zip(distinct, jax.device_put(list(distinct.values()), there), strict=True))
    return jax.tree.unflatten(structure, [copies[id(leaf)] for leaf in leaves])


def side_by_side(
    places: Sequence[Place], make: Callable[[Place, Callable[[], bool]], Generator[T, None, None]]
) -> Generator[T, None, None]:
    """The results of a generator for each place, as they come.

    make(place, is_stopped) is called, and what it returns iterated over, in a thread whose default device is there. Of the other settings
    of JAX that hold for one thread alone, a thread takes over enable_x64. An error of one generator ends all, and is raised here. Where
    this is closed early, is_stopped() becomes true: the generators may raise `Stopped` then, or end when they next yield. They are waited
    for.
    """
    messages: queue.SimpleQueue[_Message[T]] = queue.SimpleQueue()
    stop, x64 = threading.Event(), jax.config.jax_enable_x64

    def work(place: Place) -> None:
        error = None
        device = place.devices.flat[0] if isinstance(place, Mesh) else place
        try:
            with jax.enable_x64(x64), jax.default_device(device), contextlib.closing(make(place, stop.is_set)) as results:
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

    threads = [threading.Thread(target=work, args=(place,), name=f"{place}", daemon=True) for place in places]
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
