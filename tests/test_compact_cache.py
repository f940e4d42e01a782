"""The compact cache: which tokens are there after any rounds, and that attention reads these and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts
from tiers import in_system

from pallas_kernels.attention import decode_attention, reference
from pallas_kernels.formats.kv_cache import FullLayer, Lengths, dequantize_groups
from pallas_kernels.formats.views import FULL_PRECISION, DenseView
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.caches.compact import KINDS, CompactCache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.ring import row_of_token, token_in_row
from qspec_jax.models.prompts import padded

B, K, N, H, T = 4, 2, 4, 16, 5
KEPT, RING = np.array([0, 3, 2, 4]), np.array([1, 2, 6, 8])  # rings of fewer tokens than a round brings, and of more
ROWS = 12


@pytest.fixture(scope="module", autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def tokens_left(taken: int, row: int) -> list[int]:
    """The numbers of the tokens that stay of the first `taken`, written down in plain Python."""
    numbers = list(range(taken))
    return numbers[: KEPT[row]] + numbers[KEPT[row] :][-RING[row] :]


def text(layer: int) -> np.ndarray:
    """Keys and values of 60 tokens [2, B, K, 60, H]."""
    return np.random.default_rng(layer).normal(0, 1, (2, B, K, 60, H))


@pytest.mark.parametrize(("kind", "chunk"), [("full", 1024), ("int8", 5), *in_system(("int8", 1024))])
def test_the_first_stay_and_of_the_others_the_most_recent(kind, chunk, monkeypatch):
    """Over rounds that bring 0 to 5 tokens to each row, and append drafts that are rolled back; read at once, or by chunks that are not
    whole."""
    monkeypatch.setattr(reference, "CHUNK_TOKENS", chunk)
    whole, taken = [text(0), text(1)], np.array([0, 2, 7, 30])
    at_first = [[tokens_left(n, row) for row, n in enumerate(taken)]]
    kept, ring = jnp.array(KEPT), jnp.array(RING)
    number = np.asarray(token_in_row(jnp.arange(ROWS), jnp.array(taken), kept, ring))
    for row in range(B):
        held = number[row, : min(taken[row], KEPT[row] + RING[row])]
        assert sorted(held) == at_first[0][row]
        np.testing.assert_array_equal(row_of_token(jnp.array(held)[None], kept[row : row + 1], ring[row : row + 1])[0], range(len(held)))
    first = [tuple(jnp.array(np.take_along_axis(x, number[:, None, :, None], 2)) for x in layer) for layer in whole]
    layers = [CompactCache.make_layer(*each, kind=kind, appended=3) for each in first]
    cache = CompactCache.of(layers, kept=kept, ring=ring, taken=jnp.array(taken))
    cos, sin = (jnp.asarray(f(np.random.default_rng(2).normal(0, 9, (B, 1, H // 2)))) for f in (np.cos, np.sin))
    qkv = np.random.default_rng(3).normal(0, 1, (3, B, 1, (N + 2 * K) * H))
    attend = jax.jit(lambda cache, i, qkv: cache.attend(i, qkv, cos, sin, view=None), static_argnums=1)
    read = jax.jit(lambda q, layer, lengths: decode_attention(q, layer, lengths, FULL_PRECISION)[0])
    take_in, r = jax.jit(CompactCache.take_in), np.random.default_rng(4)
    for _ in range(8):
        before, drafted = cache, []
        for x in qkv:
            found, layers = zip(*(attend(cache, i, jnp.asarray(x))[:2] for i in range(2)))
            cache = cache.advance(layers, 1)
            q, k, v = split_and_rotate(jnp.asarray(x), cos, sin, kv_heads=K)
            drafted.append((k, v))
            left = [tokens_left(n, row) for row, n in enumerate(taken)]
            lengths = Lengths(jnp.zeros(B, int), jnp.array([len(numbers) + len(drafted) for numbers in left]))
            for i in range(2):
                expected = np.zeros((2, B, K, ROWS + len(qkv), H))  # of one shape whatever is there, so that it is compiled once
                for j, row in np.ndindex(2, B):
                    there = [whole[i][j][row][:, left[row]], *(np.swapaxes(d[j][row], 0, 1) for d in drafted)]
                    expected[j, row, :, : lengths.buffered[row]] = np.concatenate(there, 1)
                expected = read(q, FullLayer(*map(jnp.array, expected)), lengths)
                np.testing.assert_allclose(found[i], expected, atol=1e-12 if kind == "full" else 0.03)
        cache = cache.rollback(before.lengths)
        count = r.integers(0, T + 1, B)
        come = [tuple(jnp.array([x[row][:, taken[row] : taken[row] + T] for row in range(B)]) for x in layer) for layer in whole]
        cache = take_in(cache, come, jnp.array(count))
        taken = taken + count
        np.testing.assert_array_equal(cache.lengths.total, [len(tokens_left(n, row)) for row, n in enumerate(taken)])
    assert (taken > KEPT + RING + 3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_where_nothing_comes(kind):
    layer = tuple(jnp.array(x[:, :, :ROWS]) for x in text(0))
    layers = [CompactCache.make_layer(*layer, kind=kind, appended=3)]
    cache = CompactCache.of(layers, kept=jnp.array(KEPT), ring=jnp.array(RING), taken=jnp.array(KEPT + RING))
    count = jnp.array([0, 3, 0, 1])
    new = jax.jit(CompactCache.take_in)(cache, [tuple(x[:, :, :T] for x in layer)], count)
    for old, now in zip(jax.tree.leaves(cache), jax.tree.leaves(new)):
        np.testing.assert_array_equal(old[::2], now[::2])
    assert new.taken.tolist() == (KEPT + RING + count).tolist()


@pytest.mark.parametrize("kind", ["full", "int8"])
def test_tokens_of_a_targets_cache_are_as_it_reads_them(kind):
    """Quantized and buffered ones, in rows of different lengths; all of them, and some that each KV head chooses."""
    model, G = random_model(jnp.float64), 8
    prompts, n = padded(random_prompts([5, 70, 43]))
    empty = CacheConfig(kind, group_size=G).empty(model.config, batch=3, capacity=80, num_speculative_tokens=3, dtype=model.dtype)
    _, cache = jax.jit(prefill)(model, prompts, n, empty)
    chosen = jnp.array(np.random.default_rng(0).integers(0, 5, (3, 2, 9)))
    for i, layer in enumerate(cache.layers):
        if kind == "full":
            expected = [[np.asarray(x[row, :, : n[row]]) for row in range(3)] for x in (layer.keys, layer.values)]
        else:
            quantized = dequantize_groups(layer.keys, layer.values, planes=2, dtype=jnp.float64)
            expected = [
                [
                    np.concatenate([old[row].reshape(2, -1, 16)[:, : cache.lengths.quantized[row]], new[row]], 1)[:, : n[row]]
                    for row in range(3)
                ]
                for old, new in zip(quantized, (layer.buffer.keys, layer.buffer.values))
            ]
        for positions in (jnp.arange(70)[None, None], chosen * (n // 5)[:, None, None]):
            for found, whole in zip(cache.tokens(i, positions), expected):
                assert found.dtype == model.dtype
                for row in range(3):
                    for head in range(2):
                        at = np.broadcast_to(positions, (3, 2, positions.shape[2]))[row, head]
                        at = at[at < n[row]]
                        np.testing.assert_allclose(found[row, head, : len(at)], whole[row][head, at], atol=1e-12)


def test_a_compact_cache_observes_nothing():
    layer = tuple(jnp.array(x[:, :, :ROWS]) for x in text(0))
    layers = [CompactCache.make_layer(*layer, kind="full", appended=1)]
    cache = CompactCache.of(layers, kept=jnp.array(KEPT), ring=jnp.array(RING), taken=jnp.array(KEPT))
    with pytest.raises(ValueError, match="no groups"):
        cache.for_pass((DenseView(None, observed=True),))
