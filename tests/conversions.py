"""Two conversions, or a directory before and after one, compared; and what convert refuses."""

from pathlib import Path

import jax
import numpy as np
import pytest

from convert import convert
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama


def bits(model: Llama) -> dict[str, tuple]:
    """Every array of the model: its dtype, shape and bytes."""
    leaves = jax.tree_util.tree_leaves_with_path(model.weights())
    return {jax.tree_util.keystr(path): (str(x.dtype), x.shape, np.asarray(x).tobytes()) for path, x in leaves}


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refused(named: str, *args, **settings) -> None:
    with pytest.raises(InputError) as error:
        convert(*args, **settings)
    assert named in str(error.value) and "\n" not in str(error.value)
