"""QuantSpec in JAX: self-speculative decoding over one hierarchical quantized KV cache."""

from qspec_jax.checkpoint import load
from qspec_jax.config import CacheConfig, GenerationConfig, LlamaConfig
from qspec_jax.errors import InputError
from qspec_jax.generate import Generation, Piece, Stats, Stream, generate, stream

__all__ = [
    "CacheConfig",
    "Generation",
    "GenerationConfig",
    "InputError",
    "LlamaConfig",
    "Piece",
    "Stats",
    "Stream",
    "generate",
    "load",
    "stream",
]
