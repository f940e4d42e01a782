"""Layers to flush, and what a flush promises of them, bit for bit; shared by the tests of its implementations."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, Planes, quantize_groups

B, K, C, SPARE = 5, 2, 4, 5
# Groups quantized before: none, some, and as many as leave room for one; rows that are full must not be due.
GROUPS = np.array([0, 2, 3, 1, C])
DUE = [[True, True, True, True, False], [False, True, False, False, False], [True, False, True, False, False], [False] * B]

quantize_jit = jax.jit(quantize_groups, static_argnames=("scheme", "dtype"))


def filled_layer(G: int, dtype: str, head_dim: int) -> HierarchicalLayer:
    """Random bytes and numbers everywhere, so that any bit written shows."""
    r = np.random.default_rng(0)
    parameters = "float32" if dtype == "float32" else "bfloat16"

    def planes(codes: tuple[int, ...], shape: tuple[int, ...]) -> Planes:
        upper, lower = r.integers(0, 256, (2, B, K, C, *codes), np.uint8)
        scale, zero = r.standard_normal((2, B, K, C, *shape))
        return Planes(jnp.asarray(upper), jnp.asarray(lower), jnp.asarray(scale, parameters), jnp.asarray(zero, parameters))

    keys, values = r.standard_normal((2, B, K, 2 * G + SPARE, head_dim)) * r.uniform(0.1, 10, head_dim) + 3
    buffer = FullLayer(jnp.asarray(keys, dtype), jnp.asarray(values, dtype))
    return HierarchicalLayer(planes((G, head_dim // 2), (head_dim,)), planes((head_dim, G // 2), (G,)), buffer)


def lengths_of(G: int, buffered: int | None = None) -> Lengths:
    return Lengths(jnp.asarray(GROUPS * G, jnp.int32), jnp.full(B, 2 * G if buffered is None else buffered, jnp.int32))


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def same_bits(tokens: FullLayer, got: tuple[Planes, Planes], expected: tuple[Planes, Planes]) -> None:
    for x, y in zip(*map(jax.tree.leaves, (got, expected))):
        np.testing.assert_array_equal(bits(x), bits(y))


def check(old: HierarchicalLayer, new: HierarchicalLayer, due: list[bool], scheme: str, same_codes: Callable = same_bits) -> None:
    """Everything that flush promises. same_codes compares the groups written [rows, K, ...] with those of the reference."""
    G = old.group_size
    assert jax.tree.structure(old) == jax.tree.structure(new)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(old)] == [(x.shape, x.dtype) for x in jax.tree.leaves(new)]
    rows = np.flatnonzero(due)
    written = rows, slice(None), GROUPS[rows]
    oldest = jax.tree.map(lambda x: x[:, :, None, :G], old.buffer)
    codes = quantize_jit(oldest.keys, oldest.values, scheme=scheme, dtype=old.keys.scale.dtype.name)
    pick = lambda tree, at: jax.tree.map(lambda x: np.asarray(x)[at], tree)
    now = rows, slice(None), 0
    same_codes(pick(oldest, now), pick((new.keys, new.values), written), pick(codes, now))
    for before, after in zip(*map(jax.tree.leaves, ((old.keys, old.values), (new.keys, new.values)))):
        expected = bits(before).copy()
        expected[written] = bits(after)[written]
        np.testing.assert_array_equal(bits(after), expected)
    for before, after in zip(*map(jax.tree.leaves, (old.buffer, new.buffer))):
        for row in range(B):
            if due[row]:
                np.testing.assert_array_equal(bits(after)[row, :, :-G], bits(before)[row, :, G:])
            else:
                np.testing.assert_array_equal(bits(after)[row], bits(before)[row])
