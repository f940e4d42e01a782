"""The groups of states in device memory: pages that states share, in arrays that no state holds.

Programs that flush consume these arrays and return them. The states of a pool therefore hold numbers of pages, and a pool the arrays.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Planes
from qspec_jax.caches.cache import PooledCache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.errors import InputError
from qspec_jax.models.sharding import divided_over, mesh_of
from qspec_jax.states.pages import HeldPages, PagePool

Groups = tuple[tuple[Planes, Planes], ...]  # keys and values of each layer's pages
_MIN_GROWTH = 16  # pages by which a pool grows: programs are compiled for its size
_pools: "WeakValueDictionary[Hashable, Pool]" = WeakValueDictionary()


class Pool:
    """The pages of all states of one model and cache.

    Args:
        groups: the arrays with the dummy page alone.

    Attributes:
        lock: to be held from `lent` to `take_back`, so that another thread waits until the arrays are there.
    """

    def __init__(self, groups: Groups):
        self.pages, self.groups, self.lock = PagePool(1), groups, threading.RLock()

    @classmethod
    def of(cls, key: Hashable, first: Callable[[], Groups]) -> "Pool":
        """The pool with this key, which is made if no state uses it, or if its arrays are lost. first: makes the arrays of a new one."""
        if (pool := _pools.get(key)) is None or pool.lost:
            pool = _pools[key] = cls(first())
        return pool

    @property
    def lost(self) -> bool:
        """Whether a program that was interrupted has consumed the arrays."""
        with self.lock:  # a program that is running has them
            return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.groups))

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the pages."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.groups))

    def reserve(self, count: int) -> HeldPages:
        """Pages that nothing else holds. The pool grows if it has too few."""
        with self.lock:
            self.make_room(count)
            return HeldPages(self.pages, self.pages.reserve(count))

    def make_room(self, count: int) -> None:
        """Grows if fewer than `count` pages are free. Growing once for several rows copies the pages, and compiles programs, once."""
        with self.lock:
            if count > self.pages.free:
                self._grow(self.pages.size + max(count - self.pages.free, self.pages.size // 4, _MIN_GROWTH))

    def longer(self, held: HeldPages, groups: int) -> HeldPages:
        """The pages of a row that goes on to this number of groups: those that it has, which it now shares, and new ones."""
        if groups <= len(held):
            return held
        new = self.reserve(groups - len(held))
        return HeldPages.shared(self.pages, [*held, *new])

    def shorter(self, held: HeldPages, groups: int) -> HeldPages:
        """The first pages of a row."""
        return held if groups == len(held) else HeldPages.shared(self.pages, held[:groups])

    def table(self, rows: Sequence[Sequence[int]], width: int) -> Int[Array, "B C"]:
        """The table of rows with these pages, on the device: [rows, width], filled up with the dummy page 0."""
        table = np.zeros((len(rows), width), np.int32)
        for row, pages in zip(table, rows):
            row[: len(pages)] = tuple(pages)
        return jnp.asarray(table)

    def put(self, cache: PooledCache, pages: HeldPages) -> PooledCache:
        """Copies the groups of a row that shares no pool into its pages. Returns the row's cache without groups."""
        part, table = cache.pooled_part, self.table([pages], cache.groups)
        with self.lock:
            self._each_layer(_written, [(part.with_layers((layer,)), table) for layer in part.layers], donate=0)
        return without_groups(cache)

    def groups_of(self, pages: HeldPages) -> Groups:
        """Copies of the groups in these pages, without those of other rows."""
        at = jnp.array(pages, jnp.int32)
        with self.lock:
            self._check_held()
            return jax.tree.map(lambda x: x[at], self.groups)

    def fill(self, pages: HeldPages, groups: Groups) -> None:
        """Writes groups, as `groups_of` returns them, into these pages."""
        if not pages:
            return
        with self.lock:
            self.groups = divided_over(mesh_of(self.groups), _filled, donate=0)(self.groups, groups, jnp.array(pages, jnp.int32))

    def lent(self, cache: PooledCache) -> PooledCache:
        """A cache with the pool's arrays, which a program may consume; `take_back` has to be given the cache that it returns.

        The caller holds `lock` until then.

        Args:
            cache: of rows whose pages are in the pool, with their table and without groups.

        Raises:
            InputError: if a program that was interrupted has consumed the arrays, so that the states are lost.
        """
        self._check_held()
        part = cache.pooled_part
        layers = (HierarchicalLayer(*groups, layer.buffer) for groups, layer in zip(self.groups, part.layers, strict=True))
        return cache.with_pooled_part(part.with_layers(tuple(layers)))

    def take_back(self, cache: PooledCache) -> PooledCache:
        """Keeps the arrays of a cache. Returns the cache without them, but with its table."""
        self.groups, part = groups_of_layers(cache), cache.pooled_part
        return with_table(without_groups(cache), part.pages, part.shared_groups)

    def _check_held(self) -> None:
        if self.lost:
            raise InputError("what these states share was lost when a run was interrupted; read their text again, or load the states")

    def _grow(self, size: int) -> None:
        def grow(groups):
            return jax.tree.map(lambda x: jnp.pad(x, ((0, max(0, size - x.shape[0])), *((0, 0),) * (x.ndim - 1))), groups)

        self._check_held()
        self._each_layer(grow)  # so that one layer's pages alone need memory twice
        self.pages.grow(size)

    def _each_layer(self, function: Callable, arguments: Sequence[tuple] | None = None, *, donate: int | None = None) -> None:
        """Replaces each layer's groups, one after the other: the program is as small as one layer's.

        Where memory runs out, some layers have been replaced and others have not.

        Args:
            function: of a layer's groups, and of its further arguments.
            arguments: for each layer; None: there are none.
            donate: see `divided_over`.
        """
        made = list(self.groups)
        self.groups, program = (), divided_over(mesh_of(made), function, donate=donate)
        try:
            for i, groups in enumerate(made):
                made[i] = program(groups, *(arguments[i] if arguments else ()))
        finally:
            self.groups = tuple(made)


