#!/usr/bin/env bash
# jax 0.12.0.1: in Pallas Mosaic GPU the result of a wgmma that is stored transposed in shared memory can be copied on in slices of whole
# tiles of 8 rows alone; jax 0.11.2 lowers a copy of any number of rows.
#
# Behaviour seen: a product [64, 16] is assigned to a transposed reference [16, 64] of bfloat16 in shared memory, and the first rows of that
# are copied to global memory. Slices of 8 and 16 rows are lowered by both. One of 12, which ends within a tile, is lowered by jax 0.11.2;
# by 0.12.0.1 lowering ends with ValueError, "Failed to infer a possible set of layouts", which names neither the slice nor the store. The
# same copy after a store that is not transposed is lowered by both. Lowering needs no GPU.
#
# Needs Python >= 3.12 (PYTHON=python3.12). Output seen:
#   0.11.2    transposed, 8 rows: lowered  12 rows: lowered     16 rows: lowered  not transposed, 12 rows: lowered
#   0.12.0.1  transposed, 8 rows: lowered  12 rows: ValueError  16 rows: lowered  not transposed, 12 rows: lowered
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/lower.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

OUTPUTS, COLUMNS, INPUTS = 64, 16, 64


def lowered(rows, transposed=True):
    shape = (COLUMNS, OUTPUTS) if transposed else (OUTPUTS, COLUMNS)

    def body(a, b, y, a_copy, b_copy, staged, arrived):
        for i, (source, target) in enumerate([(a, a_copy), (b, b_copy)]):
            plgpu.copy_gmem_to_smem(source, target, arrived.at[i])
            plgpu.barrier_wait(arrived.at[i])

        def product(total):
            plgpu.wgmma(total, a_copy, b_copy.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return total[...]

        found = pl.run_scoped(product, plgpu.ACC((OUTPUTS, COLUMNS), jnp.float32)).astype(jnp.bfloat16)
        target = staged.transpose((1, 0)) if transposed else staged
        target[...] = found
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, rows)], y.at[pl.ds(0, rows)])
        plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16),
        grid=(1,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((OUTPUTS, INPUTS), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((COLUMNS, INPUTS), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM(shape, jnp.bfloat16),
            plgpu.Barrier(num_barriers=2),
        ],
    )
    arguments = (jax.ShapeDtypeStruct((n, INPUTS), jnp.bfloat16) for n in (OUTPUTS, COLUMNS))
    try:
        jax.jit(kernel).trace(*arguments).lower(lowering_platforms=("cuda",))
    except Exception as error:
        return type(error).__name__
    return "lowered"


seen = "  ".join(f"{rows} rows: {lowered(rows):{width}}" for rows, width in ((8, 0), (12, 10), (16, 0)))
print(f"{jax.__version__:9} transposed, {seen}  not transposed, 12 rows: {lowered(12, transposed=False)}")
PYTHON
for version in 0.11.2 0.12.0.1; do
    "${PYTHON:-python3}" -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "jax==$version" "jaxlib==$version" 2> /dev/null
    JAX_PLATFORMS=cpu "$folder/$version/bin/python" "$folder/lower.py" | tee -a "$folder/seen"
done
diff "$folder/seen" - <<'SEEN'
0.11.2    transposed, 8 rows: lowered  12 rows: lowered     16 rows: lowered  not transposed, 12 rows: lowered
0.12.0.1  transposed, 8 rows: lowered  12 rows: ValueError  16 rows: lowered  not transposed, 12 rows: lowered
SEEN
