"""Plain JAX attention: runs everywhere, and is what every kernel is tested against.

The cache is read in chunks with a running softmax (flash decoding in series), as many as the longest row fills: logits of
bounded size in prefill, and dequantized keys and values of one chunk at a time, so that nothing of cache size is ever made.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, Planes, dequantize_groups
from pallas_kernels.formats.rounding import accumulation_dtype

CHUNK_TOKENS = 1024
# A full-precision cache is read without a copy where the logits of all its tokens are no more than this.
MAX_LOGITS = 1 << 21

Partial = tuple[Array, Array, Array]  # running maximum [B, K, R], sum of exponentials [B, K, R], weighted values [B, K, R, H]
Load = Callable[[Array | int], tuple[Array, Array, Bool[Array, "B #R S"]]]


def decode_attention(
    q: Float[Array, "B T N H"], layer: HierarchicalLayer | FullLayer, lengths: Lengths, *, planes: int | None
) -> Float[Array, "B T N H"]:
    """See `pallas_kernels.attention.decode_attention`."""
    B, T, N, H = q.shape
    buffer = layer if isinstance(layer, FullLayer) else layer.buffer
    K = buffer.keys.shape[1]
    rows = q.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * (N // K), H)
    # Scaling in the accumulation dtype costs nothing and loses nothing.
    rows = rows.astype(accumulation_dtype(q.dtype)) * H**-0.5

    partial = _full(rows, buffer, lengths.buffered, T)
    if isinstance(layer, HierarchicalLayer) and layer.groups > 0:
        partial = _merge(partial, _quantized(rows, layer, lengths.quantized, planes))
    _, total, values = partial
    out = (values / total[..., None]).reshape(B, K, T, N // K, H)
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q.dtype)


def _full(rows: Array, layer: FullLayer, length: Int[Array, "B"], T: int) -> Partial:
    capacity = layer.keys.shape[2]
    chunk = min(max(CHUNK_TOKENS, MAX_LOGITS // rows.shape[2]), capacity)
    query = jnp.arange(rows.shape[2]) // (rows.shape[2] // T)
    seen = length[:, None] - T + query + 1

    def load(i):
        start = jnp.minimum(i * chunk, capacity - chunk)
        token = start + jnp.arange(chunk)
        # The last chunk is pulled back to end at the capacity: leave out what the one before it has read.
        visible = (token >= i * chunk) & (token < seen[..., None])
        return _slice(layer.keys, start, chunk), _slice(layer.values, start, chunk), visible

    return _attend(rows, load, capacity, chunk, length)


def _quantized(rows: Array, layer: HierarchicalLayer, length: Int[Array, "B"], planes: int | None) -> Partial:
    groups, G = layer.groups, layer.group_size
    chunk = min(max(1, CHUNK_TOKENS // G), groups)

    def load(i):
        start = jnp.minimum(i * chunk, groups - chunk)
        token = start * G + jnp.arange(chunk * G)
        visible = (token >= i * chunk * G) & (token < length[:, None])
        part = [Planes(*(_slice(x, start, chunk) for x in (p.upper, p.lower, p.scale, p.zero))) for p in (layer.keys, layer.values)]
        k, v = dequantize_groups(*part, planes=planes, dtype=rows.dtype)
        merge = lambda x: x.reshape(*x.shape[:2], chunk * G, x.shape[-1])
        return merge(k), merge(v), visible[:, None]

    return _attend(rows, load, groups * G, chunk * G, length)


def _attend(rows: Array, load: Load, capacity: int, chunk: int, length: Int[Array, "B"]) -> Partial:
    def step(i, partial: Partial) -> Partial:
        keys, values, visible = load(i)
        logits = _product("bkrh,bksh->bkrs", rows.astype(keys.dtype), keys, rows.dtype)
        logits = jnp.where(visible[:, None], logits, -jnp.inf)
        top = logits.max(-1)
        weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0)[..., None])
        read = _product("bkrs,bksh->bkrh", weights.astype(values.dtype), values, rows.dtype)
        return _merge(partial, (top, weights.sum(-1), read))

    empty = (jnp.full(rows.shape[:3], -jnp.inf, rows.dtype), jnp.zeros(rows.shape[:3], rows.dtype), jnp.zeros_like(rows))
    if capacity <= chunk:
        return step(0, empty)
    return lax.fori_loop(0, (length.max() + chunk - 1) // chunk, step, empty)


def _merge(a: Partial, b: Partial) -> Partial:
    """Merges two partial softmaxes; either may be empty (maximum -inf)."""
    top = jnp.maximum(a[0], b[0])
    finite = jnp.where(jnp.isfinite(top), top, 0)
    wa, wb = jnp.exp(a[0] - finite), jnp.exp(b[0] - finite)
    return top, a[1] * wa + b[1] * wb, a[2] * wa[..., None] + b[2] * wb[..., None]


def _slice(x: Array, start: Array | int, size: int) -> Array:
    if size == x.shape[2]:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _product(letters: str, a: Array, b: Array, dtype) -> Array:
    # HIGHEST: a GPU would otherwise round float32 operands to tf32.
    return jnp.einsum(letters, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
