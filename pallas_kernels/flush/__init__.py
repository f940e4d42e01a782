"""Flush: quantizes the oldest group of each row that is due and appends it in place."""

from jaxtyping import Array, Bool

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import HierarchicalLayer, Lengths


def flush(
    layer: HierarchicalLayer, lengths: Lengths, due: Bool[Array, "B"], *, scheme: str, implementation: Implementation = "auto"
) -> HierarchicalLayer:
    """Makes the oldest G buffered tokens of each row that is due group `lengths.quantized // G`, and moves the rest up.

    Rows that are not due keep every bit. The caller updates the lengths.
    Raises NotImplementedError where the implementation asked for does not support the device or the shapes.
    """
    # Without room for a group, as in a short row, nothing is ever due.
    slow = layer.groups > 0
    module = choose("flush", implementation, layer, lengths, due, scheme=scheme, slow_reference=slow)
    return module.flush(layer, lengths, due, scheme=scheme)
