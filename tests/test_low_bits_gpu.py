"""The Hopper kernel of decode attention over KIVI's format, and with replaced tokens, against the reference in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import needs_gpu, skip_or_fail
from jaxtyping import Array, Float
from runs import random_model

from pallas_kernels import dispatch
from pallas_kernels.attention import decode_attention, mosaic_low_bits, reference
from pallas_kernels.attention.arguments import AttentionArguments
from pallas_kernels.attention.partials import merged
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer
from pallas_kernels.formats.views import BOTH_PLANES, FULL_PRECISION
from pallas_kernels.gather import mosaic_gpu as gather
from pallas_kernels.replaced_attention import attend_and_choose
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate

pytestmark = [pytest.mark.gpu, needs_gpu]

# Compiled, for JAX would compile each operation by itself, which takes longer.
WIDE = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize == 2 else leaf, tree))
SIZE, ROWS = 2048, 160  # of the codes and of the buffer
QUANTIZED, BUFFERED = [0, 64, 1056, SIZE], [ROWS, 17, 100, 64]  # nothing in codes, one step of a program, an odd number of tiles, all


def problem(bits: int, T: int, heads: int, kv_heads: int, head_dim: int, group: int, *, outliers: bool):
    """outliers: a few channels and tokens a hundred times as loud as the others. One query is all zeros, and so attends to all alike."""
    r = np.random.default_rng(bits + T)
    draw = lambda *shape: r.standard_normal((len(QUANTIZED), *shape)).astype(np.float32)
    keys, values = draw(kv_heads, SIZE, head_dim), draw(kv_heads, SIZE, head_dim)
    if outliers:
        keys[..., ::17] *= 100
        values[:, :, ::101] *= 100
    coded = [
        jax.jit(functools.partial(LowBits.of, bits=bits, tokens=t, channels=c, rule="centred", dtype=dtype))(x.astype(jnp.bfloat16))
        for x, t, c, dtype in ((keys, group, 1, jnp.float16), (values, 1, group, jnp.bfloat16))
    ]
    buffer = FullLayer(*(jnp.asarray(draw(kv_heads, ROWS, head_dim), jnp.bfloat16) for _ in range(2)))
    lengths = Lengths(jnp.array(QUANTIZED, jnp.int32), jnp.array(BUFFERED, jnp.int32))
    q = draw(T, heads, head_dim)
    q[2, -1, 0] = 0
    return jnp.asarray(q, jnp.bfloat16), TokenCodesLayer(*coded, buffer), lengths


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    ("bits", "T", "heads", "kv_heads", "head_dim", "group"),
    [
        (2, 1, 8, 2, 128, 32),
        (1, 2, 8, 2, 128, 32),
        (1, 7, 1, 1, 128, 64),
        (2, 5, 1, 1, 64, 32),
        (1, 2, 4, 4, 256, 32),
        (2, 1, 7, 1, 256, 128),
    ],
)
def test_equals_float32(bits, T, heads, kv_heads, head_dim, group, outliers):
    skip_or_fail("mosaic_gpu", dispatch.no_mosaic_gpu())
    q, layer, lengths = problem(bits, T, heads, kv_heads, head_dim, group, outliers=outliers)
    found = decode_attention(q, layer, lengths, BOTH_PLANES, implementation="mosaic_gpu")[0].astype(jnp.float32)
    expected = exactly(q, layer, lengths)
    scale = float(jnp.abs(expected).max())
    rounded = float(jnp.abs(_attended(q, _in_bfloat16(layer), layer, lengths) - expected).max())  # what that rounding alone makes
    assert float(jnp.abs(found - expected).max()) <= 2 * rounded + 0.01 * scale, (rounded, scale)
    again = decode_attention(q, layer, lengths, BOTH_PLANES, implementation="mosaic_gpu")[0].astype(jnp.float32)
    np.testing.assert_array_equal(found, again)


@jax.jit
def exactly(q: Array, layer: TokenCodesLayer, lengths: Lengths) -> Array:
    """What the reference reads, in float32."""
    return reference.decode_attention(AttentionArguments(WIDE(q), WIDE(layer), lengths, BOTH_PLANES))[0]


@jax.jit
def _in_bfloat16(layer: TokenCodesLayer) -> list[Array]:
    """The codes' keys and values. A program of its own: XLA leaves out rounding after which it goes on in float32."""
    return [x.dequantized(jnp.bfloat16) for x in (layer.keys, layer.values)]


@jax.jit
def _attended(q: Array, held: list[Array], layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced | None = None) -> Array:
    """What the reference reads, in float32, where keys and values have passed through bfloat16, as they would in a cache of that dtype.
    held: those of the codes."""
    size, rows = layer.keys.tokens, layer.buffer.keys.shape[2]
    if replaced is not None:
        put = jax.vmap(jax.vmap(lambda held, at, new: held.at[at].set(new, mode="drop")))
        at = jnp.where(replaced.positions < 0, size, replaced.positions)
        held = [put(x, at, new) for x, new in zip(held, (replaced.keys, replaced.values))]
    joined = WIDE([jnp.concatenate(both, 2) for both in zip(held, (layer.buffer.keys, layer.buffer.values))])
    # Each row's tokens of codes and of the buffer, one after the other.
    token, quantized = jnp.arange(size + rows), lengths.quantized[:, None]
    at = jnp.where(token < quantized, token, token - quantized + size)
    layer = FullLayer(*(jnp.take_along_axis(x, at[:, None, :, None], 2, mode="clip") for x in joined))
    lengths = Lengths(jnp.zeros_like(lengths.quantized), lengths.total)
    return reference.decode_attention(AttentionArguments(WIDE(q), layer, lengths, FULL_PRECISION))[0]


