"""Plain JAX attention: runs everywhere, and is what every kernel is tested against.

The cache is read in chunks with a running softmax (flash decoding in series), up to the end of the longest row: logits of bounded size in
prefill, and dequantized keys and values of one chunk at a time, so that nothing of cache size is ever made.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import in_fixed_order
from pallas_kernels.formats.kv_cache import FullLayer, HeldKeys, HierarchicalLayer, Lengths, dequantize_groups
from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.formats.token_codes import FullTokens, Layer, TokenCodesLayer
from pallas_kernels.formats.views import BOTH_PLANES, ChosenTokens, DenseView, ListedGroups, View

CHUNK_TOKENS = 1024
# A full-precision cache is read without a copy where the logits of all its tokens are not more than this.
MAX_LOGITS = 1 << 21
# Tokens of a chunk that does not depend on the cache's capacity.
FIXED_CHUNK_TOKENS = 256

Partial = tuple[Array, Array, Array]  # running maximum [B, K, R], sum of exponentials [B, K, R], weighted values [B, K, R, H]
Load = Callable[[Array | int], tuple[Array, Array, Bool[Array, "B #K #R S"]]]


def decode_attention(
    q: Float[Array, "B T N H"], layer: Layer, lengths: Lengths, view: View
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T C"] | None]:
    (B, T, N, _), K = q.shape, layer.buffer.keys.shape[1]
    rows = _rows(q, K)
    partial, by_group = _full(rows, layer.buffer, lengths.buffered, T), None
    if isinstance(layer, TokenCodesLayer):
        partial = _merge(partial, _coded(rows, layer, lengths.quantized))
    if layer.groups > 0:
        chosen = None if isinstance(view, DenseView | ListedGroups) else _chosen(rows, layer, lengths.quantized, view, partial, T)
        load = _groups(rows, layer, lengths.quantized, view, chosen)
        partial = _merge(partial, _attend(rows, *load))
        by_group = _by_part(rows, *load, parts=layer.groups) if view.observed else None
    top, total, values = partial
    out = _by_query(values / total[..., None], q)
    if not view.observed:
        return out, None
    if by_group is None:
        return out, jnp.zeros((B, K, T, 0), jnp.float32)
    mass = jnp.exp(by_group - (top + jnp.log(total))[..., None])
    return out, mass.reshape(B, K, T, N // K, -1).sum(3).astype(jnp.float32)


def _rows(q: Float[Array, "B T N H"], K: int) -> Float[Array, "B K R H"]:
    """The scaled queries that read a KV head, those of its query heads for each token."""
    B, T, N, H = q.shape
    rows = q.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * (N // K), H)
    # Scaling in the accumulation dtype costs nothing and loses nothing.
    return rows.astype(accumulation_dtype(q.dtype)) * H**-0.5


def _by_query(rows: Float[Array, "B K R H"], q: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Results of `_rows` in the order and dtype of the queries."""
    B, T, N, H = q.shape
    return rows.reshape(B, rows.shape[1], T, -1, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q.dtype)


