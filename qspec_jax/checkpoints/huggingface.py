"""Hugging Face directories: their config, their safetensors files and the tensors in these."""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Set
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.hub import local
from qspec_jax.checkpoints.other_formats import MERGE, describe_folder, is_of_an_adapter
from qspec_jax.checkpoints.small_files import small_file
from qspec_jax.checkpoints.source import WeightSource
from qspec_jax.checkpoints.tensor_names import BASE, canonical, places, table, tensor_shapes
from qspec_jax.checkpoints.weight_files import INDEX, WHOLE, WeightFiles, weight_files
from qspec_jax.errors import InputError, listed, one_line, reading, warn_once
from qspec_jax.files import read_json, refuse_pointer
from qspec_jax.models.config import LlamaConfig, eos_token_ids, quantized_already, stated_dtype
from qspec_jax.models.families import WRAPPERS

log = logging.getLogger(__name__)

# Buffers of old checkpoints, which are computed here.
_IGNORED = re.compile(r"((.*\.)?rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias)$")
# Tensors that GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8 checkpoints and MLX have beside or instead of a weight.
_OF_QUANTIZATION = re.compile(
    r".*\.(qweight|qzeros|g_idx|weight_packed|weight_shape|weight_scale(_inv|_2)?|weight_zero_point|input_scale|SCB|weight_format|scales|biases"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*))$"
)
_CODES = ("I8", "U8", "I16", "U16", "I32", "U32")  # dtypes of packed weights, besides F8_E4M3 and the like
_FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
_NAMES = {kind: np.dtype(dtype).name for kind, dtype in _FLOATS.items()}
_COMPARED = 1 << 24  # numbers compared at a time


def load_config(directory: str | Path, *, dtype: str | None = None) -> LlamaConfig:
    """The model's config, with the EOS ids of generation_config.json if that has them.

    Args:
        directory: the checkpoint's directory, or its name on the Hub.
        dtype: the weights' dtype if config.json has none; None: the dtype of the tensors, or float32 if there are none.

    Raises:
        InputError: for a directory without a config, and as `LlamaConfig.from_hf` does.
    """
    directory = local(directory)
    path = directory / "config.json"
    with reading(path):
        missing = not path.exists()
    if missing:
        reason = "it is a link to a file that is not there" if path.is_symlink() else "No such file or directory"
        hint = describe_folder(directory) or ("an empty name or . is the current directory" if directory == Path() else "")
        raise InputError(
            f"{path}: cannot be read ({reason}); the directory of a Hugging Face checkpoint is needed{f', and {hint}' if hint else ''}"
        )
    raw = read_json(path)
    config = LlamaConfig.from_hf(raw, source=str(path), dtype=dtype or "float32")
    if dtype is None and stated_dtype(raw) is None:
        config = dataclasses.replace(config, dtype=_dtype_of_tensors(directory, config.dtype))
    if config.wrapper is not None and config.tie_word_embeddings and _has_head(directory):
        config = dataclasses.replace(config, tie_word_embeddings=False)  # as transformers does
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = eos_token_ids(read_json(generation).get("eos_token_id"), str(generation), config.vocab_size)
        config = dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)
    return config


def _dtype_of_tensors(directory: Path, default: str) -> str:
    """The dtype of a directory's weights as transformers finds it: that of their index, or of the first tensor of floats."""
    files = weight_files(directory)
    if files.dtype and (stated := files.dtype.removeprefix("torch.")) in _NAMES.values():
        return stated
    if not (directory / files.names[0]).is_file():
        return default
    tensors = read_header(directory / files.names[0])
    return next((_NAMES[tensors[name].dtype] for name in sorted(tensors) if tensors[name].dtype in _FLOATS), default)


