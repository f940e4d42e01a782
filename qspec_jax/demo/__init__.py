"""The embedded model, a Llama of 7.9 M parameters trained on Python source, and an EAGLE-3 head for it."""

import importlib.resources
from pathlib import Path

import jax

MODEL = Path(str(importlib.resources.files(__name__) / "model"))
HEAD = MODEL.parent / "head"


def dtype() -> str | None:
    """The dtype to load the embedded model in; None is as stored."""
    # A CPU has no bfloat16 arithmetic to speak of.
    return "float32" if jax.default_backend() == "cpu" else None
