"""Measurements of quality: each file holds what one evaluation measures, its table and its plot."""

import importlib
import warnings

_MOVED = ("BatchRun", "BatchStats", "Request", "Result", "run_batch")


def __getattr__(name: str):
    """What was here before it went to `qspec_jax.decoding.batch`, for one more release."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"qspec_jax.evaluate.{name} is qspec_jax.decoding.batch.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("qspec_jax.decoding.batch"), name)
