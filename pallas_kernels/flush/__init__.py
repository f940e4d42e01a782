"""Quantize the oldest group of each row that is due and append it in place."""

from jaxtyping import Array, Bool

from pallas_kernels.flush import reference
from pallas_kernels.kv_format import HierarchicalLayer, Lengths


def flush(layer: HierarchicalLayer, lengths: Lengths, due: Bool[Array, "B"], *, scheme: str) -> HierarchicalLayer:
    """For each row that is due: its oldest G buffered tokens become group `lengths.quantized // G`, the rest move up.

    Rows that are not due keep every bit. The caller updates the lengths.
    """
    return reference.flush(layer, lengths, due, scheme=scheme)
