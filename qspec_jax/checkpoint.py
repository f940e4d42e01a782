"""Hugging Face checkpoints: the one table of tensor names, and loading a directory tensor by tensor to the device."""

import dataclasses
import logging
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (gives numpy its bfloat16, which safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from qspec_jax.config import LlamaConfig, read_json, token_ids
from qspec_jax.errors import InputError
from qspec_jax.model import Llama

log = logging.getLogger(__name__)

# (path in qspec_jax.model, name in the checkpoint); {i} is the layer.
_LLAMA_NAMES = (
    ("embedding", "model.embed_tokens.weight"),
    ("head", "lm_head.weight"),
    ("norm.weight", "model.norm.weight"),
    ("layers.{i}.input_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.post_attention_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    *((f"layers.{{i}}.{n}_norm.weight", f"model.layers.{{i}}.self_attn.{n}_norm.weight") for n in "qk"),
    *((f"layers.{{i}}.{n}_proj.{w}", f"model.layers.{{i}}.self_attn.{n}_proj.{w}") for n in "qkvo" for w in ("weight", "bias")),
    *((f"layers.{{i}}.{n}_proj.{w}", f"model.layers.{{i}}.mlp.{n}_proj.{w}") for n in ("gate", "up", "down") for w in ("weight", "bias")),
)
# Buffers that old checkpoints carry and that are computed here.
_IGNORED = re.compile(r"(.*\.rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias)$")
_FLOATS = {"F16", "BF16", "F32", "F64"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LOADED_AS = ("bfloat16", "float32", "float64")


def hf_name(path: str) -> str:
    """The checkpoint's name of the weight at a path of the model."""
    layer = re.match(r"layers\.(\d+)\.", path)
    pattern = path if layer is None else "layers.{i}." + path[layer.end() :]
    return dict(_LLAMA_NAMES)[pattern].replace("{i}", layer[1] if layer else "")


def load_config(directory: str | Path) -> LlamaConfig:
    """The model's config, with the EOS ids of generation_config.json where it has them."""
    directory = _existing(directory)
    config = LlamaConfig.from_hf(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = token_ids(read_json(generation).get("eos_token_id"), str(generation))
        config = dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)
    return config


def load_model(directory: str | Path, *, dtype: str | None = None, progress: bool | None = None) -> Llama:
    """Loads a Hugging Face directory (config.json, one or sharded safetensors), one tensor at a time, to the default device.

    dtype: bfloat16, float32 or float64; None is the checkpoint's own (float16 becomes bfloat16). progress: a bar on
    standard error; None shows it on a terminal. Raises InputError that lists every missing, unexpected or misshapen tensor at once.
    """
    config = load_config(directory)
    dtype = dtype or stored_dtype(config)
    if dtype not in _LOADED_AS:
        raise InputError(f"dtype {dtype} is not one to load as; {', '.join(_LOADED_AS)} are")
    wanted = jnp.dtype(dtype)
    if wanted == jnp.float64 and not jax.config.jax_enable_x64:
        raise InputError("float64 needs 64-bit JAX: set JAX_ENABLE_X64=1 or jax.config.update('jax_enable_x64', True)")
    with ExitStack() as stack:
        tensors = _open(Path(directory), stack)
        shapes = _shapes(config)
        tied = _check(Path(directory), config, shapes, tensors)
        bar = stack.enter_context(tqdm(total=len(shapes), desc="load", unit="tensor", disable=None if progress is None else not progress))

        def make(path: str, shape: tuple[int, ...]) -> jax.Array:
            array = _read(tensors, hf_name(path))
            bar.update()
            if path == "embedding" and tied and not np.array_equal(array, _read(tensors, hf_name("head"))):
                raise InputError(
                    f"{directory}: config.json says tie_word_embeddings, but lm_head.weight differs from the embedding; "
                    "one of them is wrong"
                )
            # Cast on the host's view, so that the device never holds two copies.
            return jnp.asarray(array.astype(wanted, copy=False))

        return Llama(config, make)


def tensor_shapes(directory: str | Path, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, read from the headers alone. Raises InputError as loading would."""
    shapes = _shapes(config)
    with ExitStack() as stack:
        _check(Path(directory), config, shapes, _open(Path(directory), stack))
    return shapes


def load_tokenizer(directory: str | Path):
    """The directory's tokenizer (a transformers fast tokenizer)."""
    directory = _existing(directory)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{directory}: no tokenizer in it; one of {', '.join(_TOKENIZER_FILES)} is needed")
    from transformers import AutoTokenizer  # slow to import, and not needed for token ids

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # whatever a broken file makes of it, the tokenizers library a bare Exception
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise InputError(f"{directory}: no tokenizer that transformers can read ({reason})") from None


def load(directory: str | Path, *, dtype: str | None = None):
    """The model and the tokenizer of a checkpoint directory. Raises InputError."""
    return load_model(directory, dtype=dtype), load_tokenizer(directory)


def _existing(directory: str | Path) -> Path:
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; a Hugging Face checkpoint directory is needed")
    return directory


def stored_dtype(config: LlamaConfig) -> str:
    """The dtype that a checkpoint is loaded in if no other is asked for."""
    if config.dtype == "float16":
        log.warning("the checkpoint is float16; loading it as bfloat16 (--dtype float32 keeps every bit)")
        return "bfloat16"
    return config.dtype


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model asks for, by the checkpoint's name."""
    shapes = {}

    def make(path: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        shapes[hf_name(path)] = shape
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    Llama(config, make)
    return shapes


def _open(directory: Path, stack: ExitStack) -> dict[str, safe_open]:
    """Tensor name -> open file, over all shards."""
    index = directory / "model.safetensors.index.json"
    named: dict[str, str] | None = None
    if index.exists():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
            raise InputError(f"{index}: weight_map should map tensors to files, and does not")
        names = sorted(set(named.values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, safe_open] = {}
    for name in names:
        path = directory / name
        if not path.is_file():
            hint = "; only safetensors can be loaded, convert the .bin files first" if any(directory.glob("*.bin")) else ""
            raise InputError(f"{path}: missing{hint}")
        try:
            file = stack.enter_context(safe_open(path, framework="np"))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not a whole safetensors file ({_one_line(error)})") from None
        keys = set(file.keys())
        tensors |= dict.fromkeys(keys, file)
        if named is not None:
            lost = sorted(k for k, v in named.items() if v == name and k not in keys)
            stray = sorted(keys - named.keys())
            if lost:
                raise InputError(f"{index}: names tensors that {name} lacks: {_some(lost)}")
            if stray:
                raise InputError(f"{index}: has no entry for tensors of {name}: {_some(stray)}")
    return tensors


def _check(directory: Path, config: LlamaConfig, shapes: dict[str, tuple[int, ...]], tensors: dict[str, safe_open]) -> bool:
    """Raises one InputError with all that is wrong; returns whether a tied checkpoint carries its head too."""
    head = hf_name("head")
    carried = config.tie_word_embeddings and head in tensors
    expected = shapes | ({head: shapes[hf_name("embedding")]} if carried else {})
    wrong = []
    if missing := sorted(expected.keys() - tensors.keys()):
        reason = " (config.json says that the embeddings are not tied)" if missing == [head] else ""
        wrong.append(f"missing {_some(missing)}{reason}")
    if extra := sorted(k for k in tensors.keys() - expected.keys() if not _IGNORED.match(k)):
        wrong.append(f"unexpected {_some(extra)}")
    for name in sorted(expected.keys() & tensors.keys()):
        part = tensors[name].get_slice(name)
        if tuple(part.get_shape()) != expected[name]:
            wrong.append(f"{name} has shape {list(part.get_shape())}, config.json asks for {list(expected[name])}")
        elif part.get_dtype() not in _FLOATS:
            wrong.append(f"{name} has dtype {part.get_dtype()}, should be floating point")
    if wrong:
        raise InputError(f"{directory}: the checkpoint does not fit its config: {'; '.join(wrong)}")
    return carried


def _read(tensors: dict[str, safe_open], name: str) -> np.ndarray:
    return tensors[name].get_tensor(name)


def _some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
