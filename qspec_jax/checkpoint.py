"""Hugging Face checkpoints: the one table of tensor names, and loading a directory tensor by tensor to the device."""

import dataclasses
import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (gives numpy its bfloat16, which safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from qspec_jax.config import ARCHITECTURES, LlamaConfig, read_json, token_ids
from qspec_jax.errors import InputError
from qspec_jax.model import Llama

log = logging.getLogger(__name__)

Table = Mapping[str, tuple[str, ...]]

# What an architecture calls its tensors -> paths in qspec_jax.model; {i} is the layer. Where there are several paths, the tensor has their
# rows one after the other.
_LLAMA: Table = {
    "model.embed_tokens.weight": ("embedding",),
    "lm_head.weight": ("head",),
    "model.norm.weight": ("norm.weight",),
    "model.layers.{i}.input_layernorm.weight": ("layers.{i}.input_norm.weight",),
    "model.layers.{i}.post_attention_layernorm.weight": ("layers.{i}.post_attention_norm.weight",),
    **{f"model.layers.{{i}}.self_attn.{n}.weight": (f"layers.{{i}}.{n}.weight",) for n in ("q_norm", "k_norm")},
    **{
        f"model.layers.{{i}}.{part}.{n}_proj.{w}": (f"layers.{{i}}.{n}_proj.{w}",)
        for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
        for n in names
        for w in ("weight", "bias")
    },
}
_PHI3: Table = _LLAMA | {
    "model.layers.{i}.self_attn.qkv_proj.weight": tuple(f"layers.{{i}}.{n}_proj.weight" for n in "qkv"),
    "model.layers.{i}.mlp.gate_up_proj.weight": ("layers.{i}.gate_proj.weight", "layers.{i}.up_proj.weight"),
}
TABLES: dict[str, Table] = dict.fromkeys(ARCHITECTURES, _LLAMA) | {"Phi3ForCausalLM": _PHI3}
# Buffers that old checkpoints carry and that are computed here.
_IGNORED = re.compile(r"(.*\.rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias)$")
_FLOATS = {"F16", "BF16", "F32", "F64"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_COMPARED = 1 << 24  # numbers at a time
_LOADED_AS = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a checkpoint has a weight of the model: all of a tensor, or its rows from `first` on."""

    name: str
    shape: tuple[int, ...]
    first: int | None = None


def places(config: LlamaConfig) -> dict[str, Place]:
    """By the path of every weight of the model (see `Llama.weights`)."""
    of_path = {path: (name, paths) for name, paths in TABLES[config.architecture].items() for path in paths}
    shapes = weight_shapes(config)
    found = {}
    for path, shape in shapes.items():
        layer = re.match(r"layers\.(\d+)\.", path)
        number = layer[1] if layer else ""
        name, paths = of_path[path if layer is None else "layers.{i}." + path[layer.end() :]]
        before = [shapes[other.replace("{i}", number)][0] for other in paths]
        at = [other.replace("{i}", number) for other in paths].index(path)
        found[path] = Place(name.replace("{i}", number), shape, sum(before[:at]) if len(paths) > 1 else None)
    return found


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's weights, by their paths."""
    shapes = {}

    def make(path: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        shapes[path] = shape
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    Llama(config, make)
    return shapes


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors, by their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in places(config).values():
        rows = shapes.get(place.name, (0,))[0] + place.shape[0]
        shapes[place.name] = (rows, *place.shape[1:])
    return shapes


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
    with Source(directory) as source:
        source.check_contents()
        wanted = jnp.dtype(as_loaded(dtype or stored_dtype(source.config)))
        hide = None if progress is None else not progress
        with tqdm(total=len(source.places), desc="load", unit="tensor", disable=hide) as bar:

            def make(path: str, shape: tuple[int, ...]) -> jax.Array:
                array = source.read(path)
                bar.update()
                # Cast on the host's view, so that the device never holds two copies.
                return jnp.asarray(array.astype(wanted, copy=False))

            return Llama(source.config, make)


def as_loaded(dtype: str) -> str:
    """The dtype; raises InputError if nothing can be loaded as such here."""
    if dtype not in _LOADED_AS:
        raise InputError(f"dtype {dtype} is not one to load as; {', '.join(_LOADED_AS)} are")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise InputError("float64 needs 64-bit JAX: set JAX_ENABLE_X64=1 or jax.config.update('jax_enable_x64', True)")
    return dtype


class Source:
    """A Hugging Face directory whose tensors are there and of the right shapes, opened to read them one at a time.

    Raises InputError that lists every missing, unexpected or misshapen tensor at once, and for a directory that is none.
    """

    def __init__(self, directory: str | Path):
        self.config = load_config(directory)
        self.directory = Path(directory)
        self.places = places(self.config)
        self.files = ExitStack()
        self.opened: dict[str, safe_open] = {}
        self.twice: list[tuple[str, str, str]] = []  # tensors in two files
        try:
            self.tensors = self._open()
            self._check()
        except BaseException:
            self.files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.files.close()

    def read(self, path: str) -> np.ndarray:
        """The weight at a path of the model, as it is stored."""
        place = self.places[path]
        if place.first is None:
            return self.tensors[place.name].get_tensor(place.name)
        return self.tensors[place.name].get_slice(place.name)[place.first : place.first + place.shape[0]]

    def check_contents(self) -> None:
        """Raises InputError where a tensor that is there twice, or the head of tied embeddings, is not the same both times."""
        for name, file, other in self.twice:
            if not _equal(self.opened[file], name, self.opened[other], name):
                raise InputError(f"{self.directory}: {name} is in both {file} and {other}, and differs; one of them is wrong")
        if self.carries_head:
            head, embedding = (
                next(n for n, paths in TABLES[self.config.architecture].items() if paths == (p,)) for p in ("head", "embedding")
            )
            if not _equal(self.tensors[head], head, self.tensors[embedding], embedding):
                raise InputError(
                    f"{self.directory}: config.json says tie_word_embeddings, but {head} differs from the embedding; one of them is wrong"
                )

    def _open(self) -> dict[str, safe_open]:
        """Tensor name -> open file, over all shards."""
        index = self.directory / "model.safetensors.index.json"
        named: dict[str, str] | None = None
        if index.exists():
            named = read_json(index).get("weight_map")
            if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
                raise InputError(f"{index}: weight_map should map tensors to files, and does not")
            if outside := sorted(
                file for file in set(named.values()) if file in ("", ".", "..") or Path(file).name != file or "\\" in file
            ):
                raise InputError(f"{index}: weight_map should name files beside it, not {_some(map(repr, outside))}")
            names = sorted(set(named.values()))
        else:
            names = ["model.safetensors"]
        first: dict[str, str] = {}
        for name in names:
            file = self.opened[name] = self._open_file(name)
            keys = set(file.keys())
            self.twice += [(key, first[key], name) for key in sorted(keys & first.keys())]
            first = dict.fromkeys(keys, name) | first
            if named is not None:
                lost = sorted(k for k, v in named.items() if v == name and k not in keys)
                stray = sorted(keys - named.keys())
                if lost:
                    raise InputError(f"{index}: names tensors that {name} lacks: {_some(lost)}")
                if stray:
                    raise InputError(f"{index}: has no entry for tensors of {name}: {_some(stray)}")
        return {key: self.opened[name] for key, name in first.items()}

    def _open_file(self, name: str) -> safe_open:
        path = self.directory / name
        if not path.is_file():
            pickled = any(self.directory.glob("*.bin")) or any(self.directory.glob("*.pt*"))
            hint = "; pickled weights (.bin) can run code and are not read: save the model as safetensors" if pickled else ""
            raise InputError(f"{path}: missing{hint}")
        try:
            return self.files.enter_context(safe_open(path, framework="np"))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not a whole safetensors file ({_one_line(error)})") from None

    def _check(self) -> None:
        """Raises one InputError with all that is wrong with names, shapes and dtypes."""
        head = next(name for name, paths in TABLES[self.config.architecture].items() if paths == ("head",))
        expected = tensor_shapes(self.config)
        self.carries_head = self.config.tie_word_embeddings and head in self.tensors
        if self.carries_head:
            expected[head] = self.places["embedding"].shape
        wrong = []
        if missing := sorted(expected.keys() - self.tensors.keys()):
            reason = " (config.json says that the embeddings are not tied)" if missing == [head] else ""
            wrong.append(f"missing {_some(missing)}{reason}")
        if extra := sorted(k for k in self.tensors.keys() - expected.keys() if not _IGNORED.match(k)):
            wrong.append(f"unexpected {_some(extra)}")
        for name in sorted(expected.keys() & self.tensors.keys()):
            part = self.tensors[name].get_slice(name)
            if tuple(part.get_shape()) != expected[name]:
                wrong.append(f"{name} has shape {list(part.get_shape())}, config.json asks for {list(expected[name])}")
            elif part.get_dtype() not in _FLOATS:
                wrong.append(f"{name} has dtype {part.get_dtype()}, should be floating point")
        if wrong:
            raise InputError(f"{self.directory}: the checkpoint does not fit its config: {'; '.join(wrong)}")


def load_tokenizer(directory: str | Path):
    """The directory's tokenizer (a transformers fast tokenizer)."""
    directory = _existing(directory)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{directory}: no tokenizer in it; one of {', '.join(_TOKENIZER_FILES)} is needed")
    from transformers import AutoTokenizer  # slow to import, and not needed for token ids

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
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


def _equal(file: safe_open, name: str, other_file: safe_open, other: str) -> bool:
    """Whether two tensors are the same, read a part at a time."""
    one, two = file.get_slice(name), other_file.get_slice(other)
    shape = one.get_shape()
    if (shape, one.get_dtype()) != (two.get_shape(), two.get_dtype()):
        return False
    if not shape:
        return file.get_tensor(name).tobytes() == other_file.get_tensor(other).tobytes()
    rows = max(1, _COMPARED // max(1, math.prod(shape[1:])))
    parts = (slice(i, min(i + rows, shape[0])) for i in range(0, shape[0], rows))
    return all(one[part].tobytes() == two[part].tobytes() for part in parts)


def _some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
