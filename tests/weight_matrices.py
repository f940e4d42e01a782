"""Matrices to round, and reading INT4 weights as their format is documented."""

import ml_dtypes
import numpy as np

from pallas_kernels.formats.weights import Int4Weight

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OUT = 48


def weights(in_features: int) -> dict[str, np.ndarray]:
    r = np.random.default_rng(in_features)
    gauss = r.standard_normal((OUT, in_features))
    return {
        "gaussian": 0.02 * gauss,
        "outliers": np.where(np.arange(in_features) % 50 == 3, 50 * gauss, gauss),
        "heavy tails": gauss**5,
        "mean 100": gauss + 100,
        "constant rows": np.broadcast_to(gauss[:, :1], gauss.shape),
        "zeros": 0 * gauss,
        "two values": np.where(gauss > 0, 0.5, -0.25),
        "huge": 1e30 * gauss,
        "tiny": 1e-30 * gauss,
    }


def read(q: Int4Weight) -> np.ndarray:
    """The weight in float64, from the bytes as documented: of G inputs, i in the low and i + G/2 in the high nibble of byte i."""
    codes, scale, zero = (np.asarray(x) for x in (q.codes, q.scale, q.zero))
    nibbles = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float64)
    groups = nibbles * scale[..., None].astype(np.float64) + zero[..., None].astype(np.float64)
    return groups.reshape(len(codes), -1)[:, : q.in_features]
