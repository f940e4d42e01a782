"""Kernels that Pallas lays out in registers are lowered for a GPU on a machine without one: each version of JAX has rules of its own.

Simulations of kernels (tests/simulated_gpu.py) do not see these rules.
"""

import jax
import jax.numpy as jnp
import pytest
from checkpoints import hf_config

from pallas_kernels.formats.quantization import SCHEMES
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.models.config import LlamaConfig

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need jax >= 0.11")]


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_flush(head_dim, scheme):
    from pallas_kernels.flush import mosaic_gpu

    config = LlamaConfig.from_hf(hf_config(head_dim=head_dim, max_position_embeddings=4096))

    def flush():
        cache = CacheConfig.parse("int8").empty(config, batch=2, capacity=1024, num_speculative_tokens=3, dtype=jnp.bfloat16)
        return mosaic_gpu.flush(cache.layers[0], cache.lengths, jnp.array([True, False]), scheme=scheme)

    assert "mosaic_gpu" in lowered(flush)


@pytest.mark.parametrize("rows", [1, 40, 100, 165, 320])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_plain_matmul(rows, dtype):
    from pallas_kernels.matmul import mosaic_plain

    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 4096), (6144, 4096)))
    assert "mosaic_gpu" in lowered(lambda x, weight: mosaic_plain.skinny_matmul(x, [weight], dtype=dtype), x, weight)


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 165])
def test_gated_matmul(rows):
    """Whatever the rows leave of a tile of 8."""
    from pallas_kernels.matmul import mosaic_plain

    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 4096), (14336, 4096)))
    assert "mosaic_gpu" in lowered(mosaic_plain.gated_matmul, x, weight, weight)
