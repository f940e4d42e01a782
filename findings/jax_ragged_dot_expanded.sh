#!/usr/bin/env bash
# jax 0.10.2: on a CPU lax.ragged_dot multiplies every row by the matrices of all groups, and holds the rows once for each group.
#
# Behaviour seen: of 1024 rows sorted into groups, each row should be multiplied by the matrix of its group alone, whatever the number of
# groups. XLA instead makes an array [groups, rows, inputs], in which all rows but those of the group are zeros, and one large product of it,
# so that FLOPs and temporary memory grow with the number of groups. The result is right. On NVIDIA GPUs XLA does the same by default, as
# pull request 40189 of openxla/xla says, which adds another way with --xla_gpu_experimental_use_ragged_dot_fusion.
#
# Output seen:
#    1 groups: FLOPs   1.0 times what is needed, temporary memory 0.5 MB
#    8 groups: FLOPs   8.3 times what is needed, temporary memory 4.5 MB
#   64 groups: FLOPs  66.0 times what is needed, temporary memory 35.7 MB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" 2> /dev/null
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp

rows, inputs, outputs, found = 1024, 128, 64, []
for groups in (1, 8, 64):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, inputs), (groups, inputs, outputs))]
    program = jax.jit(jax.lax.ragged_dot).lower(*shapes, jax.ShapeDtypeStruct((groups,), jnp.int32)).compile()
    times = program.cost_analysis()["flops"] / (2 * rows * inputs * outputs)
    memory = program.memory_analysis().temp_size_in_bytes / 1e6
    print(f"{groups:3} groups: FLOPs {times:5.1f} times what is needed, temporary memory {memory:.1f} MB")
    found.append(groups <= times < 1.2 * groups + 1)
sys.exit(not all(found))
PYTHON
