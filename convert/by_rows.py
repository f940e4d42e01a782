"""The draft's INT4 weights, some rows at a time: making them anew takes several float32 copies of a weight."""

import operator
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.weight_format import Int4Weight, dequantize_weight
from qspec_jax.quantize import quantize_weight

ROWS_SIZE = 1 << 22  # numbers at a time


def quantize_by_rows(weight: np.ndarray) -> Int4Weight:
    """`quantize_weight`, in the host's memory."""
    parts = []
    for rows in _parts(weight):
        quantized = jax.device_get(quantize_weight(jnp.asarray(_padded(weight[rows], weight))))
        parts.append(jax.tree.map(operator.itemgetter(slice(len(weight[rows]))), quantized))
    return jax.tree.map(lambda *several: np.concatenate(several), *parts)


def draft_error(stored: Int4Weight, weight: np.ndarray) -> float:
    """The largest root mean square error of a row's group, as a share of what it may be: that of quantizing the weight again, one per
    cent more, and a thousandth of the group's range, for XLA may add in another order.

    A group of the weight that is not finite has none.
    """
    host = jax.tree.map(np.asarray, stored)
    parts = ((jax.tree.map(lambda x: _padded(x[rows], weight), host), _padded(weight[rows], weight)) for rows in _parts(weight))  # noqa: B023
    return max(float(_largest_error(*part)) for part in parts)


@jax.jit
def _largest_error(stored: Int4Weight, weight: jax.Array) -> jax.Array:
    size = 2 * stored.codes.shape[-1]

    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % size)), mode="edge").reshape(len(x), -1, size)

    groups = split(weight)
    tiny = jnp.finfo(jnp.float32).tiny
    width = groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True) + tiny
    # In widths of the group, whose square may be beyond float32.
    apart = lambda w: (split(dequantize_weight(w, jnp.float32)) - groups) / width
    error, expected = (jnp.sqrt(jnp.square(apart(w)).mean(-1)) for w in (stored, quantize_weight(weight)))
    ratio = error / (1.01 * expected + 1e-3)
    ratio = jnp.where(jnp.isnan(ratio), jnp.inf, ratio)
    return jnp.where(jnp.isfinite(groups).all(-1), ratio, 0).max()


def _parts(weight: np.ndarray) -> Iterator[slice]:
    rows = _rows(weight)
    return (slice(first, first + rows) for first in range(0, len(weight), rows))


def _rows(weight: np.ndarray) -> int:
    return min(len(weight), max(1, ROWS_SIZE // weight.shape[1]))


def _padded(part: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """All parts of one size, for each size is compiled; rows do not depend on each other."""
    return np.pad(part, ((0, _rows(weight) - len(part)), *((0, 0),) * (part.ndim - 1)))
