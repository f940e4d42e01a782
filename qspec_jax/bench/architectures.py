"""Models of known shapes with random weights, for figures that depend on shapes alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Key

from pallas_kernels.formats.rounding import parameter_dtype
from pallas_kernels.formats.weights import Int4Weight, NestedWeight
from qspec_jax.checkpoints.weights_text import DEQUANTIZED, NESTED, PACKED, WeightsChoice
from qspec_jax.errors import InputError
from qspec_jax.models.block import Weight
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.placement import Placement
from qspec_jax.models.sharding import mesh_of, weight_sharding
from qspec_jax.progress import working
from qspec_jax.quantization.weights import group_size_over, is_linear, nest_weight


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


_GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_SEED_OSS = {
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "head_dim": 128,
    "attention_bias": True,
    "attention_out_bias": False,
    "rope_theta": 1e7,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "rope_theta": 1e6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

ARCHITECTURES = {
    "llama-2-7b": _llama(32000, 4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama(32000, 5120, 13824, 40, 40, 40),
    "llama-3.1-8b": _llama(128256, 4096, 14336, 32, 32, 8, rope_theta=500000.0),
    "llama-3.1-70b": _llama(128256, 8192, 28672, 80, 64, 8, rope_theta=500000.0),
    "llama-3.2-1b": _llama(128256, 2048, 8192, 16, 32, 8, rope_theta=500000.0, head_dim=64, tie_word_embeddings=True),
    "mistral-7b": _llama(32768, 4096, 14336, 32, 32, 8, rope_theta=1e6),
    "gemma-3-12b": _llama(262208, 3840, 15360, 48, 16, 8, **_GEMMA_3),
    "seed-oss-36b": _llama(155136, 5120, 27648, 64, 80, 8, **_SEED_OSS),
    "qwen3-30b-a3b": _llama(151936, 2048, 6144, 48, 32, 4, **_QWEN3_MOE),
    "smollm2-135m": _llama(49152, 576, 1536, 30, 9, 3, rope_theta=100000.0, head_dim=64, tie_word_embeddings=True),
    "tiny": _llama(256, 256, 512, 2, 4, 2),
}
TINY = ("tiny",)  # those that any machine runs in seconds


def architecture(name: str, layers: int | None = None) -> LlamaConfig:
    """The configuration of a known shape, or of its first layers. Raises InputError for an unknown name, and for layers that it has not."""
    if name not in ARCHITECTURES:
        raise InputError(f"no architecture {name!r}; there are {', '.join(ARCHITECTURES)}")
    config = LlamaConfig.from_hf(ARCHITECTURES[name], source=name)
    if layers is not None and not 1 <= layers <= config.num_layers:
        raise InputError(f"{layers} layers of {name} should be from 1 to {config.num_layers}")
    if layers is None:
        return config
    nope, sliding = (tuple(layer for layer in found if layer < layers) for found in (config.nope_layers, config.sliding_layers))
    config = dataclasses.replace(config, num_layers=layers, nope_layers=nope, sliding_layers=sliding)
    if config.experts is None:
        return config
    return dataclasses.replace(config, experts=dataclasses.replace(config.experts, layers=tuple(range(layers))))


def with_weights(config: LlamaConfig, choice: WeightsChoice) -> LlamaConfig:
    """The shape with linear layers in the format that is chosen for random weights. Raises InputError for what needs a checkpoint."""
    if choice == WeightsChoice(DEQUANTIZED):
        raise InputError("--weights dequantized needs a quantized checkpoint, which random weights are not; leave it out")
    if choice.calibration:
        raise InputError(
            "--weights nested:calibration=FILE needs a trained checkpoint, which random weights are not; leave calibration out"
        )
    return dataclasses.replace(config, int4_weights=choice.linears == PACKED, nested_weights=choice.linears == NESTED)


def check_gpu(name: str) -> None:
    """Raises InputError for a shape that needs a GPU to be measured, if there is none."""
    if name not in TINY and jax.default_backend() != "gpu":
        raise InputError(f"--arch {name} needs a GPU, and JAX finds none; --arch {' or '.join(TINY)} runs anywhere")


@working("making random weights")
def random_model(config: LlamaConfig, *, seed: int = 0, mesh: Mesh | None = None) -> Llama:
    """Makes a model in bfloat16: normal matrices with a standard deviation of 0.02, norms 1, biases 0.

    Args:
        config: its shape; with its `int4_weights`, linear layers are random INT4 codes in the groups of `quantize_linears`; with its
            `nested_weights` they are nested.
        seed: of the weights.
        mesh: to divide it over, see `load_model`.
    """
    keys, placement = iter(jax.random.split(jax.random.key(seed), 16 * config.num_layers + 16)), Placement(config, mesh)

    def make(path: str, shape: tuple[int, ...]) -> Weight:
        place = None if mesh is None else functools.partial(placement.stored, path)
        if len(shape) < 2:
            drawn = jnp.full(shape, not path.endswith(".bias"), jnp.bfloat16, device=place and place(shape))
        elif config.int4_weights and is_linear(path):
            drawn = _drawn_int4(next(keys), path, shape, jnp.dtype(jnp.bfloat16), place)
        else:
            drawn = _compiled_normal(shape, place and place(shape))(next(keys))
            drawn = nest_weight(path, drawn) if config.nested_weights else drawn
        return placement.spread(path, drawn)

    return placement.model(make)


def random_int4(model: Llama) -> Llama:
    """Replaces linear layers by random INT4 codes, in the groups of `quantize_linears`; those in INT4, the upper planes of nested ones and
    all else are the same arrays."""
    weights, mesh = model.weights(), mesh_of(model.weights())
    keys = iter(jax.random.split(jax.random.key(1), 16 * model.config.num_layers + 16))

    def made(path: str, weight: Weight) -> Weight:
        if isinstance(weight, NestedWeight):
            return weight.upper
        if not is_linear(path) or isinstance(weight, Int4Weight):
            return weight
        place = None if mesh is None else lambda shape: weight_sharding(path, shape, mesh)
        return _drawn_int4(next(keys), path, weight.shape, model.dtype, place)

    return model.with_weights({path: made(path, weight) for path, weight in weights.items()})


def _drawn_int4(
    key: Key[Array, ""], path: str, shape: tuple[int, int], dtype: jnp.dtype, place: Callable[[tuple[int, ...]], Sharding] | None
) -> Int4Weight:
    """A random weight in INT4. place: gives the sharding of an array of this shape; None: the default device."""
    size = group_size_over(path, shape, place and place(shape))
    shapes = jax.eval_shape(lambda: _int4(jax.random.key(0), shape, size, dtype))
    places = None if place is None else tuple(place(x.shape) for x in jax.tree.leaves(shapes))
    return _compiled_int4(shape, size, dtype, places, jax.tree.structure(shapes))(key)


@functools.cache
def _compiled_normal(shape: tuple[int, ...], place: Sharding | None) -> Callable:
    return jax.jit(lambda key: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), out_shardings=place)


@functools.cache
def _compiled_int4(shape: tuple[int, int], size: int, dtype, places: tuple[Sharding, ...] | None, tree: Any) -> Callable:
    there = None if places is None else jax.tree.unflatten(tree, places)
    return jax.jit(lambda key: _int4(key, shape, size, dtype), out_shardings=there)


def _int4(key: Key[Array, ""], shape: tuple[int, int], size: int, dtype) -> Int4Weight:
    """Random codes in groups of `size` inputs."""
    out, inputs = shape
    groups = -(-inputs // size)
    codes = lax.bitcast_convert_type(jax.random.randint(key, (out, groups, size // 2), -128, 128, jnp.int8), jnp.uint8)
    # Codes 0 to 15 about zero, with a standard deviation of 0.02.
    scale = jnp.full((out, groups), 0.02 / 4.6, parameter_dtype(dtype))
    return Int4Weight(codes, scale, -7.5 * scale, -inputs % size)
