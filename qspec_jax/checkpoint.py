"""Checkpoints: the one table of tensor names, Hugging Face directories and their tensors, and loading these or converted ones."""

import codecs
import contextlib
import dataclasses
import json
import logging
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from qspec_jax import converted
from qspec_jax.config import ARCHITECTURES, LlamaConfig, eos_token_ids, read_json
from qspec_jax.errors import InputError
from qspec_jax.hub import SMALL_FILES, local
from qspec_jax.model import Llama

log = logging.getLogger(__name__)

Table = Mapping[str, tuple[str, ...]]

# What an architecture calls its tensors -> paths in qspec_jax.model; {i} is the layer. Where there are several paths, the tensor has their
# rows one after the other. A path is read from the last tensor that names it.
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
_FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_COMPARED = 1 << 24  # numbers at a time
_LOADED_AS = ("bfloat16", "float32", "float64")
# The bits that are all set in infinities and NaNs alone: numpy takes several times as long to ask a bfloat16 what it is.
_EXPONENTS = {np.float16: 0x7C00, ml_dtypes.bfloat16: 0x7F80, np.float32: 0x7F800000, np.float64: 0x7FF0000000000000}
_EXAMINED = 1 << 17  # numbers at a time: what a core's cache holds


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a checkpoint has a weight of the model: all of a tensor, or its rows from `first` on."""

    name: str
    shape: tuple[int, ...]
    first: int | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


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
    directory = local(directory)
    config = LlamaConfig.from_hf(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = eos_token_ids(read_json(generation).get("eos_token_id"), str(generation), config.vocab_size)
        config = dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)
    return config


def load_model(directory: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None, progress: bool | None = None) -> Llama:
    """Loads a Hugging Face directory (config.json, one or sharded safetensors) or ORG/NAME on the Hub, one tensor at a time, or a
    converted directory.

    dtype: bfloat16, float32 or float64; None is the checkpoint's own (float16 becomes bfloat16). To the default device, or over a mesh, see
    `converted.weight_sharding`. progress: a bar on standard error; None shows it on a terminal. Raises InputError that lists every
    missing, unexpected or misshapen tensor at once, and for a conversion that is not finished.
    """
    directory = local(directory, progress=progress)
    if converted.is_converted(directory):
        return _load_converted(directory, dtype, mesh)
    source = Source(directory)
    source.check_contents()
    wanted = jnp.dtype(as_loaded(dtype or stored_dtype(source.config)))
    with tqdm(total=len(source.places), desc="load", unit="tensor", disable=None if progress is None else not progress) as bar:

        def make(path: str, shape: tuple[int, ...]) -> jax.Array:
            array = source.read(path)
            bar.update()
            # Cast on the host, so that the device never holds two copies.
            array = array.astype(wanted, copy=False)
            source.examine(path, array)
            return jnp.asarray(array) if mesh is None else jax.device_put(array, converted.weight_sharding(shape, mesh))

        model = Llama(source.config, make)
    source.warn_of_not_finite()
    return model


def _load_converted(directory: Path, dtype: str | None, mesh: Mesh | None) -> Llama:
    config, stored = _checked_conversion(directory)
    wanted = jnp.dtype(as_loaded(dtype or stored))
    shapes = {path: jax.ShapeDtypeStruct(shape, wanted) for path, shape in weight_shapes(config).items()}
    weights = converted.restore(directory, converted.TARGET, shapes, mesh)
    return Llama(config, lambda path, shape: weights[path])


def checked(directory: str | Path) -> tuple[LlamaConfig, str]:
    """The config, and the dtype to load as by default, of a directory whose tensors are there; no weight is read."""
    directory = local(directory)
    if converted.is_converted(directory):
        config, dtype = _checked_conversion(directory)
        return dataclasses.replace(config, dtype=dtype), dtype
    config = Source(directory).config
    return config, stored_dtype(config)


def _checked_conversion(directory: Path) -> tuple[LlamaConfig, str]:
    config, manifest = load_config(directory), converted.read_manifest(directory)
    converted.check_shapes(directory, manifest, weight_shapes(config))
    return config, manifest.dtype


def as_loaded(dtype: str) -> str:
    """The dtype; raises InputError if nothing can be loaded as such here."""
    if dtype not in _LOADED_AS:
        raise InputError(f"dtype {dtype} is not one to load as; {', '.join(_LOADED_AS)} are")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise InputError("float64 needs 64-bit JAX: set JAX_ENABLE_X64=1 or jax.config.update('jax_enable_x64', True)")
    return dtype


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file: `start` is its first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, first: int = 0, rows: int | None = None, memory: np.ndarray | None = None) -> np.ndarray:
        """So many of its rows, all by default, copied: a mapped file would count as memory in use, as much of it as was ever read.

        memory: bytes to read them into.
        """
        shape, dtype = self.shape if rows is None else (rows, *self.shape[1:]), _FLOATS[self.dtype]
        array = np.empty(shape, dtype) if memory is None else memory.view(dtype).reshape(shape)
        try:
            with self.file.open("rb") as file:
                file.seek(self.start + first * math.prod(self.shape[1:]) * array.itemsize)
                count = file.readinto(array.reshape(-1).view(np.uint8))
        except OSError as error:
            raise InputError(f"{self.file}: cannot be read ({error.strerror})") from None
        if count != array.nbytes:
            raise InputError(f"{self.file}: shorter than when it was opened; it must not change while it is read")
        return array

    def equals(self, other: "Tensor") -> bool:
        """Bit for bit, read a part at a time."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        rows = max(1, _COMPARED // max(1, math.prod(self.shape[1:])))
        parts = [(i, min(rows, self.shape[0] - i)) for i in range(0, self.shape[0], rows)] if self.shape else [(0, None)]
        return all(self.read(*part).tobytes() == other.read(*part).tobytes() for part in parts)


