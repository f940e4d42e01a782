"""What a block of the Mosaic GPU matmul with plain weights does.

It has the same share of the outputs of each weight as every other block, and goes through all inputs, a step at a time. The tensor memory
accelerator copies a step's weights and activations to a slot of a ring in shared memory; as many steps are on their way as there are slots.
A warpgroup multiplies 64 rows, which a product takes: of those that there are no activations for it reads whatever is in shared memory, and
their outputs are not written. Or it multiplies 64 outputs by all rows (`weights_first`). Where there are two warpgroups, both multiply by
the same slots.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.matmul.mosaic_plain_plan import PRODUCT_ROWS, TILE, Plan

WARPGROUP = "warpgroup"  # the axis of a block's warpgroups


def body(plan: Plan, x, *refs) -> None:
    """What a block does. refs: of the weights, then of the outputs."""
    *weights, y = refs
    # A share that would reach beyond its weight's end is moved back to end there. Blocks whose shares overlap write the same bits.
    block = lax.axis_index("block")
    firsts = [jnp.minimum(block * share, outputs - share) for share, outputs in zip(plan.shares, plan.outputs)]
    tiled = (plgpu.TilingTransform((TILE, 64)), plgpu.SwizzleTransform(128))  # as the tensor cores read it
    together = functools.partial(pl.run_scoped, collective_axes=WARPGROUP)

    def ring(*shape):
        return plgpu.SMEM((*shape, plan.step), jnp.bfloat16, transforms=tiled)

    # A product takes 64 rows: those that are not there belong to the slots after it.
    x_rows = (plan.slots - 1) * plan.tiled_rows + plan.product_rows
    filled = plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=plan.slots)
    emptied = plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.slots)
    done = plgpu.Barrier(num_arrivals=plan.warpgroups)
    multiply = functools.partial(_multiply, plan, x, weights, firsts)
    sums = together(multiply, ring(x_rows), [ring(plan.slots, share) for share in plan.shares], filled, emptied, done)
    found = [total.astype(plan.dtype) for total in sums]
    if plan.gated:
        gate, up = (part.astype(jnp.float32) for part in found)
        found = [(jax.nn.silu(gate) * up).astype(plan.dtype)]
    # They take the ring's place in shared memory.
    staged = [plgpu.SMEM((plan.product_rows, share), plan.dtype) for share in plan.shares[: len(found)]]
    together(functools.partial(_write, plan, found, firsts, y), *staged)


def _multiply(plan: Plan, x, weights: Sequence, firsts: Sequence, x_ring, weight_rings: Sequence, filled, emptied, done) -> list:
    """The warpgroup's sums of each weight, [rows, outputs], or [outputs, rows] where weights are first, in float32.

    firsts: the first of the block's outputs of each.
    """
    warpgroup = lax.axis_index(WARPGROUP)

    def x_slot(slot, rows: int, first=0):
        return x_ring.at[pl.ds(pl.multiple_of(slot * plan.tiled_rows + first, TILE), rows)]

    def fetch(step) -> None:
        at, slot = pl.ds(step * plan.step, plan.step), lax.rem(step, plan.slots)
        plgpu.copy_gmem_to_smem(x.at[:, at], x_slot(slot, plan.tiled_rows), filled.at[slot])
        for weight, ring, first, share in zip(weights, weight_rings, firsts, plan.shares):
            plgpu.copy_gmem_to_smem(weight.at[pl.ds(first, share), at], ring.at[slot], filled.at[slot])

    def multiply(slot, sums) -> None:
        for total, ring in zip(sums, weight_rings):
            if plan.weights_first:
                plgpu.wgmma(total, ring.at[slot], x_slot(slot, plan.tiled_rows).transpose((1, 0)))
            else:
                plgpu.wgmma(total, x_slot(slot, PRODUCT_ROWS, warpgroup * PRODUCT_ROWS), ring.at[slot].transpose((1, 0)))

    shapes = [(share, plan.tiled_rows) if plan.weights_first else (PRODUCT_ROWS, share) for share in plan.shares]
    return sums_of_steps(plan, warpgroup, shapes, fetch, multiply, filled, emptied, done)


def sums_of_steps(
    plan: Plan, warpgroup, shapes: Sequence[tuple[int, int]], fetch: Callable, multiply: Callable, filled, emptied, done
) -> list:
    """The warpgroup's sums over all inputs, in float32.

    Each product of the tensor cores adds its 16 inputs to what those before have found, in the order of the inputs; how many of them a step
    has makes no difference. So a row has the same bits in every kernel that adds up by this function.

    Args:
        plan: has `steps`, `slots` and `warpgroups`; also one of mosaic_tiled_plan.py.
        warpgroup: its number in the block.
        shapes: of each sum.
        fetch: fetch(step) copies a step's activations and weights to its slot.
        multiply: multiply(slot, sums) begins one product for each sum.
        filled: barriers of the slots, at which a step's copies arrive.
        emptied: barriers of the slots, at which the warpgroups arrive that are done with them; those of all blocks that share copies.
        done: a barrier of the block's warpgroups.
    """

    def accumulate(*sums) -> list:
        @pl.when(warpgroup == 0)
        def _():
            for step in range(plan.slots):
                fetch(step)

        @pl.loop(0, plan.steps)
        def _(step):
            slot = lax.rem(step, plan.slots)
            plgpu.barrier_wait(filled.at[slot])
            multiply(slot, sums)
            # This step's products go on. The step before it is done with its slot.
            plgpu.wgmma_wait(len(sums))

            @pl.when((step > 0) & (step - 1 + plan.slots < plan.steps))
            def _():
                before = lax.rem(step - 1, plan.slots)
                if plan.warpgroups > 1:
                    plgpu.barrier_arrive(emptied.at[before])

                @pl.when(warpgroup == 0)
                def _():
                    if plan.warpgroups > 1:
                        plgpu.barrier_wait(emptied.at[before])
                    fetch(step - 1 + plan.slots)

        found = [total[...] for total in sums]
        if plan.warpgroups > 1:
            # Until all are done their operands stay in shared memory.
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
        return found

    return pl.run_scoped(accumulate, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def _write(plan: Plan, found: Sequence[Array], firsts: Sequence, y, *staged) -> None:
    """Writes the block's outputs of the rows of `Plan.shape`, by way of shared memory."""
    warpgroup = lax.axis_index(WARPGROUP)
    for value, ref in zip(found, staged):
        if plan.weights_first:
            ref.transpose((1, 0))[...] = value
        else:
            ref[pl.ds(warpgroup * PRODUCT_ROWS, PRODUCT_ROWS)] = value
    plgpu.commit_smem()
    starts = [*itertools.accumulate(plan.written, initial=0)]

    def write(rows) -> None:
        for ref, start, first, share in zip(staged, starts, firsts, plan.shares):
            plgpu.copy_smem_to_gmem(ref.at[rows], y.at[rows, pl.ds(start + first, share)])

    for number in range(plan.warpgroups):
        first = number * PRODUCT_ROWS
        pl.when(warpgroup == number)(functools.partial(write, pl.ds(first, min(plan.shape[0] - first, PRODUCT_ROWS))))
    plgpu.wait_smem_to_gmem(0)
