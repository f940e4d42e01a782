"""Activations of MLPs without a gate."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.formats.rounding import accumulation_dtype


def relu2(x: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """The square of relu(x)."""
    return jnp.square(jax.nn.relu(x))


class XIELU(nnx.Module):
    """xIELU, whose two slopes are trained (arXiv 2411.13010).

    Args:
        make: supplies weights, see `Llama`.
        path: the path of the activation in the model.
    """

    def __init__(self, make, path: str):
        self.alpha_p = nnx.Param(make(f"{path}.alpha_p", (1,)))
        self.alpha_n = nnx.Param(make(f"{path}.alpha_n", (1,)))
        self.beta = nnx.Param(make(f"{path}.beta", ()))
        self.eps = nnx.Param(make(f"{path}.eps", ()))

    def __call__(self, x: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        wide = x.astype(accumulation_dtype(x.dtype))
        alpha_p, alpha_n, beta, eps = (param.get_value().astype(wide.dtype) for param in (self.alpha_p, self.alpha_n, self.beta, self.eps))
        positive = jax.nn.softplus(alpha_p) * wide * wide
        negative = (jnp.expm1(jnp.minimum(wide, eps)) - wide) * (beta + jax.nn.softplus(alpha_n))
        return (jnp.where(wide > 0, positive, negative) + beta * wide).astype(x.dtype)
