#!/usr/bin/env bash
# jax 0.10.2 on a CPU and ml_dtypes 0.7.0 give different bfloat16 for the same int32 and float64; with ml_dtypes 0.6.0 they agree.
#
# Behaviour seen: XLA rounds an int32 or a float64 to float32 first, and that to bfloat16 (a float64 to float16 in the same way). A number
# just above the middle of two becomes that middle, and then the even one of the two, which is not the nearest. ml_dtypes up to 0.6.0 does
# the same in NumPy's casts, and from 0.7.0 on rounds once: `np.asarray(x).astype(jnp.bfloat16)` and `jnp.asarray(x).astype(jnp.bfloat16)`
# then differ by a unit in the last place, and one upgrade changes the bits of weights and reference values that NumPy casts.
# float64 to float8_e4m3fn is rounded once by XLA, and by way of float32 by ml_dtypes 0.6.0: there the two agree from 0.7.0 on.
#
# Output seen (int32 2**30 + 2**22 + 1 and float64 1 + 2**-8 + 2**-40 to bfloat16, 1 + 2**-11 + 2**-40 to float16, 1 + 2**-4 + 2**-40 to
# float8_e4m3fn):
#   ml_dtypes 0.6.0: NumPy 1.07374e+09 1 1.00098 1, jax 1.07374e+09 1 1 1.125
#   ml_dtypes 0.7.0: NumPy 1.08213e+09 1.00781 1.00098 1.125, jax 1.07374e+09 1 1 1.125
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
export JAX_PLATFORMS=cpu
for version in 0.6.0 0.7.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" "ml_dtypes==$version" 2> /dev/null
    "$folder/venv/bin/python" - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

jax.config.update("jax_enable_x64", True)
cases = [
    (np.int32(2**30 + 2**22 + 1), jnp.bfloat16),
    (np.float64(1 + 2**-8 + 2**-40), jnp.bfloat16),
    (np.float64(1 + 2**-11 + 2**-40), jnp.float16),
    (np.float64(1 + 2**-4 + 2**-40), jnp.float8_e4m3fn),
]
by_numpy = [float(np.asarray([x]).astype(dtype)[0]) for x, dtype in cases]
by_jax = [float(jnp.asarray([x]).astype(dtype)[0]) for x, dtype in cases]
show = lambda found: " ".join(f"{x:.6g}" for x in found)
print(f"ml_dtypes {ml_dtypes.__version__}: NumPy {show(by_numpy)}, jax {show(by_jax)}")
low = [2.0**30, 1.0, 1.0, 1.0]
high = [2.0**30 + 2**23, 1 + 2**-7, 1 + 2**-10, 1.125]
once = ml_dtypes.__version__ == "0.7.0"
expected = [high[i] if once or i == 2 else low[i] for i in range(4)]
sys.exit(by_numpy != expected or by_jax != [*low[:3], 1.125])
PYTHON
done
