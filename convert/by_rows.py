"""INT4 and nested weights, quantized and compared some rows at a time: both take several float32 copies of the rows."""

import operator
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.weights import Int4Weight, NestedWeight, dequantize_weight
from qspec_jax.quantization.weights import quantize_weight

ROWS_SIZE = 1 << 22  # numbers of a weight at a time


def quantize_by_rows(weight: np.ndarray, quantize: Callable = quantize_weight) -> Int4Weight | NestedWeight:
    """Quantizes a weight in host memory into host memory. quantize: `quantize_weight` or `quantize_nested`."""
    parts = []
    for rows, part in _parts(weight):
        quantized = jax.device_get(quantize(jnp.asarray(part)))
        parts.append(jax.tree.map(operator.itemgetter(slice(rows.stop - rows.start)), quantized))
    return jax.tree.map(lambda *several: np.concatenate(several), *parts)


def stored_error(stored: Int4Weight | NestedWeight, weight: np.ndarray) -> float:
    """The error of a stored INT4 or nested weight divided by the allowed error; more than 1 is wrong.

    Of a nested weight each number may err as `NestedWeight.max_error` says, and by what bfloat16 rounds of the largest of its group.
    Of an INT4 weight it is the maximum over all groups of root mean square errors. Allowed are 1.01 times the error of quantizing the
    weight again, plus a thousandth of the group's range and float32's rounding, since XLA may add in another order. Groups of the weight
    that are not finite do not count.
    """
    host = jax.tree.map(np.asarray, stored)
    largest_error = _largest_nested_error if isinstance(stored, NestedWeight) else _largest_error
    worst = 0.0
    for rows, part in _parts(weight):
        codes = jax.tree.map(lambda x: _padded(x[rows], len(part)), host)  # noqa: B023
        worst = max(worst, float(largest_error(codes, part)))
    return worst


@jax.jit
def _largest_nested_error(stored: NestedWeight, weight: jax.Array) -> jax.Array:
    size = 2 * stored.lower.shape[-1]

    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % size)), mode="edge").reshape(len(x), -1, size)

    groups, found = split(weight), split(dequantize_weight(stored, jnp.float32))
    allowed = stored.upper.scale[..., None].astype(jnp.float32) * stored.max_error
    rounding = jnp.finfo(jnp.bfloat16).eps * jnp.abs(groups).max(-1, keepdims=True)
    ratio = jnp.abs(found - groups) / (allowed + rounding + jnp.finfo(jnp.float32).tiny)
    ratio = jnp.where(jnp.isnan(ratio), jnp.inf, ratio)
    return jnp.where(jnp.isfinite(groups).all(-1, keepdims=True), ratio, 0).max()


@jax.jit
def _largest_error(stored: Int4Weight, weight: jax.Array) -> jax.Array:
    size = 2 * stored.codes.shape[-1]

    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % size)), mode="edge").reshape(len(x), -1, size)

    groups = split(weight)
    # Numbers are scaled by a power of two near the group's maximum, since squares may overflow float32.
    exponent = jnp.frexp(jnp.abs(groups).max(-1, keepdims=True))[1]

    def scaled(x: jax.Array) -> jax.Array:
        return jnp.ldexp(x, -exponent)

    def rms_error(w: Int4Weight) -> jax.Array:
        return jnp.sqrt(jnp.square(scaled(split(dequantize_weight(w, jnp.float32))) - scaled(groups)).mean(-1))

    error, expected = rms_error(stored), rms_error(quantize_weight(weight))
    width = scaled(groups).max(-1) - scaled(groups).min(-1)
    float32 = jnp.finfo(jnp.float32)
    rounding = 4 * float32.eps + 4 * scaled(jnp.full_like(exponent, float32.tiny, jnp.float32))[..., 0]
    ratio = error / (1.01 * expected + 1e-3 * width + rounding)
    ratio = jnp.where(jnp.isnan(ratio), jnp.inf, ratio)
    return jnp.where(jnp.isfinite(groups).all(-1), ratio, 0).max()


def _parts(weight: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields the parts of a weight with their rows; all are padded to one size, since each size is compiled."""
    size = min(len(weight), max(1, ROWS_SIZE // weight.shape[1]))
    for first in range(0, len(weight), size):
        rows = slice(first, min(first + size, len(weight)))
        yield rows, _padded(weight[rows], size)


def _padded(part: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(part, ((0, rows - len(part)), *((0, 0),) * (part.ndim - 1)))
