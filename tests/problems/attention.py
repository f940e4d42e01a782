"""Random problems of decode attention that all its tests share."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, Planes
from pallas_kernels.formats.views import ListedGroups


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one problem; rows of a batch differ in their lengths, which `lengths` gives in groups and buffered tokens."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    group_size: int = 16
    capacity: int = 5
    groups: tuple[int, ...] = (0, 1, 3, 5, 5, 2)

    @property
    def buffer_rows(self) -> int:
        return 2 * self.group_size + self.tokens

    @property
    def buffered(self) -> tuple[int, ...]:
        """From T alone to all that a round can hold: 2G - 1 tokens before it and its T; six rows, again and again."""
        T, G = self.tokens, self.group_size
        six = (T, G + T, 2 * G - 1 + T, T, 2 * G - 1 + T, G - 1 + T)
        return tuple(itertools.islice(itertools.cycle(six), len(self.groups)))

    @property
    def lengths(self) -> Lengths:
        return Lengths(jnp.array(self.groups, jnp.int32) * self.group_size, jnp.array(self.buffered, jnp.int32))

    def attended(self, layer: HierarchicalLayer, planes: int | None) -> tuple[HierarchicalLayer | FullLayer, Lengths]:
        """What there is to attend to: everything, or for planes None the buffer as a cache of its own."""
        if planes is not None:
            return layer, self.lengths
        return layer.buffer, dataclasses.replace(self.lengths, quantized=jnp.zeros_like(self.lengths.quantized))


def random_problem(case: Case, dtype: str, data: str = "gaussian") -> tuple[jax.Array, HierarchicalLayer]:
    """Queries, and a layer in which every group and buffer row is filled, also beyond the lengths."""
    r = np.random.default_rng(case.tokens * case.head_dim)
    B, K, H, G = len(case.groups), case.kv_heads, case.head_dim, case.group_size
    channel, token = np.ones(H), np.ones((case.capacity + 1, G))
    if data == "outliers":  # loud channels of keys, as models with rotary positions have them, and loud tokens of values
        channel[::13] = 30
        token[:, ::11] = 50
    q = r.standard_normal((B, case.tokens, case.heads, H)) * (20 if data == "peaked" else 1)
    lift = 0
    if data == "far below":  # every logit about -2000
        q, lift = q + 5, -2000 / 5 / np.sqrt(H)

    def planes(codes: tuple[int, ...], loud: np.ndarray, lift: float = 0) -> Planes:
        lead = (B, K, case.capacity)
        upper, lower = r.integers(0, 256, (2, *lead, *codes), np.uint8)
        scale = r.uniform(0.1, 0.4, (*lead, loud.shape[-1])) * loud
        parameters = "float64" if dtype == "float64" else "bfloat16"  # in float32 too: attention is to take what it gets
        return Planes(*map(jnp.asarray, (upper, lower)), jnp.asarray(scale, parameters), jnp.asarray(lift - 7.3 * scale, parameters))

    keys, values = planes((G, H // 2), channel, lift), planes((H, G // 2), token[: case.capacity])
    recent = r.standard_normal((2, B, K, case.buffer_rows, H))
    buffer = FullLayer(jnp.asarray(recent[0] * channel + lift, dtype), jnp.asarray(recent[1] + 0.5, dtype))
    return jnp.asarray(q, dtype), HierarchicalLayer(keys, values, buffer)


def random_lists(case: Case, seed: int = 0) -> ListedGroups:
    """Some of each row's groups in any order, in one KV head as many as fit and in the next perhaps none; nonsense behind them."""
    r = np.random.default_rng(seed)
    lead, width = (len(case.groups), case.kv_heads), max(1, case.capacity - 1)
    groups, count = r.choice([-1, case.capacity, 1 << 30], (*lead, width)), np.zeros(lead, np.int32)
    for b, k in np.ndindex(lead):
        most = min(width, case.groups[b])
        count[b, k] = most if (b + k) % 2 else r.integers(0, most + 1)
        groups[b, k, : count[b, k]] = r.permutation(case.groups[b])[: count[b, k]]
    return ListedGroups(jnp.asarray(groups, jnp.int32), jnp.asarray(count))


def all_listed(case: Case) -> ListedGroups:
    """Every group of every row, in order."""
    lead = len(case.groups), case.kv_heads
    groups = jnp.broadcast_to(jnp.arange(case.capacity, dtype=jnp.int32), (*lead, case.capacity))
    return ListedGroups(groups, jnp.broadcast_to(jnp.array(case.groups, jnp.int32)[:, None], lead))


def with_others_spoilt(layer: HierarchicalLayer, view: ListedGroups) -> HierarchicalLayer:
    """The layer with NaN in the parameters of all groups that are not listed."""
    counted = (jnp.arange(view.groups.shape[2]) < view.count[..., None])[..., None]
    listed = ((view.groups[..., None] == jnp.arange(layer.groups)) & counted).any(2)[..., None]
    spoil = lambda x: jnp.where(listed, x, jnp.nan)
    return dataclasses.replace(
        layer,
        **{
            name: dataclasses.replace(x, scale=spoil(x.scale), zero=spoil(x.zero))
            for name, x in (("keys", layer.keys), ("values", layer.values))
        },
    )


def with_garbage(case: Case, layer: HierarchicalLayer, garbage: float = 1e30) -> HierarchicalLayer:
    """Beyond the lengths the largest codes with parameters of `garbage`, and buffer rows of +-garbage."""
    layer = jax.tree.map(np.array, layer)
    for row, (groups, buffered) in enumerate(zip(case.groups, case.buffered)):
        for p in (layer.keys, layer.values):
            p.upper[row, :, groups:] = p.lower[row, :, groups:] = 255
            p.scale[row, :, groups:] = p.zero[row, :, groups:] = garbage
        layer.buffer.keys[row, :, buffered:] = -garbage
        layer.buffer.values[row, :, buffered:] = garbage
    return jax.tree.map(jnp.asarray, layer)
