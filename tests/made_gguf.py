"""GGUF files of tiny random checkpoints, written by the package gguf as llama.cpp's converter writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

Kind = gguf.GGMLQuantizationType
PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"}
PARTS |= {f"{n}_proj": f"attn_{n}" for n in "qkv"} | {f"{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
PARTS |= {f"{n}_norm": f"attn_{n}_norm" for n in "qk"}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def gguf_name(name: str) -> str:
    """The name in GGUF of a tensor of Hugging Face."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, *_, part, end = name.split(".")
    return f"blk.{layer}.{PARTS[part]}.{end}"


def paired(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of llama.cpp: the two of each pair that RoPE rotates together follow each other."""
    return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a model with a config.json."""
    name = config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    return {"general.architecture": name, "tokenizer.ggml.eos_token_id": config["eos_token_id"]} | {
        f"{name}.{key}": value for key, value in values.items()
    }


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    metadata: Mapping[str, Any] | None = None,
    encode: Callable[[np.ndarray], tuple[np.ndarray, Kind]] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Writes a GGUF file; returns the path, or that of the first shard.

    Args:
        path: of the file.
        config: as of config.json.
        tensors: by their names in Hugging Face's checkpoints, or, if they have no counterpart there, in GGUF's.
        metadata: changes of `metadata_of`; None leaves a key out.
        encode: the blocks of a matrix, and their type; None: F32, F16 or BF16, by the dtype.
        max_tensors: of a shard; 0: one file.
    """
    name = config["model_type"]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=max_tensors)
    for key, value in (metadata_of(config) | dict(metadata or {})).items():
        if key == "general.architecture":
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value=value, type=gguf.GGUFValueType.STRING)
        elif value is not None:
            number = isinstance(value, int) and not isinstance(value, bool)
            writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if number else gguf.GGUFValueType.get_type(value))
    for each, x in tensors.items():
        is_known = each.startswith(("model.", "lm_head."))
        stored = gguf_name(each) if is_known else each
        if name == "llama" and ("q_proj" in each or "k_proj" in each):
            x = paired(x, config["num_attention_heads" if "q_proj" in each else "num_key_value_heads"])
        if x.ndim == 1 or not is_known:
            writer.add_tensor(stored, np.asarray(x, np.float32))
        elif encode is not None:
            blocks, kind = encode(x)
            writer.add_tensor(stored, blocks, raw_dtype=kind)
        elif x.dtype == ml_dtypes.bfloat16:
            writer.add_tensor(stored, x.view(np.uint8), raw_dtype=Kind.BF16)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-*"))
