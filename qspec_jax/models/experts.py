"""The experts of a layer: MLPs, of which a router chooses a few for each token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.experts import expert_mlps
from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.matmul import linear
from qspec_jax.models.config import LlamaConfig

MATRICES = ("gate", "up", "down")


class Experts(nnx.Module):
    """A router, and MLPs with a gate and SiLU; the matrices of all experts are one array for each projection.

    Args:
        config, make, axis: see `qspec_jax.models.llama.Llama`. Each device of a divided model has some columns of every expert.
        path: the path of the experts in the model.
    """

    def __init__(
        self, config: LlamaConfig, make: Callable[[str, tuple[int, ...]], Array | jax.ShapeDtypeStruct], path: str, axis: str | None
    ):
        experts, D = config.experts, config.hidden_size
        E, F = experts.count, experts.intermediate_size
        self.router = nnx.Param(make(f"{path}.router", (E, D)))
        self.gate = nnx.Param(make(f"{path}.gate", (E, D, F)))
        self.up = nnx.Param(make(f"{path}.up", (E, D, F)))
        self.down = nnx.Param(make(f"{path}.down", (E, F, D)))
        self.chosen, self.normalized, self.axis = experts.chosen, experts.normalized, axis

    def __call__(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The outputs of the chosen experts, times their shares, added up in at least float32 and rounded once."""
        rows = h.reshape(-1, h.shape[-1])
        matrices = (getattr(self, name).get_value() for name in MATRICES)
        added = expert_mlps(rows, *self.route(rows), *matrices)
        if self.axis is not None:
            added = lax.psum(added, self.axis)
        return added.astype(h.dtype).reshape(h.shape)

    def route(self, rows: Float[Array, "R D"]) -> tuple[Int[Array, "R C"], Float[Array, "R C"]]:
        """The experts of each token, the one with the largest share first, and their shares, in at least float32."""
        logits = linear(rows, [self.router.get_value()], dtype=accumulation_dtype(rows.dtype))
        shares, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), self.chosen)
        return chosen, shares / jnp.sum(shares, axis=-1, keepdims=True) if self.normalized else shares


def is_expert_matrix(path: str) -> bool:
    """Whether the weight at a path of the model is that of all experts of a layer, of which a pass reads those that are chosen."""
    *_, owner, name = path.split(".") if "." in path else ("", path)
    return owner == "experts" and name in MATRICES
