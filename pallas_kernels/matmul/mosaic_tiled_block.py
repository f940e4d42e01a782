"""What a block of the Mosaic GPU matmul with plain weights does where there are many rows.

It has a tile of one weight's outputs, or of both of a gated pair, and a tile of rows, and goes through all inputs, a step at a time, as a
block of mosaic_plain_block.py does. Both must give a row the same bits: in both each product of the tensor cores adds its 16 inputs to what
those before have found, in the order of the inputs, and it makes no difference how many of them a step has.

Weights come from memory once and to the other blocks from the L2, whose speed is the limit then: so the blocks of a cluster divide the
copies of what they have in common, and each part goes to all of them. Weights are the first operand of products, which are [outputs, rows].
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

from pallas_kernels.matmul.mosaic_plain_block import WARPGROUP
from pallas_kernels.matmul.mosaic_plain_plan import TILE
from pallas_kernels.matmul.mosaic_tiled_plan import STEP, WARPGROUPS, TiledPlan

BLOCK, PART, CLUSTER = "block", "part", "cluster"  # axes of the grid: tiles of outputs, and of rows; and the blocks of a cluster


def body(plan: TiledPlan, x, *refs) -> None:
    """What a block does. refs: of the weights, then of the outputs."""
    *weights, y = refs
    tile, part, cluster = lax.axis_index(BLOCK), lax.axis_index(PART), plan.config.cluster
    if plan.config.common == "rows":
        # The last cluster may have more blocks than there are tiles left: those write the same bits.
        tile = jnp.minimum(tile * cluster + lax.axis_index(CLUSTER), sum(plan.tiles) - 1)
    else:
        part = part * cluster + lax.axis_index(CLUSTER)
    # A tile that would reach beyond the end is moved back to end there. Blocks whose tiles overlap write the same bits.
    row = jnp.minimum(part * plan.row_tile, plan.tiled_rows - plan.row_tile)
    tiled = (plgpu.TilingTransform((TILE, STEP)), plgpu.SwizzleTransform(128))  # as the tensor cores read it
    together = functools.partial(pl.run_scoped, collective_axes=WARPGROUP)

    def ring(rows: int):
        return plgpu.SMEM((plan.slots, rows, STEP), jnp.bfloat16, transforms=tiled)

    filled = plgpu.Barrier(num_arrivals=1 + plan.weights_at_once, num_barriers=plan.slots)
    emptied = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.slots)
    if cluster > 1:
        # A slot is filled in all blocks of a cluster at once.
        emptied = plgpu.ClusterBarrier(collective_axes=(CLUSTER,), num_arrivals=WARPGROUPS, num_barriers=plan.slots)
    done = plgpu.Barrier(num_arrivals=WARPGROUPS)
    multiply = functools.partial(_multiply, plan, x, weights, tile, row)
    sums = together(multiply, ring(plan.row_tile), plan.weights_at_once * [ring(plan.config.tile)], filled, emptied, done)
    found, *up = (total.astype(plan.dtype) for total in sums)
    if up:
        found = (jax.nn.silu(found.astype(jnp.float32)) * up[0].astype(jnp.float32)).astype(plan.dtype)
    # They take the ring's place in shared memory.
    shape = plan.product if plan.float32_out else plan.product[::-1]
    together(functools.partial(_write, plan, found, tile, row, y), plgpu.SMEM((WARPGROUPS, *shape), plan.dtype))


def _each_weight(plan: TiledPlan, tile) -> list[tuple]:
    """Of each weight whose outputs are written: whether the tile is of it, and the first of the tile's outputs."""
    found, starts = [], [*itertools.accumulate(plan.tiles, initial=0)]
    for start, end, outputs in zip(starts, starts[1:], plan.written):
        first = jnp.minimum((tile - start) * plan.config.tile, outputs - plan.config.tile)
        found.append(((tile >= start) & (tile < end), first))
    return found


