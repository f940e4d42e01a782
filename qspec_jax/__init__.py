"""QuantSpec in JAX: self-speculative decoding over one hierarchical quantized KV cache."""

from qspec_jax.checkpoint import load
from qspec_jax.config import CacheConfig, GenerationConfig, LlamaConfig
from qspec_jax.errors import InputError
from qspec_jax.generate import Generation, Stats, generate

__all__ = ["CacheConfig", "Generation", "GenerationConfig", "InputError", "LlamaConfig", "Stats", "generate", "load"]
