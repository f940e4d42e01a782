"""Reading checkpoint directories, and how reading is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tensor_names import places
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

INDEX = "model.safetensors.index.json"


def loaded(model: Llama) -> dict[str, np.ndarray]:
    """The checkpoint's tensors, by their names, put together from the model's weights."""
    weights, parts = model.weights(), {}
    for path, place in places(model.config).items():
        parts.setdefault(place.name, []).append(np.asarray(weights[path]))
    return {name: np.concatenate(several) for name, several in parts.items()}


def refused(directory: Path, *named: str, read: Callable = load_model) -> str:
    """Reading must fail with one line that names the directory and these; returns the line."""
    with pytest.raises(InputError) as error:
        read(directory)
    message = str(error.value)
    assert message.startswith(str(directory)) and "\n" not in message
    assert all(name in message for name in named), message
    return message


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
