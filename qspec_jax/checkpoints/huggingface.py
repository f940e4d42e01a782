"""Hugging Face directories: their config, their safetensors files and the tensors in these."""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qspec_jax.checkpoints.hub import local
from qspec_jax.checkpoints.tensor_names import TABLES, places, tensor_shapes
from qspec_jax.errors import InputError, one_line, reading
from qspec_jax.files import read_json
from qspec_jax.models.config import LlamaConfig, eos_token_ids

log = logging.getLogger(__name__)

# Buffers that old checkpoints carry and that are computed here.
_IGNORED = re.compile(r"(.*\.rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias)$")
_FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
_COMPARED = 1 << 24  # numbers at a time
# The bits that are all set in infinities and NaNs alone: numpy takes several times as long to ask a bfloat16 what it is.
_EXPONENTS = {np.float16: 0x7C00, ml_dtypes.bfloat16: 0x7F80, np.float32: 0x7F800000, np.float64: 0x7FF0000000000000}
_EXAMINED = 1 << 17  # numbers at a time: what a core's cache holds


def load_config(directory: str | Path) -> LlamaConfig:
    """The model's config, with the EOS ids of generation_config.json where it has them. Raises InputError as `LlamaConfig.from_hf`."""
    directory = local(directory)
    path = directory / "config.json"
    with reading(path):
        missing = not path.exists()
    if missing:
        raise InputError(f"{path}: cannot be read (No such file or directory); the directory of a Hugging Face checkpoint is needed")
    config = LlamaConfig.from_hf(path)
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = eos_token_ids(read_json(generation).get("eos_token_id"), str(generation), config.vocab_size)
        config = dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)
    return config


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a safetensors file. start: where its first byte is."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, first: int = 0, rows: int | None = None, memory: np.ndarray | None = None) -> np.ndarray:
        """Some rows of the tensor, from `first` on, or all; copied, since a mapped file would count as memory in use, as much of it as was
        ever read.

        memory: bytes to read them into. Raises InputError where the file cannot be read, or is shorter than when it was opened.
        """
        shape, dtype = self.shape if rows is None else (rows, *self.shape[1:]), _FLOATS[self.dtype]
        array = np.empty(shape, dtype) if memory is None else memory.view(dtype).reshape(shape)
        with reading(self.file), self.file.open("rb") as file:
            file.seek(self.start + first * math.prod(self.shape[1:]) * array.itemsize)
            count = file.readinto(array.reshape(-1).view(np.uint8))
        if count != array.nbytes:
            raise InputError(f"{self.file}: shorter than when it was opened; it must not change while it is read")
        return array

    def equals(self, other: "Tensor") -> bool:
        """Whether two tensors are the same bit for bit; they are read a part at a time."""
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
        """Bytes that a weight takes as it is stored."""
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
        """Remembers the tensor of a weight if there is an infinity or a NaN among its numbers, in the dtype that it is used in."""
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
            raise InputError(f"{path}: not a whole safetensors file ({one_line(error)})") from None
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


def all_finite(array: np.ndarray) -> bool:
    """Whether there is neither an infinity nor a NaN in an array of floats, looked at a part at a time."""
    exponent = np.array(_EXPONENTS[array.dtype.type], f"u{array.itemsize}")
    bits = array.reshape(-1).view(exponent.dtype)
    parts = (bits[i : i + _EXAMINED] for i in range(0, len(bits), _EXAMINED))
    return all((part & exponent).max() != exponent for part in parts)


def _some(names: Iterable[str], most: int = 8) -> str:
    names = [name if name.isprintable() else ascii(name) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
