"""Reads single tokens in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.kv_cache import take
from pallas_kernels.formats.token_codes import FullTokens


def gather_tokens(
    store: Float[Array, "B K S 2 H"], positions: Int[Array, "B K n"], fetched: FullTokens | None
) -> Float[Array, "B K n 2 H"]:
    """See `pallas_kernels.gather.gather_tokens`. Ignores `fetched`."""
    return gather_positions(store, positions)


def gather_positions(
    store: Float[Array, "B K S *rest"], positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None
) -> Float[Array, "R K T *rest"]:
    """A copy, on the device, of the entries at some positions of an array that may be in host memory, by XLA's gather.

    Args:
        store: the array.
        positions: along axis 2; one beyond either end reads the entry at that end.
        batch_rows: the rows of the batch to read; all by default.
    """
    B, K, S, *rest = store.shape
    positions = jnp.clip(positions, 0, S - 1)
    if jax.typeof(store).memory_space != jax.memory.Space.Host:
        return take(store, positions, batch_rows)
    of_batch = jnp.arange(B) if batch_rows is None else batch_rows
    places = of_batch[:, None, None], jnp.arange(K)[:, None], positions
    indices = jnp.stack(jnp.broadcast_arrays(*(x.astype(jnp.int32) for x in places)), -1)
    # lax.gather directly, on indices that are made on the device, so that they are not computed in host memory.
    offsets = tuple(range(3, store.ndim))
    dimensions = lax.GatherDimensionNumbers(offset_dims=offsets, collapsed_slice_dims=(0, 1, 2), start_index_map=(0, 1, 2))
    found = lax.gather(
        store, jax.device_put(indices, jax.memory.Space.Host), dimensions, (1, 1, 1, *rest), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )
    # Without the barrier XLA may also do what comes next in host memory, which it cannot compile (jax 0.11).
    return lax.optimization_barrier(jax.device_put(found, jax.memory.Space.Device))
