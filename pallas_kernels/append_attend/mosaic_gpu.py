"""RoPE, append and attention on NVIDIA Hopper in the launch of attention (pallas_kernels/attention/mosaic_append.py)."""

import dataclasses

from jaxtyping import Array, Float

from pallas_kernels.append_attend.arguments import AppendAttendArguments
from pallas_kernels.attention import mosaic_gpu as attention
from pallas_kernels.attention.mosaic_plan import Config
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer
from pallas_kernels.rope_append import mosaic_gpu as rope_append


def unsupported(args: AppendAttendArguments) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if not isinstance(args.layer, HierarchicalLayer | FullLayer):
        return "reads groups, and does not support TokenCodesLayer"
    if reason := attention.unsupported(args.of_attention) or rope_append.unsupported(args.of_append):
        return reason
    separate, fused = (attention.plan_for(args.of_attention, appends=appends) for appends in (False, True))
    if dataclasses.replace(fused, appends=False) != separate or fused.slots < separate.slots:
        return "would have fewer slots of the ring than separate launches"
    return None


def append_and_attend(
    args: AppendAttendArguments, *, config: Config | None = None
) -> tuple[Float[Array, "B T N H"], HierarchicalLayer | FullLayer, Float[Array, "B K T C"] | None]:
    """See `pallas_kernels.append_attend.append_and_attend`. Raises ValueError for a configuration that cannot work."""
    qkv, cos, sin, layer, lengths, view = args
    plan = attention.plan_for(args.of_attention, appends=True, config=config)
    angles = cos.astype(qkv.dtype), sin.astype(qkv.dtype)
    attended, mass, buffer = attention.run(plan, qkv, lengths, layer, view if plan.list_width else None, angles)
    return attended, layer.with_buffer(buffer), mass if view.observed else None
