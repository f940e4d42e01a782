#!/usr/bin/env bash
# jax 0.12.0.1: in Pallas Mosaic GPU an assignment to a reference in global memory is refused where its accesses are no whole sectors of 32
# bytes; jax 0.11.2 lowers the same kernel, and 0.11 has no other way to say it.
#
# Behaviour seen: a kernel that writes a column of 16 bytes of an array [64, 32] of uint8, `ref[...] = value`, is lowered by jax 0.11.2. By jax
# 0.12.0.1 lowering ends with TransferPlanDerivationError, "GMEM transfer does not access a whole number of complete 32 byte sectors". What
# works there, `plgpu.store(ref, value, optimized=False)`, does not exist in 0.11.2, so that a kernel for both asks which there is. Lowering
# needs no GPU.
#
# Needs Python >= 3.12 (PYTHON=python3.12). Output seen:
#   0.11.2    plgpu.store: no   assignment: lowered                      store: -
#   0.12.0.1  plgpu.store: yes  assignment: TransferPlanDerivationError  store: lowered
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/lower.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def lowered(write):
    def body(source, target):
        write(target.at[:, :16], plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.uint8))

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 32), jnp.uint8), grid=(1,), grid_names=("block",))
    try:
        jax.jit(kernel).trace(jax.ShapeDtypeStruct((64, 16), jnp.bfloat16)).lower(lowering_platforms=("cuda",))
    except Exception as error:
        return type(error).__name__
    return "lowered"


def assign(ref, value):
    ref[...] = value


has_store = hasattr(plgpu, "store")
stored = lowered(lambda ref, value: plgpu.store(ref, value, optimized=False)) if has_store else "-"
print(f"{jax.__version__:9} plgpu.store: {'yes' if has_store else 'no':4} assignment: {lowered(assign):28} store: {stored}")
PYTHON
for version in 0.11.2 0.12.0.1; do
    "${PYTHON:-python3}" -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "jax==$version" "jaxlib==$version" 2> /dev/null
    JAX_PLATFORMS=cpu "$folder/$version/bin/python" "$folder/lower.py" | tee -a "$folder/seen"
done
diff "$folder/seen" - <<'SEEN'
0.11.2    plgpu.store: no   assignment: lowered                      store: -
0.12.0.1  plgpu.store: yes  assignment: TransferPlanDerivationError  store: lowered
SEEN
