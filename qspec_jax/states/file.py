"""Files of named arrays with a header: safetensors whose every byte is covered by a checksum, which is verified before anything is read.

The checksum is that of the file with zeros in its own place.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from qspec_jax.errors import InputError, reading, writing
from qspec_jax.files import whole_file

NO_STATE = "is not a saved state"
HEADER, CHECKSUM = "qspec_state", "sha256"
_ZEROS = "0" * hashlib.sha256().digest_size * 2
_PLACE = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_NAMES = {f"{name}{bits}": f"{letter}{bits}" for name, letter in (("int", "I"), ("uint", "U"), ("float", "F")) for bits in (8, 16, 32, 64)}
_NAMES |= {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_MAX_HEADER, _BLOCK = 100_000_000, 1 << 20  # bytes; safetensors takes no longer headers


def write(path: Path, header: Mapping[str, Any], arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Writes a file that appears whole or not at all.

    Args:
        path: of the file; one that exists is replaced.
        header: anything that JSON can express, which `read_header` returns.
        arrays: by their names, of types that safetensors has.

    Raises:
        InputError: if it cannot be written.
    """
    # Not by safetensors, whose own unfinished file would stay if the process is killed, and which needs all arrays on the host at once.
    described: dict[str, Any] = {"__metadata__": {HEADER: json.dumps(header), CHECKSUM: _ZEROS}}
    names, at = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize), 0  # so that each array is aligned
    for name in names:
        x = arrays[name]
        offsets = [at, at := at + x.nbytes]
        described[name] = {"dtype": _type_of(x.dtype), "shape": list(x.shape), "data_offsets": offsets}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    with writing(path), whole_file(path) as unfinished, unfinished.open("wb") as file:
        digest = hashlib.sha256(begin)
        file.write(begin)
        for name in names:
            content = _bytes_of(arrays[name])
            digest.update(content)
            file.write(content)
        file.seek(8 + _PLACE.search(text).start(1))
        file.write(digest.hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file. Raises InputError if it cannot be read, is no such file, or is damaged."""
    with reading(path):
        digest, at = _digest(path)
        with path.open("rb") as file:
            file.seek(at)
            found = file.read(len(_ZEROS)).decode("ascii", "replace")
    if digest != found:
        raise InputError(f"{path}: is damaged, since its checksum is not that of its content; save the state again")
    with reading(path, SafetensorError), safe_open(path, "numpy") as file:
        found = (file.metadata() or {}).get(HEADER)
    try:
        header = json.loads(found or "")
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise InputError(f"{path}: {NO_STATE}")
    return header


def read(path: Path, shapes: Mapping[str, jax.ShapeDtypeStruct], *, zeros: Collection[str] = ()) -> dict[str, jax.Array]:
    """The arrays of a file whose header was read.

    Args:
        path: of the file.
        shapes: those of the arrays that it should hold, by their names, each with its sharding if that is not the default device.
        zeros: names of those that it does not hold, and that are zeros.

    Raises:
        InputError: if it holds other arrays, and for one with numbers that are none (NaN).
    """
    with reading(path, SafetensorError), safe_open(path, "flax") as file:
        names = set(file.keys())
        if names != (expected := set(shapes) - set(zeros)):
            other = min(names ^ expected)
            raise InputError(f"{path}: {'holds' if other in names else 'lacks'} {other}, unlike a state of this model, cache and draft")
        arrays = {}
        for name, shape in shapes.items():
            if name in zeros:
                arrays[name] = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
                continue
            found, needed = file.get_slice(name), (list(shape.shape), _type_of(shape.dtype))
            if (held := (found.get_shape(), found.get_dtype())) != needed:
                raise InputError(f"{path}: {name} is {held[1]} of shape {held[0]}, and {needed[1]} of shape {needed[0]} is needed")
            array = file.get_tensor(name)
            if jnp.issubdtype(array.dtype, jnp.inexact) and jnp.isnan(array).any():
                raise InputError(f"{path}: {name} has numbers that are none (NaN); make the state again")
            arrays[name] = array if shape.sharding is None else jax.device_put(array, shape.sharding)
    return arrays


def _type_of(dtype: Any) -> str:
    """What safetensors calls a type of arrays."""
    return _NAMES[str(dtype)]


def _bytes_of(x: jax.Array | np.ndarray) -> memoryview:
    """The content of an array, on the host."""
    return memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8))


def _digest(path: Path) -> tuple[str, int]:
    """The checksum that a file should have, and where in it the checksum is. Raises InputError for what is no such file."""
    no_state = f"{path}: {NO_STATE}"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        count = int.from_bytes(length, "little")
        if len(length) < 8 or count > min(size - 8, _MAX_HEADER):
            raise InputError(no_state)
        header = file.read(count)
        if not (place := _PLACE.search(header)):
            raise InputError(no_state)
        begin, end = place.span(1)
        digest = hashlib.sha256(length + header[:begin] + _ZEROS.encode() + header[end:])
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest(), 8 + begin
