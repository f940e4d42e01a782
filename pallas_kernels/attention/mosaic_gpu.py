"""Decode attention on NVIDIA Hopper in Pallas Mosaic GPU: split over the tokens, read at the speed of the memory.

A team of warps owns a run of groups and a softmax of its own, so that no team waits for another; the partial results are merged once at
the end. The cache streams through a ring in shared memory, keys and values in turn. Codes become floats in registers, where they are the
first operand of the tensor cores (16 tokens or channels a tile); the queries, or their softmax weights, are the second (8 rows a tile). So
the keys' scales multiply queries, and the values' scales weights, 8 rows at a time.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import mosaic_low_bits, support
from pallas_kernels.attention.mosaic_plan import KERNEL, ROWS, WARPS, Config, Plan
from pallas_kernels.dispatch import in_fixed_order, no_mosaic_gpu
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.token_codes import Layer, TokenCodesLayer
from pallas_kernels.formats.views import ListedGroups, View
from pallas_kernels.gpu.launch import launch, lowered_once

MAX_ROWS = 64, 32, 16, 8  # query rows of a block; another block, which reads the cache again, takes the rest


def unsupported(q: Array, layer: Layer, lengths: Lengths, view: View) -> str | None:
    if isinstance(layer, TokenCodesLayer):
        return "does not support TokenCodesLayer" if in_fixed_order() else mosaic_low_bits.unsupported(q, layer, lengths)
    if reason := no_mosaic_gpu() or support.unsupported(q, layer, lengths, view):
        return reason
    if in_fixed_order() and isinstance(layer, HierarchicalLayer) and not layer.groups:  # which would be read in the runs of a `FullLayer`
        return "needs a layer with room for at least one group"
    return "reads the groups of each row for itself" if support.are_shared(q, layer, view) else None


def decode_attention(
    q: Float[Array, "B T N H"], layer: Layer, lengths: Lengths, view: View, *, config: Config | None = None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T C"] | None]:
    """See `pallas_kernels.attention.decode_attention`. config: of anything but a `TokenCodesLayer`.

    Raises ValueError for a configuration that cannot work.
    """
    if isinstance(layer, TokenCodesLayer):
        return mosaic_low_bits.decode_attention(q, layer, lengths), None
    plan = plan_for(q, layer, view, config=config)
    out, mass, _ = run(plan, q, lengths, layer, view if plan.list_width else None)
    return out, mass if view.observed else None


def plan_for(
    q: Array | jax.ShapeDtypeStruct,
    layer: Layer,
    view: View,
    *,
    appends: bool = False,
    config: Config | None = None,
) -> Plan:
    """The kernel for these shapes. Raises ValueError for a configuration that cannot work."""
    B, T, N, H = q.shape
    K, buffer_rows = layer.buffer.keys.shape[1:3]
    R = T * (N // K)
    list_width = view.groups.shape[2] if isinstance(view, ListedGroups) else None
    quantized = layer.groups > 0
    shapes = functools.partial(
        Plan,
        batch=B,
        kv_heads=K,
        tokens=T,
        heads_per_kv_head=N // K,
        head_dim=H,
        group_size=layer.group_size if quantized else 0,
        groups=layer.groups,
        buffer_rows=buffer_rows,
        planes=view.planes if quantized else None,
        list_width=list_width if quantized else None,
        observe=view.observed and quantized,
        appends=appends,
        paged=quantized and layer.pages is not None,
        fixed_runs=in_fixed_order(),
    )
    # The most query rows in a block that leave room for the ring.
    for max_rows in MAX_ROWS:
        blocks = math.ceil(R / max_rows)
        plan = shapes(blocks_of_rows=blocks, block_tiles=math.ceil(R / blocks / ROWS))
        if plan.default().slots >= 3:
            break
    return plan.configured(config).with_room()


def tunable(q: Array, layer: Layer, lengths: Lengths, view: View) -> tuple[str, dict, list[Config]]:
    """The kernel, the problem, and the configurations to measure, the default first, for `tuning`."""
    plan = plan_for(q, layer, view)
    return KERNEL, plan.problem, [candidate.config for candidate in plan.candidates()]


@lowered_once
def run(
    plan: Plan, q: Array, lengths: Lengths, layer: HierarchicalLayer | FullLayer, *more: ListedGroups | tuple[Array, Array] | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T C"], FullLayer]:
    """The values read, the attention mass (of no groups where it is not observed), and the buffer. more: the other arguments of
    `launches`."""
    found = launches(plan, q, lengths, layer, *more)
    buffer = FullLayer(found["keys"], found["values"]) if plan.appends else layer.buffer
    if not plan.observe:
        return found["merged"], jnp.zeros((plan.batch, plan.kv_heads, plan.tokens, 0), jnp.float32), buffer
    return found["merged"], attention_mass(plan, found["observed"], found["everything"], lengths.quantized), buffer


def launches(
    plan: Plan,
    q: Array,
    lengths: Lengths,
    layer: HierarchicalLayer | FullLayer,
    lists: ListedGroups | None = None,
    angles: tuple[Array, Array] | None = None,
) -> dict[str, Array]:
    """A launch for the partial results of teams, and one that merges them.

    Args:
        q: the queries, or where the plan appends the projections [B T channels], where a single row may have more tokens, which are passed
            over.
        lengths: where the plan appends, those before the new tokens.
        lists: the groups to read; None: all.
        angles: cosines and sines in bfloat16, where the plan appends.

    Returns:
        By name: "merged", the values read [B T N H], with all tokens of `q`, in float32 where the plan finds totals; where it appends,
        "keys" and "values" of the buffer; where it finds totals or observes, "everything", and where it observes, "observed", see
        `attention_mass`.
    """
    from pallas_kernels.attention import mosaic_blocks

    buffer = layer.buffer
    # How much there is to read in each row.
    sizes = {"quantized": lengths.quantized, "buffered": lengths.buffered}
    if lists is not None:
        sizes["count"] = lists.count
    inputs, updated = {"q": q, **sizes}, {"keys": buffer.keys, "values": buffer.values}
    if plan.appends:
        inputs["cos"], inputs["sin"] = angles
    else:
        inputs, updated = inputs | updated, {}
    if lists is not None:
        inputs["listed"] = lists.groups
    if plan.paged:
        inputs["pages"] = layer.pages
    if plan.planes is not None:
        for name, planes in ("key", layer.keys), ("value", layer.values):
            inputs |= {f"{name}_upper": planes.upper, f"{name}_scale": planes.scale, f"{name}_zero": planes.zero}
            if plan.planes == 2:
                inputs[f"{name}_lower"] = planes.lower
    blocks_of_heads = plan.kv_heads * plan.blocks_of_rows
    partials = plan.batch * plan.max_partials if plan.fixed_runs else plan.splits * plan.teams
    lead = (blocks_of_heads, partials, plan.block_rows)

    def numbers(**shapes):
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    partial = numbers(out=(*lead, plan.head_dim), top=lead, total=lead)
    shape = *q.shape[:2], plan.kv_heads * plan.heads_per_kv_head, plan.head_dim
    merged = {"merged": jax.ShapeDtypeStruct(shape, jnp.float32 if plan.totals else q.dtype)}
    observed = {}
    if plan.observe or plan.totals:
        merged |= numbers(everything=(plan.batch, plan.tokens, plan.kv_heads, plan.heads_per_kv_head))
    if plan.observe:
        observed = numbers(observed=(plan.batch, plan.kv_heads, plan.groups, plan.padded_rows))
    name = f"decode_attention_{'full' if plan.planes is None else f'int{4 * plan.planes}'}"
    name += "_listed" * (lists is not None) + "_observed" * plan.observe + "_appended" * plan.appends + "_paged" * plan.paged
    emit = functools.partial(mosaic_blocks.emit_block, plan)
    blocks = blocks_of_heads * plan.splits
    found = launch(name, emit, inputs, partial | observed, blocks, plan.config.warpgroups, plan.shared_bytes, updated)
    shared = 4 * WARPS * (plan.head_dim + 1)
    rows = plan.batch * plan.tokens * plan.kv_heads * plan.heads_per_kv_head
    emit = functools.partial(mosaic_blocks.emit_merge, plan)
    return found | launch("merge_attention", emit, {name: found[name] for name in partial} | sizes, merged, rows, 1, shared)


def attention_mass(
    plan: Plan, observed: Float[Array, "B K C R"], everything: Float[Array, "B T K N"], quantized: Int[Array, "B"]
) -> Float[Array, "B K T C"]:
    """Each group's share of a query token's attention, summed over the query heads of a KV head; 0 for groups that are not quantized yet.

    Args:
        observed: the logarithm (base 2) of each group's sum of exponentials, for the R padded query rows of a KV head.
        everything: the same of all that a query reads, for the N query heads of a KV head.
    """
    by_group = observed[..., : plan.rows].reshape(*observed.shape[:3], plan.tokens, plan.heads_per_kv_head)
    shares = jnp.exp2(by_group - everything.transpose(0, 2, 1, 3)[:, :, None])
    # The kernel has not written groups that are not there. No reduction over the heads: XLA can do additions for all layers in one launch.
    there = jnp.arange(plan.groups) < (quantized // plan.group_size)[:, None]
    shares = jnp.where(there[:, None, :, None, None], shares, 0)
    return sum(shares[..., head] for head in range(plan.heads_per_kv_head)).swapaxes(2, 3)
