"""Decode attention over a layer of KV cache."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths

GPU_IMPLEMENTATIONS = ("mosaic_gpu", "triton")


def decode_attention(
    q: Float[Array, "B T N H"],
    layer: HierarchicalLayer | FullLayer,
    lengths: Lengths,
    *,
    planes: int | None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N H"]:
    """Causal attention of the last T tokens of each row over everything cached.

    q: queries after RoPE, N = K * (query heads per KV head). The T tokens' own keys and values are already appended and
    counted in `lengths.buffered`: query t sees the quantized region and the first buffered - T + t + 1 rows of the
    buffer. planes: 1 reads the upper 4 bits of the quantized region, 2 both planes, None a `FullLayer`.
    Raises ValueError where planes does not fit the layer, or the implementation asked for does not support the device or the shapes.
    """
    if planes not in ((None,) if isinstance(layer, FullLayer) else (1, 2)):
        raise ValueError(f"planes is {planes}; it should be None for a FullLayer, 1 or 2 for a HierarchicalLayer")
    module = choose("attention", GPU_IMPLEMENTATIONS, implementation, q, layer, lengths, planes=planes)
    return module.decode_attention(q, layer, lengths, planes=planes)
