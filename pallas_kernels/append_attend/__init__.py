"""RoPE, new keys and values at the end of a layer's buffer, and decode attention over the layer."""

from jaxtyping import Array, Float

from pallas_kernels.attention import check
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.formats.views import View


def append_and_attend(
    qkv: Float[Array, "B filled channels"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    layer: Layer,
    lengths: Lengths,
    view: View,
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B filled N H"], Layer, Float[Array, "B K T C"] | None]:
    """RoPE and append (`rotate_and_append`) from row `lengths.buffered` on, and then `decode_attention`, for which the T new tokens count.

    On a GPU, the reference, which calls the two, does what the kernel does not support.

    Args:
        qkv, cos, sin: see `pallas_kernels.rope_append.rotate_and_append`. More tokens may follow the T in `qkv`, so that it has the
            number that other kernels take at once: they are passed over, and what is returned for them is unspecified.
        layer: the cache without the new tokens. Where its buffer has no room for max(2, T) rows more, the values read are unspecified.
        lengths: those before the new tokens.
        view: what is read, see `pallas_kernels.attention.decode_attention`.

    Returns:
        The values read, the layer with the new tokens in its buffer, and the attention mass where the view is observed, else None.

    Raises:
        ValueError: see `decode_attention`.
        NotImplementedError: the implementation asked for does not support the device or the arguments.
    """
    check(layer, view)
    args = qkv, cos, sin, layer, lengths, view
    return choose("append_attend", implementation, *args, slow_reference=False).append_and_attend(*args)
