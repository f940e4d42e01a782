"""Formats of quantized checkpoints, a file each: what their tensors are called, how codes are packed, and the weights that they mean."""
