"""What RoPE and append are given, as their implementations get it."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.formats.kv_cache import FullLayer


class RopeAppendArguments(NamedTuple):
    """The arguments of `pallas_kernels.rope_append.rotate_and_append`."""

    qkv: Float[Array, "B T channels"]
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    buffer: FullLayer
    offset: Int[Array, "B"]
