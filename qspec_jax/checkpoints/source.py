"""The interface of an unconverted checkpoint: a Hugging Face directory has it, and other files of weights may."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.checkpoints.tensor_names import Place
from qspec_jax.errors import listed
from qspec_jax.models.config import LlamaConfig

log = logging.getLogger(__name__)

# Bits that are all set only in infinities and NaNs; numpy's isfinite takes several times as long for bfloat16.
_EXPONENTS = {np.float16: 0x7C00, ml_dtypes.bfloat16: 0x7F80, np.float32: 0x7F800000, np.float64: 0x7FF0000000000000}
_EXAMINED = 1 << 17  # numbers examined at a time; they fit a core's cache


class WeightSource(Protocol):
    """An unconverted checkpoint, whose weights are read one at a time, also by several threads at once.

    Opening one reads headers alone, and raises InputError for missing, unexpected or misshapen tensors, all in one sentence.

    Attributes:
        directory: the directory or the file of the checkpoint, for messages and for the tokenizer.
        config: of the model; its dtype is the one that the weights are loaded in by default.
        places: for each weight of the model, by its path in `Llama`, the name of its tensor and its shape.
        quantization: the name of the format that linear layers are stored in as codes; None: they are stored as numbers.
        not_finite: names of the examined tensors that have infinities or NaNs.
    """

    directory: Path
    config: LlamaConfig
    places: Mapping[str, Place]
    quantization: str | None = None
    not_finite: set[str]

    def read(self, path: str, memory: np.ndarray | None = None) -> np.ndarray:
        """The weight at a path of the model.

        Args:
            path: of the weight.
            memory: `read_bytes` bytes to read into; None: new memory.

        Returns:
            The weight as it is stored, or in float32 if it is stored as codes: callers cast it to the dtype of the model, which rounds a
            dequantized weight once.

        Raises:
            InputError: if it cannot be read, or its contents are wrong.
        """
        ...

    def read_bytes(self, path: str) -> int:
        """Bytes of the array that `read` returns."""
        ...

    def can_pack(self, path: str) -> bool:
        """Whether `read_packed` can give the weight at a path of the model."""
        return False

    def read_packed(self, path: str) -> Int4Weight:
        """The weight at a path of the model, which is stored in groups of 4-bit codes, in INT4, in numpy arrays; see `can_pack`.

        Its values in float32 (see `Int4Weight`) are those that `read` returns, bit for bit.
        """
        raise ValueError(f"{path} is not stored in groups of 4-bit codes that can be packed")

    def read_parameters(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        """Scale and zero of `read_packed`."""
        raise ValueError(f"{path} is not stored in groups of 4-bit codes that can be packed")

    def check_contents(self) -> None:
        """Raises InputError if tensors contradict each other, such as two different copies of one."""
        ...

    def small_file(self, name: str) -> bytes | None:
        """The contents of the file of this name (see `hub.SMALL_FILES`) in a conversion of the checkpoint; None if there is none.

        A config.json is always there, from which `load_config` reads the config of the source.
        """
        ...

    def examine(self, path: str, weight: np.ndarray) -> None:
        """Notes the tensor of a weight, which has the dtype that it is used in, if it has infinities or NaNs."""
        if not all_finite(weight):
            self.not_finite.add(self.places[path].name)

    def warn_of_not_finite(self) -> None:
        """Logs the names of examined tensors that have infinities or NaNs."""
        if names := sorted(self.not_finite):
            hold = "1 tensor holds" if len(names) == 1 else f"{len(names)} tensors hold"
            log.warning("%s: %s numbers that are not finite: %s", self.directory, hold, listed(names))


def all_finite(array: np.ndarray) -> bool:
    """Whether an array of floats has neither infinities nor NaNs; it is examined a part at a time."""
    exponent = np.array(_EXPONENTS[array.dtype.type], f"u{array.itemsize}")
    bits = array.reshape(-1).view(exponent.dtype)
    parts = (bits[i : i + _EXAMINED] for i in range(0, len(bits), _EXAMINED))
    return all((part & exponent).max() != exponent for part in parts)
