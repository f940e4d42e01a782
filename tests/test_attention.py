"""The reference decode_attention against softmax attention in numpy, written as plainly as can be."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from problems.attention import Case, random_problem, with_garbage

from pallas_kernels.attention import decode_attention, reference
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, Planes
from pallas_kernels.formats.views import DenseView, ListedGroups

CASES = {
    "T1-GQA-64": Case(1, 4, 2, 64),
    "T3-MHA-96": Case(3, 2, 2, 96),
    "T7-GQA-128": Case(7, 6, 2, 128),
    "G32": Case(3, 3, 1, 64, group_size=32, capacity=3, groups=(3, 0, 1, 2, 0, 3)),
}


traces = []


@functools.cache
def attend_in_chunks(tokens: int) -> Callable:
    """decode_attention under jit, in chunks of that many tokens; traced apart from those of another size."""

    def attend(*args, planes):
        traces.append(tokens)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "CHUNK_TOKENS", tokens)
            patch.setattr(reference, "MAX_LOGITS", 1)
            return decode_attention(*args, view=DenseView(planes))[0]

    return jax.jit(attend, static_argnames="planes")


# By default all that these cases hold is one chunk.
attend = attend_in_chunks(reference.CHUNK_TOKENS)


# In numpy -------------------------------------------------------------------------------------------------------------


def plain_quantized(planes: Planes, number: int) -> np.ndarray:
    """Keys or values of all groups as stored, the two halves of each row unpacked."""
    codes = lambda x: np.concatenate([np.asarray(x) % 16, np.asarray(x) // 16], -1).astype(np.float64)
    scale, zero = (np.asarray(x).astype(np.float64)[..., None, :] for x in (planes.scale, planes.zero))
    x = codes(planes.upper) * scale + zero
    return x if number == 1 else x + (codes(planes.lower) - 8) * scale / 16


def plain_attention(q: jax.Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, planes: int | None) -> np.ndarray:
    """Softmax attention in float64, one query at a time."""
    buffer = layer if isinstance(layer, FullLayer) else layer.buffer
    q, recent_k, recent_v = (np.asarray(x).astype(np.float64) for x in (q, buffer.keys, buffer.values))
    B, T, N, H = q.shape
    K = recent_k.shape[1]
    old_k = old_v = np.zeros((B, K, 0, H))
    if planes is not None:
        old_k = plain_quantized(layer.keys, planes).reshape(B, K, -1, H)
        old_v = np.swapaxes(plain_quantized(layer.values, planes), -1, -2).reshape(B, K, -1, H)
    quantized, buffered = np.asarray(lengths.quantized), np.asarray(lengths.buffered)
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(B, T, N):
        k = n // (N // K)
        recent = buffered[b] - T + t + 1
        keys = np.concatenate([old_k[b, k, : quantized[b]], recent_k[b, k, :recent]])
        values = np.concatenate([old_v[b, k, : quantized[b]], recent_v[b, k, :recent]])
        logits = keys @ q[b, t, n] / np.sqrt(H)
        weights = np.exp(logits - logits.max())
        out[b, t, n] = weights @ values / weights.sum()
    return out


def assert_equal_to_plain(out: jax.Array, q: jax.Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, planes: int | None) -> None:
    assert out.shape == q.shape and out.dtype == q.dtype
    buffer = layer if isinstance(layer, FullLayer) else layer.buffer
    expected = plain_attention(q, layer, lengths, planes)
    # What rounding may do: to a logit, in proportion to |q| |k|, and so to the weights; to the values.
    norm = lambda x: np.sqrt(np.square(np.asarray(x).astype(np.float64)).sum(-1)).max()
    logit = norm(q) * norm(buffer.keys) / np.sqrt(q.shape[-1])
    tolerance = 8 * float(jnp.finfo(q.dtype).eps) * (1 + logit) * abs(np.asarray(buffer.values)).max()
    np.testing.assert_allclose(np.asarray(out), expected, rtol=0, atol=tolerance)
    # Far below any mistake: a single token more or less.
    assert tolerance < 1e-2 * abs(expected).max()


# Equality -------------------------------------------------------------------------------------------------------------

KINDS = [
    *[(name, planes, "float32") for name in CASES for planes in (2, None)],
    ("T7-GQA-128", 1, "float32"),
    *[("T3-MHA-96", planes, "float64") for planes in (1, 2)],
    ("T7-GQA-128", 2, "float64"),
]


@pytest.mark.parametrize("name, planes, dtype", KINDS)
def test_equals_plain_attention(name, planes, dtype):
    case = CASES[name]
    with jax.enable_x64(dtype == "float64"):
        for data in ("gaussian", "outliers", "peaked", *(["far below"] if dtype == "float64" else [])):
            q, layer = random_problem(case, dtype, data)
            layer, lengths = case.attended(layer, planes)
            assert_equal_to_plain(attend(q, layer, lengths, planes=planes), q, layer, lengths, planes)


# 5 groups of 16 by one, two and three; a buffer of 35 tokens by 1 and 24.
@pytest.mark.parametrize("planes, chunk", [(2, 24), (2, 32), (1, 48), (None, 1), (None, 24)])
def test_equals_plain_attention_in_chunks(planes, chunk):
    case = CASES["T3-MHA-96"]
    attend = attend_in_chunks(chunk)
    for data in ("gaussian", "peaked"):
        q, layer = random_problem(case, "float32", data)
        layer, lengths = case.attended(layer, planes)
        assert_equal_to_plain(attend(q, layer, lengths, planes=planes), q, layer, lengths, planes)
        # Also where no row fills every chunk.
        short = Lengths(jnp.minimum(lengths.quantized, case.group_size), jnp.minimum(lengths.buffered, 20))
        assert_equal_to_plain(attend(q, layer, short, planes=planes), q, layer, short, planes)


def test_a_full_cache_is_read_whole_while_its_logits_are_few(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_TOKENS", 8)
    case = CASES["T3-MHA-96"]
    q, layer = random_problem(case, "float32")
    layer, lengths = case.attended(layer, None)
    loops = lambda: str(jax.make_jaxpr(lambda *args: decode_attention(*args, view=DenseView(None)))(q, layer, lengths)).count("while")
    rows, queries = case.buffer_rows, case.tokens * case.heads // case.kv_heads
    for most, expected in ((rows * queries, 0), (rows * queries - 1, 1)):
        monkeypatch.setattr(reference, "MAX_LOGITS", most)
        assert loops() == expected


@pytest.mark.parametrize("planes", [1, 2])
def test_nothing_of_cache_size_is_made(planes):
    layer = jax.eval_shape(lambda: HierarchicalLayer.zeros(2, 4, 256, 128, 261, 128, jnp.dtype(jnp.bfloat16)))
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    q = jax.ShapeDtypeStruct((2, 5, 8, 128), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda *args: decode_attention(*args, view=DenseView(planes)))(q, layer, Lengths(lengths, lengths))
    sizes = [v.aval.size for eqn in equations(jaxpr.jaxpr) for v in eqn.outvars]
    chunk = 2 * 4 * reference.CHUNK_TOKENS * 128
    assert max(sizes) == chunk < 2 * 4 * 256 * 128 * 128 // 16


def equations(jaxpr) -> list:
    """All of a jaxpr's, those of its loops included."""
    inner = [jaxprs_in_params(eqn.params) for eqn in jaxpr.eqns]
    return [*jaxpr.eqns, *(eqn for found in inner for sub in found for eqn in equations(sub))]


