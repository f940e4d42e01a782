"""Attention of rows whose first groups lie in the same pages, which are read once for all of them.

The queries of all rows attend to these groups as if they were the tokens of one row, and each row to the tokens of its own; the two results
are combined by their sums of exponentials.
"""

import dataclasses
import itertools

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention import support
from pallas_kernels.attention.mosaic_gpu import attention_mass, launches, plan_for
from pallas_kernels.attention.mosaic_plan import Plan
from pallas_kernels.dispatch import no_mosaic_gpu
from pallas_kernels.formats.kv_cache import HierarchicalLayer, Lengths
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.formats.views import DenseView, View
from pallas_kernels.gpu.launch import lowered_once


def unsupported(q: Array, layer: Layer, lengths: Lengths, view: View) -> str | None:
    if not support.are_shared(q, layer, view):
        return "reads groups that rows share"
    return no_mosaic_gpu() or support.unsupported(q, layer, lengths, view)


def decode_attention(
    q: Float[Array, "B T N H"], layer: HierarchicalLayer, lengths: Lengths, view: DenseView
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T C"] | None]:
    """See `pallas_kernels.attention.decode_attention`."""
    rows = max(1, support.MAX_TOKENS // q.shape[1])
    parts = [slice(first, first + rows) for first in range(0, q.shape[0], rows)]
    plans = tuple(_with_totals(plan_for(_as_one_row(q[part]), layer, view)) for part in parts)
    # A row's own tokens are few: a block for each row and KV head, or for each multiprocessor, is enough.
    of_own = plan_for(q, layer, view).default()
    out, mass = _run((plans, _with_totals(of_own)), q, lengths, layer)
    return out, mass if view.observed else None


def _with_totals(plan: Plan) -> Plan:
    return dataclasses.replace(plan, totals=True)


def _as_one_row(x: Float[Array, "B T *rest"]) -> Float[Array, "1 BT *rest"]:
    return x.reshape(1, -1, *x.shape[2:])


@lowered_once
def _run(
    plans: tuple[tuple[Plan, ...], Plan], q: Float[Array, "B T N H"], lengths: Lengths, layer: HierarchicalLayer
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T C"]]:
    """plans: of the parts of the batch over the shared groups, and of all rows over their own tokens."""
    of_shared, of_own = plans
    shared, G, C, T = layer.shared_groups[0], layer.group_size, layer.groups, q.shape[1]
    # The kernel finds the pages of its only row at the beginning of the table, and reads nothing of the buffer.
    of_all = Lengths(jnp.reshape(shared * G, 1), jnp.zeros(1, jnp.int32))
    ends = list(itertools.accumulate(plan.tokens // T for plan in of_shared))
    parts = [launches(plan, _as_one_row(q[end - plan.tokens // T : end]), of_all, layer) for plan, end in zip(of_shared, ends, strict=True)]

    def of_rows(name: str) -> Array:
        return jnp.concatenate([part[name].reshape(-1, T, *part[name].shape[2:]) for part in parts])

    # Group c of the row that the kernel sees is group shared + c.
    own_lengths = dataclasses.replace(lengths, quantized=lengths.quantized - shared * G)
    own_layer = dataclasses.replace(layer, pages=layer.pages[:, jnp.minimum(jnp.arange(C) + shared, C - 1)])
    own = launches(of_own, q, own_lengths, own_layer)
    totals = of_rows("everything"), own["everything"]
    top = jnp.maximum(*totals)
    everything = top + jnp.log2(sum(jnp.exp2(total - top) for total in totals))
    weight, own_weight = (jnp.exp2(total - everything).reshape(*q.shape[:3], 1) for total in totals)
    # Over no groups there are no values: what was read then means nothing.
    read = jnp.where(shared > 0, of_rows("merged") * weight, 0)
    out = (read + own["merged"] * own_weight).astype(q.dtype)
    if not of_own.observe:
        return out, jnp.zeros(0, jnp.float32)
    masses = [
        attention_mass(plan, part["observed"], _as_one_row(everything[end - plan.tokens // T : end]), of_all.quantized)
        for plan, part, end in zip(of_shared, parts, ends, strict=True)
    ]
    mass = jnp.concatenate([each.reshape(each.shape[1], -1, T, C).swapaxes(0, 1) for each in masses])
    own_mass = attention_mass(of_own, own["observed"], everything, own_lengths.quantized)
    number = jnp.arange(C)
    return out, jnp.where(number < shared, mass, own_mass[..., jnp.maximum(number - shared, 0)])
