"""Random EAGLE-3 heads for small models."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from qspec_jax.checkpoints.eagle3_config import read_head_config
from qspec_jax.models.eagle3 import Eagle3Head
from qspec_jax.models.llama import Llama

LAYER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def head_config(model: Llama, taps: tuple[int, ...], tokens: int | None = None, **changes) -> dict:
    """config.json of a head that predicts `tokens` of the target's vocabulary; None: all of them."""
    c = model.checkpoint_config
    sizes = dict(LAYER, vocab_size=c.vocab_size, draft_vocab_size=tokens or c.vocab_size, target_hidden_size=c.hidden_size)
    named = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", rms_norm_eps=1e-6, max_position_embeddings=4096)
    return named | sizes | dict(eagle_aux_hidden_state_layer_ids=list(taps)) | changes


def random_head(model: Llama, *, taps: tuple[int, ...] = (0, 1), tokens: int | None = None, **changes) -> Eagle3Head:
    """A head of one layer. Where it does not predict the whole vocabulary, its tokens have ids at equal distances."""
    settings = read_head_config(head_config(model, taps, tokens, **changes), model.checkpoint_config)
    keys = iter(jax.random.split(jax.random.key(5), 64))

    def make(path, shape):
        if path == "target_ids":
            return jnp.arange(shape[0], dtype=jnp.int32) * (model.config.vocab_size // shape[0])
        return (0.3 * jax.random.normal(next(keys), shape) + path.endswith("norm.weight")).astype(model.dtype)

    return Eagle3Head(settings, make)


def write_head(directory: Path, model: Llama, *, taps: tuple[int, ...] = (0, 1), tokens: int | None = None) -> Path:
    """Writes a random head as SpecForge does, but with its embedding."""
    head, directory = random_head(model, taps=taps, tokens=tokens), Path(directory)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(head_config(model, taps, tokens)))
    layer = head.layers[0]
    params = {f"midlayer.self_attn.{name}.weight": getattr(layer, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    params |= {f"midlayer.mlp.{name}.weight": getattr(layer, name).weight for name in ("gate_proj", "up_proj", "down_proj")}
    norms = {"midlayer.input_layernorm": layer.input_norm, "midlayer.post_attention_layernorm": layer.post_attention_norm}
    norms |= {"midlayer.hidden_norm": head.hidden_norm, "norm": head.norm, "fc": head.fc}
    params |= {f"{name}.weight": module.weight for name, module in norms.items()}
    params |= {"lm_head.weight": head.head, "embed_tokens.weight": head.embedding}
    tensors = {name: np.asarray(param.get_value()) for name, param in params.items()}
    if tokens is not None:
        tensors["d2t"] = np.asarray(head.target_ids.get_value(), np.int64) - np.arange(tokens)
    save_file(tensors, directory / "model.safetensors")
    return directory
