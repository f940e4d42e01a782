"""The draft's INT4 weights, quantized and compared some rows at a time, since that takes several float32 copies of the rows."""

import operator
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.weights import Int4Weight, dequantize_weight
from qspec_jax.quantization.weights import quantize_weight

ROWS_SIZE = 1 << 22  # numbers of a weight at a time


def quantize_by_rows(weight: np.ndarray) -> Int4Weight:
    """Quantizes a weight as `quantize_weight` does, from the host's memory and into it."""
    parts = []
    for rows, part in _parts(weight):
        quantized = jax.device_get(quantize_weight(jnp.asarray(part)))
        parts.append(jax.tree.map(operator.itemgetter(slice(rows.stop - rows.start)), quantized))
    return jax.tree.map(lambda *several: np.concatenate(several), *parts)


def draft_error(stored: Int4Weight, weight: np.ndarray) -> float:
    """How far a stored INT4 weight is from the weight that it was made of, as a share of what is allowed; more than 1 is wrong.

    It is the largest over all groups of the root mean square error over the allowed one: 1.01 times that of quantizing the weight again,
    a thousandth of the group's range, and float32's rounding, since XLA may add in another order. Groups of the weight that are not
    finite do not count.
    """
    host = jax.tree.map(np.asarray, stored)
    worst = 0.0
    for rows, part in _parts(weight):
        codes = jax.tree.map(lambda x: _padded(x[rows], len(part)), host)  # noqa: B023
        worst = max(worst, float(_largest_error(codes, part)))
    return worst


@jax.jit
def _largest_error(stored: Int4Weight, weight: jax.Array) -> jax.Array:
    size = 2 * stored.codes.shape[-1]

    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % size)), mode="edge").reshape(len(x), -1, size)

    groups = split(weight)
    # Numbers are scaled by a power of two near the group's largest, since squares may leave float32.
    exponent = jnp.frexp(jnp.abs(groups).max(-1, keepdims=True))[1]
    scaled = lambda x: jnp.ldexp(x, -exponent)
    apart = lambda w: scaled(split(dequantize_weight(w, jnp.float32))) - scaled(groups)
    error, expected = (jnp.sqrt(jnp.square(apart(w)).mean(-1)) for w in (stored, quantize_weight(weight)))
    width = scaled(groups).max(-1) - scaled(groups).min(-1)
    float32 = jnp.finfo(jnp.float32)
    rounding = 4 * float32.eps + 4 * scaled(jnp.full_like(exponent, float32.tiny, jnp.float32))[..., 0]
    ratio = error / (1.01 * expected + 1e-3 * width + rounding)
    ratio = jnp.where(jnp.isnan(ratio), jnp.inf, ratio)
    return jnp.where(jnp.isfinite(groups).all(-1), ratio, 0).max()


def _parts(weight: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields some rows of a weight at a time, and which they are. All parts are padded to one size, since each size is compiled."""
    size = min(len(weight), max(1, ROWS_SIZE // weight.shape[1]))
    for first in range(0, len(weight), size):
        rows = slice(first, min(first + size, len(weight)))
        yield rows, _padded(weight[rows], size)


def _padded(part: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(part, ((0, rows - len(part)), *((0, 0),) * (part.ndim - 1)))
