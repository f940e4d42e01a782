"""Conversion of Hugging Face checkpoints for JAX, and back: `convert(SRC, DST)`, `verify(SRC, DST)`, `export(DST, HF_DIR)`.

`qspec_jax.load` reads both kinds of directory.
"""

from convert.compare import verify
from convert.to_hf import export
from convert.to_orbax import convert

__all__ = ["convert", "export", "verify"]
