"""All that a layer with INT4 weights does between its attention and the next layer's."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.weights import Int4Weight

GPU_IMPLEMENTATIONS = ("mosaic_gpu",)


def between_attentions(
    x: Float[Array, "*rows D"],
    attended: Float[Array, "*rows channels"],
    o: Int4Weight,
    norm: Float[Array, "D"],
    gate: Int4Weight,
    up: Int4Weight,
    down: Int4Weight,
    following_norm: Float[Array, "D"] | None = None,
    following: Sequence[Int4Weight] = (),
    handoff: Array | None = None,
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows out"], Array | None]:
    """Output projection, residual connection, norm, gated MLP, residual connection, and the next layer's norm and projections.

    x: the residual stream. attended: what attention read. Returns the new residual stream and the projections, one after the other in
    the last axis; without `following` and its norm, the stream before the MLP and what the MLP adds to it; and `handoff` for the next
    layer's call. On a GPU the reference is a composition of kernels.

    handoff: the buffer that the call for the layer before returned, which saves this one a launch; None before the first.

    Raises ValueError where of `following` and its norm one is missing, and where the implementation asked for does not support the
    device or the shapes.
    """
    if (following_norm is None) == bool(following):
        raise ValueError("fused_layer: `following` and `following_norm` go together")
    args = x, attended, o, norm, gate, up, down, following_norm, following, handoff
    return choose("fused_layer", GPU_IMPLEMENTATIONS, implementation, *args, slow_reference=False, eps=eps).between_attentions(
        *args, eps=eps
    )