class Source:
    """A Hugging Face directory whose tensors are there and of the right shapes, to be read one at a time.

    Raises InputError that lists every missing, unexpected or misshapen tensor at once, and for a directory that is none.
    """

    def __init__(self, directory: str | Path):
        self.directory = local(directory)
        self.config = load_config(self.directory)
        self.tensors: dict[str, Tensor] = {}
        self.twice: list[tuple[str, Tensor, Tensor]] = []
        self.not_finite: set[str] = set()
        self._open()
        if self.config.num_layers > len(self.tensors):  # before so many are counted
            raise InputError(
                f"{directory}: config.json asks for {self.config.num_layers} layers, and there are {len(self.tensors)} tensors"
            )
        self.places = places(self.config)
        self._check()

    def read(self, path: str, memory: np.ndarray | None = None) -> np.ndarray:
        """The weight at a path of the model, as it is stored. memory: `read_bytes` bytes to read it into."""
        place = self.places[path]
        tensor = self.tensors[place.name]
        return tensor.read(memory=memory) if place.first is None else tensor.read(place.first, place.shape[0], memory)

    def read_bytes(self, path: str) -> int:
        """Of a weight, as it is stored."""
        place = self.places[path]
        return place.size * np.dtype(_FLOATS[self.tensors[place.name].dtype]).itemsize

    def check_contents(self) -> None:
        """Raises InputError where a tensor that is there twice, or the head of tied embeddings, is not the same both times."""
        for name, one, other in self.twice:
            if not one.equals(other):
                raise InputError(
                    f"{self.directory}: {name} is in both {one.file.name} and {other.file.name}, and differs; one of them is wrong"
                )
        if self.carries_head and not self.tensors[self.head].equals(self.tensors[self.places["embedding"].name]):
            raise InputError(
                f"{self.directory}: config.json says tie_word_embeddings, but {self.head} differs from the embedding; one of them is wrong"
            )

    def examine(self, path: str, weight: np.ndarray) -> None:
        """Remembers the tensor of a weight, in the dtype that it is used in, if there is an infinity or a NaN among its numbers."""
        if not all_finite(weight):
            self.not_finite.add(self.places[path].name)

    def warn_of_not_finite(self) -> None:
        """Logs which of the tensors that were examined hold infinities or NaNs."""
        if names := sorted(self.not_finite):
            hold = "1 tensor holds" if len(names) == 1 else f"{len(names)} tensors hold"
            log.warning("%s: %s numbers that are not finite: %s", self.directory, hold, _some(names))

    @property
    def head(self) -> str:
        """The name of the head's tensor."""
        return next(name for name, paths in TABLES[self.config.architecture].items() if paths == ("head",))

    @property
    def carries_head(self) -> bool:
        """Whether the head of tied embeddings is there too."""
        return self.config.tie_word_embeddings and self.head in self.tensors

    def _open(self) -> None:
        """Finds the tensors of all shards."""
        index = self.directory / "model.safetensors.index.json"
        named: dict[str, str] | None = None
        if index.exists():
            named = read_json(index).get("weight_map")
            if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
                raise InputError(f"{index}: weight_map should map tensors to files, and does not")
            # What is not printable may be half a surrogate pair, which no file's name can hold.
            plain = lambda file: (
                file.isprintable() and Path(file).name == file not in ("", "..") and "\\" not in file and len(file.encode()) <= 255
            )
            if outside := sorted(file for file in set(named.values()) if not plain(file)):
                raise InputError(f"{index}: weight_map should name files beside it, not {_some(map(repr, outside))}")
        for name in sorted(set(named.values())) if named else ["model.safetensors"]:
            found = self._tensors_of(name)
            again = sorted(key for key in found.keys() & self.tensors.keys() if not _IGNORED.match(key))
            self.twice += [(key, self.tensors[key], found[key]) for key in again]
            self.tensors = found | self.tensors
            if named is not None:
                lost = sorted(k for k, v in named.items() if v == name and k not in found)
                stray = sorted(found.keys() - named.keys())
                if lost:
                    raise InputError(f"{index}: names tensors that {name} lacks: {_some(lost)}")
                if stray:
                    raise InputError(f"{index}: has no entry for tensors of {name}: {_some(stray)}")

    def _tensors_of(self, name: str) -> dict[str, Tensor]:
        path = self.directory / name
        if not path.is_file():
            pickled = any(self.directory.glob("*.bin")) or any(self.directory.glob("*.pt*"))
            hint = "; pickled weights (.bin) can run code and are not read: save the model as safetensors" if pickled else ""
            raise InputError(f"{path}: missing{hint}")
        try:
            with path.open("rb") as file, safe_open(path, framework="np"):  # which checks the header
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path}: not a whole safetensors file ({_one_line(error)})") from None
        header.pop("__metadata__", None)
        start = lambda entry: 8 + size + entry["data_offsets"][0]
        return {key: Tensor(path, entry["dtype"], tuple(entry["shape"]), start(entry)) for key, entry in header.items()}

    def _check(self) -> None:
        """Raises one InputError with all that is wrong with names, shapes and dtypes."""
        expected = tensor_shapes(self.config)
        if self.carries_head:
            expected[self.head] = self.places["embedding"].shape
        wrong = []
        if missing := sorted(expected.keys() - self.tensors.keys()):
            reason = " (config.json says that the embeddings are not tied)" if missing == [self.head] else ""
            wrong.append(f"missing {_some(missing)}{reason}")
        if extra := sorted(k for k in self.tensors.keys() - expected.keys() if not _IGNORED.match(k)):
            wrong.append(f"unexpected {_some(extra)}")
        for name in sorted(expected.keys() & self.tensors.keys()):
            tensor = self.tensors[name]
            if tensor.shape != expected[name]:
                wrong.append(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(expected[name])}")
            elif tensor.dtype not in _FLOATS:
                wrong.append(f"{name} has dtype {tensor.dtype}, should be one of {', '.join(_FLOATS)}")
        if wrong:
            raise InputError(f"{self.directory}: the checkpoint does not fit its config: {'; '.join(wrong)}")


