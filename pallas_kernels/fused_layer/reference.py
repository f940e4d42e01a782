"""The layer as a composition: linear layers of any weight format, and the residual connection with its norm."""

from collections.abc import Mapping, Sequence

from jaxtyping import Array, Float

from pallas_kernels.formats.weights import Weight
from pallas_kernels.matmul import gated_linear, linear
from pallas_kernels.norm import add_rms_norm


def between_attentions(
    x: Float[Array, "*rows D"],
    attended: Float[Array, "*rows channels"],
    o: Weight,
    norm: Float[Array, "D"],
    gate: Weight,
    up: Weight,
    down: Weight,
    following_norm: Float[Array, "D"] | None,
    following: Sequence[Weight],
    handoff: Array | None = None,
    *,
    eps: float,
    biases: Mapping[str, Float[Array, "out"]],
    axis: str | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows out"], Array | None]:
    """See `pallas_kernels.fused_layer.between_attentions`."""
    of = lambda *names: [biases[name] for name in names if name in biases]
    x, h = add_rms_norm(x, linear(attended, [o], of("o"), summed_over=axis), norm, eps=eps)
    added = linear(gated_linear(h, gate, up, of("gate", "up")), [down], of("down"), summed_over=axis)
    if following_norm is None:
        return x, added, handoff
    x, h = add_rms_norm(x, added, following_norm, eps=eps)
    return x, linear(h, following), handoff
