"""Writes a checkpoint with random weights in the shape of JackFram/llama-68m, TriForce's small model: python small_model.py DIR VOCABULARY

Where acceptance is simulated, the shape is all that counts; the vocabulary has to be the target's.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS = 768, 3072, 2, 12


def main(directory: Path, vocabulary: int) -> None:
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16)
    ones = lambda: np.ones(HIDDEN, ml_dtypes.bfloat16)
    tensors = {
        "model.embed_tokens.weight": draw(vocabulary, HIDDEN),
        "lm_head.weight": draw(vocabulary, HIDDEN),
        "model.norm.weight": ones(),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name in ("q", "k", "v", "o"):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = draw(HIDDEN, HIDDEN)
        tensors[f"{layer}.mlp.gate_proj.weight"] = draw(INTERMEDIATE, HIDDEN)
        tensors[f"{layer}.mlp.up_proj.weight"] = draw(INTERMEDIATE, HIDDEN)
        tensors[f"{layer}.mlp.down_proj.weight"] = draw(HIDDEN, INTERMEDIATE)
        tensors |= {f"{layer}.input_layernorm.weight": ones(), f"{layer}.post_attention_layernorm.weight": ones()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 1 << 20,  # it reads a window, and positions are counted within that
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