def _multiply(plan: TiledPlan, x, weights: Sequence, tile, row, x_ring, weight_rings: Sequence, filled, emptied, done) -> list:
    """The warpgroup's sums [outputs, rows] of each weight that the block multiplies by, in float32."""
    warpgroup = lax.axis_index(WARPGROUP)
    outputs, rows = plan.product
    common = plan.config.common if plan.config.cluster > 1 else ""
    x_axis, weight_axis = (CLUSTER if common == name else None for name in ("rows", "outputs"))
    each = _each_weight(plan, tile)

    def fetch(step) -> None:
        at, slot = pl.ds(step * STEP, STEP), lax.rem(step, plan.slots)
        plgpu.copy_gmem_to_smem(x.at[pl.ds(row, plan.row_tile), at], x_ring.at[slot], filled.at[slot], collective_axes=x_axis)

        def copy(weight, ring, first) -> None:
            tile = weight.at[pl.ds(first, plan.config.tile), at]
            plgpu.copy_gmem_to_smem(tile, ring.at[slot], filled.at[slot], collective_axes=weight_axis)

        if plan.gated or len(weights) == 1:
            for weight, ring in zip(weights, weight_rings):
                copy(weight, ring, each[0][1])
        else:
            for weight, (mine, first) in zip(weights, each):
                pl.when(mine)(functools.partial(copy, weight, weight_rings[0], first))

    def accumulate(*sums) -> list:
        @pl.when(warpgroup == 0)
        def _():
            for step in range(plan.slots):
                fetch(step)

        @pl.loop(0, plan.steps)
        def _(step):
            slot = lax.rem(step, plan.slots)
            plgpu.barrier_wait(filled.at[slot])
            for total, ring in zip(sums, weight_rings):
                weight, activations = ring.at[slot], x_ring.at[slot]
                if plan.by_rows:
                    activations = activations.at[pl.ds(warpgroup * rows, rows)]
                else:
                    weight = weight.at[pl.ds(warpgroup * outputs, outputs)]
                plgpu.wgmma(total, weight, activations.transpose((1, 0)))
            # This step's products go on, one for each weight. The step before it is done with its slot.
            plgpu.wgmma_wait(plan.weights_at_once)

            @pl.when((step > 0) & (step - 1 + plan.slots < plan.steps))
            def _():
                before = lax.rem(step - 1, plan.slots)
                plgpu.barrier_arrive(emptied.at[before])

                @pl.when(warpgroup == 0)
                def _():
                    plgpu.barrier_wait(emptied.at[before])
                    fetch(step - 1 + plan.slots)

        found = [total[...] for total in sums]
        # Until all are done their operands stay in shared memory.
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        return found

    return pl.run_scoped(accumulate, *(plgpu.ACC(plan.product, jnp.float32) for _ in range(plan.weights_at_once)))


def _write(plan: TiledPlan, found: Array, tile, row, y, staged) -> None:
    """Writes the warpgroup's outputs, by way of shared memory."""
    warpgroup = lax.axis_index(WARPGROUP)
    outputs, rows = plan.product
    mine = staged.at[warpgroup]
    if plan.float32_out:
        mine[...] = found
    else:
        mine.transpose((1, 0))[...] = found
    plgpu.commit_smem()
    first_row, first_output = (warpgroup * rows, 0) if plan.by_rows else (0, warpgroup * outputs)
    of_rows = pl.ds(row + first_row, rows)

    def write(start) -> None:
        of_outputs = pl.ds(start + first_output, outputs)
        plgpu.copy_smem_to_gmem(mine, y.at[of_outputs, of_rows] if plan.float32_out else y.at[of_rows, of_outputs])

    for start, (of_weight, first) in zip(itertools.accumulate(plan.written, initial=0), _each_weight(plan, tile)):
        pl.when(of_weight)(functools.partial(write, start + first))
    plgpu.wait_smem_to_gmem(0)
