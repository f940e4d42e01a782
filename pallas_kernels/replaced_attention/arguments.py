"""What attention with replaced tokens is given, as its implementations get it."""

from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.token_codes import FullTokens, TokenCodesLayer


class ReplacedArguments(NamedTuple):
    """The arguments of `pallas_kernels.replaced_attention.attend_and_choose`."""

    q: Float[Array, "B T N H"]
    layer: TokenCodesLayer
    lengths: Lengths
    replaced: FullTokens
    k: int
