"""Launches a kernel whose body places every register itself (see ptx.py)."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

SHARED_BYTES = 227 * 1024  # that a block may have, on Hopper
RESERVED_BYTES = 2048  # of these: Mosaic takes some for itself
# A cluster lies within a GPC. GPC: multiprocessors that it has on average, at least; MIN_OF_GPC: those that the smallest has.
GPC, MIN_OF_GPC = 16, 12
MAX_CLUSTER = 8  # blocks, that every device with clusters can run at once


def clusters_at_once(size: int, multiprocessors: int) -> int:
    """How many clusters of `size` blocks surely run at once, with one block on each multiprocessor.

    On an H200 with 132 multiprocessors 16 clusters of 6 and 24 of 4 blocks did, and 16 of 7 or 8, 24 of 5 and 32 of 4 did not.
    """
    if size <= 2:  # two neighbours always make a cluster
        return multiprocessors // size
    return multiprocessors // GPC * (MIN_OF_GPC // size)


def lowered_once(run: Callable) -> Callable:
    """Jits a launch `run(plan, *arrays)`: a function of its own in the program, lowered once however many layers call it."""
    return jax.jit(run, static_argnums=0)


def launch(
    name: str,
    emit: Callable,
    inputs: dict,
    outputs: dict,
    blocks: int,
    warpgroups: int,
    shared_bytes: int,
    updated: dict | None = None,
    cluster: int = 1,
) -> dict:
    """Runs `emit(refs)` in each block of a launch. Under jax.vmap the launches come one after the other.

    Args:
        name: the kernel's, in profiles.
        emit: emits the program of a block; refs: of all arrays by their names, and "shared", the block's shared memory.
        inputs: arrays by name.
        outputs: shapes by name.
        blocks: of the launch.
        warpgroups: of each block.
        shared_bytes: of each block's shared memory.
        updated: arrays by name that the kernel writes to in place.
        cluster: blocks with neighbouring numbers that run at the same time, and may read each other's shared memory.

    Returns:
        The outputs and the arrays of `updated`, by name.
    """
    from jax.experimental.mosaic.gpu import core as mosaic
    from jax.experimental.pallas import mosaic_gpu as plgpu

    updated = updated or {}
    names = (*inputs, *updated, *outputs, "shared")

    def body(*refs):
        types = tuple(plgpu.RefType() for _ in refs)
        plgpu.inline_mgpu(arg_types=types)(lambda ctx, *raw: emit(dict(zip(names, raw))))(*refs)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(blocks // cluster,),
        grid_names=("block",),
        **({"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(plgpu.SMEM((shared_bytes,), jnp.uint8),),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
        kernel_name=name,
    )

    # Pallas would give the grid another axis, of which blocks that address memory themselves know nothing: they would read elsewhere.
    @sequential_vmap
    def run(read, written):
        references = [jax.new_ref(array) for array in written]
        results = kernel(*read, *references), [jax.freeze(reference) for reference in references]
        return jax.tree.map(functools.partial(varying_as, [*read, *written]), results)

    results, written = run(list(inputs.values()), list(updated.values()))
    return dict(zip(outputs, results)) | dict(zip(updated, written))


def varying_as(arrays: Sequence[jax.Array], result: jax.Array) -> jax.Array:
    """The result, which within jax.shard_map differs between devices where any of the arrays does."""

    def of(array):
        return jax.typeof(array).manual_axis_type.varying

    missing = frozenset().union(*map(of, arrays)) - of(result)
    return jax.lax.pcast(result, tuple(missing), to="varying") if missing else result
