"""Everything between a layer's attention and the next layer's."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.weights import Weight
from pallas_kernels.fused_layer import reference
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

    Where the fused kernel does not support the arguments, the reference runs, which on a GPU calls the separate matmul and norm kernels.

    Args:
        x: the residual stream.
        attended: the output of attention.
        o, gate, up, down: weights [out, in] in any format.
        norm: RMSNorm's weight [D], before the MLP.
        following_norm: the next layer's; None for the last layer.
        following: the weights of the next layer's projections; empty for the last layer.
        handoff: the buffer that the call for the layer before returned, which saves this one a launch; None before the first. Only the
            kernel knows what it holds. It is consumed: no other call may be given it.
        eps: of both norms.
        biases: bias vectors by projection: "o", "gate", "up", "down". Those of `following` are the caller's to add.
        axis: of the mesh over whose devices the heads and the columns of the MLP are divided, within `jax.shard_map`. The results of `o`
            and `down` on a device are then partial sums; the sums are the same on all devices. None: nothing is divided.

    Returns:
        The new residual stream, the outputs of `following` one after the other in the last axis, and the handoff buffer for the next
        layer's call; the reference returns the one that it was given, so None if none was. Without `following`, the first two are the
        stream before the MLP, and what the MLP adds to it.

    Raises:
        ValueError: `following` or its norm is missing without the other, or a bias is of no such projection.
        NotImplementedError: the implementation asked for does not support the device or the arguments.
    """
    if (following_norm is None) == bool(following):
        raise ValueError("fused_layer: `following` and `following_norm` should be given together")
    if others := set(biases or ()) - set(BIASED):
        raise ValueError(f"fused_layer: biases of {', '.join(sorted(others))}, should be of {', '.join(BIASED)}")
    args = LayerArguments(x, attended, o, norm, gate, up, down, following_norm, following, handoff, eps, biases or {}, axis)
    if (max_rows := dispatch.rows_in_fixed_order("fused_layer")) < dispatch.ANY:
        return _in_fixed_order(args, implementation, max_rows)
    return choose("fused_layer", implementation, args, slow_reference=False).between_attentions(args)


def _in_fixed_order(args: LayerArguments, implementation: Implementation, max_rows: int) -> tuple[Array, Array, Array | None]:
    """The layer in `dispatch.fixed_order`. The kernel runs if it would for `max_rows` rows, however many there are, which it takes at a
    time."""
    rows, names = math.prod(args.x.shape[:-1]), ("x", "attended")

    def with_rows(start: int, stop: int, **others: Any) -> LayerArguments:
        """Some of the rows."""
        return args._replace(**{name: getattr(args, name).reshape(rows, -1)[start:stop] for name in names}, **others)

    widest = {name: jax.ShapeDtypeStruct((max_rows, getattr(args, name).shape[-1]), getattr(args, name).dtype) for name in names}
    module = choose("fused_layer", implementation, args._replace(**widest), slow_reference=False)
    if module is reference or rows <= max_rows:
        return module.between_attentions(args)
    handoff, found = args.handoff, []
    for start in range(0, rows, max_rows):
        *part, handoff = module.between_attentions(with_rows(start, start + max_rows, handoff=handoff))
        found.append(part)
    x, y = (jnp.concatenate(parts).reshape(*args.x.shape[:-1], -1) for parts in zip(*found))
    return x, y, handoff
