"""EAGLE-3 heads of random weights, of the sizes that heads mostly have: to measure their speed where none was trained."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qspec_jax.checkpoints.eagle3 import weights_of_target
from qspec_jax.models.block import Weight
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.eagle3 import Eagle3Config, Eagle3Head
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import mesh_of
from qspec_jax.quantization.outline import is_outline

DRAFT_VOCABULARY = 32_000  # tokens that heads predict of larger vocabularies
_MIN_LAYERS = 7  # of a target whose usual taps are different ones in order


def random_head(target: Llama, *, seed: int = 0) -> Eagle3Head:
    """Makes a head of one layer of the target's sizes, whole on each of the target's devices: normal matrices with a standard deviation of
    0.02, norms 1. For a target whose weights are shapes, the head has shapes too."""
    config = target.checkpoint_config
    settings = _settings(config)
    shared, dtype = weights_of_target(settings, target, target.dtype), target.dtype

    def whole(**given: Weight) -> Eagle3Head:
        keys = iter(jax.random.split(jax.random.key(seed), 16))

        def make(path: str, shape: tuple[int, ...]) -> Weight:
            if path == "target_ids":  # at equal distances
                return jnp.arange(shape[0], dtype=jnp.int32) * (config.vocab_size // shape[0])
            return jnp.ones(shape, dtype) if len(shape) < 2 else (0.02 * jax.random.normal(next(keys), shape, jnp.float32)).astype(dtype)

        return Eagle3Head(settings, make, **given)

    if is_outline(target):
        return jax.eval_shape(whole, **shared)
    head, mesh = whole(**shared), mesh_of(target.weights())
    return head if mesh is None else jax.device_put(head, NamedSharding(mesh, PartitionSpec()))


def _settings(target: LlamaConfig) -> Eagle3Config:
    n, vocabulary = target.num_layers, min(target.vocab_size, DRAFT_VOCABULARY)
    sizes = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": target.max_length,
    }
    named = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": target.rms_norm_eps, "tie_word_embeddings": False}
    layers = LlamaConfig.from_hf(named | sizes, source="a random head")
    taps = (2, n // 2, n - 3) if n >= _MIN_LAYERS else tuple(sorted({0, n // 2, n}))
    return Eagle3Config(layers, taps, target.hidden_size, vocabulary)