def load_tokenizer(directory: str | Path):
    """The directory's tokenizer (a transformers fast tokenizer)."""
    directory = local(directory)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{directory}: no tokenizer in it; one of {', '.join(_TOKENIZER_FILES)} is needed")
    from transformers import AutoTokenizer  # slow to import, and not needed for token ids

    try:
        with _without_marks(directory) as folder:
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes of it, the tokenizers library a bare Exception
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise InputError(f"{directory}: no tokenizer that transformers can read ({reason})") from None


@contextlib.contextmanager
def _without_marks(directory: Path) -> Iterator[Path]:
    """The directory, or for a while a copy of its small files without the byte order marks that transformers does not take."""
    contents = {name: (directory / name).read_bytes() for name in SMALL_FILES if (directory / name).is_file()}
    if not any(content.startswith(codecs.BOM_UTF8) for content in contents.values()):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="qspec-") as folder:
        for name, content in contents.items():
            Path(folder, name).write_bytes(content.removeprefix(codecs.BOM_UTF8))
        yield Path(folder)


def load(directory: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None):
    """The model and the tokenizer of a checkpoint directory, see `load_model`. Raises InputError."""
    return load_model(directory, dtype=dtype, mesh=mesh), load_tokenizer(directory)


def stored_dtype(config: LlamaConfig) -> str:
    """The dtype that a checkpoint is loaded in if no other is asked for."""
    if config.dtype == "float16":
        log.warning("the checkpoint is float16; loading it as bfloat16 (--dtype float32 keeps every bit)")
        return "bfloat16"
    return config.dtype


def all_finite(array: np.ndarray) -> bool:
    """Whether there is neither an infinity nor a NaN in an array of floats, looked at a part at a time."""
    exponent = np.array(_EXPONENTS[array.dtype.type], f"u{array.itemsize}")
    bits = array.reshape(-1).view(exponent.dtype)
    parts = (bits[i : i + _EXAMINED] for i in range(0, len(bits), _EXAMINED))
    return all((part & exponent).max() != exponent for part in parts)


def _some(names: Iterable[str], most: int = 8) -> str:
    names = [name if name.isprintable() else ascii(name) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
