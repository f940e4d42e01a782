"""Passes whose tokens have the same bits whatever else a pass holds, on a GPU."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from qspec_jax.errors import InputError
from qspec_jax.models.llama import AttendingCache
from qspec_jax.models.viewed import ViewedModel


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class FixedOrderModel(ViewedModel):
    """A model of which every pass adds up in an order that depends on a row's length alone (`dispatch.fixed_order`).

    Raises InputError where no kernel does so for the model.
    """

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache]:
        with _fixed_order():
            return super().__call__(tokens, positions, cache)

    def observed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache, tuple[Float[Array, "B K T C"], ...]]:
        with _fixed_order():
            return super().observed(tokens, positions, cache)


@contextlib.contextmanager
def _fixed_order() -> Iterator[None]:
    try:
        with dispatch.fixed_order():
            yield
    except dispatch.NoFixedOrder as error:
        raise InputError(f"exact bits: {error}; give exact tokens") from None
