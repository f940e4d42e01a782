"""RoPE, and new keys and values at the end of a full-precision buffer."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import FullLayer
from pallas_kernels.rope_append.reference import rotate as rotate
from pallas_kernels.rope_append.reference import split_and_rotate as split_and_rotate


def rotate_and_append(
    qkv: Float[Array, "B T channels"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    buffer: FullLayer,
    offset: Int[Array, "B"],
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N H"], FullLayer]:
    """Queries after RoPE, and the buffer with keys, after RoPE, and values from row `offset[b]` on.

    Args:
        qkv: for each token, N heads of queries, then K of keys and K of values.
        cos, sin: of the tokens' angles.
        buffer: keys and values, updated in place where a kernel runs.
        offset: the caller sees to it that offset + max(2, T) rows are there. Where they are not, the last rows are written instead, or the
            first ones for a negative offset, and nothing beyond the buffer.

    Raises:
        NotImplementedError: the implementation asked for does not support the device or the shapes.
    """
    args = qkv, cos, sin, buffer, offset
    return choose("rope_append", implementation, *args, slow_reference=False).rotate_and_append(*args)
