#!/usr/bin/env bash
# jax 0.11.2: up to eleven programs that one thread lowers share a context of MLIR, so lowered programs are not independent values.
#
# Behaviour seen: twelve programs lowered one after the other in a thread are in two contexts, ten of them in the first, after that of the
# array that they are for; in jax 0.10.2 each has its own. Programs lowered in other threads have others. Compiling a program runs MLIR
# passes in its context, which is not made for two threads, so programs lowered in one thread should not be compiled by several at a time,
# nor one be compiled while another is lowered. Nothing in the documentation of ahead-of-time lowering says so. This script compiles nothing.
#
# Needs Python >= 3.12 (PYTHON=python3.12).
#
# Output seen:
#   jax 0.10.2: 12 programs of a thread in 12 contexts
#   jax 0.11.2: 12 programs of a thread in 2 contexts, the first with 10; one of another thread is in another: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12) and "jax 0.11 needs Python 3.12; say which: PYTHON=python3.12")'
for version in 0.10.2 0.11.2; do
    "$python" -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "jax==$version" "jaxlib==$version" 2> /dev/null
    JAX_PLATFORMS=cpu "$folder/$version/bin/python" - <<'PYTHON'
import sys
import threading

import jax
import jax.numpy as jnp

number = jnp.zeros(())  # by a program of its own, the first in the first context
lowered = [jax.jit(lambda x, i=i: x + i).lower(number) for i in range(12)]
contexts = [program.compiler_ir().context for program in lowered]
distinct = {id(context): context for context in contexts}
first = sum(context is contexts[0] for context in contexts)
line = f"jax {jax.__version__}: 12 programs of a thread in {len(distinct)} contexts"
elsewhere = []
thread = threading.Thread(target=lambda: elsewhere.append(jax.jit(lambda x: 2 * x).lower(number)))
thread.start()
thread.join()
apart = all(elsewhere[0].compiler_ir().context is not context for context in contexts)
if jax.__version__ == "0.10.2":
    print(line)
    sys.exit(len(distinct) != 12)
print(f"{line}, the first with {first}; one of another thread is in another: {apart}")
sys.exit(not (len(distinct) == 2 and 1 < first < 12 and apart))
PYTHON
done
