"""Decode attention over a layer of KV cache."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.token_codes import Layer, TokenCodesLayer
from pallas_kernels.formats.views import ListedGroups, View


def decode_attention(
    q: Float[Array, "B T N H"],
    layer: Layer,
    lengths: Lengths,
    view: View,
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T C"] | None]:
    """Causal attention of the last T tokens of each row over what the view reads of the cache.

    Args:
        q: queries after RoPE; N = K * (query heads of a KV head).
        layer: the cache. The T tokens' own keys and values are appended already. Its quantized region is in groups, or in tokens with a
            scale each, of which both planes are read.
        lengths: of the rows, the T tokens counted in `lengths.buffered`: query t sees what the view reads of the quantized region and the
            first buffered - T + t + 1 rows of the buffer.
        view: what is read.

    Returns:
        The values read, and where the view is observed the attention mass in float32, else None: the share of a query token's attention
        that each of the layer's C groups got, summed over the query heads of a KV head, so at most N / K. The rest of that sum went to the
        buffer.

    Raises:
        ValueError: the view does not fit the layer, has lists of the wrong shapes, or is observed where the layer has no groups.
        NotImplementedError: the implementation asked for does not support the device or the shapes.
    """
    check(layer, view)
    args = q, layer, lengths, view
    return choose("attention", implementation, *args).decode_attention(*args)


def check(layer: Layer, view: View) -> None:
    """Raises ValueError where a view does not fit a layer, or cannot be observed; see `decode_attention`."""
    planes = {FullLayer: (None,), TokenCodesLayer: (2,), HierarchicalLayer: (1, 2)}[type(layer)]
    if view.planes not in planes:
        fitting = " or ".join(map(str, planes))
        raise ValueError(f"the view reads planes {view.planes}; it should be {fitting} for a {type(layer).__name__}")
    if view.observed and not isinstance(layer, HierarchicalLayer):
        raise ValueError(f"attention mass is that of the groups of a HierarchicalLayer; a {type(layer).__name__} has none to observe")
    if isinstance(view, ListedGroups):
        heads = layer.buffer.keys.shape[:2]
        if view.groups.shape[:2] != heads or view.groups.ndim != 3 or view.groups.shape[2] < 1 or view.count.shape != heads:
            found = f"groups {list(view.groups.shape)} and count {list(view.count.shape)}"
            raise ValueError(f"lists of groups should have shapes [B K n], n >= 1, and [B K], with B and K {list(heads)}; not {found}")
