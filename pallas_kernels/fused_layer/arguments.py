"""What lies between two attentions, as the implementations get it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.formats.weights import Weight


class LayerArguments(NamedTuple):
    """The arguments of `pallas_kernels.fused_layer.between_attentions`."""

    x: Float[Array, "*rows D"]
    attended: Float[Array, "*rows channels"]
    o: Weight
    norm: Float[Array, "D"]
    gate: Weight
    up: Weight
    down: Weight
    following_norm: Float[Array, "D"] | None
    following: Sequence[Weight]
    handoff: Array | None
    eps: float
    biases: Mapping[str, Float[Array, "out"]]
    axis: str | None
