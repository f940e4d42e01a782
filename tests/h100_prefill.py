"""Compiles what prefill does in a layer for an H100, on a machine without one: a script, for jax must not look for a GPU.

python tests/h100_prefill.py        a JSON object: what it takes to go through a layer, where no queries are asked for and where the last
                                    ones are, and to quantize its keys and values, beside what is given and comes of it, in arrays of the
                                    size of its keys
"""

import json
from collections.abc import Callable
from unittest import mock

import h100  # first, as it keeps JAX from looking for a GPU
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, use_abstract_mesh
from runs import random_model

from qspec_jax.caches.prefill import through_layers
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.models import prompts
from qspec_jax.models.block import Angles

TOKENS, HEADS, HEAD_DIM = 1 << 14, 8, 128
HIDDEN = HEADS * HEAD_DIM
SHAPE = dict(hidden_size=HIDDEN, intermediate_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM)
CACHE = CacheConfig.parse("int8:host=lower,resident=0", group_size=128)


def main() -> None:
    h100.use_first_kernels()
    model = jax.eval_shape(lambda: random_model(jnp.bfloat16, num_hidden_layers=1, max_position_embeddings=TOKENS, **SHAPE))
    empty = lambda: CACHE.empty(model.config, batch=1, capacity=TOKENS, num_speculative_tokens=3, dtype=jnp.bfloat16)
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    x, keys, n = array(1, TOKENS, HIDDEN), array(1, TOKENS, HEADS, HEAD_DIM), array(1, dtype=jnp.int32)
    angles = Angles(((array(1, TOKENS, HEAD_DIM // 2, dtype=jnp.float32),) * 2,), None)

    def through_layer(queries: int) -> Callable:
        return lambda x, block, angles, n: through_layers([block], angles, x, n, empty(), num_queries=queries)

    def fill(n, keys, values):
        return empty().fill(0, jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), n)

    def temporaries(function: Callable, *args, **options) -> float:
        compiled = jax.jit(function, **options).lower(*jax.tree.map(h100.place, args)).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (2 * TOKENS * HIDDEN)

    layer = x, model.layers[0], angles, n
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=h100.abstract_device())),
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        # As many parts as a longer prompt is attended, and quantized, in.
        mock.patch.multiple(prompts, compute_capability=lambda: 9.0, FLASH_BYTES=1 << 22, QUANTIZED_BYTES=1 << 22),
    ):
        found = {f"{queries} queries": temporaries(through_layer(queries), *layer, donate_argnums=0) for queries in (0, 64)}
        print(json.dumps({**found, "quantizing": temporaries(fill, n, keys, keys)}))


if __name__ == "__main__":
    main()
