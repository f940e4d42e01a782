"""bitsandbytes NF4: 4-bit indices into a table, scaled by the maximum of each block of the flat weight.

The first number of a byte is in its high nibble. Blocks run over the flat weight, whatever its number of inputs. The maxima may be
quantized again, by blocks of their own.
"""

import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np

from qspec_jax.checkpoints.quantized.settings import Settings
from qspec_jax.checkpoints.quantized.tensor import Dequantize, Parts, QuantizedTensor, check_tensor, needed, wrong

STATE = "weight.quant_state.bitsandbytes__nf4"
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


@dataclasses.dataclass(frozen=True)
class Nf4Tensor(QuantizedTensor):
    """A weight in NF4.

    Attributes:
        block: numbers that share a maximum.
        nested_block: maxima that share a maximum; None where maxima are stored as float32.
        offset: what is added to each maximum, where they are quantized.
    """

    block: int
    nested_block: int | None
    offset: float

    def load(self, first: int, rows: int) -> Dequantize:
        """See `QuantizedTensor`."""
        inputs, parts = self.shape[1], self.parts
        packed, table, maxima = parts["weight"].read().reshape(-1).view(np.uint8), parts["weight.quant_map"].read(), self._maxima()

        def dequantize(start: int, stop: int) -> np.ndarray:
            begin, end = (first + start) * inputs, (first + stop) * inputs
            some = packed[begin // 2 : -(-end // 2)]
            codes = np.stack([some >> 4, some & 15], axis=-1).reshape(-1)[begin % 2 :][: end - begin]
            values = table[codes]
            values *= maxima[np.arange(begin, end) // self.block]
            return values.reshape(stop - start, inputs)

        return dequantize

    def _maxima(self) -> np.ndarray:
        """The maximum of each block, in float32."""
        stored = self.parts["weight.absmax"].read()
        if self.nested_block is None:
            return stored
        maxima, table = (self.parts[name].read() for name in NESTED)
        return table[stored] * maxima[np.arange(len(stored)) // self.nested_block] + np.float32(self.offset)


@dataclasses.dataclass(frozen=True)
class BitsAndBytes:
    """The format of quant_method bitsandbytes with NF4. Block sizes are in the tensors alone."""

    name = "bitsandbytes"
    suffixes = ("weight", "weight.absmax", "weight.quant_map", STATE, *NESTED)
    kernel_group_size = None
    unused = ()

    def tensor(self, module: str, shape: tuple[int, int], parts: Parts) -> Nf4Tensor | None:
        """See `Format`."""
        if parts.keys() <= {"weight"} and (not parts or parts["weight"].dtype != "U8"):
            return None
        beside, size = next(iter(parts)), math.prod(shape)
        for name in ("weight", "weight.absmax", "weight.quant_map", STATE):
            needed(module, name, parts, beside)
        state = self._state(module, parts)
        number = functools.partial(_number, state, module, parts)
        block, is_nested = number("blocksize"), parts["weight.absmax"].dtype == "U8"
        if state.get("quant_type") != "nf4" or state.get("shape") != list(shape):
            found = f"{state.get('quant_type')} of shape {state.get('shape')}"
            raise wrong(module, STATE, parts, f"is of {found}, should be of nf4 of shape {list(shape)}")
        names = ("weight", "weight.absmax", "weight.quant_map", STATE, *(NESTED if is_nested else ()))
        found = {name: needed(module, name, parts, "weight") for name in names}
        blocks = -(-size // block)
        check_tensor(module, "weight", parts, ("U8",), (-(-size // 2), 1))
        check_tensor(module, "weight.absmax", parts, ("U8",) if is_nested else ("F32",), (blocks,))
        check_tensor(module, "weight.quant_map", parts, ("F32",), (16,))
        if not is_nested:
            return Nf4Tensor(module, shape, found, block, None, 0.0)
        nested, offset = number("nested_blocksize"), state.get("nested_offset")
        if not isinstance(offset, float | int) or not math.isfinite(offset):
            raise wrong(module, STATE, parts, f"has a nested_offset of {offset!r}, should be a number")
        check_tensor(module, NESTED[0], parts, ("F32",), (-(-blocks // nested),))
        check_tensor(module, NESTED[1], parts, ("F32",), (256,))
        return Nf4Tensor(module, shape, found, block, nested, float(offset))

    def _state(self, module: str, parts: Parts) -> dict[str, Any]:
        """The JSON object in the tensor of the quantization's state."""
        try:
            state = json.loads(parts[STATE].read().tobytes()) if parts[STATE].dtype == "U8" else None
        except ValueError:
            state = None
        if not isinstance(state, dict):
            raise wrong(module, STATE, parts, "should hold a JSON object, and does not")
        return state


def _number(state: dict[str, Any], module: str, parts: Parts, name: str) -> int:
    """A whole number above 0 of the quantization's state."""
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong(module, STATE, parts, f"has a {name} of {value!r}, should be a whole number above 0")
    return value


def bitsandbytes_format(settings: Settings) -> BitsAndBytes:
    """The format that the settings of quant_method bitsandbytes ask for. Raises InputError for one that is not supported."""
    if settings.raw.get("load_in_8bit") or not settings.raw.get("load_in_4bit"):
        raise settings.refused("the bitsandbytes quantization is of 8 bits (load_in_8bit), which is not supported; nf4 is")
    settings.choice("bnb_4bit_quant_type", ("nf4",))
    settings.choice("bnb_4bit_quant_storage", (None, "uint8"))
    return BitsAndBytes()
