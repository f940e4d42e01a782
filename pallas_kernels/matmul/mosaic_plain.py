"""Matmul with plain bfloat16 weights on NVIDIA Hopper in Pallas Mosaic GPU, for up to 64 rows: the weights are read once.

A block has the same share of the outputs of each weight, and goes through all inputs, a step at a time. The tensor memory accelerator
copies a step's weights and activations to a slot of a ring in shared memory; as many steps are on their way as there are slots. One
warpgroup multiplies, 64 rows at a time: those that there are no activations for hold whatever was in shared memory, and are not written.
Sums are of all inputs in their order, so a row's outputs depend neither on other rows nor on how many there are.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import multiprocessors, no_mosaic_gpu
from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES, varying_as
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.transforms import divided, transformable

MAX_ROWS = 64  # that a product of the tensor cores takes
STEP = 128  # inputs that a block multiplies at once
TILE = 8  # rows and outputs come in multiples of these
MOST_OUTPUTS = 224  # of a block: of 64 rows they stay in registers, in float32, and a step's weights have room three times over
ITEM_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """One launch. outputs: of each weight. at_once: blocks that run at the same time. gated: whether there are two weights, of whose
    outputs only silu(first) * second is written. float32_out: whether that is in float32, not bfloat16."""

    rows: int
    inputs: int
    outputs: tuple[int, ...]
    at_once: int
    float32_out: bool = False
    gated: bool = False

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float32 if self.float32_out else jnp.bfloat16

    @property
    def written(self) -> tuple[int, ...]:
        """Outputs that are written, one after the other."""
        return self.outputs[:1] if self.gated else self.outputs

    @functools.cached_property
    def shares(self) -> tuple[int, ...]:
        """Outputs of each weight that a block has: of as few blocks as run at once, then twice as many, and so on, where they have room."""
        of = lambda blocks: tuple(TILE * math.ceil(outputs / blocks / TILE) for outputs in self.outputs)
        return next(shares for times in itertools.count(1) if sum(shares := of(times * self.at_once)) <= MOST_OUTPUTS)

    @property
    def blocks(self) -> int:
        return max(math.ceil(outputs / share) for outputs, share in zip(self.outputs, self.shares))

    @property
    def steps(self) -> int:
        return self.inputs // STEP

    @property
    def slots(self) -> int:
        """Steps that are in shared memory or on their way there."""
        slot_bytes = (MAX_ROWS + sum(self.shares)) * STEP * ITEM_BYTES
        return min(self.steps, (SHARED_BYTES - RESERVED_BYTES) // slot_bytes)


def unsupported(x: Array, weights: Sequence[Array], *, dtype: DTypeLike) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    if reason := no_mosaic_gpu():
        return reason
    if others := {jnp.dtype(a.dtype).name for a in (x, *weights)} - {"bfloat16"}:
        return f"needs activations and weights in bfloat16, not {', '.join(sorted(others))}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"gives bfloat16 or float32, not {jnp.dtype(dtype).name}"
    if not 1 <= (rows := math.prod(x.shape[:-1])) <= MAX_ROWS:
        return f"supports up to {MAX_ROWS} rows, not {rows}"
    if x.shape[-1] % STEP or x.shape[-1] == 0:
        return f"supports inputs in multiples of {STEP}, not {x.shape[-1]}"
    if others := [weight.shape for weight in weights if weight.shape[1:] != x.shape[-1:]]:
        return f"needs weights [outputs, {x.shape[-1]}], not {list(others[0])}"
    if others := [weight.shape[0] for weight in weights if weight.shape[0] % TILE or weight.shape[0] == 0]:
        return f"supports outputs in multiples of {TILE}, not {others[0]}"
    if TILE * len(weights) > MOST_OUTPUTS:
        return f"supports up to {MOST_OUTPUTS // TILE} weights, not {len(weights)}"
    return "needs all weights on one device" if divided((x, *weights)) else None


def skinny_matmul(x: Float[Array, "*rows in"], weights: Sequence[Array], *, dtype) -> Float[Array, "*rows out"]:
    """x @ weight.T for each weight, one after the other in the last axis, accumulated in float32, in `dtype`."""
    return _computed(x, weights, functools.partial(reference.skinny_matmul, dtype=dtype), jnp.dtype(dtype) == jnp.float32, gated=False)


def gated_matmul(x: Float[Array, "*rows in"], gate: Float[Array, "out in"], up: Float[Array, "out in"]) -> Float[Array, "*rows out"]:
    """See `pallas_kernels.matmul.gated_linear`."""
    return _computed(x, (gate, up), lambda x, weights: reference.gated_matmul(x, *weights), float32_out=False, gated=True)


def _computed(x: Array, weights: Sequence[Array], xla, float32_out: bool, gated: bool) -> Array:
    rows, outputs = x.reshape(-1, x.shape[-1]), tuple(weight.shape[0] for weight in weights)
    plan = Plan(*rows.shape, outputs, multiprocessors(), float32_out, gated)
    return transformable(functools.partial(run, plan), xla)(rows, tuple(weights)).reshape(*x.shape[:-1], -1)


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnums=0)
def run(plan: Plan, x: Float[Array, "M in"], weights: Sequence[Array]) -> Float[Array, "M out"]:
    """The weights' outputs one after the other, or those of a gated pair."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    kernel = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=jax.ShapeDtypeStruct((plan.rows, sum(plan.written)), plan.dtype),
        grid=(plan.blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="gated_matmul" if plan.gated else "plain_matmul",
    )
    # The copies of activations are of whole tiles of rows.
    return varying_as([x, *weights], kernel(jnp.pad(x, ((0, -plan.rows % TILE), (0, 0))), *weights))


