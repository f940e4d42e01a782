"""Attention with replaced tokens in plain JAX, see `pallas_kernels.attention.reference`."""

from jaxtyping import Array

from pallas_kernels.attention.reference import attend_replaced
from pallas_kernels.replaced_attention.arguments import ReplacedArguments
from pallas_kernels.replaced_attention.choice import choose_tokens


def attend_and_choose(args: ReplacedArguments) -> tuple[Array, Array]:
    """See `pallas_kernels.replaced_attention.attend_and_choose`."""
    *read, k = args
    out, share = attend_replaced(*read)
    return out, choose_tokens(share, k)
