"""Rows of a residual stream, to be added to and normalized."""

import jax
import jax.numpy as jnp
import numpy as np


def random_rows(rows: int, width: int, scale: float = 1.0, part: int = 0) -> list[jax.Array]:
    r = np.random.default_rng([rows, width, part])
    outliers = np.where(np.arange(width) % 61 == 7, 50, 1)
    arrays = r.standard_normal((rows, width)) * outliers * scale, r.standard_normal((rows, width)) * scale, r.uniform(0.2, 3, width)
    return [jnp.asarray(x, jnp.bfloat16) for x in arrays]
