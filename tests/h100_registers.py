"""Compiles the INT4 matmul of many rows for an H100, on a machine without one: a script, for jax must not look for a GPU.

MOSAIC_GPU_DUMP_PTXAS=1 MOSAIC_GPU_DUMP_TO=DIR python tests/h100_registers.py        leaves in DIR what ptxas says of registers
"""

import h100  # first: it sets JAX_PLATFORMS, which jax looks at when it is imported
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, use_abstract_mesh

from pallas_kernels.formats.weights import Int4Weight
from pallas_kernels.matmul import mosaic_wide
from pallas_kernels.matmul.mosaic_wide_plan import MAX_ROWS, Plan


def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return h100.place(jax.ShapeDtypeStruct(shape, dtype))


def compile_kernel(inputs: int, outputs: tuple[int, ...]) -> None:
    groups = inputs // 128
    weights = tuple(Int4Weight(array(n, groups, 64, dtype=jnp.uint8), array(n, groups), array(n, groups)) for n in outputs)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=h100.abstract_device())):
        mosaic_wide.run.lower(Plan.fitting(MAX_ROWS, groups, outputs, h100.MULTIPROCESSORS), array(MAX_ROWS, inputs), weights).compile()


if __name__ == "__main__":
    for shape in ((4096, (28672,)), (4096, (4096, 1024, 1024)), (14336, (4096,))):
        compile_kernel(*shape)
