"""What a checkpoint is and what it takes in memory, from its headers alone: no weight is read."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import config_and_dtype
from qspec_jax.checkpoints.tensor_names import weight_shapes
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.quantization.weights import is_linear, quantize_rows, quantize_weight


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What a checkpoint is, and what it takes: bytes of its weights in the dtype that it is loaded in, of what an INT4 draft adds to them,
    and of the hierarchical cache and a full one for one sequence of `context` tokens."""

    architecture: str
    dtype: str
    parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_length: int
    rope_type: str
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    draft_weight_bytes: int
    context: int
    cache_bytes: int
    full_cache_bytes: int


def model_info(
    directory: str | Path, *, context: int | None = None, cache: CacheConfig | None = None, num_speculative_tokens: int = 4
) -> ModelInfo:
    """What a checkpoint is, from its config.json and its tensors' headers.

    context: tokens to size the caches for; None is the model's longest sequence. num_speculative_tokens: drafts of a round, for which they
    have room. Raises InputError as loading would, and for a context below 1.
    """
    config, dtype = config_and_dtype(directory)
    dtype = jnp.dtype(dtype)
    context = config.max_length if context is None else context
    if context < 1:
        raise InputError(f"context {context} should be at least 1 token")
    with jax.enable_x64(dtype == jnp.float64):
        return _sizes(config, dtype, context, cache or CacheConfig(), num_speculative_tokens)


def _sizes(config: LlamaConfig, dtype: jnp.dtype, context: int, cache: CacheConfig, num_speculative_tokens: int) -> ModelInfo:
    weights = {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in weight_shapes(config).items()}
    drafted = [jax.eval_shape(quantize_weight, w) for path, w in weights.items() if is_linear(path)]
    drafted.append(jax.eval_shape(quantize_rows, weights.get("head", weights["embedding"])))

    def cache_bytes(kind: CacheConfig) -> int:
        sizes = dict(batch=1, capacity=context, num_speculative_tokens=num_speculative_tokens, dtype=dtype)
        return jax.eval_shape(lambda: kind.empty(config, **sizes)).num_bytes

    return ModelInfo(
        architecture=config.architecture,
        dtype=config.dtype,
        parameters=sum(math.prod(w.shape) for w in weights.values()),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tie_word_embeddings,
        max_length=config.max_length,
        rope_type=config.rope.rope_type,
        eos_token_ids=config.eos_token_ids,
        weight_bytes=sum(math.prod(w.shape) for w in weights.values()) * dtype.itemsize,
        draft_weight_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(drafted)),
        context=context,
        cache_bytes=cache_bytes(cache),
        full_cache_bytes=cache_bytes(CacheConfig("full")),
    )
