"""Prefill's attention on a GPU against the same in float32, a chunk at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import needs_gpu

from qspec_jax.models import prompts
from qspec_jax.models.prompts import attend_prompt

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("all_heads", [True, False])
@pytest.mark.parametrize("tokens", [64, 320, 1024])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (4, 4, 64), (4, 1, 256)])
def test_equals_float32(heads, kv_heads, head_dim, tokens, all_heads, monkeypatch):
    if not all_heads:
        monkeypatch.setattr(prompts, "FLASH_BYTES", 1 << 16)
    keys = jax.random.split(jax.random.key(0), 3)
    make = lambda key, heads: jax.random.normal(key, (2, tokens, heads, head_dim), jnp.bfloat16)
    q, k, v = make(keys[0], heads), make(keys[1], kv_heads), make(keys[2], kv_heads)
    out = np.asarray(jax.jit(lambda *x: attend_prompt(*x))(q, k, v), np.float32)
    expected = np.asarray(jax.jit(lambda *x: attend_prompt(*x))(*(x.astype(jnp.float32) for x in (q, k, v))))
    assert np.linalg.norm(out - expected) <= 1e-2 * np.linalg.norm(expected)
    # What follows does not reach back.
    beyond = [x.at[:, 50:].set(100) for x in (q, k, v)]
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda *x: attend_prompt(*x))(*beyond), np.float32)[:, :50], out[:, :50])
