"""The format of a checkpoint's quantized weights, by what config.json says of it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qspec_jax.checkpoints.quantized.awq import awq_format
from qspec_jax.checkpoints.quantized.bitsandbytes import bitsandbytes_format
from qspec_jax.checkpoints.quantized.compressed_tensors import compressed_tensors
from qspec_jax.checkpoints.quantized.fp8 import fp8_format
from qspec_jax.checkpoints.quantized.gptq import gptq_format
from qspec_jax.checkpoints.quantized.settings import Settings
from qspec_jax.checkpoints.quantized.tensor import Format
from qspec_jax.errors import InputError
from qspec_jax.files import read_json

CONFIG_KEY = "quantization_config"
_INNER = "text_config"  # the settings of the text model of a multimodal one
BESIDE = "quantize_config.json"  # settings of GPTQ; config.json has precedence
_FORMATS: Mapping[str, tuple[str, Callable[[Settings], Format]]] = {
    "fp8": ("FP8", fp8_format),
    "compressed-tensors": ("compressed-tensors", compressed_tensors),
    "awq": ("AWQ", awq_format),
    "gptq": ("GPTQ", gptq_format),
    "bitsandbytes": ("bitsandbytes", bitsandbytes_format),
}


def without_quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without its settings of quantized weights."""
    plain = {key: value for key, value in raw.items() if key != CONFIG_KEY}
    if isinstance(inner := plain.get(_INNER), Mapping):
        plain[_INNER] = {key: value for key, value in inner.items() if key != CONFIG_KEY}
    return plain


def quantized_format(directory: Path, raw: Mapping[str, Any]) -> Format | None:
    """The format of a checkpoint's quantized weights.

    Args:
        directory: of the checkpoint.
        raw: its config.json.

    Returns:
        The format; None for a checkpoint that is not quantized.

    Raises:
        InputError: for a format that is not supported.
    """
    config, beside = directory / "config.json", directory / BESIDE
    inner = raw.get(_INNER)
    given = raw.get(CONFIG_KEY) or (inner.get(CONFIG_KEY) if isinstance(inner, Mapping) else None)
    if not given and not beside.is_file():
        return None
    source = str(config) if given else str(beside)
    if not given:
        given = {"quant_method": "gptq"} | read_json(beside)
    if not isinstance(given, Mapping):
        raise InputError(f"{config}: {CONFIG_KEY} is {json.dumps(given)}, should be an object")
    method = given.get("quant_method")
    if method == "gptq" and beside.is_file():
        given = read_json(beside) | {key: value for key, value in given.items() if value is not None}
    if not isinstance(method, str) or method not in _FORMATS:
        raise InputError(f"{source}: quantization by {json.dumps(method)} is not supported; supported are {', '.join(_FORMATS)}")
    name, read = _FORMATS[method]
    return read(Settings(given, source, name))
