"""Decode attention over a layer of KV cache."""

from jaxtyping import Array, Float

from pallas_kernels.attention import reference
from pallas_kernels.kv_format import FullLayer, HierarchicalLayer, Lengths


def decode_attention(
    q: Float[Array, "B T N H"], layer: HierarchicalLayer | FullLayer, lengths: Lengths, *, planes: int | None
) -> Float[Array, "B T N H"]:
    """Causal attention of the last T tokens of each row over everything cached.

    q: queries after RoPE, N = K * (query heads per KV head). The T tokens' own keys and values are already appended and
    counted in `lengths.buffered`: query t sees the quantized region and the first buffered - T + t + 1 rows of the
    buffer. planes: 1 reads the upper 4 bits of the quantized region, 2 both planes, None a `FullLayer`.
    """
    return reference.decode_attention(q, layer, lengths, planes=planes)