@functools.partial(jax.jit, donate_argnums=0)
def _written(groups: tuple[Planes, Planes], row: HierarchicalCache, table: Int[Array, "1 C"]) -> tuple[Planes, Planes]:
    """A layer's groups with those of a row, a cache of this one layer, in the pages of the table."""
    (layer,) = row.layers
    pooled = dataclasses.replace(row, layers=(HierarchicalLayer(*groups, layer.buffer),), pages=table)
    return groups_of_layers(pooled.with_rows(row, jnp.zeros(1, jnp.int32), table))[0]


@functools.partial(jax.jit, donate_argnums=0)
def _filled(groups: Groups, new: Groups, at: Int[Array, "n"]) -> Groups:
    return jax.tree.map(lambda x, new: x.at[at].set(new), groups, new)


def groups_of_layers(cache: PooledCache) -> Groups:
    """The keys and values of a cache's layers that have groups."""
    return tuple((layer.keys, layer.values) for layer in cache.pooled_part.layers)


def without_groups(cache: PooledCache) -> PooledCache:
    """A cache without its groups and their table."""
    part = cache.pooled_part
    layers = (HierarchicalLayer(None, None, FullLayer(layer.buffer.keys, layer.buffer.values)) for layer in part.layers)
    return with_table(cache.with_pooled_part(part.with_layers(tuple(layers))), None)


def with_table(cache: PooledCache, pages: Int[Array, "B C"] | None, shared_groups: Int[Array, "B"] | None = None) -> PooledCache:
    """A cache with this table of pages; see `HierarchicalLayer`."""
    return cache.with_pooled_part(dataclasses.replace(cache.pooled_part, pages=pages, shared_groups=shared_groups))
