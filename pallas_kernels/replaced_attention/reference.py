"""Attention with replaced tokens in plain JAX, see `pallas_kernels.attention.reference`."""

from pallas_kernels.attention.reference import attend_replaced

__all__ = ["attend_replaced"]
