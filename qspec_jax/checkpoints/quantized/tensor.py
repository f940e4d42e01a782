"""Weights that are stored as codes, and the formats that have them."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Protocol

import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.checkpoints.safetensors_file import FLOATS, Tensor
from qspec_jax.errors import InputError, either

PART = 1 << 21  # numbers dequantized at a time
SCALES = tuple(kind for kind in FLOATS if kind != "F64")  # dtypes of scales
Parts = Mapping[str, Tensor]
Dequantize = Callable[[int, int], np.ndarray]


class Format(Protocol):
    """A format of quantized weights, with the settings of one checkpoint.

    Attributes:
        name: of the format, for messages.
        suffixes: the last parts of the names of tensors that a quantized weight consists of, without the name of its module.
        kernel_group_size: inputs of a group where kernels can multiply by its codes, with scales in bfloat16 or float16; None where they
            cannot. The settings say it.
        unused: the last parts of names of tensors that a quantized module may have too, and that its weight does not need.
    """

    name: str
    suffixes: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def kernel_group_size(self) -> int | None: ...

    def tensor(self, module: str, shape: tuple[int, int], parts: Parts) -> "QuantizedTensor | None":
        """The quantized weight of a module.

        Args:
            module: its name, which its tensors' names begin with.
            shape: of the weight, [out, in].
            parts: its tensors, by their suffixes.

        Returns:
            The weight, or None if it is not quantized.

        Raises:
            InputError: for a tensor that is missing, or has another shape or dtype than the format asks for.
        """
        ...


@dataclasses.dataclass(frozen=True)
class QuantizedTensor(abc.ABC):
    """A weight [out, in] that is stored as codes and read as float32, with the interface of `Tensor`.

    Attributes:
        module: the name of its module.
        shape: of the weight.
        parts: its tensors, by their suffixes.
    """

    module: str
    shape: tuple[int, int]
    parts: Parts
    dtype: ClassVar[str] = "F32"

    @abc.abstractmethod
    def load(self, first: int, rows: int) -> Dequantize:
        """Reads the codes of rows; the result gives the weight of some of them, from and up to a row, in float32."""

    def check(self) -> None:
        """Raises InputError if tensors have contents that their format does not allow."""
        return

    @property
    def file(self) -> Path:
        """The file of its codes."""
        return next(iter(self.parts.values())).file

    def read(self, first: int = 0, rows: int | None = None, memory: np.ndarray | None = None) -> np.ndarray:
        """Rows of the dequantized weight, in float32. See `Tensor.read`."""
        rows = self.shape[0] if rows is None else rows
        whole = (rows, self.shape[1])
        out = np.empty(whole, np.float32) if memory is None else memory.view(np.float32).reshape(whole)
        dequantize = self.load(first, rows)
        step = max(1, PART // self.shape[1])
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            out[start:stop] = dequantize(start, stop)
        return out

    def equals(self, other: object) -> bool:
        """Whether another weight has the same tensors, bit for bit."""
        if not isinstance(other, QuantizedTensor) or self.parts.keys() != other.parts.keys():
            return False
        return all(part.equals(other.parts[suffix]) for suffix, part in self.parts.items())

    def error(self, suffix: str, what: str) -> InputError:
        """The error that something is wrong with one of its tensors."""
        return wrong(self.module, suffix, self.parts, what)


@dataclasses.dataclass(frozen=True)
class GroupedTensor(QuantizedTensor):
    """A weight of integer codes with a scale, and perhaps a zero point, for each group of inputs: (code - zero point) * scale.

    Attributes:
        bits: of a code.
        group_size: inputs of a group; the last group may have fewer.
        order: the suffix of the tensor that says the group of each input; None: inputs are grouped in order.
    """

    bits: int
    group_size: int
    order: str | None = None

    @property
    def groups(self) -> int:
        """The number of groups of an output."""
        return -(-self.shape[1] // self.group_size)

    @abc.abstractmethod
    def codes(self, first: int, rows: int) -> np.ndarray:
        """Codes of rows, uint8 [rows, in]."""

    @abc.abstractmethod
    def scales(self) -> np.ndarray:
        """Scales as they are stored, [out, groups]."""

    @abc.abstractmethod
    def zero_points(self) -> np.ndarray:
        """Zero points, uint8 [out, groups]."""

    def group_of_input(self) -> np.ndarray:
        """The group of each input, [in]."""
        return np.arange(self.shape[1]) // self.group_size if self.order is None else self.parts[self.order].read()

    def check(self) -> None:
        """Raises InputError if an input is in a group that does not exist."""
        if self.order is None:
            return
        found = self.group_of_input()
        if len(outside := found[(found < 0) | (found >= self.groups)]):
            raise self.error(self.order, f"has a group of {outside[0]}, should be from 0 to {self.groups - 1}")

    def can_pack(self) -> bool:
        """Whether `pack` can give the weight: codes have 4 bits, and groups are whole and in order."""
        whole = self.shape[1] % self.group_size == 0 and self.group_size % 2 == 0
        return self.bits == 4 and whole and np.array_equal(self.group_of_input(), np.arange(self.shape[1]) // self.group_size)

    def pack(self, first: int, rows: int) -> Int4Weight:
        """Rows of the weight in INT4, in numpy arrays, whose values in float32 are those of `read`, bit for bit.

        Scales are as they are stored. Where they are in bfloat16, and minus the products of zero points and scales are numbers of bfloat16,
        as those of symmetric weights are, these products are the zeros. All others are zero points in int16.
        """
        codes = self.codes(first, rows).reshape(rows, -1, self.group_size)
        half = self.group_size // 2
        packed = codes[..., half:] << 4
        packed |= codes[..., :half]
        return Int4Weight(packed, *self.parameters(first, rows))

    def parameters(self, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Scale and zero of `pack`, of rows."""
        scales, zeros = (np.ascontiguousarray(x[first : first + rows]) for x in (self.scales(), self.zero_points()))
        if scales.dtype == jnp.bfloat16:
            zero = -zeros.astype(np.float32) * scales.astype(np.float32)
            narrow = zero.astype(scales.dtype)
            if np.array_equal(narrow.astype(np.float32), zero):
                return scales, narrow
        return scales, zeros.astype(np.int16)

    def load(self, first: int, rows: int) -> Dequantize:
        """See `QuantizedTensor`."""
        codes = self.codes(first, rows)
        scales, zeros = (x[first : first + rows].astype(np.float32) for x in (self.scales(), self.zero_points()))
        group, (inputs, size) = self.group_of_input(), (self.shape[1], self.group_size)
        in_order = inputs % size == 0 and np.array_equal(group, np.arange(inputs) // size)

        def dequantize(start: int, stop: int) -> np.ndarray:
            values = codes[start:stop].astype(np.float32)
            if in_order:
                grouped = values.reshape(stop - start, -1, size)
                grouped -= zeros[start:stop, :, None]
                grouped *= scales[start:stop, :, None]
            else:
                values -= zeros[start:stop, group]
                values *= scales[start:stop, group]
            return values

        return dequantize


def needed(module: str, suffix: str, parts: Parts, beside: str) -> Tensor:
    """A tensor of a quantized weight. Raises InputError if it is missing although the weight has the tensor `beside`."""
    if suffix not in parts:
        raise InputError(f"{parts[beside].file}: {module}.{suffix} is missing, which {module}.{beside} needs")
    return parts[suffix]


def check_tensor(module: str, suffix: str, parts: Parts, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Raises InputError unless a tensor has one of the dtypes and one of the shapes."""
    tensor = parts[suffix]
    if tensor.dtype not in dtypes:
        raise wrong(module, suffix, parts, f"has dtype {tensor.dtype}, should be {either(dtypes)}")
    if tensor.shape not in shapes:
        asked = f"should be {either(map(list, shapes))} by the model's sizes and the settings of its quantization"
        raise wrong(module, suffix, parts, f"has shape {list(tensor.shape)}, {asked}")


def wrong(module: str, suffix: str, parts: Parts, what: str) -> InputError:
    """The error that something is wrong with a tensor of a quantized weight."""
    return InputError(f"{parts[suffix].file}: {module}.{suffix} {what}")
