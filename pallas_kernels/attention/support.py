"""Arguments that the GPU kernels of decode attention support, and how lists of groups enter their tuning."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.formats.kv_cache import HierarchicalLayer, Lengths
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.formats.views import ChosenTokens, DenseView, LargestMass, ListedGroups, View

MAX_TOKENS = 128  # of a row
MAX_ROUND_TOKENS = 16  # of a row in a verification: for these the time is known (`qspec_jax.planning`)
# In a fixed order, a pass over a full-precision cache gives the same bits to tokens up to the next multiple of these after its first token:
# attention divides a row up to there.
PASS_SPAN = 512
MAX_SHARING_ROWS = 16  # query rows of a KV head, of one row of the batch, for which groups that rows share are read once
HEAD_DIMS = (64, 128, 256)
GROUP_SIZES = (64, 128)


def unsupported(q: Array, layer: Layer, lengths: Lengths, view: View) -> str | None:
    """Why no GPU kernel takes these arguments, or None. They read memory by its bytes: every dtype counts."""
    arrays = [q, layer.buffer.keys, layer.buffer.values]
    if isinstance(layer, HierarchicalLayer):
        arrays += [x for planes in (layer.keys, layer.values) for x in (planes.scale, planes.zero)]
    if isinstance(view, ChosenTokens | LargestMass):
        return "reads all tokens of a group, and chooses none"
    if reason := unsupported_queries(arrays, lengths):
        return reason
    if isinstance(view, ListedGroups) and {view.groups.dtype, view.count.dtype} != {jnp.dtype(jnp.int32)}:
        return f"needs lists and counts of groups in int32, not {view.groups.dtype} and {view.count.dtype}"
    if layer.groups and layer.group_size not in GROUP_SIZES:
        return f"supports groups of 64 and 128 tokens, not {layer.group_size}"
    return None


def unsupported_queries(arrays: list[Array], lengths: Lengths) -> str | None:
    """Why no GPU kernel takes these queries, whatever the format of the cache, or None. arrays: q, and all others of its dtype."""
    q = arrays[0]
    if others := {x.dtype.name for x in arrays} - {"bfloat16"}:
        return f"needs queries and a cache in bfloat16, not {', '.join(sorted(others))}"
    if {lengths.quantized.dtype, lengths.buffered.dtype} != {jnp.dtype(jnp.int32)}:
        return f"needs lengths in int32, not {lengths.quantized.dtype} and {lengths.buffered.dtype}"
    if q.shape[1] > MAX_TOKENS:
        return f"supports up to {MAX_TOKENS} tokens a row, not {q.shape[1]}"
    if q.shape[3] not in HEAD_DIMS:
        return f"supports head_dim 64, 128 and 256, not {q.shape[3]}"
    return None


def are_shared(q: Array, layer: Layer, view: View) -> bool:
    """Whether groups that all rows share are read once for all: where each row has so few queries that the arithmetic of several rows takes
    no longer than reading the groups for each."""
    if not isinstance(layer, HierarchicalLayer) or layer.shared_groups is None or not isinstance(view, DenseView):
        return False
    return q.shape[1] * (q.shape[2] // layer.buffer.keys.shape[1]) <= MAX_SHARING_ROWS


def listed_problem(width: int | None) -> dict[str, int]:
    """The part that lists of groups add to the problem that a best configuration is kept for: their width, rounded up to a power of two.

    A short list is another problem than a long cache, as a warp then has a step or two. width: None where all groups are read, which adds
    nothing.
    """
    return {} if width is None else {"list_width": 1 << (width - 1).bit_length()}