def _body(plan: Plan, x, *refs) -> None:
    """What a block does. refs: of the weights, then of the outputs."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *weights, y = refs
    # The last share of a weight ends where the weight does. What it has in common with the share before comes out the same of both.
    block = lax.axis_index("block")
    firsts = [jnp.minimum(block * share, outputs - share) for share, outputs in zip(plan.shares, plan.outputs)]
    tiled = (plgpu.TilingTransform((TILE, 64)), plgpu.SwizzleTransform(128))  # as the tensor cores read it
    ring = lambda items: plgpu.SMEM((plan.slots, items, STEP), jnp.bfloat16, transforms=tiled)
    arrivals = plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=plan.slots)
    multiply = functools.partial(_multiply, plan, x, weights, firsts)
    sums = pl.run_scoped(multiply, ring(MAX_ROWS), [ring(share) for share in plan.shares], arrivals)
    found = [total.astype(plan.dtype) for total in sums]
    if plan.gated:
        gate, up = (part.astype(jnp.float32) for part in found)
        found = [(jax.nn.silu(gate) * up).astype(plan.dtype)]
    # The ring has room for them, and is free.
    staged = [plgpu.SMEM((MAX_ROWS, share), plan.dtype) for share in plan.shares[: len(found)]]
    pl.run_scoped(functools.partial(_write, plan, found, firsts, y), *staged)


def _multiply(plan: Plan, x, weights: Sequence, firsts: Sequence, x_ring, weight_rings: Sequence, arrivals) -> list:
    """The block's sums of each weight, [64, outputs] in float32. firsts: the first of its outputs of each."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def fetch(step) -> None:
        at, slot = pl.ds(step * STEP, STEP), lax.rem(step, plan.slots)
        plgpu.copy_gmem_to_smem(x.at[:, at], x_ring.at[slot, pl.ds(0, x.shape[0])], arrivals.at[slot])
        for weight, ring, first, share in zip(weights, weight_rings, firsts, plan.shares):
            plgpu.copy_gmem_to_smem(weight.at[pl.ds(first, share), at], ring.at[slot], arrivals.at[slot])

    def accumulate(*sums) -> list:
        for step in range(plan.slots):
            fetch(step)

        @pl.loop(0, plan.steps)
        def _(step):
            slot = lax.rem(step, plan.slots)
            plgpu.barrier_wait(arrivals.at[slot])
            for total, ring in zip(sums, weight_rings):
                plgpu.wgmma(total, x_ring.at[slot], ring.at[slot].transpose((1, 0)))
            # This step's products go on, one for each weight. The step before it is done with its slot.
            plgpu.wgmma_wait(len(weights))

            @pl.when((step > 0) & (step - 1 + plan.slots < plan.steps))
            def _():
                fetch(step - 1 + plan.slots)

        return [total[...] for total in sums]

    return pl.run_scoped(accumulate, *(plgpu.ACC((MAX_ROWS, share), jnp.float32) for share in plan.shares))


def _write(plan: Plan, found: Sequence[Array], firsts: Sequence, y, *staged) -> None:
    """Writes the block's outputs of the rows that there are, by way of shared memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    for value, ref in zip(found, staged):
        ref[...] = value
    plgpu.commit_smem()
    starts = itertools.accumulate(plan.written, initial=0)
    for ref, start, first, share in zip(staged, starts, firsts, plan.shares):
        plgpu.copy_smem_to_gmem(ref.at[pl.ds(0, plan.rows)], y.at[:, pl.ds(start + first, share)])
    plgpu.wait_smem_to_gmem(0)
