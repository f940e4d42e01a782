"""RoPE, new keys and values at the end of a layer's buffer, and decode attention over the layer."""

from jaxtyping import Array, Float

from pallas_kernels.append_attend.arguments import AppendAttendArguments
from pallas_kernels.attention import check
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.formats.views import View


def append_and_attend(
    qkv: Float[Array, "B T channels"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    layer: Layer,
    lengths: Lengths,
    view: View,
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T N H"], Layer, Float[Array, "B K T C"] | None]:
    """What `rotate_and_append` does at row `lengths.buffered`, and then `decode_attention`, in which the T new tokens are counted.

    Returns what was attended to, the layer with the new tokens in its buffer, and the attention mass where it is observed, else None.
    qkv, cos, sin: as `rotate_and_append` takes them. lengths: those before the new tokens. view: as `decode_attention` takes them.
    Where the buffer has no room for max(2, T) rows more, what is attended to is unspecified.

    On a GPU, what the kernel does not support is done by the reference, which calls the two.
    Raises ValueError where `decode_attention` does for the view, and where the implementation asked for does not support the device or
    the arguments.
    """
    check(layer, view)
    args = AppendAttendArguments(qkv, cos, sin, layer, lengths, view)
    return choose("append_attend", implementation, args, slow_reference=False).append_and_attend(args)
