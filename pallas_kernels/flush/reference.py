"""Plain JAX flush: scatters whose index is out of bounds, and so dropped, for rows that are not due."""

import jax
from jaxtyping import Array, Bool

from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, moved_up, quantize_groups


def flush(layer: HierarchicalLayer, lengths: Lengths, due: Bool[Array, "B"], *, scheme: str) -> HierarchicalLayer:
    G = layer.group_size
    buffer = layer.buffer
    row, group = layer.next_places(lengths, due)
    codes = quantize_groups(buffer.keys[:, :, None, :G], buffer.values[:, :, None, :G], scheme=scheme, dtype=layer.keys.scale.dtype)

    def append(cache, new):
        return cache.at[row, :, group].set(new[:, :, 0], mode="drop")

    keys, values = jax.tree.map(append, (layer.keys, layer.values), codes)

    shifted = FullLayer(moved_up(buffer.keys, G, due), moved_up(buffer.values, G, due))
    return HierarchicalLayer(keys, values, shifted, layer.pages)