def attend_replaced(
    q: Float[Array, "B T N H"], layer: TokenCodesLayer, lengths: Lengths, replaced: Replaced
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S"]]:
    """`reference.attend_replaced` by the Mosaic kernel. Only tests want all shares: `attend_and_choose` chooses from what `run` returns."""
    plan = mosaic_low_bits.Plan.of(q, layer, replaced.positions.shape[2], occupied=gather.occupied())
    found = mosaic_low_bits.run(plan, q, lengths, layer, replaced)
    shares = mosaic_low_bits.shares(found, replaced.positions, lengths.quantized)
    return merged(found["out"], found["top"], found["total"], q), shares


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    ("bits", "T", "heads", "kv_heads", "head_dim", "group", "count"),
    [
        (1, 2, 8, 2, 128, 32, 64),
        (2, 2, 4, 4, 128, 64, 16),
        (2, 1, 7, 1, 64, 32, 33),
    ],
)
def test_replaced_tokens(bits, T, heads, kv_heads, head_dim, group, count, outliers):
    """In rows with fewer tokens than may be replaced, or none; other tokens of each KV head, and not all of them there."""
    skip_or_fail("mosaic_gpu", dispatch.no_mosaic_gpu())
    q, layer, lengths = problem(bits, T, heads, kv_heads, head_dim, group, outliers=outliers)
    r = np.random.default_rng(count)
    positions = np.full((len(QUANTIZED), kv_heads, count), -1, np.int32)
    for b, k in np.ndindex(len(QUANTIZED), kv_heads):
        some = min(count - k, QUANTIZED[b])
        positions[b, k, :some] = r.choice(QUANTIZED[b], some, replace=False) if some else []
    draw = lambda: jnp.asarray(r.standard_normal((len(QUANTIZED), kv_heads, count, head_dim)), jnp.bfloat16)
    replaced = Replaced(jnp.asarray(positions), jnp.stack([draw(), draw()], 3))
    found, share = attend_replaced(q, layer, lengths, replaced)
    expected, expected_share = jax.jit(reference.attend_replaced)(WIDE(q), WIDE(layer), lengths, WIDE(replaced))
    error = float(jnp.abs(_attended(q, _in_bfloat16(layer), layer, lengths, replaced) - expected).max())
    scale = float(jnp.abs(expected).max())
    assert float(jnp.abs(found.astype(jnp.float32) - expected).max()) <= 2 * error + 0.01 * scale, (error, scale)
    there = np.arange(SIZE) < np.array(QUANTIZED)[:, None, None]
    np.testing.assert_array_equal(np.isneginf(share), np.broadcast_to(~there, share.shape))
    # As shares of attention: logarithms of almost nothing may differ more. Loud channels make logits of hundreds.
    np.testing.assert_allclose(np.exp(share), np.exp(expected_share), atol=0.2 if outliers else 0.01)
    for one, other in zip(attend_replaced(q, layer, lengths, replaced), (found, share), strict=True):
        np.testing.assert_array_equal(one, other)
    again, chosen = attend_and_choose(q, layer, lengths, replaced, count, implementation="mosaic_gpu")
    np.testing.assert_array_equal(again, found)
    # Those with the largest shares, up to the order in which shares are added up.
    for b, k in np.ndindex(chosen.shape[:2]):
        some = min(count, QUANTIZED[b])
        (mine,) = np.nonzero(chosen[b, k] >= 0)
        at = np.asarray(chosen[b, k, mine])
        assert len(set(at.tolist())) == len(mine) == some and (at < QUANTIZED[b]).all()
        np.testing.assert_allclose(np.sort(share[b, k, at]), np.sort(share[b, k])[SIZE - some :], atol=1e-4)


def test_decoding_takes_it():
    """Over several flushes; the same chances as by the reference, up to rounding."""
    skip_or_fail("mosaic_gpu", dispatch.no_mosaic_gpu())
    shape = dict(hidden_size=512, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    model = random_model("bfloat16", vocab_size=512, spread=0.05, **shape)
    settings = dict(max_new_tokens=300, draft="none", num_speculative_tokens=0, ignore_eos=True, output_logprobs=True)
    config = GenerationConfig(cache="kivi:bits=2,residual=128", **settings)
    prompt = np.random.default_rng(0).integers(0, 512, 700).tolist()
    Compiled.forget()
    with dispatch.watched() as seen:
        found = generate(model, [prompt], config=config)
    assert "mosaic_gpu" in {choice.implementation for choice in seen if choice.kernel == "attention"}
    assert len(found.token_ids[0]) == 300 and np.isfinite(found.logprobs[0]).all()

    with dispatch.watched() as seen:
        found = generate(model, [prompt], config=GenerationConfig(cache="specache:bits=1,residual=128", **settings))
    assert [choice.implementation for choice in seen if choice.kernel == "replaced_attention"] == ["mosaic_gpu"]
    assert len(found.token_ids[0]) == 300 and np.isfinite(found.logprobs[0]).all()