def test_without_capacity_for_groups():
    case = dataclasses.replace(CASES["T3-MHA-96"], capacity=0, groups=(0,) * 6)
    q, layer = random_problem(case, "float32")
    assert layer.groups == 0
    out = attend(q, layer, case.lengths, planes=2)
    np.testing.assert_array_equal(out, attend(q, layer.buffer, case.lengths, planes=None))
    assert_equal_to_plain(out, q, layer.buffer, case.lengths, None)


@pytest.mark.parametrize("planes", [2, None])
def test_bfloat16(planes):
    case = CASES["T7-GQA-128"]
    q, layer = random_problem(case, "bfloat16")
    layer, lengths = case.attended(layer, planes)
    out = attend(q, layer, lengths, planes=planes)
    assert out.dtype == jnp.bfloat16
    expected = plain_attention(q, layer, lengths, planes)
    for row, plain in zip(np.asarray(out).astype(float), expected):
        assert abs(row - plain).max() < 1e-2 * abs(plain).max()
        assert np.square(row - plain).sum() < 5e-3**2 * np.square(plain).sum()


@pytest.mark.parametrize("shapes", [((6, 1, 2), (6, 2)), ((6, 2, 2), (6, 1)), ((1, 2, 2), (6, 2)), ((6, 2, 0), (6, 2)), ((6, 2), (6, 2))])
def test_lists_of_other_shapes_are_refused(shapes):
    """A kernel would read behind them, where the reference would repeat them."""
    q, layer = random_problem(case := CASES["T7-GQA-128"], "float32")
    view = ListedGroups(*(jnp.zeros(shape, jnp.int32) for shape in shapes))
    with pytest.raises(ValueError, match=r"shapes \[B K n\], n >= 1, and \[B K\], with B and K \[6, 2\]; not groups"):
        decode_attention(q, layer, case.lengths, view)


