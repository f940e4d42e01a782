"""Quantized weights of the draft and of the target.

INT4, for linear layers: groups along the input, a search for the range that errs least, and, with calibration, rounding that makes up for
the errors of the inputs before (GPTQ, arXiv 2210.17323). Nested, for linear layers of the target: 8 bits of which the upper 4 are the
draft's. INT8, for the head: rounded to nearest.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from pallas_kernels.formats.quantization import pack
from pallas_kernels.formats.rounding import accumulation_dtype, parameter_dtype, round_down, round_up
from pallas_kernels.formats.weights import (
    FAR_STEPS,
    LOWER_MIDDLE,
    NEAREST_STEPS,
    Int4Weight,
    Int8Weight,
    NestedWeight,
    Weight,
    upper_plane,
)
from pallas_kernels.matmul.support import GROUP_SIZES
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import MODEL, divided_over, mesh_of, weight_sharding

# Shares of a group's range that are tried; what lies outside is clipped.
CLIP_RATIOS = tuple(1 - i / 32 for i in range(17))
REFITS = 2
# Scales of nested weights that are tried, as shares of the least one whose codes cover a group's range, and places of the range in them.
# So no weight is clipped, which the target would suffer from.
NESTED_SCALES, NESTED_PLACES = tuple(1 + i / 60 for i in range(5)), (0.0, 0.5, 1.0)
# What is added to the diagonal of the inputs' second moments, as a share of its mean (GPTQ, section 3.3).
DAMPING = 0.01


def weight_group_size(in_features: int) -> int:
    """How many inputs share a scale: 128, or 64 or 32 where that divides and 128 does not; otherwise 32, the last group padded."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), GROUP_SIZES[-1])


@functools.partial(jax.jit, static_argnames="group_size")
def quantize_weight(
    weight: Float[Array, "out in"], moments: Float[Array, "in in"] | None = None, *, group_size: int | None = None
) -> Int4Weight:
    """The weight in INT4 with a scale and a zero per group of inputs, `weight_group_size` unless given.

    For each group every ratio of CLIP_RATIOS is tried, each refined by least squares (codes fixed, best scale and zero; then codes
    again), and the one of least squared error is kept: never worse than plain rounding over the full range.
    moments: x x^T summed over the layer's inputs x. With them the errors that count are those of the outputs: inputs weigh in the
    search by their power, and inputs still to be rounded make up for the error of those that have been.
    """
    out_features, in_features = weight.shape
    size = group_size or weight_group_size(in_features)
    dtype = parameter_dtype(weight.dtype)
    wide, padding = _padded(weight, size)
    counts = (jnp.arange(wide.shape[1]) < in_features).astype(wide.dtype)
    if moments is None:
        groups = wide.reshape(out_features, -1, size)
        scale, zero = _fit(groups, counts.reshape(-1, size), dtype)
        codes = _round(groups, scale, zero)
    else:
        moments = jnp.pad(moments.astype(wide.dtype), (0, padding))
        codes, scale, zero = _compensated_int4(wide, moments, counts, size, dtype)
    return Int4Weight(pack(codes.astype(jnp.uint8)), scale[..., 0].astype(dtype), zero[..., 0].astype(dtype), padding)


@functools.partial(jax.jit, static_argnames="group_size")
def quantize_nested(
    weight: Float[Array, "out in"], moments: Float[Array, "in in"] | None = None, *, group_size: int | None = None
) -> NestedWeight:
    """The weight in 8 bits with a scale and a zero per group of inputs, `weight_group_size` unless given; the upper 4 are an INT4 weight.

    Of the scales and zeros with which no weight of the group is clipped it takes those with which the nearest upper codes err least.
    moments: as in `quantize_weight`. With them upper codes make up for the errors of inputs before, as far as the lower plane reaches,
    whose steps are then an eighth of the upper one's; and so do codes of both planes.
    """
    size, dtype = group_size or weight_group_size(weight.shape[1]), parameter_dtype(weight.dtype)
    wide, padding = _padded(weight, size)
    groups = wide.reshape(len(wide), -1, size)
    if moments is None:
        steps = NEAREST_STEPS
        scale, zero = _fit_range(groups, dtype)
        both = _round_nested(groups, scale, zero)
        upper, lower = both // steps, both % steps
    else:
        steps = FAR_STEPS
        counts = (jnp.arange(wide.shape[1]) < weight.shape[1]).astype(wide.dtype)
        moments = jnp.pad(moments.astype(wide.dtype), (0, padding))
        upper, lower, scale, zero = _compensated_nested(wide, moments, counts, size, dtype)
    upper, lower = (pack(codes.astype(jnp.uint8)) for codes in (upper, lower))
    return NestedWeight(Int4Weight(upper, scale[..., 0].astype(dtype), zero[..., 0].astype(dtype), padding), lower, steps)


