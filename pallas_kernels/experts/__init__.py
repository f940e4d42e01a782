"""Experts: MLPs with weights of one shape, of which each row of activations goes through a few."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose


def expert_mlps(
    x: Float[Array, "R D"],
    chosen: Int[Array, "R C"],
    shares: Float[Array, "R C"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "R D"]:
    """The sum over a row's experts of share * (silu(x @ gate) * (x @ up)) @ down, in the dtype of the shares.

    The products of gate and up are rounded to x's dtype, as those of `pallas_kernels.matmul.gated_linear`. A row's result depends on no
    other row, whatever that holds.

    Args:
        x: the rows.
        chosen: the experts of each row, different ones.
        shares: what the output of each is multiplied by, in at least float32.
        gate, up, down: the matrices of all experts.
        implementation: "auto", or the one to run.

    Raises:
        NotImplementedError: the implementation asked for does not support the device or the shapes.
    """
    return choose("experts", implementation, slow_reference=False).expert_mlps(x, chosen, shares, gate, up, down)
