"""INT4 weights of the draft: round to nearest in groups along the input, with a search for the range that errs least."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.kv_format import accumulation_dtype, pack, parameter_dtype, round_down, round_up
from pallas_kernels.weight_format import Int4Weight
from qspec_jax.model import Llama, Weight

GROUP_SIZES = (128, 64, 32)
# Share of the group's range that is kept; what lies outside is clipped.
CLIP_RATIOS = tuple(1 - i / 32 for i in range(17))
REFITS = 2


def weight_group_size(in_features: int) -> int:
    """128 inputs to a group, or 64 or 32 where that divides and 128 does not; otherwise 32, the last group padded."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), GROUP_SIZES[-1])


@functools.partial(jax.jit, static_argnames="group_size")
def quantize_weight(weight: Float[Array, "out in"], *, group_size: int | None = None) -> Int4Weight:
    """The weight in INT4 with a scale and a zero per group.

    For each group every ratio of CLIP_RATIOS is tried, each refined by least squares (codes fixed, best scale and zero; then codes
    again), and the one of least squared error is kept: never worse than plain rounding over the full range.
    """
    out_features, in_features = weight.shape
    size = group_size or weight_group_size(in_features)
    wide = weight.astype(accumulation_dtype(weight.dtype))
    # Padding by the last column leaves each group's range alone.
    groups = jnp.pad(wide, ((0, 0), (0, -in_features % size)), mode="edge").reshape(out_features, -1, size)
    dtype = parameter_dtype(weight.dtype)
    middle = (groups.max(-1, keepdims=True) + groups.min(-1, keepdims=True)) / 2
    half = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / 2

    def keep_better(best, scale, zero):
        # Scales and zeros are judged as stored.
        scale, zero = round_up(jnp.maximum(scale, jnp.finfo(dtype).tiny), dtype), round_down(zero, dtype)
        codes = jnp.clip(jnp.rint((groups - zero) / scale), 0, 15)
        error = jnp.square(codes * scale + zero - groups).sum(-1, keepdims=True)
        best = jax.tree.map(lambda old, new: jnp.where(error < best[0], new, old), best, (error, codes, scale, zero))
        return best, codes

    def attempt(i, best):
        kept = half * jnp.asarray(CLIP_RATIOS, groups.dtype)[i]
        best, codes = keep_better(best, 2 * kept / 15, middle - kept)
        for _ in range(REFITS):
            mean, target = codes.mean(-1, keepdims=True), groups.mean(-1, keepdims=True)
            spread = jnp.square(codes - mean).sum(-1, keepdims=True)
            scale = ((codes - mean) * (groups - target)).sum(-1, keepdims=True) / jnp.maximum(spread, 1)
            best, codes = keep_better(best, scale, target - scale * mean)
        return best

    nothing = (jnp.full_like(middle, jnp.inf), jnp.zeros_like(groups), jnp.ones_like(middle), jnp.zeros_like(middle))
    _, codes, scale, zero = lax.fori_loop(0, len(CLIP_RATIOS), attempt, nothing)
    return Int4Weight(pack(codes.astype(jnp.uint8), -1), scale[..., 0].astype(dtype), zero[..., 0].astype(dtype), in_features)


def quantize_linears(model: Llama) -> Llama:
    """The model with INT4 linear layers; embedding, head, norms and biases are the same arrays, not copies."""
    weights = model.weights()

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        return quantize_weight(weights[path]) if path.endswith("_proj.weight") else weights[path]

    return Llama(model.config, make)
