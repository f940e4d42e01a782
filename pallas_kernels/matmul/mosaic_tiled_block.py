"""What a block of the Mosaic GPU matmul with plain weights does where there are many rows.

It has a tile of one weight's outputs, or of both of a gated pair, and a tile of rows, and goes through all inputs, a step at a time, as a
block of mosaic_plain_block.py does, whose bits a row has here too (`sums_of_steps`).

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

from pallas_kernels.matmul.mosaic_plain_block import WARPGROUP, sums_of_steps
from pallas_kernels.matmul.mosaic_plain_plan import TILE
from pallas_kernels.matmul.mosaic_tiled_plan import STEP, WARPGROUPS, TiledPlan

BLOCK, ROWS, CLUSTER = "block", "rows", "cluster"  # axes of the grid: tiles of outputs, and of rows; and the blocks of a cluster


def body(plan: TiledPlan, x, *refs) -> None:
    """What a block does. refs: of the weights, then of the outputs."""
    *weights, y = refs
    tile, row_tile, cluster = lax.axis_index(BLOCK), lax.axis_index(ROWS), plan.config.cluster
    if plan.config.common == "rows":
        # The last cluster may have more blocks than there are tiles left: those write the same bits.
        tile = jnp.minimum(tile * cluster + lax.axis_index(CLUSTER), sum(plan.tiles) - 1)
    else:
        row_tile = row_tile * cluster + lax.axis_index(CLUSTER)
    # A tile that would reach beyond the end is moved back to end there. Blocks whose tiles overlap write the same bits.
    row = jnp.minimum(row_tile * plan.row_tile, plan.tiled_rows - plan.row_tile)
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


def _places_of_tile(plan: TiledPlan, tile) -> list[tuple]:
    """A pair for each weight whose outputs are written: whether the tile is one of that weight's, and the tile's first output."""
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
    places = _places_of_tile(plan, tile)

    def fetch(step) -> None:
        at, slot = pl.ds(step * STEP, STEP), lax.rem(step, plan.slots)
        plgpu.copy_gmem_to_smem(x.at[pl.ds(row, plan.row_tile), at], x_ring.at[slot], filled.at[slot], collective_axes=x_axis)

        def copy(weight, ring, first) -> None:
            tile = weight.at[pl.ds(first, plan.config.tile), at]
            plgpu.copy_gmem_to_smem(tile, ring.at[slot], filled.at[slot], collective_axes=weight_axis)

        if plan.gated or len(weights) == 1:
            for weight, ring in zip(weights, weight_rings):
                copy(weight, ring, places[0][1])
        else:
            for weight, (mine, first) in zip(weights, places):
                pl.when(mine)(functools.partial(copy, weight, weight_rings[0], first))

    def multiply(slot, sums) -> None:
        for total, ring in zip(sums, weight_rings):
            weight, activations = ring.at[slot], x_ring.at[slot]
            if plan.by_rows:
                activations = activations.at[pl.ds(warpgroup * rows, rows)]
            else:
                weight = weight.at[pl.ds(warpgroup * outputs, outputs)]
            plgpu.wgmma(total, weight, activations.transpose((1, 0)))

    return sums_of_steps(plan, warpgroup, plan.weights_at_once * [plan.product], fetch, multiply, filled, emptied, done)


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

    for start, (of_weight, first) in zip(itertools.accumulate(plan.written, initial=0), _places_of_tile(plan, tile)):
        pl.when(of_weight)(functools.partial(write, start + first))
    plgpu.wait_smem_to_gmem(0)
