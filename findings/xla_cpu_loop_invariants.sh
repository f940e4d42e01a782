#!/usr/bin/env bash
# jax 0.10.2: on a CPU the bits of a bfloat16 computation within a loop depend on the program around the loop.
#
# Behaviour seen: two matrix products with silu are computed in a loop of one trip, which XLA cannot inline, of 16 rows at a time; one program
# does that once, another three times with the same rows. XLA moves what no trip changes out of the loop (the pass
# while-loop-invariant-code-motion), in the two programs differently, and some results round differently. They are equal with that pass
# disabled, and with jax.lax.optimization_barrier within the loop over the weights and the loop's own count, which changes with each trip. In
# float32 they were equal.
#
# Output seen (Intel Xeon with AVX-512 and AMX):
# as it is: 52 of 3840 numbers differ
# with a barrier: 0 of 3840 numbers differ
# with the pass disabled: 0 of 3840 numbers differ
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" 2> /dev/null
cat > "$folder/compared.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

barrier = sys.argv[1] == "barrier"


def in_a_loop(weights, rows, never):
    def once(carry):
        weights, rows, _, count = carry
        if barrier:
            weights, count = lax.optimization_barrier((weights, count))
        found = rows
        for weight in weights:
            found = jax.nn.silu(found @ weight.T)
        return weights, rows, found, count + 1

    return lax.while_loop(lambda carry: carry[3] < jnp.where(never, 0, 1), once, (weights, rows, jnp.zeros_like(rows), 0))[2]


@jax.jit
def repeated(weights, rows, never):
    def step(i, found):
        of_one = in_a_loop(weights, lax.dynamic_index_in_dim(rows, i, 0, False), never)
        return lax.dynamic_update_index_in_dim(found, of_one, i, 0)

    return lax.fori_loop(0, len(rows), step, jnp.zeros_like(rows))


random = np.random.default_rng(0)
weights = [jnp.asarray(random.normal(0, 0.05, shape), jnp.bfloat16) for shape in ((600, 240), (240, 600))]
rows = jnp.asarray(random.normal(size=(1, 16, 240)), jnp.bfloat16)
one, three = (repeated(weights, jnp.repeat(rows, times, 0), False)[0] for times in (1, 3))
different = int((np.asarray(one) != np.asarray(three)).sum())
print(f"{different} of {one.size} numbers differ")
sys.exit((different == 0) != (sys.argv[2] == "equal"))
PYTHON
export JAX_PLATFORMS=cpu
echo -n "as it is: " && "$folder/venv/bin/python" "$folder/compared.py" plain different
echo -n "with a barrier: " && "$folder/venv/bin/python" "$folder/compared.py" barrier equal
echo -n "with the pass disabled: " &&
    XLA_FLAGS=--xla_disable_hlo_passes=while-loop-invariant-code-motion "$folder/venv/bin/python" "$folder/compared.py" plain equal
