"""The flush: rows that are due quantize their oldest group in place, all others keep every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems.flush import DUE, GROUPS, SPARE, B, C, K, bits, check, filled_layer, lengths_of, quantize_jit

from pallas_kernels.flush import flush
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, dequantize_groups
from pallas_kernels.formats.quantization import SCHEMES

H = 24

append_jit = jax.jit(FullLayer.append)
flush_jit = jax.jit(flush, static_argnames="scheme")
dequantize_jit = jax.jit(dequantize_groups, static_argnames=("planes", "dtype"))
both = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.mark.parametrize("due", DUE)
@pytest.mark.parametrize("scheme, G, dtype", [("paper", 4, "float32"), ("int8_first", 4, "float32"), ("paper", 128, "bfloat16")])
def test_rows_due_move_a_group_and_others_keep_every_bit(scheme, G, dtype, due):
    layer = filled_layer(G, dtype, H)
    new = flush_jit(layer, lengths_of(G), jnp.array(due), scheme=scheme)
    check(layer, new, due, scheme)
    changed = [bool((bits(a) != bits(b)).any()) for a, b in zip(jax.tree.leaves(layer), jax.tree.leaves(new))]
    assert changed == [any(due)] * 10


def test_lengths_say_nothing_of_what_is_due():
    # The caller decides, by any rule; a row that holds fewer or more than 2G is treated alike.
    layer, due = filled_layer(4, "float32", H), jnp.array([True, False, True, False, False])
    for buffered in (4, 8, 13):
        check(layer, flush_jit(layer, lengths_of(4, buffered), due, scheme="paper"), [*due], "paper")


@both
def test_what_was_flushed_reads_as_the_tokens_were(scheme):
    """Against the tokens themselves: right row, group, order of tokens, keys and values not mixed up."""
    G, due = 4, [True, True, True, True, False]
    layer = filled_layer(G, "float32", H)
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
