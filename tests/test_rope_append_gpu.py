"""The GPU kernel of RoPE and append against the reference, and what it does not take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import gpu, skip_or_fail
from problems.rope_append import OUTSIDE, random_projections

from pallas_kernels.formats.kv_cache import FullLayer
from pallas_kernels.rope_append import mosaic_gpu, reference, rotate_and_append

run = jax.jit(rotate_and_append, static_argnames="implementation")


@gpu
@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "head_dim"), [(1, 32, 8, 128), (3, 8, 8, 64), (2, 6, 1, 256), (4, 14, 2, 64), (1, 4, 2, 96)]
)
def test_equals_the_reference_and_touches_no_other_row(batch, heads, kv_heads, head_dim, tokens):
    qkv, cos, sin, buffer, offset = random_projections(batch, tokens, heads, kv_heads, head_dim)
    skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(qkv, cos, sin, buffer, offset))
    q, new = run(qkv, cos, sin, buffer, offset, implementation="mosaic_gpu")
    rounded = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    wide = FullLayer(buffer.keys.astype(jnp.float32), buffer.values.astype(jnp.float32))
    expected_q, expected = reference.rotate_and_append(qkv.astype(jnp.float32), rounded(cos), rounded(sin), wide, offset)
    np.testing.assert_allclose(np.asarray(q, np.float32), np.asarray(expected_q), rtol=2**-8, atol=2**-8)
    written = (np.arange(buffer.keys.shape[2]) >= np.asarray(offset)[:, None]) & (
        np.arange(buffer.keys.shape[2]) < np.asarray(offset)[:, None] + tokens
    )
    for ours, theirs, old, tolerance in (
        (new.keys, expected.keys, buffer.keys, 2**-8),
        (new.values, expected.values, buffer.values, 0),
    ):
        ours, theirs, old = (np.asarray(x, np.float32).swapaxes(1, 2) for x in (ours, theirs, old))
        np.testing.assert_allclose(ours[written], theirs[written], rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(ours[~written], old[~written])


@gpu
@pytest.mark.parametrize("tokens", [2, 3])
def test_an_offset_without_room_writes_to_the_last_rows(tokens):
    *args, _ = random_projections(4, tokens, 4, 2, 64)
    skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(*args, jnp.array(OUTSIDE, jnp.int32)))
    ours = run(*args, jnp.array(OUTSIDE, jnp.int32), implementation="mosaic_gpu")[1]
    theirs = run(*args, jnp.array(OUTSIDE, jnp.int32), implementation="reference")[1]
    np.testing.assert_array_equal(np.asarray(ours.values, np.float32), np.asarray(theirs.values, np.float32))
    np.testing.assert_allclose(np.asarray(ours.keys, np.float32), np.asarray(theirs.keys, np.float32), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_the_reference_moves_an_offset_without_room_as_the_kernel_does(tokens):
    *args, _ = random_projections(4, tokens, 4, 2, 64)
    last = 40 - max(2, tokens)
    outside, inside = (run(*args, jnp.array(rows, jnp.int32), implementation="reference")[1] for rows in (OUTSIDE, [0, last, last, last]))
    np.testing.assert_array_equal(np.asarray(outside.values, np.float32), np.asarray(inside.values, np.float32))
    np.testing.assert_array_equal(np.asarray(outside.keys, np.float32), np.asarray(inside.keys, np.float32))


@pytest.mark.parametrize(
    ("tokens", "head_dim", "dtype", "offset_dtype", "reason"),
    [
        (257, 64, jnp.bfloat16, jnp.int32, "up to 256 tokens, not 257"),
        (1, 6, jnp.bfloat16, jnp.int32, "multiples of 4"),
        (1, 64, jnp.float32, jnp.int32, "bfloat16, not float32"),
        (1, 64, jnp.bfloat16, jnp.int16, "offsets in int32, not int16"),
    ],
)
def test_the_kernel_takes_no_other_shapes(monkeypatch, tokens, head_dim, dtype, offset_dtype, reason):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    *args, offset = random_projections(1, tokens, 2, 1, head_dim, rows=300, dtype=dtype)
    args = *args, offset.astype(offset_dtype)
    assert reason in mosaic_gpu.unsupported(*args)
    q, new = run(*args)
    assert q.shape == (1, tokens, 2, head_dim) and new.keys.shape == (1, 1, 300, head_dim)


def test_the_kernel_takes_the_shapes_of_a_decode_step(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    assert mosaic_gpu.unsupported(*random_projections(8, 7, 32, 8, 128)) is None