# What must not matter -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [32, 1024])
def test_what_lies_beyond_the_lengths_does_not_change_a_bit(chunk):
    case = CASES["T3-MHA-96"]
    q, layer = random_problem(case, "float32")
    garbage = with_garbage(case, layer)
    assert all((np.asarray(a) != np.asarray(b)).any() for a, b in zip(jax.tree.leaves(layer), jax.tree.leaves(garbage)))
    attend = attend_in_chunks(chunk)
    for planes in (2, None):
        clean, lengths = case.attended(layer, planes)
        dirty, _ = case.attended(garbage, planes)
        np.testing.assert_array_equal(attend(q, clean, lengths, planes=planes), attend(q, dirty, lengths, planes=planes))


@pytest.mark.parametrize("chunk", [32, 1024])
def test_rows_do_not_touch_each_other(chunk):
    case = CASES["T3-MHA-96"]
    q, layer = random_problem(case, "float32")
    attend = attend_in_chunks(chunk)
    out = np.asarray(attend(q, layer, case.lengths, planes=2))
    for row in (0, 3, 4):
        others = np.arange(len(case.groups)) != row

        def spoil(x: jax.Array, others=others) -> jax.Array:
            x = np.array(x)
            if x.dtype != np.uint8:
                x[others] = np.nan
            return jnp.asarray(x)

        spoilt = np.asarray(attend(*jax.tree.map(spoil, (q, layer)), case.lengths, planes=2))
        np.testing.assert_array_equal(spoilt[row], out[row])
        assert np.isnan(np.delete(spoilt, row, axis=0)).all()


def test_the_same_twice():
    case = CASES["T3-MHA-96"]
    q, layer = random_problem(case, "float32", "peaked")
    outs = [np.asarray(attend(q, layer, case.lengths, planes=2)) for _ in range(2)]
    np.testing.assert_array_equal(*outs)


def test_lengths_are_traced():
    """One compilation, whatever the lengths."""
    case = CASES["T3-MHA-96"]
    q, layer = random_problem(case, "float32")
    attend(q, layer, case.lengths, planes=2)
    before = len(traces)
    for shift in range(3):
        lengths = jax.tree.map(lambda x, shift=shift: jnp.asarray(np.roll(x, shift)), case.lengths)
        assert_equal_to_plain(attend(q, layer, lengths, planes=2), q, layer, lengths, 2)
    assert len(traces) == before > 0


def test_appended_tokens_are_seen_causally():
    """T tokens at once read what they read one after the other."""
    case = CASES["T3-MHA-96"]
    T = case.tokens
    with jax.enable_x64(True):
        q, layer = random_problem(case, "float64")
        together = attend(q, layer, case.lengths, planes=2)
        for t in range(T):
            lengths = dataclasses.replace(case.lengths, buffered=case.lengths.buffered - (T - 1 - t))
            np.testing.assert_allclose(attend(q[:, t : t + 1], layer, lengths, planes=2)[:, 0], together[:, t], rtol=0, atol=1e-13)
