"""Passes whose tokens have the same bits whatever else a pass holds, on a GPU."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.matmul.mosaic_plain_plan import TILE
from qspec_jax.errors import BitsRefused
from qspec_jax.models.llama import AttendingCache, Seen
from qspec_jax.models.viewed import ViewedModel


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class FixedOrderModel(ViewedModel):
    """A model of which every pass adds up in the order of `dispatch.fixed_order`.

    Raises BitsRefused where no kernel does so for the model.
    """

    def watched(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: AttendingCache,
        *,
        observe: bool = False,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T V"], AttendingCache, Seen]:
        with _fixed_order():
            return super().watched(tokens, positions, cache, observe=observe, taps=taps)

    def filled(self, tokens: Int[Array, "B T"]) -> int:
        """Over a single row, what a matmul kernel of plain weights reads at a time: it would otherwise copy its input to fill it up."""
        (rows, length), config = tokens.shape, self.model.config
        uncoded = not (config.int4_weights or config.nested_weights)
        fills = dispatch.platform() == "gpu" and rows == 1 and uncoded and self.model.fillable
        return TILE * math.ceil(length / TILE) if fills else 0


@contextlib.contextmanager
def _fixed_order() -> Iterator[None]:
    try:
        with dispatch.fixed_order():
            yield
    except dispatch.NoFixedOrder as error:
        raise BitsRefused(f"needs kernels that add up in a fixed order; {error}") from None
