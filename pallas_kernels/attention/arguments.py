"""What decode attention is given, as its implementations get it."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.formats.views import View


class AttentionArguments(NamedTuple):
    """The arguments of `pallas_kernels.attention.decode_attention`; for plans and checks, shapes are enough."""

    q: Float[Array, "B T N H"] | jax.ShapeDtypeStruct
    layer: Layer
    lengths: Lengths
    view: View