def _has_head(directory: Path) -> bool:
    """Whether a directory, converted or not, has a head besides the embedding."""
    if converted.is_converted(directory):
        return "head" in converted.read_manifest(directory).shapes
    files = weight_files(directory)
    found = [directory / name for name in files.names if not files.weight_map and (directory / name).is_file()]
    names = files.weight_map or {key for file in found for key in read_header(file)}
    return any(name.endswith("lm_head.weight") for name in names)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a safetensors file, whose first byte is at `start`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, first: int = 0, rows: int | None = None, memory: np.ndarray | None = None) -> np.ndarray:
        """Rows of the tensor, copied, since the pages of a mapped file would count as memory in use.

        Args:
            first: the first row.
            rows: the number of rows; None: all.
            memory: bytes to read into; None: new memory.

        Raises:
            InputError: if the file cannot be read, or is shorter than when it was opened.
        """
        shape, dtype = self.shape if rows is None else (rows, *self.shape[1:]), _FLOATS[self.dtype]
        array = np.empty(shape, dtype) if memory is None else memory.view(dtype).reshape(shape)
        with reading(self.file), self.file.open("rb") as file:
            file.seek(self.start + first * math.prod(self.shape[1:]) * array.itemsize)
            count = file.readinto(array.reshape(-1).view(np.uint8))
        if count != array.nbytes:
            raise InputError(f"{self.file}: is shorter than when it was opened; it must not change while it is read")
        return array

    def equals(self, other: "Tensor") -> bool:
        """Whether two tensors have the same bits; they are read a part at a time."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        rows = max(1, _COMPARED // max(1, math.prod(self.shape[1:])))
        parts = [(i, min(rows, self.shape[0] - i)) for i in range(0, self.shape[0], rows)] if self.shape else [(0, None)]
        return all(self.read(*part).tobytes() == other.read(*part).tobytes() for part in parts)


class Source(WeightSource):
    """A Hugging Face directory with all tensors of its model in the right shapes, which are read one at a time.

    Raises:
        InputError: for a directory without a checkpoint; it lists every missing, unexpected or misshapen tensor at once.
    """

    def __init__(self, directory: str | Path):
        self.directory = local(directory)
        self.config = load_config(self.directory)
        self.tensors: dict[str, Tensor] = {}
        self.twice: list[tuple[str, Tensor, Tensor]] = []
        self._names_in: dict[str, Set[str]] = {}
        self._is_base = False  # whether its tensors have names of a model without a head
        self.not_finite: set[str] = set()
        self.files = weight_files(self.directory)
        self._open()
        if self.config.num_layers > len(self.tensors):  # a huge number of layers would take long to count
            raise InputError(
                f"{directory}: config.json asks for {self.config.num_layers} layers, and there are {len(self.tensors)} tensors"
            )
        self.places = places(self.config)
        self._rename(tensor_shapes(self.config).keys() | {self.head})
        self._check()

    def read(self, path: str, memory: np.ndarray | None = None) -> np.ndarray:
        """The weight at a path of the model, as it is stored, read into `memory` of `read_bytes` bytes if that is given."""
        place = self.places[path]
        tensor = self.tensors[place.name]
        return tensor.read(memory=memory) if place.first is None else tensor.read(place.first, place.shape[0], memory)

    def read_bytes(self, path: str) -> int:
        """Bytes that a weight takes as it is stored."""
        place = self.places[path]
        return place.size * np.dtype(_FLOATS[self.tensors[place.name].dtype]).itemsize

    def check_contents(self) -> None:
        """Raises InputError if the two copies of a tensor differ, or the head and the embedding that it is tied to."""
        for name, one, other in self.twice:
            if not one.equals(other):
                where = f"both {one.file.name} and {other.file.name}" if one.file != other.file else f"{one.file.name} by two names"
                raise InputError(f"{self.directory}: {name} is in {where}, and differs; one of them is wrong")
        if self.carries_head and not self.tensors[self.head].equals(self.tensors[self.embedding]):
            raise InputError(
                f"{self.directory}: config.json says tie_word_embeddings, but {self.head} differs from the embedding; one of them is wrong"
            )

    def small_file(self, name: str) -> bytes | None:
        """The contents of a file of the directory, see `WeightSource`."""
        return small_file(self.directory, name)

    @property
    def head(self) -> str:
        """The name of the head's tensor."""
        return next(name for name, paths in table(self.config).items() if paths == ("head",))

    @property
    def embedding(self) -> str:
        """The name of the embedding's tensor."""
        return self.places["embedding"].name

    @property
    def carries_head(self) -> bool:
        """Whether a head is stored although the embeddings are tied."""
        return self.config.tie_word_embeddings and self.head in self.tensors

    def _is_left_out(self, name: str) -> bool:
        """Whether a tensor is not read: a buffer, or of another part of a multimodal model than its text model."""
        return bool(_IGNORED.match(name)) or (self.config.wrapper is not None and name.startswith(WRAPPERS[self.config.wrapper].left_out))

    def _open(self) -> None:
        """Finds the tensors of all files, and warns of other files of weights, which are not read."""
        for name in self.files.names:
            path = self.directory / name
            if not path.is_file():
                raise InputError(f"{path}: missing{_why_missing(path, self.directory, self.files)}")
            found = read_header(path)
            self._names_in[name] = found.keys()
            self.twice += [
                (key, self.tensors[key], found[key]) for key in sorted(found.keys() & self.tensors.keys()) if not self._is_left_out(key)
            ]
            self.tensors = found | self.tensors
        if self.files.passed_over:
            read = ", ".join(self.files.names) if self.files.index is None else self.files.index
            others = listed(self.files.passed_over)
            warn_once(log, f"{self.directory}: {read} is read, as transformers does, and {others} passed over")
        if (wrapper := self.config.wrapper) and (others := sorted(filter(self._is_left_out, self.tensors))):
            count = f"{len(others)} tensors of its other parts are left out ({listed(others, 1)})"
            warn_once(log, f"{self.directory}: the text model of {wrapper} is read; {count}")
        if (self.directory / "adapter_config.json").exists():
            warn_once(log, f"{self.directory}: the model is read without the adapter in its directory (adapter_config.json)")

    def _rename(self, expected: Set[str]) -> None:
        """Gives tensors their names in a whole model, and checks that the files have the tensors that their index names.

        Names differ if the model was saved without its head, or if only the head of two tied tensors is stored. `expected` has the names
        of the model's tensors and of its head.
        """
        own = {name: canonical(name, expected) for name in self.tensors}
        renamed = sorted(name for name in own if own[name] != name)
        self._is_base = any(own[name] == BASE + name for name in renamed)
        for name in renamed:
            tensor = self.tensors.pop(name)
            if own[name] in self.tensors:
                self.twice.append((own[name], self.tensors[own[name]], tensor))
            self.tensors[own[name]] = tensor
        if self.config.tie_word_embeddings and self.embedding not in self.tensors and self.head in self.tensors:
            self.tensors[self.embedding] = self.tensors.pop(self.head)
        # One of two tied tensors may be left out, and buffers are not read: index and files may differ in these.
        free = {self.head, self.embedding} if self.config.tie_word_embeddings else set()

        def matters(name: str) -> bool:
            return not self._is_left_out(name) and canonical(name, expected) not in free

        for file in self.files.names if self.files.index else ():
            index, found = self.directory / self.files.index, self._names_in[file]
            named = {name for name, holder in self.files.weight_map.items() if holder == file}
            if lost := sorted(filter(matters, named - found)):
                raise InputError(f"{index}: names tensors that {file} lacks: {listed(lost)}")
            if stray := sorted(filter(matters, found - self.files.weight_map.keys())):
                raise InputError(f"{index}: has no entry for tensors of {file}: {listed(stray)}")

    def _check(self) -> None:
        """Raises one InputError for all wrong names, shapes and dtypes."""
        expected = tensor_shapes(self.config)
        if self.carries_head:
            expected[self.head] = self.places["embedding"].shape
        missing = sorted(expected.keys() - self.tensors.keys())
        extra = sorted(k for k in self.tensors.keys() - expected.keys() if not self._is_left_out(k))
        if any(map(is_of_an_adapter, extra)):
            raise InputError(f"{self.directory}: its tensors are those of an adapter of PEFT, or not merged ({listed(extra, 2)}); {MERGE}")
        named = [name for name in extra if missing and _OF_QUANTIZATION.match(name)]
        packed = [name for name in sorted(self.tensors) if name.endswith("_proj.weight") and _is_of_codes(self.tensors[name].dtype)]
        if named or packed:
            raise InputError(f"{self.directory}: {quantized_already(listed(named or packed, 2))}")
        wrong = []
        if missing:
            alone = " (config.json says that the embeddings are not tied)" if missing == [self.head] else ""
            base = "; it was saved without its head, as a base model: bring the one with it" if alone and self._is_base else ""
            wrong.append(f"missing {listed(missing)}{alone}{base}")
        if extra:
            wrong.append(f"unexpected {listed(extra)}")
        for name in sorted(expected.keys() & self.tensors.keys()):
            tensor = self.tensors[name]
            if tensor.shape != expected[name]:
                wrong.append(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(expected[name])}")
            elif tensor.dtype not in _FLOATS:
                wrong.append(f"{name} has dtype {tensor.dtype}, should be one of {', '.join(_FLOATS)}")
        if wrong:
            raise InputError(f"{self.directory}: the checkpoint does not fit its config: {'; '.join(wrong)}")


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by their names; none is read. Raises InputError for any other or a truncated file."""
    with reading(path), path.open("rb") as file:
        refuse_pointer(path, file.read(64))
    try:
        with path.open("rb") as file, safe_open(path, framework="np"):  # safe_open checks the header
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({one_line(error)})") from None
    header.pop("__metadata__", None)
    begin = 8 + size
    return {key: Tensor(path, e["dtype"], tuple(e["shape"]), begin + e["data_offsets"][0]) for key, e in header.items()}


def _why_missing(path: Path, directory: Path, files: WeightFiles) -> str:
    """The end of a sentence on a file of weights that is missing: the reason, or what to give."""
    if path.is_symlink():
        return "; it is a link to a file that is not there: fetch it again"
    if files.index:
        return f"; {files.index} names it: fetch it too"
    whole = f"a Hugging Face checkpoint has its weights in {WHOLE}, or in shards and {INDEX}"
    return f"; {describe_folder(directory) or whole}"


def _is_of_codes(dtype: str) -> bool:
    return dtype in _CODES or dtype.startswith(("F8_", "F6_", "F4"))
