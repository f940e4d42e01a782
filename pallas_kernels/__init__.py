"""Arrays in, arrays out: the formats of the quantized cache and weights, and the operations that read them.

Depends on jax alone. Knows no model.
"""
