"""Conversion of Hugging Face checkpoints for JAX: `convert(SRC, DST)`; `qspec_jax.load` reads both kinds of directory."""

from convert.to_orbax import convert as convert

__all__ = ["convert"]
