"""Formats: quantized caches and weights as pytrees, their codes, what rounds them, and the views through which they are read."""
