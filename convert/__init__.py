"""Conversion of checkpoints between formats. Hugging Face directories are loaded directly, see `qspec_jax.checkpoint`."""
