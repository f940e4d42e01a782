#!/usr/bin/env bash
# jax 0.10.2: with the random generators rbg and unsafe_rbg, draws under jax.vmap over keys come from the first key alone.
#
# Behaviour seen: vmap(uniform)([k0, k1]) gives the same two numbers as vmap(uniform)([k0, k2]), whatever k1 and k2 are; only the first
# number is that of its key drawn alone. With threefry2x32, the default, each row is that of its own key. JAX_DEFAULT_PRNG_IMPL=rbg sets
# the generator for a whole program, so code that keeps a key for each row of a batch draws dependent rows without a word.
# The documentation of jax.random says that vmap over these generators is not as a loop over keys.
#
# Output seen:
#   threefry2x32 second key matters: True; rows are as alone: [True, True]
#   rbg second key matters: False; rows are as alone: [True, False]
#   unsafe_rbg second key matters: False; rows are as alone: [True, False]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" 2> /dev/null
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp

found = {}
for generator in ("threefry2x32", "rbg", "unsafe_rbg"):
    keys = [jax.random.key(seed, impl=generator) for seed in range(3)]
    together = lambda *rows: jax.vmap(jax.random.uniform)(jnp.stack(rows)).tolist()
    one, other = together(keys[0], keys[1]), together(keys[0], keys[2])
    alone = [float(jax.random.uniform(key)) for key in keys[:2]]
    matters, as_alone = one[1] != other[1], [a == b for a, b in zip(one, alone)]
    print(f"{generator} second key matters: {matters}; rows are as alone: {as_alone}")
    found[generator] = matters, as_alone
same = (False, [True, False])
sys.exit(found != {"threefry2x32": (True, [True, True]), "rbg": same, "unsafe_rbg": same})
PYTHON
