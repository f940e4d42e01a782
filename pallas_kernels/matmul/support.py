"""The arguments that the GPU kernels of INT4 matmul take."""

import math
from collections.abc import Sequence

from jaxtyping import Array

from pallas_kernels.formats.weights import Int4Weight

GROUP_SIZE = 128
MAX_ROWS = 16  # of the kernels for few rows
OUTPUTS = 16  # a weight has a multiple of these


def unsupported(x: Array, weights: Sequence[Int4Weight], max_rows: int = MAX_ROWS) -> str | None:
    """Why no kernel for up to `max_rows` rows runs on these arguments, or None."""
    if others := {a.dtype.name for a in (x, *(p for w in weights for p in (w.scale, w.zero)))} - {"bfloat16"}:
        return f"needs activations, scales and zeros in bfloat16, not {', '.join(sorted(others))}"
    rows = math.prod(x.shape[:-1])
    if not 1 <= rows <= max_rows:
        return f"supports up to {max_rows} rows, not {rows}"
    if others := {weight.in_features for weight in weights} - {x.shape[-1]}:
        return f"needs weights of as many inputs as there are activations, {x.shape[-1]}, not {', '.join(map(str, sorted(others)))}"
    for weight in weights:
        out, groups, half = weight.codes.shape
        if 2 * half != GROUP_SIZE or groups * GROUP_SIZE != weight.in_features:
            return f"supports inputs in whole groups of {GROUP_SIZE}, not {weight.in_features} in groups of {2 * half}"
        if out % OUTPUTS:
            return f"supports outputs in multiples of {OUTPUTS}, not {out}"
    return None
