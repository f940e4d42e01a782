"""The flush: rows that are due quantize their oldest group in place, all others keep every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flush import flush
from pallas_kernels.kv_format import SCHEMES, FullLayer, HierarchicalLayer, Lengths, Planes, dequantize_groups, quantize_groups

B, K, C, H, SPARE = 5, 2, 4, 24, 5
# Groups quantized before: none, some, and as many as leave room for one; rows that are full must not be due.
GROUPS = np.array([0, 2, 3, 1, C])

append_jit = jax.jit(FullLayer.append)
flush_jit = jax.jit(flush, static_argnames="scheme")
dequantize_jit = jax.jit(dequantize_groups, static_argnames=("planes", "dtype"))
quantize_jit = jax.jit(quantize_groups, static_argnames=("scheme", "dtype"))
both = pytest.mark.parametrize("scheme", SCHEMES)


def filled_layer(G: int, dtype: str) -> HierarchicalLayer:
    """Random bytes and numbers everywhere, so that any bit written shows."""
    r = np.random.default_rng(0)
    parameters = "float32" if dtype == "float32" else "bfloat16"

    def planes(codes: tuple[int, ...], shape: tuple[int, ...]) -> Planes:
        upper, lower = r.integers(0, 256, (2, B, K, C, *codes), np.uint8)
        scale, zero = r.standard_normal((2, B, K, C, *shape))
        return Planes(jnp.asarray(upper), jnp.asarray(lower), jnp.asarray(scale, parameters), jnp.asarray(zero, parameters))

    keys, values = r.standard_normal((2, B, K, 2 * G + SPARE, H)) * r.uniform(0.1, 10, H) + 3
    buffer = FullLayer(jnp.asarray(keys, dtype), jnp.asarray(values, dtype))
    return HierarchicalLayer(planes((G, H // 2), (H,)), planes((H, G // 2), (G,)), buffer)


def lengths_of(G: int, buffered: int | None = None) -> Lengths:
    return Lengths(jnp.asarray(GROUPS * G, jnp.int32), jnp.full(B, 2 * G if buffered is None else buffered, jnp.int32))


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def check(old: HierarchicalLayer, new: HierarchicalLayer, due: list[bool], scheme: str) -> None:
    """Everything that flush promises, bit for bit."""
    G = old.group_size
    assert jax.tree.structure(old) == jax.tree.structure(new)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(old)] == [(x.shape, x.dtype) for x in jax.tree.leaves(new)]
    oldest = [x[:, :, None, :G] for x in (old.buffer.keys, old.buffer.values)]
    codes = quantize_jit(*oldest, scheme=scheme, dtype=old.keys.scale.dtype.name)
    for before, after, group in zip(*map(jax.tree.leaves, ((old.keys, old.values), (new.keys, new.values), codes))):
        expected = bits(before).copy()
        for row in np.flatnonzero(due):
            expected[row, :, GROUPS[row]] = bits(group)[row, :, 0]
        np.testing.assert_array_equal(bits(after), expected)
    for before, after in zip(*map(jax.tree.leaves, (old.buffer, new.buffer))):
        for row in range(B):
            if due[row]:
                np.testing.assert_array_equal(bits(after)[row, :, :-G], bits(before)[row, :, G:])
            else:
                np.testing.assert_array_equal(bits(after)[row], bits(before)[row])


@pytest.mark.parametrize(
    "due", [[True, True, True, True, False], [False, True, False, False, False], [True, False, True, False, False], [False] * B]
)
@pytest.mark.parametrize("scheme, G, dtype", [("paper", 4, "float32"), ("int8_first", 4, "float32"), ("paper", 128, "bfloat16")])
def test_rows_due_move_a_group_and_others_keep_every_bit(scheme, G, dtype, due):
    layer = filled_layer(G, dtype)
    new = flush_jit(layer, lengths_of(G), jnp.array(due), scheme=scheme)
    check(layer, new, due, scheme)
    changed = [bool((bits(a) != bits(b)).any()) for a, b in zip(jax.tree.leaves(layer), jax.tree.leaves(new))]
    assert changed == [any(due)] * 10


def test_lengths_say_nothing_of_what_is_due():
    # The caller decides, by any rule; a row that holds fewer or more than 2G is treated alike.
    layer, due = filled_layer(4, "float32"), jnp.array([True, False, True, False, False])
    for buffered in (4, 8, 13):
        check(layer, flush_jit(layer, lengths_of(4, buffered), due, scheme="paper"), [*due], "paper")


@both
def test_what_was_flushed_reads_as_the_tokens_were(scheme):
    """Against the tokens themselves: right row, group, order of tokens, keys and values not mixed up."""
    G, due = 4, [True, True, True, True, False]
    layer = filled_layer(G, "float32")
    new = flush_jit(layer, lengths_of(G), jnp.array(due), scheme=scheme)
    read = dequantize_jit(new.keys, new.values, planes=2, dtype="float32")
    for x, tokens, axis in zip(read, (layer.buffer.keys, layer.buffer.values), (-2, -1)):
        for row in np.flatnonzero(due):
            oldest = np.asarray(tokens)[row, :, :G]
            # One step of 240 of the group's range.
            assert (abs(np.asarray(x)[row, :, GROUPS[row]] - oldest) <= 1.01 / 240 * np.ptp(oldest, axis, keepdims=True)).all()


@both
def test_flushes_fill_the_groups_in_order(scheme):
    """Rows fed token by token, each begun at another time, hold what quantizing all of their groups at once gives."""
    G = 4
    keys, values = np.random.default_rng(1).standard_normal((2, B, K, (C + 1) * G + B, H)).astype(np.float32)
    layer = HierarchicalLayer.zeros(B, K, C, G, 2 * G + SPARE, H, jnp.dtype(jnp.float32))
    quantized, buffered = np.zeros((2, B), np.int32)
    for time in range(keys.shape[2]):
        begun = time >= np.arange(B)
        token = np.clip(time - np.arange(B), 0, (C + 1) * G - 1)
        take = lambda x, token=token: jnp.asarray(x[np.arange(B), :, token][:, None])
        # What a row takes before it begins and after it is done lies beyond its length.
        layer = HierarchicalLayer(layer.keys, layer.values, append_jit(layer.buffer, take(keys), take(values), jnp.asarray(buffered)))
        buffered = buffered + (begun & (time < np.arange(B) + (C + 1) * G))
        due = buffered == 2 * G
        layer = flush_jit(layer, Lengths(jnp.asarray(quantized), jnp.asarray(buffered)), jnp.asarray(due), scheme=scheme)
        quantized, buffered = quantized + G * due, buffered - G * due
    assert (quantized == C * G).all() and (buffered == G).all()
    whole = [jnp.asarray(x[:, :, : C * G].reshape(B, K, C, G, H)) for x in (keys, values)]
    expected = quantize_jit(*whole, scheme=scheme, dtype="float32")
    for got, all_at_once in zip(*map(jax.tree.leaves, ((layer.keys, layer.values), expected))):
        np.testing.assert_array_equal(bits(got), bits(all_at_once))
    for got, x in zip((layer.buffer.keys, layer.buffer.values), (keys, values)):
        np.testing.assert_array_equal(np.asarray(got)[:, :, :G], x[:, :, C * G : (C + 1) * G])
