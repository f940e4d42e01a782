"""GGUF files (llama.cpp): which file of a folder is the model, its metadata, and its tensors, whose blocks are dequantized."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from qspec_jax.errors import InputError, listed, reading
from qspec_jax.files import refuse_pointer

MAGIC = b"GGUF"
SUFFIX = ".gguf"
FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_PROJECTOR = "mmproj"  # the first letters of the name of a file that holds a vision model only
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # bytes, of tensors in a file without general.alignment
_MAX_DIMENSIONS = 4
_PART = 1 << 22  # numbers dequantized at a time, which takes several float32 copies of them
# dtypes of numbers of metadata by the codes of their types; 7 is a bool.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its name or by its first bytes. Raises InputError if it cannot be read."""
    with reading(path):
        if not path.is_file():
            return False
        if path.suffix.lower() == SUFFIX:
            return True
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file of the one model in a folder without safetensors, or its first shard; None if there is none.

    Raises:
        InputError: for a folder with several models.
    """
    found: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".safetensors":
            return None
        if path.suffix.lower() == SUFFIX and path.is_file() and not path.name.startswith(_PROJECTOR):
            shard = _SHARD.fullmatch(path.name)
            found.setdefault(path.name if shard is None else f"{shard[1]}-of-{shard[3]}", path)
    if len(found) > 1:
        names = listed((path.name for path in found.values()), 3)
        raise InputError(f"{directory}: it holds {len(found)} models in GGUF ({names}); give one of these files")
    return next(iter(found.values()), None)


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file, whose first byte is at `start`.

    Attributes:
        kind: the name of its type, such as Q4_K.
        shape: with the outputs of a matrix first.
        row_bytes: bytes of a row, which are whole blocks; of a vector all bytes.
    """

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensor's values: float32 for blocks of quantized numbers."""
        return np.dtype(FLOATS.get(self.kind, np.float32))

    @property
    def rows(self) -> int:
        """The number of rows; a vector is one."""
        return math.prod(self.shape[:-1])

    def parts(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields the values of some rows at a time, with the rows' numbers: those of `gguf.quants.dequantize`, bit for bit.

        Raises:
            InputError: if the file cannot be read, or is shorter than when it was opened.
        """
        count = max(1, _PART // self.shape[-1])
        with reading(self.file), self.file.open("rb") as file:
            file.seek(self.start)
            for first in range(0, self.rows, count):
                rows = slice(first, min(first + count, self.rows))
                raw = np.empty((rows.stop - first, self.row_bytes), np.uint8)
                if file.readinto(raw.reshape(-1)) != raw.nbytes:
                    raise InputError(f"{self.file}: is shorter than when it was opened; it must not change while it is read")
                yield rows, self._values(raw)

    def _values(self, raw: np.ndarray) -> np.ndarray:
        if self.kind in FLOATS:
            return raw.view(FLOATS[self.kind])
        package = _package(self.file)
        with np.errstate(all="ignore"):  # scales may be infinite or NaN, which is said later with the tensor's name
            return package.quants.dequantize(raw, package.GGMLQuantizationType[self.kind])


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The headers of a GGUF file, or of all shards of a model.

    Attributes:
        path: the file, or the first shard.
        metadata: values by their keys; arrays of numbers are numpy's, arrays of strings are lists.
        tensors: by their names.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The metadata and the tensors of a GGUF file; no tensor is read. The other shards are found by the name of one.

    Raises:
        InputError: if the package gguf is missing, and for a file that is no GGUF file, is truncated, or has types that are not supported.
    """
    whole: GgufFile | None = None
    files = shards(path)
    for number, each in enumerate(files):
        metadata, tensors = _Header(each).read()
        count = metadata.get("split.count", 1) or 1  # llama.cpp writes 0 into a file that it has merged from shards
        if count != len(files) or metadata.get("split.no", 0) != number:
            said = f"shard {metadata.get('split.no', 0) + 1} of {count}"
            raise InputError(f"{each}: is {said} by its metadata, and {number + 1} of {len(files)} by its name; give it its own name")
        if whole is None:
            whole = GgufFile(each, metadata, dict(tensors))
            continue
        if twice := sorted(tensors.keys() & whole.tensors.keys()):
            raise InputError(f"{each}: {listed(twice, 2)} is in an earlier shard too")
        whole.tensors.update(tensors)
    count = whole.metadata.get("split.tensors.count", len(whole.tensors))
    if count != len(whole.tensors):
        raise InputError(f"{whole.path}: its shards hold {len(whole.tensors)} tensors, and its metadata asks for {count}; fetch them again")
    return whole


def shards(path: Path) -> list[Path]:
    """The files of the model that a GGUF file holds, or is a shard of. Raises InputError if a shard is missing."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    count = int(shard[3])
    beside = {each.name for each in path.absolute().parent.iterdir()}
    names = (f"{shard[1]}-{number:05}-of-{shard[3]}{path.suffix}" for number in range(1, count + 1))
    paths = []
    for name in names:  # ends at the first that is missing, however large the count
        if name not in beside:
            raise InputError(f"{path.with_name(name)}: missing; a model in {count} shards needs all of them in one folder")
        paths.append(path.with_name(name))
    if not paths:
        raise InputError(f"{path}: is named as a shard of 0")
    return paths


def _package(path: Path) -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise InputError(
            f"{path}: reading a GGUF file takes the package gguf, which is not installed: pip install gguf, or qspec-jax[gguf]"
        ) from None
    return gguf


class _Header:
    """Reads the header of one file. Nothing larger than what the file holds is allocated, whatever its counts are."""

    def __init__(self, path: Path):
        self.path, self.package = path, _package(path)
        self.file: BinaryIO
        self.size = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """The metadata and the tensors."""
        with reading(self.path), self.path.open("rb") as self.file:
            self.size = self.file.seek(0, 2)
            self.file.seek(0)
            begins = self.file.read(64)
            refuse_pointer(self.path, begins)
            if not begins.startswith(MAGIC):
                raise InputError(f"{self.path}: is not a GGUF file: it begins with {begins[:4]!r}, and such a file with {MAGIC!r}")
            self.file.seek(len(MAGIC))
            version = self.number("<u4")
            if version not in _VERSIONS:
                what = "big-endian" if version and not version & 0xFFFF else f"of version {version}"
                raise InputError(f"{self.path}: is a GGUF file {what}, which is not read; a little-endian one of version 2 or 3 is")
            tensors, keys = self.number("<u8"), self.number("<u8")
            metadata = {}
            for _ in range(keys):
                key = self.string("a key")
                if key in metadata:
                    raise self.error(f"has the key {key} twice")
                metadata[key] = self.value(key)
            infos = {}
            for _ in range(tensors):
                name = self.string("a tensor's name")
                if name in infos:
                    raise self.error(f"has the tensor {name} twice")
                dimensions = self.number("<u4")
                if not 1 <= dimensions <= _MAX_DIMENSIONS:
                    raise self.error(f"{name} has {dimensions} dimensions, should have 1 to {_MAX_DIMENSIONS}")
                shape = tuple(self.number("<u8") for _ in range(dimensions))[::-1]
                infos[name] = (shape, self.number("<u4"), self.number("<u8"))
            alignment = metadata.get("general.alignment", _ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
                raise self.error(f"general.alignment is {alignment!r}, should be a power of two")
            begin = -(-self.file.tell() // alignment) * alignment
        return metadata, {name: self.tensor(name, *info, begin, alignment) for name, info in infos.items()}

    def tensor(self, name: str, shape: tuple[int, ...], code: int, offset: int, begin: int, alignment: int) -> GgufTensor:
        try:
            kind = self.package.GGMLQuantizationType(code)
        except ValueError:
            raise self.error(f"{name} has a type of number {code}, which is not known") from None
        if kind.name not in FLOATS and kind.name not in QUANTIZED:
            raise self.error(f"{name} has the type {kind.name}, which is not supported; supported are {', '.join((*FLOATS, *QUANTIZED))}")
        numbers, size = self.package.GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % numbers:
            blocks = f" with rows of whole blocks of {numbers}" if numbers > 1 else ""
            raise self.error(f"{name} has the shape {list(shape)}; a tensor of {kind.name} needs numbers{blocks}")
        row_bytes = shape[-1] // numbers * size
        start, end = begin + offset, begin + offset + row_bytes * math.prod(shape[:-1])
        if offset % alignment:
            raise self.error(f"{name} begins at byte {offset} of the tensors, which is no multiple of the alignment {alignment}")
        if end > self.size:
            raise self.error(f"is not whole: {name} ends at byte {end}, and the file has {self.size}; fetch it again")
        return GgufTensor(self.path, name, kind.name, shape, start, row_bytes)

    def value(self, key: str) -> Any:
        code = self.number("<u4")
        if code == _STRING:
            return self.string(key)
        if code in _NUMBERS:
            return self.number(_NUMBERS[code])
        if code != _ARRAY:
            raise self.error(f"the value of {key} has a type of number {code}, which is not known")
        code, count = self.number("<u4"), self.number("<u8")
        if code == _STRING:
            return [self.string(key) for _ in range(self.room(count, 8))]
        if code not in _NUMBERS:
            raise self.error(f"the array of {key} has elements of type {code}; numbers and strings are read")
        dtype = np.dtype(_NUMBERS[code])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def number(self, dtype: str) -> Any:
        """An int, a float or a bool. A float32 becomes the float with the same shortest decimal, so that 1e-5 stays 1e-5."""
        found = np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0]
        return float(str(found)) if dtype == "<f4" else found.item()

    def string(self, what: str) -> str:
        raw = self.take(self.number("<u8"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"the text of {what} is not UTF-8") from None

    def take(self, size: int) -> bytes:
        return self.file.read(self.room(size, 1))

    def room(self, count: int, size: int) -> int:
        """The count. Raises InputError if the rest of the file has no room for that many elements of at least `size` bytes."""
        if count * size > self.size - self.file.tell():
            raise self.error(f"is not whole: its header goes on after the file's {self.size} bytes; fetch it again")
        return count

    def error(self, what: str) -> InputError:
        # Names from the file may hold any character.
        return InputError(f"{self.path}: {what if what.isprintable() else ascii(what)[1:-1]}")
