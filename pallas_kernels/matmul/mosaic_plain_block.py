"""What a block of the Mosaic GPU matmul with plain weights does.

It has the same share of the outputs of each weight as every other block, and goes through all inputs, a step at a time. The tensor memory
accelerator copies a step's weights and activations to a slot of a ring in shared memory; as many steps are on their way as there are slots.
One warpgroup multiplies. A product takes 64 rows: of those that there are no activations for it reads whatever is in shared memory, and
their outputs are not written.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.matmul.mosaic_plain_plan import MAX_ROWS, STEP, TILE, Plan


def body(plan: Plan, x, *refs) -> None:
    """What a block does. refs: of the weights, then of the outputs."""
    *weights, y = refs
    # A share that would reach beyond its weight's end is moved back to end there. Blocks whose shares overlap write the same bits.
    block = lax.axis_index("block")
    firsts = [jnp.minimum(block * share, outputs - share) for share, outputs in zip(plan.shares, plan.outputs)]
    tiled = (plgpu.TilingTransform((TILE, 64)), plgpu.SwizzleTransform(128))  # as the tensor cores read it

    def ring(*shape):
        return plgpu.SMEM((*shape, STEP), jnp.bfloat16, transforms=tiled)

    # A product takes 64 rows from the first of a slot on: those that are not there belong to the slots after it.
    x_rows = (plan.slots - 1) * plan.tiled_rows + MAX_ROWS
    barriers = plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=plan.slots)
    multiply = functools.partial(_multiply, plan, x, weights, firsts)
    sums = pl.run_scoped(multiply, ring(x_rows), [ring(plan.slots, share) for share in plan.shares], barriers)
    found = [total.astype(plan.dtype) for total in sums]
    if plan.gated:
        gate, up = (part.astype(jnp.float32) for part in found)
        found = [(jax.nn.silu(gate) * up).astype(plan.dtype)]
    # They take the ring's place in shared memory.
    staged = [plgpu.SMEM((MAX_ROWS, share), plan.dtype) for share in plan.shares[: len(found)]]
    pl.run_scoped(functools.partial(_write, plan, found, firsts, y), *staged)


def _multiply(plan: Plan, x, weights: Sequence, firsts: Sequence, x_ring, weight_rings: Sequence, barriers) -> list:
    """The block's sums of each weight, [64, outputs] in float32. firsts: the first of its outputs of each."""

    def x_slot(slot, rows: int):
        return x_ring.at[pl.ds(pl.multiple_of(slot * plan.tiled_rows, TILE), rows)]

    def fetch(step) -> None:
        at, slot = pl.ds(step * STEP, STEP), lax.rem(step, plan.slots)
        plgpu.copy_gmem_to_smem(x.at[:, at], x_slot(slot, plan.tiled_rows), barriers.at[slot])
        for weight, ring, first, share in zip(weights, weight_rings, firsts, plan.shares):
            plgpu.copy_gmem_to_smem(weight.at[pl.ds(first, share), at], ring.at[slot], barriers.at[slot])

    def accumulate(*sums) -> list:
        for step in range(plan.slots):
            fetch(step)

        @pl.loop(0, plan.steps)
        def _(step):
            slot = lax.rem(step, plan.slots)
            plgpu.barrier_wait(barriers.at[slot])
            for total, ring in zip(sums, weight_rings):
                plgpu.wgmma(total, x_slot(slot, MAX_ROWS), ring.at[slot].transpose((1, 0)))
            # This step's products go on, one for each weight. The step before it is done with its slot.
            plgpu.wgmma_wait(len(weights))

            @pl.when((step > 0) & (step - 1 + plan.slots < plan.steps))
            def _():
                fetch(step - 1 + plan.slots)

        return [total[...] for total in sums]

    return pl.run_scoped(accumulate, *(plgpu.ACC((MAX_ROWS, share), jnp.float32) for share in plan.shares))


def _write(plan: Plan, found: Sequence[Array], firsts: Sequence, y, *staged) -> None:
    """Writes the block's outputs of the rows that there are, by way of shared memory."""
    for value, ref in zip(found, staged):
        ref[...] = value
    plgpu.commit_smem()
    starts = itertools.accumulate(plan.written, initial=0)
    for ref, start, first, share in zip(staged, starts, firsts, plan.shares):
        plgpu.copy_smem_to_gmem(ref.at[pl.ds(0, plan.rows)], y.at[:, pl.ds(start + first, share)])
    plgpu.wait_smem_to_gmem(0)
