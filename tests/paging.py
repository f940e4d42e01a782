"""Layers of cache whose groups lie in pages of a pool, made of layers that have room of their own for each row, and the way back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.kv_cache import HierarchicalLayer

SPARE = 3  # pages that no row has, page 0 among them


def in_pages(layer: HierarchicalLayer, seed: int = 0) -> HierarchicalLayer:
    """The layer with its groups in pages in a random order; what nobody has holds the largest codes and NaN."""
    B, C = layer.buffer.keys.shape[0], layer.groups
    table = np.random.default_rng(seed).permutation(B * C + SPARE - 1)[: B * C] + 1

    def pool(x: jax.Array) -> jax.Array:
        garbage = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 255
        by_group = jnp.swapaxes(x, 1, 2).reshape(B * C, x.shape[1], 1, *x.shape[3:])
        return jnp.full((B * C + SPARE, *by_group.shape[1:]), garbage, x.dtype).at[table].set(by_group)

    keys, values = jax.tree.map(pool, (layer.keys, layer.values))
    return dataclasses.replace(layer, keys=keys, values=values, pages=jnp.asarray(table.reshape(B, C), jnp.int32))


def out_of_pages(layer: HierarchicalLayer) -> HierarchicalLayer:
    """The layer in which each row has room of its own."""
    of_rows = lambda x: jnp.swapaxes(x[layer.pages][:, :, :, 0], 1, 2)
    keys, values = jax.tree.map(of_rows, (layer.keys, layer.values))
    return dataclasses.replace(layer, keys=keys, values=values, pages=None)


def of_nobody(layer: HierarchicalLayer) -> list[np.ndarray]:
    """What lies in the pages that no row has."""
    pages = np.setdiff1d(np.arange(layer.keys.upper.shape[0]), np.asarray(layer.pages))
    return [np.asarray(x)[pages].astype(float) for x in jax.tree.leaves((layer.keys, layer.values))]


def in_shared_pages(layer: HierarchicalLayer, shared: int) -> tuple[HierarchicalLayer, HierarchicalLayer]:
    """The layer in pages, all rows with the first groups of row 0: known to be shared, and not."""
    paged = in_pages(layer)
    table = paged.pages.at[:, :shared].set(paged.pages[0, :shared])
    apart = dataclasses.replace(paged, pages=table)
    return dataclasses.replace(apart, shared_groups=jnp.full(len(table), shared, jnp.int32)), apart
