"""Emulates the plain matmul's clusters on a CPU: a script, for JAX must be told before it starts how many threads it may have.

NPROC=32 python tests/emulated_clusters.py        a JSON object for each problem: its division, and its largest relative error
"""

import json

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from problems.matmul import activations, plain_weight, relative_error, separate

from pallas_kernels.matmul import mosaic_plain
from pallas_kernels.matmul.mosaic_tiled_plan import Config, TiledPlan

# Rows, inputs, outputs, of a gated pair or float32, and the division. The second and third have more steps than slots, the first two tiles
# that overlap, and the second a cluster with fewer tiles than blocks.
PROBLEMS = [
    (256, 256, (200, 72), "", Config("rows", 2, 4)),
    (150, 1024, (192,), "", Config("rows", 2, 2)),
    (160, 1024, (256,), "", Config("outputs", 2, 2, "outputs")),
    (153, 256, (256, 136), "float32", Config("outputs", 2, 2, "outputs")),
    (131, 256, (192, 192), "gated", Config("rows", 2, 2, "outputs")),
]


def main() -> None:
    for rows, inputs, outputs, kind, config in PROBLEMS:
        plan = TiledPlan(rows, inputs, outputs, 132, kind == "float32", kind == "gated", config=config)
        x, weights = activations(rows, inputs, True), [plain_weight(out, inputs, i) for i, out in enumerate(outputs)]
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            y = mosaic_plain.run_tiled(plan, x, weights)
        if kind == "gated":
            gate, up = (np.asarray((x.astype(jnp.float32) @ w.astype(jnp.float32).T).astype(jnp.bfloat16), np.float64) for w in weights)
            expected = gate * (0.5 + 0.5 * np.tanh(gate / 2)) * up
            error = np.abs(np.asarray(y, np.float64) - expected).max() / np.abs(expected).max()
        else:
            error = max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights))
        print(json.dumps({"config": str(config), "fits": plan.fits, "float32": kind == "float32", "error": float(error)}), flush=True)


if __name__ == "__main__":
    main()
