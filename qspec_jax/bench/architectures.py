"""Models of known shapes with random weights, for figures that depend on shapes alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.rounding import parameter_dtype
from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama, Weight
from qspec_jax.quantization.weights import is_linear, weight_group_size


def _llama(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | others


ARCHITECTURES = {
    "llama-2-7b": _llama(32000, 4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama(32000, 5120, 13824, 40, 40, 40),
    "llama-3.1-8b": _llama(128256, 4096, 14336, 32, 32, 8, rope_theta=500000.0),
    "llama-3.1-70b": _llama(128256, 8192, 28672, 80, 64, 8, rope_theta=500000.0),
    "llama-3.2-1b": _llama(128256, 2048, 8192, 16, 32, 8, rope_theta=500000.0, head_dim=64, tie_word_embeddings=True),
    "mistral-7b": _llama(32768, 4096, 14336, 32, 32, 8, rope_theta=1e6),
    "tiny": _llama(256, 256, 512, 2, 4, 2),
}
TINY = ("tiny",)  # those that any machine runs in seconds


def architecture(name: str) -> LlamaConfig:
    """The configuration of a known shape. Raises InputError for an unknown name."""
    if name not in ARCHITECTURES:
        raise InputError(f"no architecture {name!r}; there are {', '.join(ARCHITECTURES)}")
    return LlamaConfig.from_hf(ARCHITECTURES[name], source=name)


def check_gpu(name: str) -> None:
    """Raises InputError for a shape that takes a GPU to measure, where there is none."""
    if name not in TINY and jax.default_backend() != "gpu":
        raise InputError(f"--arch {name} needs a GPU, and JAX finds none; --arch {' or '.join(TINY)} runs anywhere")


def random_model(config: LlamaConfig, *, seed: int = 0) -> Llama:
    """Makes a model in bfloat16: normal matrices with a standard deviation of 0.02, norms 1."""
    keys = iter(jax.random.split(jax.random.key(seed), 16 * config.num_layers + 16))

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        return _normal(next(keys), shape) if len(shape) == 2 else jnp.ones(shape, jnp.bfloat16)

    return Llama(config, make)


def random_int4(model: Llama, *, seed: int = 1) -> Llama:
    """Replaces the linear layers by random INT4 codes, in the groups of `quantize_linears`; all else is the same arrays."""
    weights = model.weights()
    keys = iter(jax.random.split(jax.random.key(seed), 16 * model.config.num_layers + 16))

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        return _random_int4(next(keys), shape, model.dtype) if is_linear(path) else weights[path]

    return Llama(model.config, make)


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape: tuple[int, ...]):
    return 0.02 * jax.random.normal(key, shape, jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_int4(key, shape: tuple[int, int], dtype) -> Int4Weight:
    out, inputs = shape
    size = weight_group_size(inputs)
    groups = -(-inputs // size)
    codes = lax.bitcast_convert_type(jax.random.randint(key, (out, groups, size // 2), -128, 128, jnp.int8), jnp.uint8)
    # Codes 0 to 15 about zero, with a standard deviation of 0.02.
    scale = jnp.full((out, groups), 0.02 / 4.6, parameter_dtype(dtype))
    return Int4Weight(codes, scale, -7.5 * scale, -inputs % size)
