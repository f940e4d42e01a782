"""The arguments of `between_attentions` as one tuple, from the operation to its implementations."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.formats.weights import Weight


class LayerArguments(NamedTuple):
    """The arguments of `pallas_kernels.fused_layer.between_attentions`, which documents them."""

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