def _padded(weight: Float[Array, "out in"], size: int) -> tuple[Float[Array, "out padded"], int]:
    """The weight in the dtype of sums with whole groups of inputs, and how many were added."""
    padding = -weight.shape[1] % size
    # Padding by the last column leaves each group's range alone; its errors do not count.
    return jnp.pad(weight.astype(accumulation_dtype(weight.dtype)), ((0, 0), (0, padding)), mode="edge"), padding


def _round_nested(groups: Array, scale: Array, zero: Array) -> Array:
    """Codes of both planes, 16 u + l, of which u is the nearest upper code, or almost."""
    return jnp.clip(jnp.rint((groups - zero) / scale * NEAREST_STEPS + LOWER_MIDDLE), 0, 16 * NEAREST_STEPS - 1)


def _fit_range(groups: Float[Array, "out C G"], dtype) -> tuple[Array, Array]:
    """The scale and zero [out, C, 1], values of `dtype`, whose codes reach from the least to the largest of each group, with the least
    squared error of upper codes."""
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    # From the first code of both planes to the last one. The ends of a group's range can then be codes: in a checkpoint that was quantized
    # before, many weights are there.
    reach = (16 * NEAREST_STEPS - 1) / NEAREST_STEPS
    # By how much a stored zero may be below what it should be.
    slack = jnp.finfo(dtype).eps * (jnp.maximum(jnp.abs(low), jnp.abs(high)) + (high - low) / 16)
    least = jnp.maximum((high - low + slack) / reach, jnp.finfo(groups.dtype).tiny)

    def attempt(i, best):
        scale = round_up(least * jnp.asarray(NESTED_SCALES, groups.dtype)[i // len(NESTED_PLACES)], dtype)
        spare = jnp.maximum(reach * scale - (high - low) - slack, 0)
        first = low + scale * (LOWER_MIDDLE / NEAREST_STEPS)
        zero = round_down(first - jnp.asarray(NESTED_PLACES, groups.dtype)[i % len(NESTED_PLACES)] * spare, dtype)
        upper = _round_nested(groups, scale, zero) // NEAREST_STEPS
        # In units of a step, whose square stays within float32 whatever the weights.
        error = jnp.square((groups - zero) / scale - upper).mean(-1, keepdims=True) * jnp.square(scale / least)
        return jax.tree.map(lambda old, new: jnp.where(error < best[0], new, old), best, (error, scale, zero))

    nothing = (jnp.full_like(least, jnp.inf), jnp.ones_like(least), jnp.zeros_like(least))
    return lax.fori_loop(0, len(NESTED_SCALES) * len(NESTED_PLACES), attempt, nothing)[1:]


def _round(groups: Array, scale: Array, zero: Array) -> Array:
    return jnp.clip(jnp.rint((groups - zero) / scale), 0, 15)


def _fit(groups: Float[Array, "out *C G"], importance: Float[Array, "*C G"], dtype) -> tuple[Array, Array]:
    """The scale and zero [out, *C, 1], values of `dtype`, with the least weighted squared error."""
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    half = (high - low) / 2
    # Whatever the size of weights and moments, no square leaves the range of float32.
    importance = importance / importance.sum(-1, keepdims=True)
    unit = jnp.maximum(half, jnp.finfo(groups.dtype).tiny)

    def mean(x):
        return (importance * x).sum(-1, keepdims=True)

    def keep_better(best, scale, zero):
        # Scales and zeros are judged as stored.
        scale, zero = round_up(jnp.maximum(scale, jnp.finfo(dtype).tiny), dtype), round_down(zero, dtype)
        codes = _round(groups, scale, zero)
        error = mean(jnp.square((codes * scale + zero - groups) / unit))
        return jax.tree.map(lambda old, new: jnp.where(error < best[0], new, old), best, (error, scale, zero)), codes

    def attempt(i, best):
        kept = half * jnp.asarray(CLIP_RATIOS, groups.dtype)[i]
        best, codes = keep_better(best, 2 * kept / 15, low + (half - kept))
        for _ in range(REFITS):
            spread = mean(jnp.square(codes - mean(codes)))
            scale = mean((codes - mean(codes)) * (groups - mean(groups))) / jnp.maximum(spread, jnp.finfo(groups.dtype).tiny)
            best, codes = keep_better(best, scale, mean(groups) - scale * mean(codes))
        return best

    nothing = (jnp.full_like(half, jnp.inf), jnp.ones_like(half), jnp.zeros_like(half))
    return lax.fori_loop(0, len(CLIP_RATIOS), attempt, nothing)[1:]


def _propagation(moments: Float[Array, "in in"], counts: Float[Array, "in"]) -> tuple[Float[Array, "in in"], Float[Array, "in"]]:
    """How GPTQ makes later inputs make up for the error of each, and how much an error of each counts.

    moments: as in `quantize_weight`. counts: 1 for an input, 0 for padding.
    """
    power = jnp.diag(moments)
    damping = jnp.maximum(DAMPING * power.mean(), jnp.finfo(moments.dtype).tiny)
    inverse = jnp.linalg.inv(moments + damping * jnp.eye(len(moments), dtype=moments.dtype))
    return jnp.linalg.cholesky((inverse + inverse.T) / 2).T, counts * (power + damping)


def _compensated(weight: Float[Array, "out in"], factor: Float[Array, "in in"], size: int, begin: Callable) -> tuple[Array, ...]:
    """Codes [out, C, G] by GPTQ, and more of each group: group after group, and within a group input after input.

    Args:
        weight: what is to be rounded.
        factor: see `_propagation`.
        size: inputs of a group, G.
        begin: (columns [out, G], the group's number) gives a function (i, column) of the code and the value that column i is rounded to,
            and a tuple of more to return of the group. Columns make up for the errors of those before.
    """

    def group(weight, index):
        at = index * size
        columns = lax.dynamic_slice_in_dim(weight, at, size, axis=1)
        rows = lax.dynamic_slice_in_dim(factor, at, size, axis=0)
        within = lax.dynamic_slice_in_dim(rows, at, size, axis=1)
        rounded, more = begin(columns, index)

        def column(i, carry):
            columns, codes, errors = carry
            code, value = rounded(i, columns[:, i])
            error = (columns[:, i] - value) / within[i, i]
            columns = columns - error[:, None] * jnp.where(jnp.arange(size) > i, within[i], 0)
            return columns, codes.at[:, i].set(code), errors.at[:, i].set(error)

        _, codes, errors = lax.fori_loop(0, size, column, (columns, jnp.zeros_like(columns), jnp.zeros_like(columns)))
        # The groups still to come take over what this one errs.
        later = jnp.where(jnp.arange(weight.shape[1]) >= at + size, rows, 0)
        return weight - jnp.matmul(errors, later, precision=lax.Precision.HIGHEST), (codes, *more)

    _, stacked = lax.scan(group, weight, jnp.arange(weight.shape[1] // size))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), stacked)


def _compensated_int4(
    weight: Float[Array, "out in"], moments: Float[Array, "in in"], counts: Float[Array, "in"], size: int, dtype
) -> tuple:
    """Codes, scale and zero of INT4. For the parameters see `_propagation` and `_compensated`."""
    factor, importance = _propagation(moments, counts)

    def begin(columns, index):
        scale, zero = _fit(columns, lax.dynamic_slice_in_dim(importance, index * size, size), dtype)

        def rounded(i, column):
            code = _round(column, scale[:, 0], zero[:, 0])
            return code, code * scale[:, 0] + zero[:, 0]

        return rounded, (scale, zero)

    return _compensated(weight, factor, size, begin)


def _compensated_nested(
    weight: Float[Array, "out in"], moments: Float[Array, "in in"], counts: Float[Array, "in"], size: int, dtype
) -> tuple:
    """Upper codes within the reach of a lower plane of `FAR_STEPS`; lower ones, which make up for errors of both planes; scale and zero."""
    factor, _ = _propagation(moments, counts)
    below, above = (LOWER_MIDDLE + 0.5) / FAR_STEPS, (15.5 - LOWER_MIDDLE) / FAR_STEPS

    def begin_upper(columns, index):
        own = lax.dynamic_slice_in_dim(weight, index * size, size, axis=1)
        scale, zero = (x[:, 0] for x in _fit_range(own[:, None], dtype))

        def rounded(i, column):
            exact = (own[:, i] - zero[:, 0]) / scale[:, 0]
            code = jnp.clip(_round(column, scale[:, 0], zero[:, 0]), jnp.ceil(exact - above), jnp.floor(exact + below))
            code = jnp.clip(code, 0, 15)
            return code, code * scale[:, 0] + zero[:, 0]

        return rounded, (scale, zero)

    upper, scale, zero = _compensated(weight, factor, size, begin_upper)

    def begin_lower(columns, index):
        steps = scale[:, index] / FAR_STEPS
        values = upper[:, index] * scale[:, index] + zero[:, index]

        def rounded(i, column):
            code = jnp.clip(jnp.rint((column - values[:, i]) / steps[:, 0]) + LOWER_MIDDLE, 0, 15)
            return code, values[:, i] + (code - LOWER_MIDDLE) * steps[:, 0]

        return rounded, ()

    (lower,) = _compensated(weight, factor, size, begin_lower)
    return upper, lower, scale, zero


def is_linear(path: str) -> bool:
    """Whether the weight at a path of the model is one that the draft has in INT4."""
    return path.endswith("_proj.weight")


def quantize_linears(model: Llama) -> Llama:
    """The model with INT4 linear layers; embedding, head, norms, biases and layers in INT4 already are the same arrays, not copies, and of
    nested ones the upper plane is taken."""

    def quantized(path: str, weight: Weight) -> Weight:
        if isinstance(weight, NestedWeight):
            return weight.upper
        return _in_groups(quantize_weight, path, weight) if is_linear(path) and not isinstance(weight, Int4Weight) else weight

    return model.with_weights({path: quantized(path, weight) for path, weight in model.weights().items()})


def nest_weight(path: str, weight: Array) -> Weight:
    """The weight at a path of the model, nested if it is one of a linear layer. Raises InputError where devices would cut its groups."""
    return _in_groups(quantize_nested, path, weight) if is_linear(path) else weight


def nest_linears(model: Llama) -> Llama:
    """The model with nested linear layers; all else is the same arrays, not copies."""
    return model.with_weights({path: nest_weight(path, weight) for path, weight in model.weights().items()})


def _in_groups(quantize: Callable, path: str, weight: Array) -> Weight:
    """The weight at a path of the model, quantized in groups that no device cuts."""
    mesh = mesh_of(weight)
    size = group_size_over(path, weight.shape, None if mesh is None else weight.sharding)
    return divided_over(mesh, _with_size(quantize, size))(weight)


def group_size_over(path: str, shape: tuple[int, int], sharding: NamedSharding | None) -> int:
    """How many inputs share a scale of the weight at a path of the model, so that no group is cut where each device has some of the inputs.

    sharding: of the weight; None on one device. Raises InputError where there is no such size.
    """
    inputs = shape[1] if sharding is None else sharding.shard_shape(shape)[1]
    size = weight_group_size(inputs)
    if inputs < shape[1] and inputs % size:
        raise InputError(
            f"weights in groups over {sharding.mesh.size} devices: {path} has {inputs} inputs on each, no multiple of {size}; use fewer "
            "devices, weights that are not nested, or a draft with weight_bits=16"
        )
    return size


def groups_are_cut(path: str, weight: Int4Weight | NestedWeight, mesh: Mesh) -> bool:
    """Whether inputs of one group of a weight, or of its shapes, would come to lie on several devices."""
    weight = upper_plane(weight)
    divided = MODEL in weight_sharding(path, weight.scale.shape, mesh).spec[1:]
    return divided and bool(weight.padding or weight.scale.shape[1] % mesh.size)


@functools.cache
def _with_size(quantize: Callable, size: int) -> Callable[[Float[Array, "out in"]], Weight]:
    return functools.partial(quantize, group_size=size)


@jax.jit
def quantize_rows(weight: Float[Array, "out in"]) -> Int8Weight:
    """The weight in INT8, with a scale per output that reaches its largest entry."""
    wide = weight.astype(accumulation_dtype(weight.dtype))
    scale = jnp.maximum(jnp.abs(wide).max(-1), jnp.finfo(wide.dtype).tiny * 127) / 127
    return Int8Weight(jnp.rint(wide / scale[:, None]).astype(jnp.int8), scale)


def quantize_embedding(model: Llama) -> Llama:
    """The model with an embedding in INT8, which is its head too where it was before; all else is the same arrays, not copies."""
    if model.checkpoint_config.int8_embedding:
        return model
    table = model.embedding.get_value()
    return model.with_embedding(divided_over(mesh_of(table), quantize_rows)(table))


def quantize_head(model: Llama) -> Llama:
    """The model with a head in INT8, also where its head was the embedding; all else is the same arrays, not copies."""
    if model.checkpoint_config.int8_head:
        return model
    head = (model.embedding if model.head is None else model.head).get_value()
    return model.with_head(divided_over(mesh_of(head), quantize_rows)(head))
