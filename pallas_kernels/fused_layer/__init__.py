"""All that a layer does between its attention and the next layer's."""

from collections.abc import Mapping, Sequence

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.weights import Weight
from pallas_kernels.fused_layer.arguments import LayerArguments

BIASED = "o", "gate", "up", "down"  # projections that may have a bias


def between_attentions(
    x: Float[Array, "*rows D"],
    attended: Float[Array, "*rows channels"],
    o: Weight,
    norm: Float[Array, "D"],
    gate: Weight,
    up: Weight,
    down: Weight,
    following_norm: Float[Array, "D"] | None = None,
    following: Sequence[Weight] = (),
    handoff: Array | None = None,
    *,
    eps: float,
    biases: Mapping[str, Float[Array, "out"]] | None = None,
    axis: str | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows out"], Array | None]:
    """Output projection, residual connection, norm, gated MLP, residual connection, and the next layer's norm and projections.

    x: the residual stream. attended: what attention read. The weights [out, in] may be of any format; `norm`, `following_norm` and `eps`
    are those of RMSNorm. biases: those of the projections "o", "gate", "up" and "down" that have one; `following` get none here.

    axis: of the mesh over whose devices the heads and the columns of the MLP are divided, within `jax.shard_map`. What `o` gives on each of
    them is then a partial sum, and so is what `down` gives; the sums are the same on all of them. None: nothing is divided.

    Returns the new residual stream and the outputs of `following`, one after the other in the last axis; without `following` and its
    norm, the stream before the MLP and what the MLP adds to it. Last comes the handoff buffer for the next layer's call.

    handoff: the buffer that the call for the layer before returned, which saves this one a launch; None before the first. What it holds is
    the kernel's affair: callers pass it on and never look into it.

    On a GPU, what the kernel does not support is done by the reference, a composition of kernels.
    Raises ValueError where `following` or its norm is missing without the other, where a bias is for no such projection, and where the
    implementation asked for does not support the device or the arguments.
    """
    if (following_norm is None) == bool(following):
        raise ValueError("fused_layer: `following` and `following_norm` go together")
    if others := set(biases or ()) - set(BIASED):
        raise ValueError(f"fused_layer: biases of {', '.join(sorted(others))}, should be of some of {', '.join(BIASED)}")
    args = LayerArguments(x, attended, o, norm, gate, up, down, following_norm, following, handoff, eps, biases or {}, axis)
    return choose("fused_layer", implementation, args, slow_reference=False).between_attentions(args)
