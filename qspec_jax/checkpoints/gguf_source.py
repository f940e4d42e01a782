"""GGUF files as a source of weights: their names of tensors, the order of their rows, and their metadata as a config.json."""

import contextlib
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qspec_jax.checkpoints.gguf_file import FLOATS, GgufFile, read_gguf
from qspec_jax.checkpoints.gguf_tokenizer import tokenizer_files
from qspec_jax.checkpoints.source import WeightSource
from qspec_jax.checkpoints.tensor_names import Place, places
from qspec_jax.errors import InputError, flat, listed
from qspec_jax.models.config import LlamaConfig

# general.architecture -> the architecture of Hugging Face, and whether rows of queries and keys are stored in pairs (2i, 2i + 1) of RoPE.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
}
# Names of tensors in Hugging Face's checkpoints -> in GGUF; {i} is the layer.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
    "model.layers.{i}.input_layernorm.weight": "blk.{i}.attn_norm.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "blk.{i}.ffn_norm.weight",
    **{f"model.layers.{{i}}.self_attn.{n}_norm.weight": f"blk.{{i}}.attn_{n}_norm.weight" for n in "qk"},
    **{f"model.layers.{{i}}.self_attn.{n}_proj.{w}": f"blk.{{i}}.attn_{n}.{w}" for n in "qkv" for w in ("weight", "bias")},
    **{f"model.layers.{{i}}.self_attn.o_proj.{w}": f"blk.{{i}}.attn_output.{w}" for w in ("weight", "bias")},
    **{f"model.layers.{{i}}.mlp.{n}_proj.{w}": f"blk.{{i}}.ffn_{n}.{w}" for n in ("gate", "up", "down") for w in ("weight", "bias")},
}
# The settings of RoPE that all models of Llama 3.1, 3.2 and 3.3 have.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FACTORS = "rope_freqs.weight"  # what llama.cpp divides the frequencies of RoPE by
_ROTATIONS = re.compile(r"blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")  # computed here
# Keys of an architecture's metadata that are read below, or change nothing.
_KEYS = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
    *(f"attention.{key}" for key in ("head_count", "head_count_kv", "layer_norm_rms_epsilon", "key_length", "value_length", "causal")),
    *("rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "finetuned", "attn_factor")),
}


def gguf_config(path: Path) -> LlamaConfig:
    """The config of the model in a GGUF file, from its metadata.

    Raises:
        InputError: as `GgufSource` does, but tensors are not compared with the config.
    """
    return _config(read_gguf(path))


def gguf_quantization(path: Path) -> str | None:
    """The types of codes that the matrices of a GGUF file are stored in, such as Q4_K; None without any.

    Raises InputError as `gguf_config`.
    """
    return ", ".join(_quantized_kinds(read_gguf(path))) or None


def gguf_tokenizer_files(path: Path) -> dict[str, bytes]:
    """The contents of the files of a Hugging Face directory for the tokenizer of a GGUF file, by their names; empty without a tokenizer.

    Raises:
        InputError: as `gguf_config` does, and for a kind of tokenizer that is not supported.
    """
    file = read_gguf(path)
    return tokenizer_files(file, _as_huggingface(file)["max_position_embeddings"])


