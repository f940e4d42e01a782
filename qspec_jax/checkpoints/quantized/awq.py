"""AWQ in the layout of its GEMM kernels: 4-bit codes that are packed along the outputs, in an order of their own."""

import dataclasses

import numpy as np

from pallas_kernels.matmul.support import GROUP_SIZES
from qspec_jax.checkpoints.quantized.settings import Settings
from qspec_jax.checkpoints.quantized.tensor import SCALES, GroupedTensor, Parts, check_tensor, needed
from qspec_jax.checkpoints.quantized.words import unpack, words_for
from qspec_jax.errors import InputError

BITS, PER_WORD = 4, 8
_IN_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word, from the lowest, that holds each of its outputs
_WORDS = 1 << 19  # unpacked at a time


class AwqTensor(GroupedTensor):
    """A weight of AWQ."""

    def codes(self, first: int, rows: int) -> np.ndarray:
        """See `GroupedTensor`."""
        begin, end = first // PER_WORD, -(-(first + rows) // PER_WORD)
        codes, step = np.empty((rows, self.shape[1]), np.uint8), max(1, _WORDS // max(1, self.shape[0] // PER_WORD))
        for start in range(0, self.shape[1], step):
            inputs = min(step, self.shape[1] - start)
            words = self.parts["qweight"].read(start, inputs)[:, begin:end]
            codes[:, start : start + inputs] = _by_outputs(words)[first - begin * PER_WORD :][:rows]
        return codes

    def scales(self) -> np.ndarray:
        """See `GroupedTensor`."""
        return self.parts["scales"].read().T

    def zero_points(self) -> np.ndarray:
        """See `GroupedTensor`."""
        return _by_outputs(self.parts["qzeros"].read())


def _by_outputs(words: np.ndarray) -> np.ndarray:
    """The codes of words [rows, outputs / 8], uint8 [outputs, rows]."""
    codes = unpack(words, BITS).reshape(*words.shape, PER_WORD)[..., _IN_ORDER]
    return codes.reshape(len(words), -1).T


@dataclasses.dataclass(frozen=True)
class AwqFormat:
    """The format of quant_method awq. group_size: inputs that share a scale; -1: all."""

    group_size: int
    name = "AWQ"
    suffixes = ("qweight", "qzeros", "scales")
    unused = ()

    @property
    def kernel_group_size(self) -> int | None:
        """See `Format`."""
        return self.group_size if self.group_size in GROUP_SIZES else None

    def tensor(self, module: str, shape: tuple[int, int], parts: Parts) -> AwqTensor | None:
        """See `Format`."""
        if not parts:
            return None
        beside = next(iter(parts))
        found = {name: needed(module, name, parts, beside) for name in self.suffixes}
        outputs, inputs = shape
        if outputs % PER_WORD:
            raise InputError(f"{parts[beside].file}: {module} has {outputs} outputs, should be a multiple of {PER_WORD} for AWQ")
        tensor = AwqTensor(module, shape, found, BITS, inputs if self.group_size == -1 else self.group_size)
        check_tensor(module, "qweight", parts, ("I32",), (inputs, words_for(outputs, BITS)))
        check_tensor(module, "qzeros", parts, ("I32",), (tensor.groups, words_for(outputs, BITS)))
        check_tensor(module, "scales", parts, SCALES, (tensor.groups, outputs))
        return tensor


def awq_format(settings: Settings) -> AwqFormat:
    """The format that the settings of quant_method awq ask for. Raises InputError for one that is not supported."""
    for name in ("version", "checkpoint_format", "format"):
        settings.choice(name, (None, "gemm"))
    settings.choice("backend", (None, "autoawq", "auto"))
    settings.choice("zero_point", (None, True))
    settings.number("bits" if "bits" in settings.raw else "w_bit", allowed=(BITS,))
    return AwqFormat(settings.number("group_size", "q_group_size"))
