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
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.groups))

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the pages."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.groups))

    def reserve(self, count: int) -> HeldPages:
        """Pages that nothing else holds. The pool grows if it has too few."""
        with self.lock:
            if (pages := self.pages.reserve(count)) is None:
                self._grow(self.pages.size + max(count - self.pages.free, self.pages.size // 4, _MIN_GROWTH))
                pages = self.pages.reserve(count)
        return HeldPages(self.pages, pages)

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

    def put(self, cache: HierarchicalCache, pages: HeldPages) -> HierarchicalCache:
        """Copies the groups of a row that shares no pool into its pages. Returns the row's cache without groups."""
        table = self.table([pages], cache.groups)
        rest = without_groups(cache)
        with self.lock:
            self.groups = divided_over(mesh_of(self.groups), _written, donate=0)(self.groups, cache, table)
        return rest

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

    def lent(self, cache: HierarchicalCache) -> HierarchicalCache:
        """A cache with the pool's arrays, which a program may consume; `take_back` has to be given the cache that it returns.

        The caller holds `lock` until then.

        Args:
            cache: of rows whose pages are in the pool, with their table and without groups.

        Raises:
            InputError: if a program that was interrupted has consumed the arrays, so that the states are lost.
        """
        self._check_held()
        layers = (HierarchicalLayer(*groups, layer.buffer) for groups, layer in zip(self.groups, cache.layers, strict=True))
        return dataclasses.replace(cache, layers=tuple(layers))

    def take_back(self, cache: HierarchicalCache) -> HierarchicalCache:
        """Keeps the arrays of a cache. Returns the cache without them, but with its table."""
        self.groups = groups_of_layers(cache)
        return dataclasses.replace(without_groups(cache), pages=cache.pages, shared_groups=cache.shared_groups)

    def _check_held(self) -> None:
        if self.lost:
            raise InputError("what these states share was lost when a run was interrupted; read their text again, or load the states")

    def _grow(self, size: int) -> None:
        def grow(groups):
            return jax.tree.map(lambda x: jnp.pad(x, ((0, max(0, size - x.shape[0])), *((0, 0),) * (x.ndim - 1))), groups)

        self._check_held()
        # A layer at a time, so that one layer's pages alone need memory twice. If it runs out, some layers stay larger than others.
        grown = list(self.groups)
        self.groups, program = (), divided_over(mesh_of(grown), grow)
        try:
            for i, groups in enumerate(grown):
                grown[i] = program(groups)
        finally:
            self.groups = tuple(grown)
        self.pages.grow(size)


@functools.partial(jax.jit, donate_argnums=0)
def _written(groups: Groups, row: HierarchicalCache, table: Int[Array, "1 C"]) -> Groups:
    layers = tuple(HierarchicalLayer(*each, layer.buffer) for each, layer in zip(groups, row.layers, strict=True))
    pooled = dataclasses.replace(row, layers=layers, pages=table).with_rows(row, jnp.zeros(1, jnp.int32), table)
    return groups_of_layers(pooled)


@functools.partial(jax.jit, donate_argnums=0)
def _filled(groups: Groups, new: Groups, at: Int[Array, "n"]) -> Groups:
    return jax.tree.map(lambda x, new: x.at[at].set(new), groups, new)


def groups_of_layers(cache: HierarchicalCache) -> Groups:
    """The keys and values of a cache's layers."""
    return tuple((layer.keys, layer.values) for layer in cache.layers)


def without_groups(cache: HierarchicalCache) -> HierarchicalCache:
    """The buffers and lengths of a cache."""
    layers = (HierarchicalLayer(None, None, FullLayer(layer.buffer.keys, layer.buffer.values)) for layer in cache.layers)
    return dataclasses.replace(cache, layers=tuple(layers), pages=None, shared_groups=None)