def _full(rows: Array, layer: FullLayer, length: Int[Array, "B"], T: int) -> Partial:
    capacity = layer.keys.shape[2]
    fixed = in_fixed_order()
    chunk = FIXED_CHUNK_TOKENS if fixed else min(max(CHUNK_TOKENS, MAX_LOGITS // rows.shape[2]), capacity)
    query = jnp.arange(rows.shape[2]) // (rows.shape[2] // T)
    seen = length[:, None] - T + query + 1

    def load(i):
        if fixed:
            token = i * chunk + jnp.arange(chunk)
            return _taken(layer.keys, token), _taken(layer.values, token), (token < seen[..., None])[:, None]
        start = jnp.minimum(i * chunk, capacity - chunk)
        token = start + jnp.arange(chunk)
        # The last chunk is pulled back to end at the capacity: leave out the tokens that the one before it has read.
        visible = (token >= i * chunk) & (token < seen[..., None])
        return _slice(layer.keys, start, chunk), _slice(layer.values, start, chunk), visible[:, None]

    return _attend(rows, load, capacity, chunk, length.max())


def attention_weights(q: Float[Array, "B T N H"], keys: Float[Array, "B K S H"], readable: Bool[Array, "B T S"]) -> Float[Array, "B K R S"]:
    """The share of each key in the attention of each query, 0 for keys that it may not read. R: the query heads of a KV head for each of
    the T tokens, token by token."""
    rows = _rows(q, keys.shape[1])
    return jax.nn.softmax(_logits(rows, keys, jnp.repeat(readable, rows.shape[2] // q.shape[1], axis=1)[:, None]), -1)


def attend_readable(
    q: Float[Array, "B T N H"], layer: FullLayer, readable: Bool[Array, "B T S"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T S"]]:
    """Attention of T tokens, each over the keys and values that it may read, of which there is one at least; and the share of each, summed
    over the query heads of a KV head."""
    (B, T, N, _), K = q.shape, layer.keys.shape[1]
    weights = attention_weights(q, layer.keys, readable)
    # A value that no query may read has a weight of 0, but may be NaN.
    values = jnp.where(readable.any(1)[:, None, :, None], layer.values, 0)
    out = _product("bkrs,bksh->bkrh", weights.astype(values.dtype), values, weights.dtype)
    return _by_query(out, q), weights.reshape(B, K, T, N // K, -1).sum(3)


def attend_replaced(
    q: Float[Array, "B T N H"], layer: TokenCodesLayer, lengths: Lengths, replaced: FullTokens
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S"]]:
    """Attention that reads some tokens in full precision instead of their codes; and the logarithm of the share of each quantized token in
    the last of the T tokens' attention, summed over the query heads of a KV head: minus infinity where there is no token."""
    (B, T, N, _), K = q.shape, layer.buffer.keys.shape[1]
    rows, size, group = _rows(q, K), layer.keys.tokens, N // K
    at = jnp.where(replaced.positions < 0, size, replaced.positions)
    left_out = jax.vmap(jax.vmap(lambda at: jnp.zeros(size, bool).at[at].set(True, mode="drop")))(at)
    there = (replaced.positions >= 0)[:, :, None]
    n = replaced.positions.shape[2]
    partial = _full(rows, layer.buffer, lengths.buffered, T)
    partial = _merge(partial, _attend(rows, lambda _: (replaced.keys, replaced.values, there), n, n, jnp.int32(n)))
    coded = _coded_load(layer, lengths.quantized, rows.dtype, left_out)
    if size:
        partial = _merge(partial, _attend(rows, *coded))
    top, total, values = partial
    out = _by_query(values / total[..., None], q)
    last = rows[:, :, -group:]
    logits = jnp.full((B, K, group, 0), -jnp.inf, rows.dtype) if size == 0 else _by_part(last, *coded, parts=size)
    of_replaced = _logits(last, replaced.keys, there)
    put = jax.vmap(jax.vmap(lambda logits, at, new: logits.at[:, at].set(new, mode="drop")))
    logits = put(logits, at, of_replaced)
    share = logits - (top + jnp.log(total))[:, :, -group:, None]
    return out, jax.nn.logsumexp(share, 2)


def _coded(rows: Array, layer: TokenCodesLayer, length: Int[Array, "B"]) -> Partial:
    if layer.keys.tokens == 0:
        return (jnp.full(rows.shape[:3], -jnp.inf, rows.dtype), jnp.zeros(rows.shape[:3], rows.dtype), jnp.zeros_like(rows))
    return _attend(rows, *_coded_load(layer, length, rows.dtype))


def _coded_load(
    layer: TokenCodesLayer, length: Int[Array, "B"], dtype, left_out: Bool[Array, "B K S"] | None = None
) -> tuple[Load, int, int, Array]:
    """How to load the quantized tokens, chunk by chunk, except those that are left out: see `_attend`."""
    capacity = layer.keys.tokens
    group = max(capacity // x.shape[2] for x in jax.tree.leaves((layer.keys, layer.values)))
    chunk = min(CHUNK_TOKENS - CHUNK_TOKENS % group, capacity)

    def load(i):
        start = jnp.minimum(i * chunk, capacity - chunk)
        token = start + jnp.arange(chunk)
        visible = (token >= i * chunk) & (token < length[:, None])
        # Of entries that several tokens share, such as scales, there are fewer.

        def part(x):
            return _slice(x, start // (capacity // x.shape[2]), chunk * x.shape[2] // capacity)

        def wide(codes):
            return jax.tree.map(part, codes).dequantized(dtype)

        visible = visible[:, None, None]
        if left_out is not None:
            visible = visible & ~_slice(left_out, start, chunk)[:, :, None]
        return wide(layer.keys), wide(layer.values), visible

    return load, capacity, chunk, length.max()


def _groups(
    rows: Array, layer: HierarchicalLayer, length: Int[Array, "B"], view: View, chosen: Bool[Array, "B K #R S"] | None = None
) -> tuple[Load, int, int, Array]:
    """How to load the tokens of the quantized region that a view reads, chunk by chunk: see `_attend`. chosen: of these; None: all."""
    G, listed = layer.group_size, isinstance(view, ListedGroups)
    groups = view.groups.shape[2] if listed else layer.groups
    count = jnp.clip(view.count, 0, groups) if listed else (length // G)[:, None]
    fixed = in_fixed_order()
    chunk = max(1, FIXED_CHUNK_TOKENS // G) if fixed else min(max(1, CHUNK_TOKENS // G), groups)

    def load(i):
        start = i * chunk if fixed else jnp.minimum(i * chunk, groups - chunk)
        group = start + jnp.arange(chunk)
        visible = (group >= i * chunk) & (group < count[..., None])

        def take(x):
            return _taken(x, group) if fixed else _slice(x, start, chunk)

        if listed or layer.pages is not None:
            # Numbers after the count may be of no group. They are weighted with 0, and must not be read as NaN.
            numbers = jnp.clip(take(view.groups), 0, layer.groups - 1) if listed else group[None, None]
            places = layer.places(numbers)

            def take(x):
                return x.at[places].get(mode="promise_in_bounds")

        k, v = dequantize_groups(*jax.tree.map(take, (layer.keys, layer.values)), planes=view.planes, dtype=rows.dtype)

        def merge(x):
            return x.reshape(*x.shape[:2], chunk * G, x.shape[-1])

        visible = jnp.repeat(visible, G, axis=-1)[:, :, None]
        if chosen is not None:
            token = start * G + jnp.arange(chunk * G)
            visible &= jnp.take(chosen, token, axis=3, mode="clip")  # in a fixed order the last chunk extends beyond the end
        return merge(k), merge(v), visible

    return load, groups * G, chunk * G, count.max() * G


def _chosen(
    rows: Array, layer: HierarchicalLayer, length: Int[Array, "B"], view: View, buffered: Partial, T: int
) -> Bool[Array, "B K #R S"]:
    """Which tokens of the quantized region a view reads. buffered: what the rows read of the buffer."""
    G, number = layer.group_size, jnp.arange(layer.groups)
    there = jnp.repeat(number < (length // G)[:, None], G, axis=-1)[:, None, None]
    if isinstance(view, DenseView):
        return there
    if isinstance(view, ListedGroups):
        listed = jnp.arange(view.groups.shape[2]) < view.count[..., None]
        found = ((view.groups[..., None] == number) & listed[..., None]).any(2)
        return there & jnp.repeat(found, G, axis=-1)[:, :, None]
    if isinstance(view, ChosenTokens):
        return there & view.chosen[:, :, None]
    parts = layer.groups * (1 if view.whole_groups else G)
    mass = _by_part(rows, *_groups(rows, layer, length, DenseView(view.planes)), parts=parts)
    everything = jnp.logaddexp(jax.nn.logsumexp(mass, -1), buffered[0] + jnp.log(buffered[1]))
    # In logarithms, in which no mass is too small to be ranked.
    by_query = (mass - everything[..., None]).reshape(*mass.shape[:2], T, -1, parts)
    score = jax.nn.logsumexp(by_query, 3)
    last = jnp.maximum(jnp.minimum(view.count, parts) - 1, 0)[:, None, None, None]
    lowest = jnp.take_along_axis(jnp.sort(score, -1, descending=True), last, -1)
    largest = (score >= lowest) & (view.count > 0)[:, None, None, None]
    return there & jnp.repeat(jnp.repeat(largest, layer.groups * G // parts, axis=-1), by_query.shape[3], axis=2)


def covered(q: Float[Array, "B T N H"], layer: HierarchicalLayer, lengths: Lengths, choice: View | HeldKeys) -> Float[Array, "B T"]:
    """The share of attention over everything cached that the tokens get that a draft reads, the mean over all query heads.

    A view chooses by what it reads itself; its choice is weighed with the attention that both planes get.

    Args:
        q, layer, lengths: see `pallas_kernels.attention.decode_attention`.
        choice: what the draft reads.
    """
    (B, T), rows = q.shape[:2], _rows(q, layer.buffer.keys.shape[1])
    buffered = _full(rows, layer.buffer, lengths.buffered, T)
    everything, left_out = buffered[0] + jnp.log(buffered[1]), jnp.zeros(rows.shape[:3], rows.dtype)
    if layer.groups:
        logits = _by_part(rows, *_groups(rows, layer, lengths.quantized, BOTH_PLANES), parts=layer.groups * layer.group_size)
        everything = jnp.logaddexp(everything, jax.nn.logsumexp(logits, -1))
        if not isinstance(choice, HeldKeys):
            chosen = _chosen(rows, layer, lengths.quantized, choice, buffered, T)
            left_out = jnp.where(chosen, 0, jnp.exp(logits - everything[..., None])).sum(-1)
    if isinstance(choice, HeldKeys):
        own = lengths.buffered[:, None] - T + jnp.arange(T)  # this round's tokens, of which a draft has those before its query
        keys = jnp.take_along_axis(layer.buffer.keys, own[:, None, :, None], 2)
        before = jnp.repeat(jnp.tri(T, dtype=bool), rows.shape[2] // T, axis=0)[None, None]
        held = jnp.arange(choice.keys.shape[2]) < choice.count[:, None, None, None]
        logits = [_logits(rows, choice.keys.astype(keys.dtype), held), _logits(rows, keys, before)]
        left_out = 1 - jnp.exp(jax.nn.logsumexp(jnp.concatenate(logits, -1), -1) - everything)
    return 1 - left_out.reshape(B, -1, T, rows.shape[2] // T).mean((1, 3)).astype(jnp.float32)


def _attend(rows: Array, load: Load, capacity: int, chunk: int, length: Int[Array, ""]) -> Partial:
    """What `rows` read of the first `length` of `capacity` tokens, of which load(i) gives the i-th chunk."""

    def step(i, partial: Partial) -> Partial:
        keys, values, visible = load(i)
        logits = _logits(rows, keys, visible)
        top = logits.max(-1)
        weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0)[..., None])
        read = _product("bkrs,bksh->bkrh", weights.astype(values.dtype), values, rows.dtype)
        return _merge(partial, (top, weights.sum(-1), read))

    empty = (jnp.full(rows.shape[:3], -jnp.inf, rows.dtype), jnp.zeros(rows.shape[:3], rows.dtype), jnp.zeros_like(rows))
    if capacity <= chunk and not in_fixed_order():
        return step(0, empty)
    return lax.fori_loop(0, (length + chunk - 1) // chunk, step, empty)


def _by_part(rows: Array, load: Load, capacity: int, chunk: int, length: Int[Array, ""], *, parts: int) -> Float[Array, "B K R P"]:
    """The logarithm of the sum of exponentials of the logits in each of `parts` equal parts; -inf where nothing of it is read."""
    size, fixed = capacity // parts, in_fixed_order()

    def step(i, found: Array) -> Array:
        keys, _, visible = load(i)
        logits = _logits(rows, keys, visible)
        sums = jax.nn.logsumexp(logits.reshape(*logits.shape[:3], chunk // size, size), -1)
        start = (i * chunk if fixed else jnp.minimum(i * chunk, capacity - chunk)) // size
        old = lax.dynamic_slice_in_dim(found, start, chunk // size, axis=3)
        return lax.dynamic_update_slice_in_dim(found, jnp.maximum(old, sums), start, axis=3)

    room = -(-capacity // chunk) * chunk // size if fixed else parts  # chunks are not pulled back to end at the capacity
    empty = jnp.full((*rows.shape[:3], room), -jnp.inf, rows.dtype)
    return lax.fori_loop(0, (length + chunk - 1) // chunk, step, empty)[..., :parts]


def _logits(rows: Array, keys: Array, visible: Bool[Array, "#B #K #R S"]) -> Float[Array, "B K R S"]:
    logits = _product("bkrh,bksh->bkrs", rows.astype(keys.dtype), keys, rows.dtype)
    return jnp.where(visible, logits, -jnp.inf)


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


def _taken(x: Array, numbers: Int[Array, "n"]) -> Array:
    """The entries of axis 2 with these numbers; for one beyond the end the last entry."""
    return jnp.take(x, numbers, axis=2, mode="clip")


def _product(letters: str, a: Array, b: Array, dtype) -> Array:
    # HIGHEST: a GPU would otherwise round float32 operands to tf32.
    return jnp.einsum(letters, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
