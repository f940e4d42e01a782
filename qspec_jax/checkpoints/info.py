"""A summary of a checkpoint and of the memory that it takes, from its headers alone: no weight is read."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats.weights import Int4Weight, NestedWeight
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import LoadPlan, load_plan
from qspec_jax.checkpoints.tensor_names import weight_shapes
from qspec_jax.errors import InputError
from qspec_jax.models.experts import is_expert_matrix
from qspec_jax.models.experts_config import ExpertsConfig
from qspec_jax.quantization.weights import is_linear, quantize_rows, quantize_weight

GAMMA = 4  # draft tokens in a round, for which caches have room


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """A checkpoint's settings and sizes.

    Attributes:
        dtype: that the checkpoint is stored in, or of a quantized one what is not stored as codes.
        sliding_window: tokens that layers with a sliding window attend to; None if no layer has one.
        sliding_layers: how many layers have it.
        quantization: the format that linear layers are stored in as codes; None if they are stored as numbers.
        linear_layers: how they are stored and loaded, in words; None if they are neither quantized nor in INT4.
        weight_bytes: of the weights, as the checkpoint is loaded.
        parameters: numbers in all weights.
        token_parameters: numbers in the weights that a token goes through: all but those of experts that it does not choose.
        experts: of layers that have experts instead of one MLP, see `models.experts_config.ExpertsConfig`; None without any.
        draft_weight_bytes: of the INT4 weights that a draft adds; it reads those of the target that are in INT4, and its experts.
        context: tokens of one sequence, for which the caches are sized.
        cache_bytes: of the hierarchical cache, or the one that was asked for.
        full_cache_bytes: of a cache in the model's precision.
    """

    architecture: str
    dtype: str
    parameters: int
    token_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    experts: ExpertsConfig | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_length: int
    rope_type: str
    sliding_window: int | None
    sliding_layers: int
    quantization: str | None
    linear_layers: str | None
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    draft_weight_bytes: int
    context: int
    cache_bytes: int
    full_cache_bytes: int


def model_info(directory: str | Path, *, context: int | None = None, cache: CacheConfig | None = None) -> ModelInfo:
    """The summary of a checkpoint, from its config.json and its tensors' headers.

    Args:
        directory: of the checkpoint, or its name on the Hub.
        context: tokens to size the caches for; None: the model's longest sequence.
        cache: the cache to size; None: the hierarchical one.

    Raises:
        InputError: as loading does, and for a context below 1.
    """
    plan = load_plan(directory)
    dtype = jnp.dtype(plan.dtype)
    context = plan.config.max_length if context is None else context
    if context < 1:
        raise InputError(f"context {context} should be at least 1 token")
    with jax.enable_x64(dtype == jnp.float64):
        return _sizes(plan, dtype, context, cache or CacheConfig())


def _sizes(plan: LoadPlan, dtype: jnp.dtype, context: int, cache: CacheConfig) -> ModelInfo:
    config, weights = plan.config, plan.weights
    own = [w for path, w in weights.items() if is_linear(path) and not isinstance(w, Int4Weight | NestedWeight)]
    drafted = [jax.eval_shape(quantize_weight, w) for w in own]
    drafted.append(jax.eval_shape(quantize_rows, weights.get("head", weights["embedding"])))

    def cache_bytes(kind: CacheConfig) -> int:
        sizes = dict(batch=1, capacity=context, num_speculative_tokens=GAMMA, dtype=dtype)
        return jax.eval_shape(lambda: kind.empty(config, **sizes)).num_bytes

    numbers = {path: math.prod(shape) for path, shape in weight_shapes(config).items()}
    unread = sum(count - config.experts.read(count, 1) for path, count in numbers.items() if is_expert_matrix(path))
    same = ("dtype", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    return ModelInfo(
        **{
            name: getattr(config, name) for name in (*same, "architecture", "experts", "tie_word_embeddings", "max_length", "eos_token_ids")
        },
        rope_type=config.rope.rope_type,
        sliding_window=config.sliding_window,
        sliding_layers=len(config.windowed_layers),
        quantization=plan.quantization,
        linear_layers=plan.described_linears(),
        parameters=sum(numbers.values()),
        token_parameters=sum(numbers.values()) - unread,
        weight_bytes=_bytes(weights),
        draft_weight_bytes=_bytes(drafted),
        context=context,
        cache_bytes=cache_bytes(cache),
        full_cache_bytes=cache_bytes(CacheConfig("full")),
    )


def _bytes(shapes: Any) -> int:
    """Bytes of arrays of these shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