class GgufSource(WeightSource):
    """The model of a GGUF file, or of the shards of one.

    Raises:
        InputError: for a file that cannot be read, an architecture or setting that is not supported, and for missing, unexpected or
            misshapen tensors.
    """

    def __init__(self, path: Path):
        self.file = read_gguf(path)
        self.directory = path
        self.config = _config(self.file)
        self.quantization = ", ".join(_quantized_kinds(self.file)) or None
        self.not_finite: set[str] = set()
        if self.config.num_layers > len(self.file.tensors):  # a huge number of layers would take long to count
            raise InputError(
                f"{path}: its metadata asks for {self.config.num_layers} layers, and there are {len(self.file.tensors)} tensors"
            )
        self._heads: dict[str, int] = {}
        self.places: Mapping[str, Place] = {each: self._place(place) for each, place in places(self.config).items()}
        self._check()

    def read(self, path: str, memory: np.ndarray | None = None) -> np.ndarray:
        """The weight at a path of the model, see `WeightSource`."""
        place = self.places[path]
        tensor = self.file.tensors[place.name]
        array = np.empty(place.shape, tensor.dtype) if memory is None else memory.view(tensor.dtype).reshape(place.shape)
        rows = array.reshape(tensor.rows, -1)
        if (heads := self._heads.get(place.name)) is None:
            for at, part in tensor.parts():
                rows[at] = part
            return array
        # The stored row of pair j and half h of a head is 2 j + h; the model's is h * head_dim / 2 + j.
        order = np.arange(place.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
        if len(place.shape) == 1:
            array[order] = np.concatenate([part for _, part in tensor.parts()]).reshape(-1)
            return array
        for at, part in tensor.parts():
            rows[order[at]] = part
        return array

    def read_bytes(self, path: str) -> int:
        """Bytes of the array that `read` returns."""
        place = self.places[path]
        return place.size * self.file.tensors[place.name].dtype.itemsize

    def check_contents(self) -> None:
        """Does nothing: a GGUF file has each tensor once."""

    def small_file(self, name: str) -> bytes | None:
        """The contents of a file of the conversion, see `WeightSource`: none of the tokenizer if that of the GGUF file is not supported."""
        return self._small_files.get(name)

    @functools.cached_property
    def _small_files(self) -> dict[str, bytes]:
        raw = _as_huggingface(self.file)
        config = json.dumps(raw, indent=2).encode() + b"\n"
        with contextlib.suppress(InputError):  # `convert` warns of it
            return {"config.json": config, **tokenizer_files(self.file, raw["max_position_embeddings"])}
        return {"config.json": config}

    def _place(self, place: Place) -> Place:
        """The place in the file of a weight that Hugging Face has at `place`."""
        layer = re.match(r"model\.layers\.(\d+)\.", place.name)
        number = layer[1] if layer else ""
        known = place.name if layer is None else "model.layers.{i}." + place.name[layer.end() :]
        name = _NAMES[known].replace("{i}", number)
        if _ARCHITECTURES[self.file.metadata["general.architecture"]][1] and (part := re.match(r"blk\.\d+\.attn_([qk])\.", name)):
            self._heads[name] = self.config.num_heads if part[1] == "q" else self.config.num_kv_heads
        return Place(name, place.shape)

    def _check(self) -> None:
        """Raises one InputError for all wrong names and shapes."""
        expected = {place.name: place.shape for place in self.places.values()}
        stored = {name: tensor.shape for name, tensor in self.file.tensors.items() if name != _FACTORS and not _ROTATIONS.fullmatch(name)}
        wrong = []
        if missing := sorted(expected.keys() - stored.keys()):
            wrong.append(f"missing {listed(missing)}")
        if extra := sorted(stored.keys() - expected.keys()):
            wrong.append(f"unexpected {listed(extra)}")
        for name in sorted(expected.keys() & stored.keys()):
            if stored[name] != expected[name]:
                wrong.append(f"{name} has shape {list(stored[name])}, the metadata asks for {list(expected[name])}")
        if wrong:
            raise InputError(f"{self.directory}: the tensors do not fit the metadata: {'; '.join(wrong)}")


def _config(file: GgufFile) -> LlamaConfig:
    return LlamaConfig.from_hf(_as_huggingface(file), source=str(file.path))


def _as_huggingface(file: GgufFile) -> dict[str, Any]:
    """The contents of a config.json for the model of a file. Values are checked when that is read."""
    reader = _Metadata(file)
    architecture = reader.architecture
    if "token_embd.weight" not in file.tensors:
        raise reader.error("the tensors do not fit the metadata: missing token_embd.weight")
    reader.refuse_unknown()
    hidden, heads = reader.value("embedding_length"), reader.value("attention.head_count")
    head_dim = reader.value(
        "attention.key_length", hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := reader.value(key, head_dim)) != head_dim:
            raise reader.error(f"{architecture}.{key} is {found}, and heads have {head_dim} numbers; only the same number is supported")
    raw = {
        "architectures": [_ARCHITECTURES[architecture][0]],
        "model_type": architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": reader.value("feed_forward_length"),
        "num_hidden_layers": reader.value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": reader.value("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.value("rope.freq_base", 10000.0),
        "max_position_embeddings": reader.value("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "torch_dtype": _dtype(file),
    }
    if scaling := reader.rope_scaling():
        raw["rope_scaling"] = scaling
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    if ids["bos"] is not None:
        raw["bos_token_id"] = ids["bos"]
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    raw["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return raw


def _dtype(file: GgufFile) -> str:
    """The dtype that the model is loaded in by default: that of its matrices, or bfloat16 if there are codes among them."""
    kinds = _matrix_kinds(file)
    if _quantized_kinds(file):
        return "bfloat16"
    return next(np.dtype(FLOATS[kind]).name for kind in ("F32", "BF16", "F16") if kind in kinds)


def _quantized_kinds(file: GgufFile) -> list[str]:
    """The types of its matrices that are codes."""
    return sorted(_matrix_kinds(file) - FLOATS.keys())


def _matrix_kinds(file: GgufFile) -> set[str]:
    return {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}


class _Metadata:
    """Reads the metadata of a file's architecture; every error names the file."""

    def __init__(self, file: GgufFile):
        self.file = file
        found = file.metadata.get("general.architecture")
        if not isinstance(found, str) or found not in _ARCHITECTURES:
            what = "has no general.architecture" if found is None else f"architecture {found} is not supported in GGUF"
            raise self.error(f"{what}; supported are {', '.join(_ARCHITECTURES)}")
        self.architecture = found

    def error(self, what: str) -> InputError:
        return InputError(f"{self.file.path}: {flat(what)}")

    def value(self, key: str, default: Any = None) -> Any:
        """The value of an architecture's key. An array that has a number for each layer is one number if all are the same."""
        name = f"{self.architecture}.{key}"
        found = self.file.metadata.get(name, default)
        if found is None:
            raise self.error(f"{name} is missing")
        if isinstance(found, np.ndarray):
            if len(found) == 0 or (found != found[0]).any():
                raise self.error(f"{name} differs between layers, which is not supported")
            return found[0].item()
        return found

    def refuse_unknown(self) -> None:
        """Raises InputError for keys of the architecture that are not known, such as those of experts, unless they are 0 or false."""
        prefix = f"{self.architecture}."
        known = {prefix + key for key in _KEYS}
        given = {key: value for key, value in self.file.metadata.items() if key.startswith(prefix) and key not in known}
        if unknown := sorted(key for key, value in given.items() if isinstance(value, np.ndarray | list) or value):
            raise self.error(f"{listed(unknown)} of its metadata is not supported")
        if self.value("attention.causal", True) is not True:
            raise self.error(f"{prefix}attention.causal is false; only causal attention is supported")

    def rope_scaling(self) -> dict[str, Any] | None:
        """The rope settings as config.json has them: the scaling of the metadata, or the factors of a tensor."""
        kind = self.value("rope.scaling.type", "none")
        old_factor = self.value("rope.scale_linear", 1.0)
        kind = "linear" if kind == "none" and old_factor != 1.0 else kind
        if kind not in ("none", "linear", "yarn"):
            raise self.error(f"rope scaling {kind} is not supported in GGUF; none, linear and yarn are")
        if (scale := self.value("rope.scaling.attn_factor", 1.0)) != 1.0:
            raise self.error(f"{self.architecture}.rope.scaling.attn_factor {scale} is not supported, only 1")
        factors = self.file.tensors.get(_FACTORS)
        if factors is not None:
            if kind != "none":
                raise self.error(f"it has both {_FACTORS} and rope scaling {kind}; one of them is supported")
            return self.factors()
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": float(self.value("rope.scaling.factor", old_factor))}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self.value("rope.scaling.original_context_length")
        return scaling

    def factors(self) -> dict[str, Any]:
        """The rope settings that llama.cpp has computed the tensor of factors from: Llama 3's, or any as those of longrope."""
        [(_, part)] = self.file.tensors[_FACTORS].parts()
        values = part.astype(np.float32).reshape(-1)
        if not (np.isfinite(values) & (values > 0)).all():
            raise self.error(f"{_FACTORS} should have finite numbers above 0")
        theta, factor = self.value("rope.freq_base", 10000.0), float(values.max())
        if isinstance(theta, float) and theta > 0 and np.allclose(values, _llama3_factors(theta, factor, len(values)), rtol=1e-5, atol=0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        shortest = [float(str(value)) for value in values]
        return {
            "rope_type": "longrope",
            "short_factor": shortest,
            "long_factor": shortest,
            "factor": 1.0,
            "original_max_position_embeddings": self.value("context_length"),
            "attention_factor": 1.0,
        }


def _llama3_factors(theta: float, factor: float, size: int) -> np.ndarray:
    """The factors that llama.cpp stores for Llama 3's scaling with `_LLAMA3`, [size]."""
    low, high, original = _LLAMA3.values()
    turns = original / (2 * np.pi * theta ** (np.arange(size) / size))
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - blend) / factor + blend)
