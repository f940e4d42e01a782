"""Tensors of safetensors files: headers are read first, tensors when they are needed, rows at a time if wanted."""

import dataclasses
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qspec_jax.errors import InputError, one_line, reading
from qspec_jax.files import refuse_pointer

FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
FLOAT_NAMES = {kind: np.dtype(dtype).name for kind, dtype in FLOATS.items()}
_DTYPES = FLOATS | {
    **{"I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu},
}
_COMPARED = 1 << 24  # numbers compared at a time


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
        shape, dtype = self.shape if rows is None else (rows, *self.shape[1:]), _DTYPES[self.dtype]
        array = np.empty(shape, dtype) if memory is None else memory.view(dtype).reshape(shape)
        with reading(self.file), self.file.open("rb") as file:
            file.seek(self.start + first * math.prod(self.shape[1:]) * array.itemsize)
            count = file.readinto(array.reshape(-1).view(np.uint8))
        if count != array.nbytes:
            raise InputError(f"{self.file}: is shorter than when it was opened; it must not change while it is read")
        return array

    def equals(self, other: object) -> bool:
        """Whether another tensor has the same bits; both are read a part at a time."""
        if not isinstance(other, Tensor) or (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        rows = max(1, _COMPARED // max(1, math.prod(self.shape[1:])))
        parts = [(i, min(rows, self.shape[0] - i)) for i in range(0, self.shape[0], rows)] if self.shape else [(0, None)]
        return all(self.read(*part).tobytes() == other.read(*part).tobytes() for part in parts)


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
