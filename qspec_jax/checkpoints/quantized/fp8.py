"""FP8 (E4M3): a weight of 8-bit floats with a scale for each block of it, each output, or the whole; the product is the weight.

The scale of the layout of DeepSeek, Qwen and Mistral is called weight_scale_inv; it is not inverted. Blocks at the ends may be partial.
"""

import dataclasses

import ml_dtypes
import numpy as np

from qspec_jax.checkpoints.quantized.settings import Settings
from qspec_jax.checkpoints.quantized.tensor import SCALES, Dequantize, Parts, QuantizedTensor, check_tensor, wrong
from qspec_jax.errors import InputError

E4M3 = "F8_E4M3"
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Fp8Tensor(QuantizedTensor):
    """A weight in FP8.

    Attributes:
        block: outputs and inputs that share a scale.
        scale: the suffix of the scales' tensor.
    """

    block: tuple[int, int]
    scale: str

    def load(self, first: int, rows: int) -> Dequantize:
        """See `QuantizedTensor`."""
        codes, (outputs, inputs) = self.parts["weight"].read(first, rows).view(np.uint8), self.block
        scales = self.parts[self.scale].read().astype(np.float32).reshape(_grid(self.shape, self.block))
        column = np.arange(self.shape[1]) // inputs

        def dequantize(start: int, stop: int) -> np.ndarray:
            values = _VALUES[codes[start:stop]]
            of_rows = scales[np.arange(first + start, first + stop) // outputs]
            values *= of_rows if of_rows.shape[1] == 1 else of_rows[:, column]
            return values

        return dequantize


def fp8_tensor(module: str, shape: tuple[int, int], parts: Parts, scale: str, block: tuple[int, int]) -> Fp8Tensor:
    """A weight in FP8 whose scales are in the tensor `scale`. Raises InputError if the two have other shapes or dtypes."""
    check_tensor(module, "weight", parts, (E4M3,), shape)
    grid = _grid(shape, block)
    flat = [(1,), ()] if grid == (1, 1) else []  # a scale of the whole weight may be a vector or a scalar
    check_tensor(module, scale, parts, (*SCALES, "F8_E8M0"), grid, *flat)
    return Fp8Tensor(module, shape, parts, block, scale)


@dataclasses.dataclass(frozen=True)
class Fp8Format:
    """The format of quant_method fp8.

    Attributes:
        block: outputs and inputs that share a scale; None: all of a weight, or all inputs of an output.
    """

    block: tuple[int, int] | None
    name = "FP8"
    suffixes = ("weight", "weight_scale_inv", "weight_scale")
    kernel_group_size = None
    unused = ("activation_scale", "input_scale", "k_scale", "v_scale", "kv_scale")

    def tensor(self, module: str, shape: tuple[int, int], parts: Parts) -> Fp8Tensor | None:
        """See `Format`."""
        scale = next((suffix for suffix in ("weight_scale_inv", "weight_scale") if suffix in parts), None)
        if scale is None:
            if "weight" in parts and parts["weight"].dtype == E4M3:
                raise InputError(f"{parts['weight'].file}: {module}.weight_scale_inv is missing, which {module}.weight in FP8 needs")
            return None
        if "weight" not in parts:
            raise wrong(module, scale, parts, f"is the scale of {module}.weight, which is missing")
        outputs, inputs = shape
        each_output = parts[scale].shape == (outputs, 1)
        return fp8_tensor(module, shape, parts, scale, self.block or ((1 if each_output else outputs), inputs))


def fp8_format(settings: Settings) -> Fp8Format:
    """The format that the settings of quant_method fp8 ask for. Raises InputError for one that is not supported."""
    settings.choice("activation_scheme", (None, "dynamic", "static"))
    settings.choice("fmt", (None, "e4m3", "float8_e4m3fn"))
    settings.choice("scale_fmt", (None, "float", "ue8m0"))
    block = settings.raw.get("weight_block_size")
    if block is None:
        return Fp8Format(None)
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise settings.refused(f"weight_block_size of the FP8 quantization is {block!r}, should be two whole numbers")
    return Fp8Format((block[0], block[1]))


def _grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """The number of blocks along outputs and inputs."""
    return (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
