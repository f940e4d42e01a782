"""RoPE, append and attention on NVIDIA Hopper in the launch of attention (pallas_kernels/attention/mosaic_append.py)."""

import dataclasses

import jax
from jaxtyping import Array, Float

from pallas_kernels.attention import mosaic_gpu as attention
from pallas_kernels.attention.mosaic_plan import ENOUGH_SLOTS, Config
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.formats.views import View
from pallas_kernels.rope_append import mosaic_gpu as rope_append


def unsupported(qkv: Array, cos: Array, sin: Array, layer: Layer, lengths: Lengths, view: View) -> str | None:
    if not isinstance(layer, HierarchicalLayer | FullLayer):
        return "reads groups, and does not support TokenCodesLayer"
    if qkv.shape[0] > 1 and qkv.shape[1] > cos.shape[1]:
        return "takes tokens that are passed over after those of a single row, not of several"
    q = _queries(qkv, layer, cos.shape[1])
    reason = attention.unsupported(q, layer, lengths, view)
    if reason := reason or rope_append.unsupported(qkv, cos, sin, layer.buffer, lengths.buffered):
        return reason
    separate, fused = (attention.plan_for(q, layer, view, appends=appends) for appends in (False, True))
    if dataclasses.replace(fused, appends=False) != separate or fused.slots < min(separate.slots, ENOUGH_SLOTS):
        return f"would have another configuration than attention alone, or fewer than {ENOUGH_SLOTS} slots of the ring where that has more"
    return None


def append_and_attend(
    qkv: Array, cos: Array, sin: Array, layer: Layer, lengths: Lengths, view: View, *, config: Config | None = None
) -> tuple[Float[Array, "B filled N H"], HierarchicalLayer | FullLayer, Float[Array, "B K T C"] | None]:
    """See `pallas_kernels.append_attend.append_and_attend`. Raises ValueError for a configuration that cannot work."""
    plan = attention.plan_for(_queries(qkv, layer, cos.shape[1]), layer, view, appends=True, config=config)
    angles = cos.astype(qkv.dtype), sin.astype(qkv.dtype)
    attended, mass, buffer = attention.run(plan, qkv, lengths, layer, view if plan.list_width else None, angles)
    return attended, layer.with_buffer(buffer), mass if view.observed else None


def _queries(qkv: Array, layer: Layer, tokens: int) -> jax.ShapeDtypeStruct:
    """The shape of these tokens' queries after RoPE."""
    _, K, _, H = layer.buffer.keys.shape
    return jax.ShapeDtypeStruct((qkv.shape[0], tokens, qkv.shape[2] // H - 2 * K, H), qkv.dtype)
