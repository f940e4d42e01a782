"""Measurements of a model, and many prompts through it."""

from qspec_jax.decoding.batch import BatchRun, BatchStats, Request, Result, run_batch

__all__ = ["BatchRun", "BatchStats", "Request", "Result", "run_batch"]
