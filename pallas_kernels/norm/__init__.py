"""Residual connection and RMSNorm in one."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose


def add_rms_norm(
    x: Float[Array, "*rows D"],
    added: Float[Array, "*rows D"] | None,
    weight: Float[Array, "*n D"],
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """x + added (x itself where nothing is added), and its RMSNorm (Zhang and Sennrich, arXiv 1910.07467), both in x's dtype.

    Args:
        x: the rows.
        added: what is added to them; None: nothing.
        weight: of all rows, [D], or of each of n in turn, [n D], for an x of [..., n, D].
        eps: is added to the mean of the squares.
        implementation: see `dispatch`.

    Raises NotImplementedError where the implementation asked for does not support the device or the shapes.
    """
    return choose("norm", implementation, x, added, weight, slow_reference=False).add_rms_norm(x, added, weight, eps=eps)
