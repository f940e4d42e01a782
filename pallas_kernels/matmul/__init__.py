"""Linear layers: activations times weights in full precision, in INT4 by groups, nested in 8 bits by groups, or in INT8."""

import math
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.weights import CodedWeight, Int4Weight, Int8Weight, NestedWeight, Weight
from pallas_kernels.matmul.support import INT4_ROWS, alike


def linear(
    x: Float[Array, "*rows in"],
    weights: Sequence[Weight],
    biases: Sequence[Float[Array, "out"]] = (),
    *,
    dtype=None,
    summed_over: str | None = None,
) -> Float[Array, "*rows out"]:
    """The outputs x @ weight.T + bias of linear layers with the same input, one after the other in the last axis.

    Args:
        x: the inputs.
        weights: [out, in] in any format; where all are INT4, or the rows few, they may share a launch.
        biases: one for each weight, or none at all.
        dtype: of the result, x's by default; outputs of INT4 weights are rounded to x's dtype before.
        summed_over: the axis of a mesh over whose devices the inputs are divided, within `jax.shard_map`: the devices' products are added
            up before the biases. None: they are not divided.

    Raises:
        ValueError: there are biases for some of the weights only.
    """
    if biases and len(biases) != len(weights):
        raise ValueError(f"linear: {len(biases)} biases for {len(weights)} weights, should be as many or none")
    y = _multiply(x, weights, x.dtype if dtype is None else dtype)
    if summed_over is not None:
        y = lax.psum(y, summed_over)
    return y + jnp.concatenate(biases) if biases else y


def gated_linear(
    x: Float[Array, "*rows in"], gate: Weight, up: Weight, biases: Sequence[Float[Array, "out"]] = ()
) -> Float[Array, "*rows out"]:
    """silu(x @ gate.T) * (x @ up.T), in x's dtype: the first half of an MLP. Both products are rounded to that dtype before.

    Args:
        x: the inputs.
        gate, up: weights [out, in] in any format.
        biases: of both, added to the products, or none at all.

    Raises:
        ValueError: the weights differ in their number of outputs, or there is only one bias.
    """
    if gate.shape[0] != up.shape[0]:
        raise ValueError(f"gated_linear: {gate.shape[0]} outputs of gate and {up.shape[0]} of up, should be the same number")
    if not biases and _plain(gate, up):
        return _by_rows(lambda x: _skinny(x, [gate, up], x.dtype, "plain").gated_matmul(x, gate, up), x, "plain")
    gate, up = jnp.split(linear(x, [gate, up], biases), 2, axis=-1)
    return jax.nn.silu(gate) * up


def coded_matmul(
    x: Float[Array, "*rows in"], weights: Sequence[Int4Weight] | Sequence[NestedWeight], *, implementation: Implementation = "auto"
) -> Float[Array, "*rows out"]:
    """x @ weight.T for each weight in INT4, or with both planes of each nested one, one after the other in the last axis, accumulated in at
    least float32, in x's dtype.

    One launch computes all of them, where a kernel runs.
    Raises NotImplementedError where the implementation asked for does not support the device or the shapes.
    """
    weight_format = _format_of_codes(weights)

    def multiplied(x: Array) -> Array:
        # For many rows, as in prefill, XLA is not slow.
        few, rows = _rows(x) <= INT4_ROWS, _rows(x)
        module = choose("matmul", implementation, x, weights, weight_format=weight_format, rows=rows, slow_reference=few)
        return module.coded_matmul(x, weights)

    return _by_rows(multiplied, x, weight_format)


def unsupported(x: Array, weights: Sequence[CodedWeight], implementation: str) -> str | None:
    """Why an implementation of `coded_matmul` cannot run on these arguments, or their shapes, here; None if it can."""
    weight_format = _format_of_codes(weights)
    if implementation not in ("reference", *dispatch.implementations("matmul", weight_format)):
        return f"does not multiply by weights in {weight_format}"
    return dispatch.unsupported("matmul", implementation, x, weights, weight_format=weight_format, rows=_rows(x))


def _format_of_codes(weights: Sequence[CodedWeight]) -> str:
    return "nested" if isinstance(weights[0], NestedWeight) else "int4"


def _multiply(x: Array, weights: Sequence[Weight], dtype) -> Array:
    """The outputs without biases."""

    def every(kind):
        return all(isinstance(weight, kind) for weight in weights)

    if (every(Int4Weight) or every(NestedWeight)) and alike(weights):
        return coded_matmul(x, weights).astype(dtype)
    if every(Int8Weight) or _plain(*weights):
        weight_format = "int8" if every(Int8Weight) else "plain"
        return _by_rows(lambda x: _skinny(x, weights, dtype, weight_format).skinny_matmul(x, weights, dtype=dtype), x, weight_format)
    return jnp.concatenate([_multiply(x, [weight], dtype) for weight in weights], axis=-1)


def _by_rows(product: Callable[[Array], Array], x: Array, weight_format: str) -> Array:
    """product(x); in `dispatch.fixed_order` in parts, of the most rows that the kernel with a fixed order takes at once."""
    most = dispatch.rows_in_fixed_order("matmul", weight_format)
    if _rows(x) <= most:
        return product(x)
    rows = x.reshape(-1, x.shape[-1])
    parts = [product(rows[first : first + most]) for first in range(0, len(rows), most)]
    return jnp.concatenate(parts).reshape(*x.shape[:-1], -1)


def _plain(*weights: Weight) -> bool:
    return not any(isinstance(weight, Int4Weight | NestedWeight | Int8Weight) for weight in weights)


def _skinny(x: Array, weights: Sequence[Weight], dtype, weight_format: str) -> ModuleType:
    """The module that multiplies by weights of the format "int8" or "plain"."""
    # XLA is not slow
    return choose("matmul", "auto", x, weights, dtype=dtype, weight_format=weight_format, rows=_rows(x), slow_reference=False)


def _rows(x: Array) -> int:
    return math.prod(x.shape[:-1])
